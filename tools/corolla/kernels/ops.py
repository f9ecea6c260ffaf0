"""The operators of the compiled decoder: `torch.ops.corolla.packed_linear` and `torch.ops.corolla.paged_attention`.

CPU tensors take the kernels of cpu.cpp, loaded by build.py; every other device takes what PyTorch offers.
"""

import torch
from torch import nn

_library = torch.library.Library("corolla", "DEF")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias, int out_features) -> Tensor")
_library.define(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor pages, "
    "Tensor positions, float scale) -> Tensor"
)


@torch.library.register_fake("corolla::packed_linear", lib=_library)
def _packed_linear_shape(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int
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
) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Stores each row's key and value at its position and attends to all positions up to it.

    `query` [N, heads, head_dim]; `key`, `value` [N, kv_heads, head_dim]; `keys`, `values` [pages, page_size,
    kv_heads, head_dim], written in place; `pages` [N, P] int32, the pages of each row's session in order;
    `positions` [N] int64, -1 for a row of padding, which gives zeros; row 0 is none. Rows may belong to one
    session: all keys are stored before the first row attends. Returns [N, heads, head_dim].

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
    visible = torch.arange(seen_keys.shape[2], device=keys.device) <= ends[:, None]
    attended = nn.functional.scaled_dot_product_attention(
        query[:, :, None], seen_keys, seen_values, visible[:, None, None], scale=scale, enable_gqa=True
    )
    return torch.where(real[:, None, None], attended[:, :, 0], torch.zeros_like(query))


_library.impl("paged_attention", paged_attention, "CUDA")
