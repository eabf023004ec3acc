"""The host tier: the device's pages in host memory, pinned where the device copies by itself."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from gpu_backend.device_cache import divided
from gpu_backend.layout import CacheLayout
from gpu_backend.queues import Queues


class HostPool:
    """Pages in host memory, with the geometry of the device cache and no sink.

    Parameters
    ----------
    layout
        Shapes and sizes; 0 host pages make an empty pool.
    queues
        Gives memory that its copies can reach.

    Attributes
    ----------
    bytes
        ``(sectors, sector_bytes)``, uint8; with one group a sector is a page.
    groups
        The same memory as pages, per group.

    Raises
    ------
    HostMemoryError
        When the memory cannot be had, or not pinned. There is no pageable fallback: a copy from such memory is
        staged by the driver and no longer follows the queue it was put on.
    """

    def __init__(self, layout: CacheLayout, queues: Queues) -> None:
        self.layout = layout
        memory = queues.host_memory(layout.host_pages * layout.sector_bytes, f"the host pool of {layout.name!r}")
        self.bytes = memory.view(layout.host_pages, layout.sector_bytes)
        self.groups = divided(memory, layout, layout.geometry().host_group_pages)

    @property
    def storage(self) -> Tensor:
        """``(host_pages, layers, 2, page_size, heads, head_dim)`` of a pool with one group."""
        [group] = self.groups
        return group.storage

    def poison(self, pages: Iterable[int], group: int = 0) -> None:
        """Spoil `pages` of a group, for tests."""
        self.groups[group].poison(pages)
