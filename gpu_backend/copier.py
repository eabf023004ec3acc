"""Page copies between two storages: as few and as long as the pages allow, straight from one to the other.

Nothing of the payload's size is ever allocated: what moves is a page, or a run of pages that lie next to each other in
both storages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from kvstate.ops import PageCopies, PageCopy
from kvstate.ordering import Queue

if TYPE_CHECKING:
    from torch import Tensor

    from gpu_backend.queues import Queues

Run = tuple[int, int, int]
"""(first source page, first target page, pages)."""

_PAGE_BITS = 40
_PAGE = (1 << _PAGE_BITS) - 1


class PageOutOfRange(IndexError):
    """A copy names a page that one of the two storages does not have. Nothing was copied."""


def runs_of(sources: Sequence[int], targets: Sequence[int]) -> list[Run]:
    """Return page copies as maximal runs: consecutive on both sides, and no two of them could be one.

    The copies of an op are in no order, so they are sorted: by how far a page moves, then by where it comes from. Each
    is one whole number for that, which a run counts up by one. One pass and one sort, 0.3 µs per page.

    >>> runs_of([7, 5, 6, 0], [3, 1, 2, 9])
    [(5, 1, 3), (0, 9, 1)]
    """
    keys = [((target - source) << _PAGE_BITS) + source for source, target in zip(sources, targets, strict=True)]
    if not keys:
        return []
    keys.sort()
    borders = [place for place, (key, above) in enumerate(pairwise(keys), 1) if above != key + 1]
    runs: list[Run] = []
    begin = 0
    for end in (*borders, len(keys)):
        source = keys[begin] & _PAGE
        runs.append((source, source + (keys[begin] >> _PAGE_BITS), end - begin))
        begin = end
    return runs


def _columns(copies: Collection[PageCopy]) -> tuple[Sequence[int], Sequence[int]]:
    if isinstance(copies, PageCopies):
        return copies.sources, copies.targets
    listed = list(copies)
    return [source for source, _, _ in listed], [target for _, target, _ in listed]


class Copier:
    """Copies pages on a queue.

    Attributes
    ----------
    pages, runs, bytes
        Copied so far, per queue. Written by one thread at a time: copies are submitted under the submission lock.
    """

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self.pages = [0 for _ in Queue]
        self.runs = [0 for _ in Queue]
        self.bytes = [0 for _ in Queue]

    def copy(self, queue: Queue, target: Tensor, source: Tensor, copies: Collection[PageCopy]) -> None:
        """Copy whole pages; of a partly filled one that includes bytes which mean nothing.

        Parameters
        ----------
        queue
            Where the copies run.
        target, source
            Bytes ``(pages, page_bytes)`` of the two storages; they may be the same one.
        copies
            (source page, target page, tokens), in no order.

        Raises
        ------
        PageOutOfRange
            Nothing was copied.
        ValueError
            When a page is read and written by copies inside one storage, or written twice: the result would depend on
            their order. Nothing was copied.
        """
        sources, targets = _columns(copies)
        if not sources:
            return
        for pages, storage, side in ((sources, source, "source"), (targets, target, "target")):
            if min(pages) < 0 or max(pages) >= len(storage):
                raise PageOutOfRange(
                    f"{side} pages {min(pages)} … {max(pages)} are not all within 0 … {len(storage) - 1}"
                )
        written = set(targets)
        if len(written) != len(targets):
            raise ValueError("two copies of one op write the same page")
        if target.data_ptr() == source.data_ptr() and not written.isdisjoint(sources):
            raise ValueError(
                "a copy reads a page that another copy of the same op writes; name the first page of a chain"
            )
        runs = runs_of(sources, targets)
        self._queues.copy(queue, target, source, runs)
        self.pages[queue] += len(sources)
        self.runs[queue] += len(runs)
        self.bytes[queue] += len(sources) * target.shape[1]
