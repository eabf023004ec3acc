"""What copying pages costs, side by side with what it could cost: ``kvstate bench copy`` on the CPU.

The limit is one memcpy of the same bytes. Beside it run, on the same memory and with the same index lists::

    copier        gpu_backend.copier, as the backend uses it
    gather        all pages gathered into a temporary, from there in runs contiguous in the target
    layer-major   storage (layers, pages, …): page by page, layer by layer

All of them move bytes by the same memmove on one thread, so what differs is what they ask of it. They take turns at the
same places, each turn longer than a CPU's cache: a page that is offloaded was last touched long ago. In a fragmented
pool the pages of a call lie anywhere, in both pools; in a fresh one, in one row.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_backend.copier import Copier, runs_of
from gpu_backend.host_size import host_memory
from gpu_backend.queues import HostQueues
from kvstate.ops import PageCopies
from kvstate.ordering import Queue

PAGE_BYTES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20)
PAGES = (16, 128, 1024)
POOLS = ("fresh", "fragmented")
LAYERS = 32
BYTES_MAX = 2 << 30
CALL_BYTES = 64 << 20
"""What one timing moves, at least: small copies are repeated on other pages."""


class BenchTooLarge(ValueError):
    """Not even the smallest copy fits into the memory; the message says how much there is."""


@attrs.frozen(eq=False)
class Case:
    """Two pools of pages, and which page goes where.

    Parameters
    ----------
    source, target
        Bytes ``(pool pages, page_bytes)``.
    sources, targets
        Page lists of the whole pools; a call takes `pages` of each, beginning at the same place.
    pages
        Per call.
    layers
        Of the layer-major layout.
    """

    source: Tensor
    target: Tensor
    sources: Sequence[int]
    targets: Sequence[int]
    pages: int
    layers: int
    copier: Copier = attrs.field(factory=lambda: Copier(HostQueues()))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.source.shape[1]

    @property
    def calls(self) -> int:
        """Calls per timing."""
        return min(-(-CALL_BYTES // (self.pages * self.page_bytes)), len(self.source) // self.pages)

    def lists(self, place: int) -> tuple[list[int], list[int]]:
        """Return what the call at `place` copies: source pages, and as many target pages."""
        chosen = slice(place, place + self.pages)
        return list(self.sources[chosen]), list(self.targets[chosen])


def limit(case: Case, place: int) -> None:
    """Copy as many bytes in one piece."""
    offset = place * case.page_bytes
    ctypes.memmove(case.target.data_ptr() + offset, case.source.data_ptr() + offset, case.pages * case.page_bytes)


def copier(case: Case, place: int) -> None:
    """Copy with the backend's copier."""
    sources, targets = case.lists(place)
    case.copier.copy(Queue.COPY_OUT, case.target, case.source, PageCopies(sources, targets, [1] * len(sources)))


def gather(case: Case, place: int) -> None:
    """Gather the pages into a temporary, in the order of the target, and copy that in runs."""
    pairs = sorted(zip(*reversed(case.lists(place)), strict=True))
    temporary = case.source.index_select(0, torch.tensor([source for _, source in pairs]))
    to, origin, size = case.target.data_ptr(), temporary.data_ptr(), case.page_bytes
    for row, target, count in runs_of(range(len(pairs)), [target for target, _ in pairs]):
        ctypes.memmove(to + target * size, origin + row * size, count * size)


def layer_major(case: Case, place: int) -> None:
    """Read both pools as ``(layers, pool pages, page_bytes / layers)``, and copy each page's part of each layer."""
    to, origin, move = case.target.data_ptr(), case.source.data_ptr(), ctypes.memmove
    part = case.page_bytes // case.layers
    layer_bytes = len(case.source) * part
    sources, targets = case.lists(place)
    for source, target in zip(sources, targets, strict=True):
        for base in range(0, case.layers * layer_bytes, layer_bytes):
            move(to + base + target * part, origin + base + source * part, part)


