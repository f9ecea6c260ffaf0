"""How the weights of the blocks' linear layers may be quantized. Embedding and head keep the dtype that is served."""

from corolla.errors import InvalidValueError

NONE, INT8, NF4 = "none", "int8", "nf4"
QUANTS = (NONE, INT8, NF4)
"""INT8: one byte per weight and a scale per output feature. NF4: half a byte per weight and a scale per 64 of them."""


def check_quant(quant: str) -> str:
    """The name itself; InvalidValueError for an unknown one."""
    if quant not in QUANTS:
        raise InvalidValueError("quant", quant, ", ".join(QUANTS))
    return quant


def default_quant(device: str) -> str:
    """What a server quantizes unless told otherwise: nothing on CPUs, NF4 on CUDA."""
    return NONE if device == "cpu" else NF4
