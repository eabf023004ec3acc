"""Copies move exactly what was asked, in as few runs as the pages allow, and nothing in between."""

import doctest
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_backend import copier as copier_module
from gpu_backend.copier import Copier, PageOutOfRange, Run, runs_of
from gpu_backend.device_cache import DeviceCache
from gpu_backend.host_pool import HostPool
from gpu_backend.queues import HostQueues
from kvstate.ops import PageCopies
from kvstate.ordering import Queue

from .rig import DTYPES, layout

PAGES = 24


@st.composite
def fragmented(draw: st.DrawFn, one_storage: bool = False) -> list[tuple[int, int]]:
    """Page copies made of chunks of pages that lie together, shuffled: targets distinct, sources may repeat."""
    sources: list[int] = []
    targets: list[int] = []
    free = set(range(PAGES))
    for _ in range(draw(st.integers(0, 6))):
        source = draw(st.integers(0, PAGES - 1))
        target = draw(st.integers(0, PAGES - 1))
        for step in range(draw(st.integers(1, 6))):
            s, t = source + step, target + step
            if s < PAGES and t in free and not (one_storage and (s in targets or t in sources or s == t)):
                free.discard(t)
                sources.append(s)
                targets.append(t)
    pairs = list(zip(sources, targets, strict=True))
    return draw(st.permutations(pairs))


def filled(pages: int, page_bytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (pages, page_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def written(runs: list[Run]) -> list[tuple[int, int]]:
    return [(source + i, target + i) for source, target, count in runs for i in range(count)]


def test_examples_run() -> None:
    assert doctest.testmod(copier_module).failed == 0


@given(fragmented())
def test_runs_cover_every_copy_once_and_are_maximal(pairs: list[tuple[int, int]]) -> None:
    runs = runs_of([s for s, _ in pairs], [t for _, t in pairs])
    assert sorted(written(runs)) == sorted(pairs)
    begins = {(source, target) for source, target, _ in runs}
    for source, target, count in runs:
        assert (source + count, target + count) not in begins, "two runs could have been one"


@pytest.mark.parametrize(
    ("sources", "targets", "runs"),
    [
        ([], [], []),
        ([4, 5, 6], [1, 2, 3], [(4, 1, 3)]),
        ([4, 5, 6], [1, 2, 9], [(4, 1, 2), (6, 9, 1)]),
        ([4, 5, 7], [1, 2, 3], [(7, 3, 1), (4, 1, 2)]),
        ([6, 5, 4], [3, 2, 1], [(4, 1, 3)]),
        ([4, 5], [2, 1], [(5, 1, 1), (4, 2, 1)]),
        ([3, 3, 4, 4], [7, 9, 8, 10], [(3, 7, 2), (3, 9, 2)]),
    ],
)
def test_a_run_ends_where_either_side_does(sources: list[int], targets: list[int], runs: list[Run]) -> None:
    assert runs_of(sources, targets) == runs


@given(fragmented(), st.integers(0, 3), st.sampled_from(("out", "in")))
def test_copies_between_tiers_equal_a_naive_loop_and_touch_nothing_else(
    pairs: list[tuple[int, int]], seed: int, direction: str
) -> None:
    source, target = filled(PAGES, 40, seed), filled(PAGES, 40, seed + 9)
    expected, before = target.clone(), source.clone()
    for s, t in pairs:
        expected[t] = source[s]
    copier = Copier(HostQueues())
    queue = Queue.COPY_OUT if direction == "out" else Queue.COPY_IN
    copier.copy(queue, target, source, [(s, t, 1) for s, t in pairs])
    assert torch.equal(target, expected)
    assert torch.equal(source, before)
    assert copier.pages[queue] == len(pairs)
    assert copier.bytes[queue] == 40 * len(pairs)


@given(fragmented(one_storage=True))
def test_copies_inside_one_storage_equal_a_naive_loop(pairs: list[tuple[int, int]]) -> None:
    storage = filled(PAGES, 40, 1)
    expected = storage.clone()
    for s, t in pairs:
        expected[t] = storage[s]
    columns = PageCopies([s for s, _ in pairs], [t for _, t in pairs], [1] * len(pairs))
    Copier(HostQueues()).copy(Queue.COMPUTE, storage, storage, columns)
    assert torch.equal(storage, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_pages_of_every_dtype_move_between_the_tiers(dtype: str) -> None:
    sizes = layout(dtype=dtype)
    cache, pool = DeviceCache(sizes, torch.device("cpu")), HostPool(sizes, HostQueues())
    cache.bytes.copy_(filled(13, sizes.page_bytes, 0))
    before = cache.bytes.clone()
    pool.bytes.zero_()
    copier = Copier(HostQueues())
    copier.copy(Queue.COPY_OUT, pool.bytes, cache.bytes, PageCopies([5, 6, 1], [0, 1, 9], [4, 4, 2]))
    cache.poison([5, 6, 1])
    copier.copy(Queue.COPY_IN, cache.bytes, pool.bytes, PageCopies([0, 1, 9], [5, 6, 1], [4, 4, 2]))
    assert torch.equal(cache.bytes, before)
    assert copier.runs == [0, 2, 2]


@pytest.mark.parametrize("copies", [[(0, 4, 1), (9, 1, 1)], [(0, 9, 1)], [(-1, 2, 1)]])
def test_a_page_that_is_not_there_is_refused_before_anything_moves(copies: list[tuple[int, int, int]]) -> None:
    source, target = filled(8, 16, 0), filled(8, 16, 1)
    before = target.clone()
    with pytest.raises(PageOutOfRange, match=r"within 0 … 7"):
        Copier(HostQueues()).copy(Queue.COPY_OUT, target, source, copies)
    assert torch.equal(target, before)


def test_copies_whose_order_would_matter_are_refused() -> None:
    storage = filled(8, 16, 0)
    before = storage.clone()
    copier = Copier(HostQueues())
    with pytest.raises(ValueError, match="first page of a chain"):
        copier.copy(Queue.COMPUTE, storage, storage, [(0, 1, 1), (1, 2, 1)])
    with pytest.raises(ValueError, match="write the same page"):
        copier.copy(Queue.COMPUTE, storage, storage, [(0, 2, 1), (1, 2, 1)])
    assert torch.equal(storage, before)
    assert copier.bytes == [0, 0, 0]


class Allocations(TorchDispatchMode):
    """Notes the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_max = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.bytes_max = max(self.bytes_max, result.untyped_storage().nbytes())
        return result


def test_no_temporary_is_allocated() -> None:
    source, target = filled(64, 4096, 0), filled(64, 4096, 1)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()
    with Allocations() as seen:
        Copier(HostQueues()).copy(Queue.COPY_OUT, target, source, PageCopies(order, list(range(64)), [1] * 64))
    assert seen.bytes_max == 0
    assert torch.equal(target, source[order])


def test_seconds_are_counted_on_the_queue_of_the_copy() -> None:
    queues = HostQueues()
    Copier(queues).copy(Queue.COPY_IN, filled(4, 16, 0), filled(4, 16, 1), [(0, 1, 1)])
    assert [second > 0 for second in queues.copy_s] == [False, False, True]


def test_the_order_of_the_copies_does_not_matter() -> None:
    pairs = [(4, 1), (5, 2), (9, 6), (6, 3), (10, 7)]
    for shuffled in (pairs, pairs[::-1], pairs[2:] + pairs[:2]):
        assert runs_of([s for s, _ in shuffled], [t for _, t in shuffled]) == [(4, 1, 3), (9, 6, 2)]
