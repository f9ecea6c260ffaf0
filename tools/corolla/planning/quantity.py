"""The numbers of a plan, each with its formula and where it comes from: tables, JSON and errors are made of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from corolla.errors import InvalidValueError

BYTES, TOKENS, BLOCKS, COUNT = "bytes", "tokens", "blocks", ""


class Origin(StrEnum):
    """Where a number comes from."""

    TENSORS = "tensors"
    MACHINE = "machine"
    MEASURED = "measured"
    CONSTANT = "constant"
    DEFAULT = "default"
    COMPUTED = "computed"
    GIVEN = "given"


@dataclass(frozen=True)
class Quantity:
    """One number of a plan: `name` is that of the flag that overrides it, `value` is in `unit`."""

    name: str
    value: int
    unit: str
    formula: str
    origin: Origin


class Numbers:
    """The quantities of a plan, in the order in which they were worked out; what was `given` is taken as it is."""

    def __init__(self, given: Mapping[str, int]) -> None:
        self.given = dict(given)
        self._found: dict[str, Quantity] = {}

    def add(self, name: str, value: int, unit: str, formula: str, origin: Origin) -> int:
        """Its value, which is `value` unless another one was given."""
        if name in self.given:
            value, formula, origin = self.given[name], f"--{name.replace('_', '-')}", Origin.GIVEN
        self._found[name] = Quantity(name, value, unit, formula, origin)
        return value

    def all(self) -> tuple[Quantity, ...]:
        """Every quantity so far."""
        return tuple(self._found.values())


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(name: str, text: str) -> int:
    """Of "12GiB", "500 MB" or "1048576". InvalidValueError for anything else."""
    number = text.strip().lower().removesuffix("b").strip()
    unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if number.endswith(unit)), "")
    try:
        value = float(number.removesuffix(unit)) * _UNITS[unit]
        if not 0 <= value < 2**63:
            raise ValueError
    except ValueError as error:
        raise InvalidValueError(name, text, "bytes, such as 1048576, 500MB or 12GiB") from error
    return round(value)


def bytes_text(value: float) -> str:
    """For people: 1.25 GiB, 32.0 MiB, 512 bytes."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}" if unit == "GiB" else f"{value / size:.1f} {unit}"
    return f"{value:.0f} bytes"