METHODS: dict[str, Callable[[Case, int], None]] = {
    "limit": limit,
    "copier": copier,
    "gather": gather,
    "layer_major": layer_major,
}


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums up the storages that operations returned and did not take: temporaries."""

    bytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        taken = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in taken:
            self.bytes += result.untyped_storage().nbytes()
        return result


def temporary_bytes(method: Callable[[Case, int], None], case: Case) -> int:
    """Return the memory that one call takes for itself: tensors, and Python's objects at their peak."""
    with _Allocations():  # type: ignore[no-untyped-call]
        method(case, 0)  # What torch loads when it is first watched is no temporary.
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        with _Allocations() as seen:  # type: ignore[no-untyped-call]
            method(case, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return int(seen.bytes) + peak - before


def cases(
    bytes_max: int, page_bytes: Sequence[int], pages: Sequence[int], layers: int, seed: int = 0
) -> list[tuple[str, Case]]:
    """Return every (pool, case) that fits: two pools of `bytes_max` / 4, and a temporary of at most as much.

    Raises
    ------
    BenchTooLarge
        When none does.
    ValueError
        When the layers do not divide a page.
    """
    for size in page_bytes:
        if size % layers:
            raise ValueError(f"a page of {size} bytes cannot be divided into {layers} layers")
    pool_bytes = bytes_max // 4 // max(page_bytes) * max(page_bytes)
    sizes = [(size, count) for size in page_bytes for count in pages if size * count <= pool_bytes]
    if not sizes:
        raise BenchTooLarge(
            f"{bytes_max / 2**20:.0f} MiB do not hold four times {min(pages)} pages of {min(page_bytes)} bytes; "
            "ask for fewer or smaller ones, or make room"
        )
    # The backend's own memory; filled, because a page that was never touched costs the first copy a fault.
    memory = [HostQueues().host_memory(pool_bytes, "a pool of the bench").fill_(value) for value in (1, 2)]
    draw = random.Random(seed)
    found = []
    for size, count in sizes:
        source, target = (pool[: pool_bytes // size * size].view(-1, size) for pool in memory)
        row = range(len(source))
        anywhere = draw.sample(row, len(row)), draw.sample(row, len(row))
        for pool, (sources, targets) in zip(POOLS, ((row, row), anywhere), strict=True):
            found.append((pool, Case(source, target, sources, targets, count, layers)))
    return found


def measure(case: Case, repeats: int) -> dict[str, list[float]]:
    """Return seconds per call of every method, one value per repeat; the methods take turns."""
    taken: dict[str, list[float]] = {name: [] for name in METHODS}
    names = list(METHODS)
    last = len(case.source) - case.pages
    place = 0
    for turn in range(repeats + 1):
        places = []
        for _ in range(case.calls):
            places.append(place)
            place = place + case.pages if place + case.pages <= last else 0
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            method = METHODS[name]
            began = time.perf_counter()
            for at in places:
                method(case, at)
            if turn:
                taken[name].append((time.perf_counter() - began) / case.calls)
    return taken


def main(
    *,
    repeats: int = 9,
    bytes_max: int = BYTES_MAX,
    page_bytes: Sequence[int] = PAGE_BYTES,
    pages: Sequence[int] = PAGES,
    layers: int = LAYERS,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure every case that fits into memory.

    Parameters
    ----------
    repeats
        Timings per method and case.
    bytes_max
        Memory to use in all; at most half of what is available is.
    page_bytes, pages
        Sizes of a page, and pages per copy.
    layers
        Of the layer-major layout.
    progress
        Told (cases done, cases) after each case.

    Returns
    -------
    dict
        ``results`` has one entry per case: the limit in GB/s, and per method the median of (limit's seconds / its
        seconds), repeat by repeat, and the bytes of its temporaries.

    Raises
    ------
    BenchTooLarge
        When not even the smallest case fits.
    ValueError
        When the layers do not divide a page.
    """
    spare = host_memory(1).spare_bytes
    usable = bytes_max if spare is None else min(bytes_max, spare // 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = []
        chosen = cases(usable, page_bytes, pages, layers)
        for done, (pool, case) in enumerate(chosen, 1):
            results.append(_result(pool, case, measure(case, repeats)))
            if progress is not None:
                progress(done, len(chosen))
    finally:
        torch.set_num_threads(threads)
    return {
        "bench": "copy",
        "torch": torch.__version__,
        "repeats": repeats,
        "bytes_max": usable,
        "layers": layers,
        "results": results,
    }


def _result(pool: str, case: Case, taken: dict[str, list[float]]) -> dict[str, Any]:
    copy_bytes = case.pages * case.page_bytes
    others = [name for name in METHODS if name != "limit"]
    return {
        "pool": pool,
        "page_bytes": case.page_bytes,
        "pages": case.pages,
        "copy_bytes": copy_bytes,
        "limit_gb_s": copy_bytes / statistics.median(taken["limit"]) / 1e9,
        "ratio": {
            name: statistics.median(best / own for best, own in zip(taken["limit"], taken[name], strict=True))
            for name in others
        },
        "temporary_bytes": {name: temporary_bytes(METHODS[name], case) for name in others},
    }
