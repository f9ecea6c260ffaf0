"""bitsandbytes, which takes seconds to import: only for who quantizes, or runs its layers."""

import logging

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # of casts in every layer, and of missing kernels

import bitsandbytes.functional as functional  # noqa: E402
import bitsandbytes.nn as layers  # noqa: E402

__all__ = ["functional", "layers"]
