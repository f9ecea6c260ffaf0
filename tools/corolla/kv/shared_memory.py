"""Files of a fixed size whose memory is reserved when they are created, and arrays in them."""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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


def map_array(file: Path, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
    """A shared array in `file`, created with zeros if it does not exist."""
    create_reserved(file, int(np.prod(shape)) * dtype.itemsize)
    return np.memmap(file, dtype=dtype, mode="r+", shape=shape).view(np.ndarray)
