"""The device tier: one tensor, page-major, the sink behind the last page."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gpu_backend.copier import runs_of
from gpu_backend.layout import CacheLayout

POISON_BYTE = 0xFF
"""Fills freed pages in tests: every dtype reads it as NaN, so it spreads through whatever attends to it."""


def dtype_of(layout: CacheLayout) -> torch.dtype:
    """Return the dtype of the K and V that a cache takes and gives."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return dtype


def paged(memory: Tensor, layout: CacheLayout) -> Tensor:
    """Return bytes `(pages, page_bytes)` as pages `(pages, layers, 2, page_size, heads, head_dim)`, no copy."""
    return memory.view(getattr(torch, layout.storage_dtype)).view(-1, *layout.page_shape)


def poison(memory: Tensor, pages: Iterable[int]) -> None:
    """Spoil `pages` of bytes `(pages, page_bytes)`."""
    spoiled = list(pages)
    for _, page, count in runs_of(spoiled, spoiled):
        memory.narrow(0, page, count).fill_(POISON_BYTE)


class DeviceCache:
    """K and V of every layer on the device.

    Parameters
    ----------
    layout
        Shapes and sizes.
    device
        Where the memory is.

    Attributes
    ----------
    bytes
        ``(pages + 1, page_bytes)``, uint8: what copies move.
    storage
        ``(pages + 1, layers, 2, page_size, heads, head_dim)``, the same memory; uint8 for 8-bit floats.

    Notes
    -----
    Fresh memory is undefined. A page that is granted is written before it is read; the sink may hold anything.
    """

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        self.layout = layout
        self.bytes = torch.empty(layout.pages + 1, layout.page_bytes, dtype=torch.uint8, device=device)
        self.storage = paged(self.bytes, layout)

    def layer_view(self, layer: int) -> Tensor:
        """Return ``(pages + 1, 2, page_size, heads, head_dim)`` of one layer: strided, no copy, in the cache's dtype.

        Raises
        ------
        IndexError
            When there is no such layer.
        """
        if not 0 <= layer < self.layout.layers:
            raise IndexError(f"{self.layout.name} has layers 0 … {self.layout.layers - 1}, not {layer}")
        return self.storage[:, layer].view(dtype_of(self.layout))

    def poison(self, pages: Iterable[int]) -> None:
        """Spoil `pages`, for tests: whoever reads them before a write gets NaN."""
        poison(self.bytes, pages)
