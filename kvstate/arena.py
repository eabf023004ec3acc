"""Page ownership in one tier: what is free, how many owners each page has, and what the next owner must wait for.

Per group::

    free      pages nobody owns, oldest first: granting is FIFO, so it is deterministic
    owners    how many owners (stream table, lease, claim) a page has; 0 is free
    fence     newest use per queue of every ownership that was ever dropped
    sealed    full pages, never written again while owned
    sink      page number `pages`: never granted, padding writes to it

free + owned = total, always. Dropping a page without owners is an error at the call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvstate.errors import DoubleFree
from kvstate.ops import Tier
from kvstate.ordering import NOTHING, Clock, merge


class Pool:
    """The pages of one group in one tier."""

    __slots__ = ("fences", "free", "owners", "pages", "sealed", "sink", "tier")

    def __init__(self, tier: Tier, pages: int) -> None:
        self.tier = tier
        self.pages = pages
        self.sink = pages
        self.free: deque[int] = deque(range(pages))
        self.owners = [0] * pages
        self.fences: list[Clock] = [NOTHING] * pages
        self.sealed = bytearray(pages)

    def grant(self, count: int) -> list[int]:
        """Take `count` free pages, oldest first, for one owner each. The caller has checked that they are there."""
        free, owners = self.free, self.owners
        granted = [free.popleft() for _ in range(count)]
        for page in granted:
            owners[page] = 1
        return granted

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to pages that have one."""
        owners = self.owners
        for page in pages:
            if not owners[page]:
                raise DoubleFree(self.tier.value, page)
            owners[page] += 1

    def drop(self, pages: Iterable[int], uses: Clock) -> int:
        """End one ownership of each page, merging the owner's `uses` into its fence; return how many became free.

        Raises
        ------
        DoubleFree
            When a page has no owner.
        """
        owners, fences, free, sealed = self.owners, self.fences, self.free, self.sealed
        freed = 0
        known: Clock | None = None
        merged = uses
        for page in pages:
            left = owners[page] - 1
            if left < 0:
                raise DoubleFree(self.tier.value, page)
            owners[page] = left
            fence = fences[page]
            if fence is not known:
                known = fence
                merged = merge(fence, uses)
            fences[page] = merged
            if not left:
                sealed[page] = 0
                free.append(page)
                freed += 1
        return freed

    def seal(self, pages: Iterable[int]) -> None:
        """Mark full pages."""
        sealed = self.sealed
        for page in pages:
            sealed[page] = 1

    def fence_of(self, pages: Iterable[int]) -> Clock:
        """Return what an op that enters `pages` follows."""
        after = known = NOTHING
        fences = self.fences
        for page in pages:
            fence = fences[page]
            if fence is not known:
                known = fence
                after = merge(after, fence)
        return after


class Arena:
    """Every page of a tier: one pool per group."""

    __slots__ = ("pools", "tier")

    def __init__(self, tier: Tier, pages: Sequence[int]) -> None:
        self.tier = tier
        self.pools = tuple(Pool(tier, count) for count in pages)

    def short(self, wanted: Sequence[int]) -> tuple[int, ...] | None:
        """Return pages short per group when `wanted` cannot be granted, else None."""
        for pool, count in zip(self.pools, wanted, strict=True):
            if count > len(pool.free):
                return tuple(max(0, need - len(other.free)) for other, need in zip(self.pools, wanted, strict=True))
        return None

    def drop(self, pages: Sequence[Iterable[int]], uses: Clock) -> int:
        """Drop pages per group (see Pool.drop); return how many became free."""
        return sum(pool.drop(own, uses) for pool, own in zip(self.pools, pages, strict=True))
