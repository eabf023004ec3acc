"""Attention over our pages, as plainly as it can be said: the reference that a paged kernel is compared with.

Every view's pages are gathered into one history, which ``torch.nn.functional.scaled_dot_product_attention`` then sees
as it would a contiguous cache. It asks the host for every view's bounds: for tests and examples, not for serving.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from gpu_backend.plan_tensors import PlanTensors


def gather_kv(layer_view: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return K and V of the first `length` tokens that `pages` hold, each ``(length, kv_heads, head_dim)``, copied.

    Parameters
    ----------
    layer_view
        ``(pages + 1, 2, page_size, kv_heads, head_dim)`` of one layer, see `KVAccess.layer_view`.
    pages
        ``(ceil(length / page_size),)`` of one view, in the order of its tokens.
    length
        Tokens.
    """
    # torch indexes no 8-bit floats; as bytes they are what they were.
    plain = layer_view.view(torch.uint8) if layer_view.element_size() == 1 else layer_view
    k, v = plain[pages].view(layer_view.dtype).unbind(1)
    return k.flatten(0, 1)[:length], v.flatten(0, 1)[:length]


def paged_attention(query: Tensor, layer_view: Tensor, tensors: PlanTensors, *, scale: float | None = None) -> Tensor:
    """Return the attention of one layer over the pages of one plan label; its K and V have been written.

    Token ``i`` of a view that begins behind `start` stored tokens sees tokens ``0 … start + i`` of its stream, itself
    included. Tokens that retention dropped are not there; what positions mean is the model's affair (they went into K
    and Q before).

    Parameters
    ----------
    query
        ``(tokens or more, heads, head_dim)``, packed like the label; `heads` is a multiple of the cache's `kv_heads`,
        and each run of ``heads / kv_heads`` of them shares one head of K and V (grouped-query attention).
    layer_view
        ``(pages + 1, 2, page_size, kv_heads, head_dim)`` of the layer, see `KVAccess.layer_view`.
    tensors
        Addressing of the label, see `KVAccess.tensors`.
    scale
        Of the scores; None: ``1 / sqrt(head_dim)``.

    Returns
    -------
    Tensor
        As `query`. Rows behind the label's tokens are 0.

    Raises
    ------
    ValueError
        When the query does not fit the label or the cache.

    References
    ----------
    Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, SOSP 2023.
    Ainslie et al., GQA: Training Generalized Multi-Query Transformer Models, EMNLP 2023.
    """
    kv_heads, head_dim = layer_view.shape[3:]
    if query.dim() != 3 or query.shape[0] < tensors.tokens or query.shape[2] != head_dim or query.shape[1] % kv_heads:
        raise ValueError(
            f"query has shape {tuple(query.shape)}; label {tensors.label!r} takes at least {tensors.tokens} rows of "
            f"(a multiple of {kv_heads}, {head_dim})"
        )
    shared = query.shape[1] // kv_heads
    tokens = pairwise(tensors.query_indptr[: tensors.views + 1].tolist())
    pages = pairwise(tensors.page_indptr[: tensors.views + 1].tolist())
    lengths = tensors.lengths[: tensors.views].tolist()
    attended = torch.zeros_like(query)
    for (first, last), (first_page, last_page), length in zip(tokens, pages, lengths, strict=True):
        span = last - first
        if not span:
            continue
        k, v = (
            rows.to(query.dtype).transpose(0, 1).repeat_interleave(shared, dim=0)
            for rows in gather_kv(layer_view, tensors.page_indices[first_page:last_page], length)
        )
        seen = torch.ones(span, length, dtype=torch.bool, device=query.device).tril(diagonal=length - span)
        found = functional.scaled_dot_product_attention(
            query[first:last].transpose(0, 1), k, v, attn_mask=seen, scale=scale
        )
        attended[first:last] = found.transpose(0, 1)
    return attended
