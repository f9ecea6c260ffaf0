"""`corolla serve --num-blocks`: a server of a checkpoint that chooses its blocks, and changes them while it runs."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import click

from corolla.balance.mover import Mover
from corolla.balance.policy import MovePolicy
from corolla.balance.start import BlockChoice
from corolla.checkpoint.source import find_source
from corolla.cli.repository_argument import repository_to_serve
from corolla.errors import InvalidValueError
from corolla.peers.membership import Membership
from corolla.peers.record import Throughput
from corolla.planning.plan import PlanError
from corolla.planning.repository import planned
from corolla.repository.choices import Choices, plan_repository
from corolla.repository.reading import is_repository
from corolla.server.supervisor import Supervisor

_FIXED = ("blocks", "ranges", "range_size")
"""Choices that say which blocks are served."""


@dataclass(frozen=True)
class OwnBlocks:
    """What was chosen first, and how to get the repository of other blocks; `period` seconds between looks."""

    choice: BlockChoice
    write: Callable[..., Path]
    period: float

    def first(self) -> Path:
        """The repository to start with."""
        return self.write(self.choice.chosen)

    def settled(self, joined: Membership, repository: Path) -> Path:
        """The one to serve, once others know of the choice."""
        return self.choice.settled(joined, self.write, repository)

    def moving(self, joined: Membership, supervisor: Supervisor) -> AbstractContextManager[Mover]:
        """Moves the server when that is called for, as long as the context lasts.

        Other blocks take the memory of those that it has now, so there need not be room for both.
        """
        policy = MovePolicy(joined.announcer.record.peer_id, Random(), self.period)
        write = partial(self.write, overcommit=True)
        return closing(Mover(self.choice.blocks, joined.announcer, joined.directory, write, supervisor.change, policy))


def blocks_that_fit(checkpoint: str, out: Path | None, choices: Mapping[str, Any]) -> int | None:
    """How many blocks of a checkpoint a server in a swarm hosts, where nothing says which, and not all of them fit.

    Else None. PlanError where not one fits.
    """
    said = out is not None or any(choices[name] is not None for name in _FIXED)
    if said or not choices["registry"] or is_repository(Path(checkpoint)):
        return None
    whole, _ = plan_repository(checkpoint, Path(), Choices(**choices))
    try:
        planned(whole, Path())
    except PlanError:
        part = planned(replace(whole, ends=choices["ends"]), Path(), whole=False)
    else:
        return None
    assert part is not None
    blocks = len(whole.hosted)
    size = min(len(part.blocks), blocks - 1)
    click.echo(f"corolla: {size} of {blocks} blocks fit here: those of which other servers are shortest are chosen")
    return size


def own_blocks(
    ctx: click.Context,
    checkpoint: str,
    out: Path | None,
    choices: Mapping[str, Any],
    size: int,
    throughput: Throughput,
    period: float,
) -> OwnBlocks:
    """The `size` blocks of which the swarm is shortest.

    InvalidValueError where something else says already what is to be served, or where nobody can be asked.
    """
    if is_repository(Path(checkpoint)):
        raise InvalidValueError("--num-blocks", size, f"only for a checkpoint; the blocks of {checkpoint} are written")
    for flag, value in (("--blocks", choices["blocks"]), ("--ranges", choices["ranges"]), ("--out", out)):
        if value is not None:
            raise InvalidValueError(flag, str(value), "none with --num-blocks, with which the blocks change")
    if not choices["registry"]:
        raise InvalidValueError("--num-blocks", size, "only with --registry, where other servers are found")
    source = find_source(checkpoint, choices["revision"], choices["token"])

    def write(blocks: range, **more: Any) -> Path:
        own = {**choices, "blocks": f"{blocks.start}:{blocks.stop}", **more}
        return repository_to_serve(ctx, checkpoint, None, own)

    chosen = BlockChoice.of(source, choices["model_name"], choices["registry"], size, throughput)
    return OwnBlocks(chosen, write, period)
