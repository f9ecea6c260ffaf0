"""How the process of a model starts: without looking for garbage, as imports leave none and it takes a fifth of them.

What such a process runs, a backend for example, imports this before all other modules and calls `started` in the end.
"""

import gc

gc.disable()


def started() -> None:
    """From now on garbage is collected, but not looked for among what was loaded: hundreds of thousands of objects."""
    gc.freeze()
    gc.enable()
