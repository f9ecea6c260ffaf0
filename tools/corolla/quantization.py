"""How the weights of the blocks' linear layers may be quantized. Embedding and head keep the dtype that is served."""

from corolla.errors import InvalidValueError

NONE, INT8, NF4 = "none", "int8", "nf4"
QUANTS = (NONE, INT8, NF4)
"""INT8: one byte per weight and a scale per output feature. NF4: half a byte per weight and a scale per 64 of them."""


def check_quant(quant: str, tensor_parallel: int) -> str:
    """The name itself; InvalidValueError for an unknown one, or one for blocks in so many shards."""
    if quant not in QUANTS:
        raise InvalidValueError("quant", quant, ", ".join(QUANTS))
    if tensor_parallel > 1 and quant != NONE:
        raise InvalidValueError("quant", quant, f"{NONE} where tensor_parallel, {tensor_parallel} here, is above 1")
    return quant


def default_quant(device: str, tensor_parallel: int) -> str:
    """What a server quantizes unless told otherwise: nothing on CPUs and in several shards, NF4 on CUDA."""
    return NONE if device == "cpu" or tensor_parallel > 1 else NF4
