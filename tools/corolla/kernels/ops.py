"""The operators of the compiled decoder, in `torch.ops.corolla`: linear layers, their adapters and paged attention.

CPU tensors take the kernels of cpu.cpp, loaded by build.py; every other device takes what PyTorch offers.
"""

import torch
from torch import nn

from corolla.model.alibi import alibi_mask

_library = torch.library.Library("corolla", "DEF")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias, int out_features) -> Tensor")
for _kind in ("int8", "nf4"):
    _library.define(
        f"packed_linear_{_kind}(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int out_features) -> Tensor"
    )
_library.define(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor pages, "
    "Tensor positions, float scale, int window=0, Tensor? slopes=None) -> Tensor"
)
_library.define("expert_linear(Tensor x, Tensor weight, Tensor experts, int out_features) -> Tensor")
_library.define("lora_add(Tensor y, Tensor x, Tensor adapters, int layer) -> Tensor")


@torch.library.register_fake("corolla::packed_linear", lib=_library)
def _packed_linear_shape(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("corolla::packed_linear_int8", lib=_library)
@torch.library.register_fake("corolla::packed_linear_nf4", lib=_library)
def _quantized_linear_shape(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, out_features: int
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("corolla::paged_attention", lib=_library)
def _paged_attention_shape(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int = 0,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@torch.library.register_fake("corolla::expert_linear", lib=_library)
def _expert_linear_shape(
    x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, out_features: int
) -> torch.Tensor:
    return x.new_empty((x.shape[0], out_features))


@torch.library.register_fake("corolla::lora_add", lib=_library)
def _lora_add_shape(y: torch.Tensor, x: torch.Tensor, adapters: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int = 0,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stores each row's key and value at its position and attends to all positions up to it.

    `query` [N, heads, head_dim]; `key`, `value` [N, kv_heads, head_dim]; `keys`, `values` [pages, page_size,
    kv_heads, head_dim], written in place; `pages` [N, P] int32, the pages of each row's session in order;
    `positions` [N] int64, -1 for a row of padding, which gives zeros; row 0 is none. Rows may belong to one
    session: all keys are stored before the first row attends. With a `window`, a row sees no more than that many
    positions, its own among them. `slopes` [heads] add slope times position, computed in the dtype of `slopes`, to the
    products of queries and keys before both are scaled. Returns [N, heads, head_dim].

    This is the form for devices without a kernel of ours; it gathers all P pages of every row.
    """
    page_size = keys.shape[1]
    real = positions >= 0
    source = torch.where(real, torch.arange(len(positions), device=positions.device), 0)  # padding repeats row 0
    ends, table = positions[source], pages[source].long()
    own_pages = table.gather(1, (ends // page_size)[:, None])[:, 0]
    for memory, new in ((keys, key), (values, value)):
        memory.index_put_((own_pages, ends % page_size), new[source])
    seen_keys, seen_values = (memory[table].flatten(1, 2).transpose(1, 2) for memory in (keys, values))
    seen = torch.arange(seen_keys.shape[2], device=keys.device)
    own = ends[:, None, None, None]
    mask = seen <= own
    if window:
        mask &= seen > own - window
    if slopes is not None:
        mask = alibi_mask(slopes, scale, seen, own, mask).to(query.dtype)
    attended = nn.functional.scaled_dot_product_attention(
        query[:, :, None], seen_keys, seen_values, mask, scale=scale, enable_gqa=True
    )
    return torch.where(real[:, None, None], attended[:, :, 0], torch.zeros_like(query))


_library.impl("paged_attention", paged_attention, "CUDA")
