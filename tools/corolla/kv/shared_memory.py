"""Files of a fixed size whose memory is reserved when they are created."""

import os
from pathlib import Path

from corolla.errors import EnvironmentProblemError


def create_reserved(path: Path, size: int) -> None:
    """Creates `path` with `size` zero bytes, all of them allocated, so that no later write can fail.

    A file that exists is left alone. Raises EnvironmentProblemError when there is no room.
    """
    if path.exists():
        return
    temporary = path.with_suffix(".new")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        os.rename(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise EnvironmentProblemError(
            f"{path}: cannot reserve {size / 2**20:.0f} MiB ({error.strerror}); enlarge {path.parents[1]} "
            "(docker: --shm-size) or write the repository with a smaller --attn-cache-tokens"
        ) from error
    finally:
        os.close(descriptor)
