"""How a checkpoint is quantized already, as its config.json says: by bitsandbytes, saved by transformers, or not."""

import re
from typing import Any

import torch
from transformers import PretrainedConfig

from corolla.errors import CheckpointError, InvalidValueError
from corolla.kernels.packed_layers import linear_names
from corolla.model.family import family_of
from corolla.quantization import INT8, NF4, NONE

FIELD = "config.json: quantization_config"
METHOD = "bitsandbytes"
INT8_SETTINGS = {"llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False}
NF4_SETTINGS = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "uint8"}
"""What can be served, by the names of BitsAndBytesConfig. Double quantization and the dtype of products are free."""
DEFAULTS = INT8_SETTINGS | {"bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "uint8"}
"""Of BitsAndBytesConfig, for what is not written."""


def stored_quant(config: PretrainedConfig) -> str:
    """How the linear layers of the blocks are quantized in the checkpoint; NONE if they are not.

    InvalidValueError, CheckpointError for a quantization that cannot be served.
    """
    settings = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if not settings:
        return NONE
    if not isinstance(settings, dict):
        raise CheckpointError(f"{FIELD}: {settings!r} is no object; fetch the checkpoint again")
    _check_method(settings)
    eight, four = bool(settings.get("load_in_8bit")), bool(settings.get("load_in_4bit"))
    if eight == four:
        raise InvalidValueError(
            f"{FIELD}: load_in_8bit, load_in_4bit", (eight, four), "one of them true, the other one false"
        )
    for name, allowed in (INT8_SETTINGS if eight else NF4_SETTINGS).items():
        value = settings.get(name) if settings.get(name) is not None else DEFAULTS[name]
        if value != allowed:
            raise InvalidValueError(f"{FIELD}.{name}", value, str(allowed))
    _check_skipped(settings.get("llm_int8_skip_modules"), config)
    return INT8 if eight else NF4


def check_fits(quant: str, config: PretrainedConfig) -> None:
    """InvalidValueError when a checkpoint that is quantized already is to be served in another way."""
    stored = stored_quant(config)
    if stored not in (NONE, quant):
        raise InvalidValueError(
            "quant", quant, f"{stored}, as the checkpoint is quantized already ({FIELD}) and served as it is"
        )


def _check_method(settings: dict[str, Any]) -> None:
    """Old files of bitsandbytes name no method."""
    old = METHOD if "load_in_8bit" in settings or "load_in_4bit" in settings else None
    method = settings.get("quant_method") or old
    if method != METHOD:
        raise InvalidValueError(
            f"{FIELD}.quant_method",
            method,
            f"{METHOD} (load_in_8bit, or load_in_4bit with nf4); or take the unquantized checkpoint, which can be "
            f"served with --quant {INT8} or {NF4}",
        )


def _check_skipped(skipped: Any, config: PretrainedConfig) -> None:
    """Nothing but what lies outside the blocks may be left out, and the head must be; None means just that."""
    if skipped is None:
        return
    from transformers.quantizers.quantizers_utils import should_convert_module  # not for every start: it takes long

    field, allowed = f"{FIELD}.llm_int8_skip_modules", "null, or names with lm_head among them and no layer of a block"
    family = family_of(config)
    with torch.device("meta"):
        linears = linear_names(family.block(config, 0))
    prefix = family.base_prefix + family.block_prefix
    in_blocks = [f"{prefix.format(index)}{name}" for index in range(config.num_hidden_layers) for name in linears]
    try:
        fits = all(should_convert_module(name, skipped) for name in in_blocks)
        fits = fits and not should_convert_module(family.head_prefix.removesuffix("."), skipped)
    except (TypeError, re.error) as error:
        raise InvalidValueError(field, skipped, allowed) from error
    if not fits:
        raise InvalidValueError(field, skipped, allowed)
