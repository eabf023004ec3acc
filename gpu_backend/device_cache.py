"""The device tier: one piece of memory, page-major, the sinks behind the last page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch
from torch import Tensor

from gpu_backend.copier import runs_of
from gpu_backend.layout import CacheLayout, PageLayout

POISON_BYTE = 0xFF
"""Fills freed pages in tests: every dtype reads it as NaN, so it spreads through whatever attends to it."""


def dtype_of(layout: CacheLayout | PageLayout) -> torch.dtype:
    """Return the dtype of the K and V that a cache takes and gives."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return dtype


@attrs.frozen(eq=False)
class GroupMemory:
    """The pages of one group in one tier.

    Parameters
    ----------
    layout
        Of a page.
    bytes
        ``(pages, page_bytes)``, uint8: what copies move.
    storage
        ``(pages, layers, 2, page_size, heads, head_dim)``, the same memory; uint8 for 8-bit floats.
    """

    layout: PageLayout
    bytes: Tensor
    storage: Tensor

    def poison(self, pages: Iterable[int]) -> None:
        """Spoil `pages`, for tests: whoever reads them before a write gets NaN."""
        spoiled = list(pages)
        for _, page, count in runs_of(spoiled, spoiled):
            self.bytes.narrow(0, page, count).fill_(POISON_BYTE)


def divided(memory: Tensor, layout: CacheLayout, pages: Sequence[int]) -> tuple[GroupMemory, ...]:
    """Return `memory` as each group sees it, no copy: its first `pages` pages. The groups see the same bytes."""
    flat = memory.view(-1)
    # One tensor that the storages of all groups are views of: torch.compile takes inputs that share memory only so.
    elements = flat.view(getattr(torch, layout.parts[0].storage_dtype))
    groups = []
    for part, count in zip(layout.parts, pages, strict=True):
        own = flat[: count * part.page_bytes].view(count, part.page_bytes)
        storage = elements[: own.numel() // elements.element_size()].view(-1, *part.page_shape)
        groups.append(GroupMemory(part, own, storage))
    return tuple(groups)


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
        ``(sectors + 1, sector_bytes)``, uint8; with one group a sector is a page. The sinks of all groups lie in the
        last sector, each at its beginning.
    groups
        The same memory as pages, per group; behind its last page comes its sink.

    Notes
    -----
    Fresh memory is undefined. A page that is granted is written before it is read; a sink may hold anything.
    """

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        self.layout = layout
        self.move(torch.empty(layout.pages + 1, layout.sector_bytes, dtype=torch.uint8, device=device))

    def move(self, memory: Tensor) -> None:
        """Put the cache into other memory of the same size; what it held is lost."""
        self.bytes = memory.view(self.layout.pages + 1, self.layout.sector_bytes)
        self.groups = divided(memory, self.layout, [sink + 1 for sink in self.layout.sinks])

    @property
    def storage(self) -> Tensor:
        """``(pages + 1, layers, 2, page_size, heads, head_dim)`` of a cache with one group."""
        [group] = self.groups
        return group.storage

    def layer_view(self, layer: int) -> Tensor:
        """Return ``(pages + 1, 2, page_size, heads, head_dim)`` of one layer: strided, no copy, in the cache's dtype.

        The layer is a number of the model, the pages are those of its group.

        Raises
        ------
        IndexError
            When there is no such layer.
        """
        group, place = self.layout.place_of(layer)
        return self.groups[group].storage[:, place].view(dtype_of(self.layout))

    def poison(self, pages: Iterable[int], group: int = 0) -> None:
        """Spoil `pages` of a group, see `GroupMemory.poison`."""
        self.groups[group].poison(pages)
