"""The command that writes a repository again, whatever the defaults are by then."""

import shlex
from pathlib import Path

from corolla.model.batch_sizes import COMPILED, joined
from corolla.repository.plan import RepositoryPlan


def init_command(plan: RepositoryPlan, width: int) -> list[str]:
    """`corolla init` with every choice spelled out, for the folder of the repository, in lines of some `width`."""
    blocks = f"{plan.hosted.start}:{plan.hosted.stop}" if plan.hosted else "none"
    options: dict[str, object] = {
        "--out": ".",
        "--blocks": "" if plan.whole else blocks,
        "--ranges": ",".join(f"{blocks.start}:{blocks.stop}" for blocks in plan.ranges),
        "--dtype": plan.dtype.name,
        "--quant": plan.quant,
        "--registry": plan.registry,
        "--model-name": plan.model_id,
        "--wire": plan.wire,
        "--step-timeout": f"{plan.step_timeout:g}" if plan.registry else "",
        "--failover-timeout": f"{plan.failover_timeout:g}" if plan.registry else "",
        "--device": plan.device,
        "--max-batch-size": plan.max_batch_size,
        "--decoder": plan.decoder,
        "--decoder-batch-sizes": joined(plan.batch_sizes) if plan.decoder == COMPILED else "",
        "--batch-channel-capacity": plan.batch_channel_capacity,
        "--threads": plan.threads,
        "--attn-cache-tokens": plan.cache_tokens,
        "--tensor-parallel": plan.tensor_parallel,
    }
    words = [f"corolla init {shlex.quote(str(plan.checkpoint))}"]
    words += [f"{flag} {shlex.quote(str(value))}" for flag, value in options.items() if value != ""]
    words += [f"--adapters {shlex.quote(f'{name}={source}')}" for name, source in sorted(plan.adapters.items())]
    words += ["--ends"] if plan.ends and not plan.whole else []
    words += ["--span"] if plan.span and not plan.registry else []
    if isinstance(plan.checkpoint, Path) and not plan.checkpoint.is_absolute():
        words.append("--relative")
    return _wrapped(words, width)


def _wrapped(words: list[str], width: int) -> list[str]:
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) < width:
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(f"  {word}")
    return lines
