"""What `corolla doctor` checks of a model and of the servers that share it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from corolla.checkpoint.source import open_checkpoint, written_source
from corolla.errors import CorollaError
from corolla.planning.repository import planned
from corolla.planning.table import summary
from corolla.reachability.address import Address
from corolla.reachability.announced import Announced
from corolla.reachability.asking import ask_peers, listening, registered_peers
from corolla.repository.choices import Choices, plan_repository
from corolla.repository.plan import RepositoryPlan
from corolla.repository.reading import is_repository
from corolla.repository.stamp import read_stamp
from corolla.repository.written_plan import written_plan
from corolla.server.checks import Check


def check_model(text: str, choices: Choices) -> tuple[RepositoryPlan | None, list[Check]]:
    """A repository, or a checkpoint that is served as was chosen: can it be read, does it fit? Its plan, if it can."""
    folder = Path(text)
    written = is_repository(folder)
    try:
        if written:
            plan = written_plan(folder)
            opened = open_checkpoint(written_source(str(plan.checkpoint), folder))
        else:
            plan, opened = plan_repository(text, folder, choices)
        opened.check_weights()
    except CorollaError as error:
        return None, [Check("model", False, str(error))]
    kind = f"{plan.config.model_type}, {len(plan.hosted)} of {plan.config.num_hidden_layers} blocks"
    checks = [Check("model", True, f"{text}: {kind} in {plan.dtype.name}, quantization {plan.quant}")]
    edited = list(_edited(folder)) if written else []
    if edited:
        checks.append(Check("repository", True, f"edited by hand: {', '.join(edited)}"))
    return plan, [*checks, _check_room(plan, folder)]


def check_registry(url: str) -> Check:
    """Whether the registry answers."""
    from corolla.peers.registry import open_registry

    remedy = "start it, or give its URL with --registry"
    try:
        registry = open_registry(url)
        try:
            models = registry.models()
            servers = sum(len(registry.list(model)) for model in models)
        finally:
            registry.close()
    except CorollaError as error:
        return Check("registry", False, str(error), remedy)
    return Check("registry", True, f"{url}: {servers} servers of {len(models)} models")


def check_reachability(announced: Announced, host: str, registry: str, peers: Sequence[str]) -> Check:
    """Whether other servers can dial this one; those of the registry are asked if no `peers` are given."""
    name = "reachability"
    if announced.address.is_loopback() and not peers:
        return Check(name, True, f"{announced.address} is for servers of this machine only; --host 0.0.0.0 for others")
    try:
        asked = list(peers) or registered_peers(registry, announced.address)
    except CorollaError as error:
        return Check(name, True, f"of {announced.address} not known: {error}")
    with listening(Address(host, announced.listening_port)) as listener:
        verdict = ask_peers(announced.address, asked, listener)
    if verdict.reachable is None:
        return Check(name, not peers, f"of {announced.address} not known: {verdict.detail}", verdict.remedy)
    return Check(name, verdict.reachable, verdict.detail, verdict.remedy)


def _check_room(plan: RepositoryPlan, folder: Path) -> Check:
    try:
        found = planned(plan, folder)
    except CorollaError as error:
        return Check("room for the model", False, str(error))
    if found is None:
        return Check("room for the model", True, "not checked: no blocks, or not the devices it is for")
    return Check("room for the model", True, summary(found).replace("\n", "; "))


def _edited(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*/config.pbtxt")):
        stamp = read_stamp(file.read_text())
        if stamp is not None and stamp.edited:
            yield str(file.relative_to(folder))
