"""What generations did on other servers, as metrics of Triton."""

from dataclasses import asdict

from corolla.remote.trip import TripCounters
from corolla.serving.metrics import Key, MakeCounter, Reports

FAMILIES = {
    "steps": "Steps that went through other servers",
    "spans": "Servers that these steps went through",
    "one_way_trips": "Messages between servers that these steps had to wait for one after the other",
    "fallbacks": "Outputs of a server that were sent on from here, as its push failed or was late",
    "moves": "Sessions that were moved to another server, as theirs failed or stopped",
}


def report_routes(counters: TripCounters, make_counter: MakeCounter) -> Reports:
    """The families corolla_route_<name>_total."""
    made = {
        (name, 0): make_counter(f"corolla_route_{name}_total", text, {"model": "generate"})
        for name, text in FAMILIES.items()
    }

    def read() -> dict[Key, int]:
        return {(name, 0): count for name, count in asdict(counters).items()}

    return Reports(made, read)
