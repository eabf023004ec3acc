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


def gather_kv(layer_view: Tensor, pages: Tensor, length: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Return K and V of tokens ``first … length`` of those that `pages` hold, ``(length - first, kv_heads, head_dim)``.

    They are copied, and no page is read that holds none of them.

    Parameters
    ----------
    layer_view
        ``(pages + 1, 2, page_size, kv_heads, head_dim)`` of one layer, see `KVAccess.layer_view`.
    pages
        ``(ceil(length / page_size),)`` of one view, in the order of its tokens.
    length, first
        Tokens; token 0 is the first of ``pages[0]``.

    Raises
    ------
    ValueError
        When there are no such tokens.
    """
    if not 0 <= first <= length:
        raise ValueError(f"tokens {first} … {length} are not in these pages")
    page_size = layer_view.shape[2]
    passed = first // page_size
    # torch indexes no 8-bit floats; as bytes they are what they were.
    plain = layer_view.view(torch.uint8) if layer_view.element_size() == 1 else layer_view
    k, v = plain[pages[passed:]].view(layer_view.dtype).unbind(1)
    chosen = slice(first - passed * page_size, length - passed * page_size)
    return k.flatten(0, 1)[chosen], v.flatten(0, 1)[chosen]


def paged_attention(
    query: Tensor, layer_view: Tensor, tensors: PlanTensors, window: int | None = None, *, scale: float | None = None
) -> Tensor:
    """Return the attention of one layer over the pages of one plan label; its K and V have been written.

    Token ``i`` of a view that begins behind `start` stored tokens sees tokens ``0 … start + i`` of its stream, itself
    included, or the last `window` of them. Tokens that retention dropped are not there; what positions mean is the
    model's affair (they went into K and Q before). What no token of a view sees is not gathered.

    Parameters
    ----------
    query
        ``(tokens or more, heads, head_dim)``, packed like the label; `heads` is a multiple of the cache's `kv_heads`,
        and each run of ``heads / kv_heads`` of them shares one head of K and V (grouped-query attention).
    layer_view
        ``(pages + 1, 2, page_size, kv_heads, head_dim)`` of the layer, see `KVAccess.layer_view`.
    tensors
        Addressing of the label in the layer's group, see `KVAccess.tensors`.
    window
        Tokens that a token sees, itself included; None: the group's.
    scale
        Of the scores; None: ``1 / sqrt(head_dim)``.

    Returns
    -------
    Tensor
        As `query`. Rows behind the label's tokens are 0.

    Raises
    ------
    ValueError
        When the query does not fit the label or the cache, or the window is wider than what the group keeps.

    References
    ----------
    Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, SOSP 2023.
    Ainslie et al., GQA: Training Generalized Multi-Query Transformer Models, EMNLP 2023.
    Beltagy et al., Longformer: The Long-Document Transformer, 2020 (sliding windows).
    """
    page_size, kv_heads, head_dim = layer_view.shape[2:]
    if query.dim() != 3 or query.shape[0] < tensors.tokens or query.shape[2] != head_dim or query.shape[1] % kv_heads:
        raise ValueError(
            f"query has shape {tuple(query.shape)}; label {tensors.label!r} takes at least {tensors.tokens} rows of "
            f"(a multiple of {kv_heads}, {head_dim})"
        )
    kept = tensors.window
    window = kept if window is None else window
    if window is not None and not 1 <= window <= (kept or window):
        raise ValueError(
            f"a window of {window} tokens was asked for; "
            + (f"this group keeps the last {kept}" if kept else "a token sees at least itself")
        )
    shared = query.shape[1] // kv_heads
    tokens = pairwise(tensors.query_indptr[: tensors.views + 1].tolist())
    pages = pairwise(tensors.page_indptr[: tensors.views + 1].tolist())
    lengths = tensors.lengths[: tensors.views].tolist()
    skipped = tensors.skipped[: tensors.views].tolist()
    attended = torch.zeros_like(query)
    for (first, last), (first_page, last_page), length, left in zip(tokens, pages, lengths, skipped, strict=True):
        span = last - first
        if not span:
            continue
        # What the view's first token sees is what any of them sees; the pages begin behind those that were left.
        begin = 0 if window is None else max(0, length - span + 1 - window)
        held = left * page_size
        k, v = (
            rows.to(query.dtype).transpose(0, 1).repeat_interleave(shared, dim=0)
            for rows in gather_kv(layer_view, tensors.page_indices[first_page:last_page], length - held, begin - held)
        )
        seen = torch.ones(span, length - begin, dtype=torch.bool, device=query.device).tril(length - begin - span)
        if window is not None:
            seen = seen.triu(length - begin - span + 1 - window)
        found = functional.scaled_dot_product_attention(
            query[first:last].transpose(0, 1), k, v, attn_mask=seen, scale=scale
        )
        attended[first:last] = found.transpose(0, 1)
    return attended
