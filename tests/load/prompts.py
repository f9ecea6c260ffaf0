"""Random prompts of a chosen length, the same ones in every run with the same seed."""

import random
from collections.abc import Iterator
from itertools import count

from locust import events
from locust.argument_parser import LocustArgumentParser

TEXT = (
    "a the of one each model server process session page cache block range step token text memory shared "
    "waits opens closes holds takes gives begins ends when that and with between after"
)

_users = count()


def prompts(words: int, seed: int) -> Iterator[str]:
    """Prompts without end, others for each caller."""
    chosen = random.Random(f"{seed}, user {next(_users)}")
    while True:
        yield " ".join(chosen.choices(TEXT.split(), k=words))


@events.init_command_line_parser.add_listener
def _add_options(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("Prompts")
    group.add_argument("--prompt-words", type=int, default=16, help="Length of a prompt (default: %(default)s)")
    group.add_argument("--seed", type=int, default=0, help="Chooses the prompts (default: %(default)s)")
