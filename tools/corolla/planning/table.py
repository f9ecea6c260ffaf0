"""A plan in words."""

import math
from collections.abc import Sequence

from corolla.planning.choices import Choice
from corolla.planning.plan import DevicePlan, MachinePlan
from corolla.planning.quantity import BYTES, Quantity, bytes_text
from corolla.planning.throughput import ServerSpeed


def plan_text(plan: MachinePlan, choices: Sequence[Choice], speed: ServerSpeed | None) -> str:
    """Everything, with formulas and reasons."""
    parts = [_aligned([(choice.name, choice.value, choice.reason) for choice in choices])]
    parts += [_device(plan, device) for device in plan.devices]
    parts.append(_speed(speed) if speed else "throughput: not measured here yet; --measure does")
    return "\n\n".join(parts)


def summary(plan: MachinePlan) -> str:
    """One line for each device."""
    return "\n".join(
        f"{device.device}: {_blocks(device.blocks)}, {bytes_text(device.needed)} of {bytes_text(device.usable)} usable"
        for device in plan.devices
    )


def _device(plan: MachinePlan, device: DevicePlan) -> str:
    count, most = len(device.blocks), plan.setup.config.num_hidden_layers
    lines = [f"{device.device}: {count} of {most} blocks, {_models(plan, device)}"]
    lines.append(_aligned([(q.name, _value(q), f"{q.formula}  [{q.origin}]") for q in device.numbers]))
    spare = device.usable - device.needed
    lines.append(f"needed {bytes_text(device.needed)}, usable {bytes_text(device.usable)}, spare {bytes_text(spare)}")
    if len(plan.devices) > 1:
        index = device.device.rpartition(":")[2]
        flags = f"--blocks {device.blocks.start}:{device.blocks.stop}{' --ends' if device.ends else ''}"
        lines.append(f"a server of its own: CUDA_VISIBLE_DEVICES={index} corolla init ... --device cuda {flags}")
    return "\n".join(lines)


def _models(plan: MachinePlan, device: DevicePlan) -> str:
    size = plan.setup.range_size or math.ceil(len(device.blocks) / 2)
    ranges = [device.blocks[start : start + size] for start in range(0, len(device.blocks), size)]
    named = [f"{blocks.start}:{blocks.stop}" for blocks in ranges]
    return f"ranges {', '.join(named)}" + (", embedding and head" if device.ends else "")


def _speed(speed: ServerSpeed) -> str:
    rates = speed.throughput
    rows = [
        ("inference", f"{rates.inference:.0f} tok/s", "one block, steps of one token"),
        ("forward", f"{rates.forward:.0f} tok/s", "one block, forwards of 1024 tokens"),
        ("network", f"{rates.network:.0f} tok/s", "hidden states over the wire"),
        ("compute", f"{speed.compute:.0f} tok/s", f"forward / (({speed.blocks} + 1) / 2)"),
        ("effective", f"{speed.effective:.0f} tok/s", "min(compute, network)"),
        (
            "session", f"{speed.session:.1f} tok/s",
            f"one stream: 1 / ({speed.blocks} / inference + {speed.ends * 1e3:.2f} ms for the ends + "
            f"{speed.stream * 1e3:.2f} ms for the stream)",
        ),
    ]  # fmt: skip
    return "throughput\n" + _aligned(rows)


def _blocks(blocks: range) -> str:
    return f"blocks {blocks.start}:{blocks.stop}"


def _value(quantity: Quantity) -> str:
    if quantity.unit == BYTES:
        return bytes_text(quantity.value)
    return f"{quantity.value} {quantity.unit}".strip()


def _aligned(rows: Sequence[tuple[str, str, str]]) -> str:
    name, value = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {row[0]:<{name}}  {row[1]:>{value}}  {row[2]}" for row in rows)
