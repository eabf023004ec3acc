"""The waiting queue: requests that hold no device pages, in the order in which they are admitted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvstate.scheduler.requests import Phase, Work


class Waiting:
    """Those on the host and those with nothing stored, each first come first served, one of each in turn.

    `barred` says that nobody is admitted: from an eviction on until an active request finishes, is cancelled or fails.
    Without it, what an eviction made room for would be taken by those who wait, and the next step would evict again.
    """

    __slots__ = ("_fresh", "_offloaded", "barred")

    def __init__(self) -> None:
        self._offloaded: OrderedDict[int, Work] = OrderedDict()
        self._fresh: OrderedDict[int, Work] = OrderedDict()
        self.barred = False

    def __len__(self) -> int:
        return len(self._offloaded) + len(self._fresh)

    def __iter__(self) -> Iterator[Work]:
        """Yield them as they would be admitted: in turn, those on the host first."""
        queues = [iter(self._offloaded.values()), iter(self._fresh.values())]
        while queues:
            queue = queues.pop(0)
            for work in queue:
                yield work
                queues.append(queue)
                break

    def join(self, work: Work) -> None:
        """Put `work` at the tail."""
        self._queue(work)[work.rank] = work

    def leave(self, work: Work) -> None:
        """Take `work` out, if it is here."""
        self._offloaded.pop(work.rank, None)
        self._fresh.pop(work.rank, None)

    def _queue(self, work: Work) -> OrderedDict[int, Work]:
        return self._offloaded if work.phase is Phase.OFFLOADED else self._fresh
