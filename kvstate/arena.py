"""Page ownership in one tier: what is free, how many owners each page has, and what the next owner must wait for.

Per group, every page of the sectors that are lent to it is exactly one of::

    owned     by one owner or more (stream table, lease, claim): `owners` counts them
    cached    nobody's, sealed and keyed: findable until it is taken for something else, oldest first
    free      nobody's and nothing

A fetching page is owned by its fetch. Per page, `fence` is the newest use per queue of every ownership that was ever
dropped, `sealed` says that it is full and never written again, and `keys` what a findable page holds. The sink is the
page behind the last: never granted, padding writes to it. Dropping a page without owners is an error at the call.

With several groups, free pages live in sectors::

    sector    bytes lent to one group until none of its pages is owned or cached: then it is empty again at once, so
              whoever counts what is available counts what is there
    carried   the merge of its pages' fences, which the next group's pages begin with

Granting is deterministic: where one group has a tier to itself, first in, first out on the device and lowest first on
the host; else from the fullest lent sectors, so that others empty out, then from the lowest empty ones, and sorted.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from kvstate.errors import DoubleFree
from kvstate.ops import Tier
from kvstate.ordering import NOTHING, Clock, merge
from kvstate.prefix import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, Key
from kvstate.types import Geometry

Changes = Sequence[Sequence[int]]
"""Pages per group that would get, or lose, their only owner."""


class Pool:
    """The pages of one group in one tier, in no sectors: free pages are granted first in, first out."""

    __slots__ = (
        "cached", "events", "fences", "free", "group", "keys", "owners", "page_size", "pages", "places", "ready",
        "sealed", "sink", "tier",
    )  # fmt: skip

    def __init__(self, tier: Tier, pages: int, group: int = 0, page_size: int = 0) -> None:
        self.tier = tier
        self.group = group
        self.pages = pages
        self.page_size = page_size
        self.sink = pages
        self.free: deque[int] = deque(range(pages))
        self.owners = [0] * pages
        self.fences: list[Clock] = [NOTHING] * pages
        self.sealed = bytearray(pages)
        # Findable pages: by key, the key of each, and what a reader of it follows. Cached ones in the order they leave.
        self.places: dict[Key, int] = {}
        self.keys: dict[int, Key] = {}
        self.ready: dict[int, Clock] = {}
        self.cached: dict[int, None] = {}
        self.events: list[CacheEvent] | None = None

    def free_pages(self) -> tuple[int, ...]:
        """Return the free pages that are this group's to grant: in that order, or sorted where they lie in sectors."""
        return tuple(self.free)

    def free_count(self) -> int:
        """Return how many those are."""
        return len(self.free)

    # -- what the capacity test counts

    @property
    def owned(self) -> int:
        """Pages that have an owner."""
        return self.pages - self.free_count() - len(self.cached)

    @property
    def busy(self) -> int:
        """Sectors with an owned page; here a page is a sector."""
        return self.owned

    def sectors_changed(self, owning: Sequence[int], releasing: Sequence[int]) -> int:
        """Return by how much `busy` would change if `owning` got, and `releasing` lost, their only owner."""
        return len(owning) - len(releasing)

    # -- owners

    def grant(self, count: int) -> list[int]:
        """Take `count` free pages for one owner each. The caller has made room."""
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

    def own(self, pages: Iterable[int]) -> None:
        """Add an owner to findable pages, cached or not."""
        owners = self.owners
        for page in pages:
            if not owners[page]:
                del self.cached[page]
                self._taken(page)
            owners[page] += 1

    def drop(self, pages: Iterable[int], uses: Clock) -> int:
        """End one ownership of each page, merging the owner's `uses` into its fence.

        Returns
        -------
        How many pages nobody owns now, cached ones included: available to whoever asks.

        Raises
        ------
        DoubleFree
            When a page has no owner.
        """
        owners, fences, keys = self.owners, self.fences, self.keys
        known: Clock | None = None
        merged = uses
        gone: list[int] = []
        kept: list[int] = []
        for page in pages:
            left = owners[page] - 1
            if left < 0:
                self._ownerless(gone, kept)
                raise DoubleFree(self.tier.value, page)
            owners[page] = left
            fence = fences[page]
            if fence is not known:
                known = fence
                merged = merge(fence, uses)
            fences[page] = merged
            if not left:
                (kept if page in keys else gone).append(page)
        self._ownerless(gone, kept)
        return len(gone) + len(kept)

    def _ownerless(self, gone: list[int], kept: list[int]) -> None:
        if kept:
            # A chain is found from its front: its later pages leave before the earlier ones.
            kept.reverse()
            self._keep(kept)
        if gone:
            self._return(gone)

    def _taken(self, page: int) -> None:
        """Note that a cached page has an owner again."""

    def _keep(self, pages: Sequence[int]) -> None:
        """Note that nobody owns these findable pages any more."""
        self.cached.update(dict.fromkeys(pages))

    def _return(self, pages: Sequence[int]) -> None:
        """Make owned pages free."""
        sealed = self.sealed
        for page in pages:
            sealed[page] = 0
        self.free.extend(pages)

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

    # -- content keys

    def key(self, page: int, key: Key, ready: Clock, parent: Key | None, tokens: tuple[int, ...]) -> bool:
        """Make a sealed page findable; False when another page has its key, or it has another key, already."""
        if key in self.places or page in self.keys:
            return self.places.get(key) == page
        self.places[key] = page
        self.keys[page] = key
        self.ready[page] = ready
        if self.events is not None:
            self.events.append(BlockStored((key,), parent, tokens, self.page_size, group_idx=self.group))
        return True

    def ready_of(self, pages: Iterable[int]) -> Clock:
        """Return what a reader of findable `pages` follows: the ops that wrote them."""
        after = NOTHING
        for page in pages:
            after = merge(after, self.ready[page])
        return after

    def _unkey(self, page: int) -> None:
        key = self.keys.pop(page)
        del self.places[key]
        del self.ready[page]
        if self.events is not None:
            self.events.append(BlockRemoved((key,), group_idx=self.group))

    def evict(self, page: int) -> None:
        """Make a cached page free."""
        del self.cached[page]
        self._unkey(page)
        self._return_cached([page])

    def forget_keys(self) -> int:
        """Make every findable page unfindable, cached ones free; return how many were findable."""
        count = len(self.keys)
        pages = list(self.cached)
        self.keys.clear()
        self.places.clear()
        self.ready.clear()
        self.cached.clear()
        self._return_cached(pages)
        return count

    def _return_cached(self, pages: Sequence[int]) -> None:
        self._return(pages)


class SortedPool(Pool):
    """The pages of the only group of a tier, granted lowest first: what is copied there lies together."""

    __slots__ = ("_heap",)

    def __init__(self, tier: Tier, pages: int, group: int = 0, page_size: int = 0) -> None:
        super().__init__(tier, pages, group, page_size)
        self.free = deque()
        self._heap = list(range(pages))

    def free_pages(self) -> tuple[int, ...]:
        return tuple(sorted(self._heap))

    def free_count(self) -> int:
        return len(self._heap)

    def grant(self, count: int) -> list[int]:
        heap, owners = self._heap, self.owners
        granted = [heapq.heappop(heap) for _ in range(count)]
        for page in granted:
            owners[page] = 1
        return granted

    def _return(self, pages: Sequence[int]) -> None:
        heap, sealed = self._heap, self.sealed
        for page in pages:
            sealed[page] = 0
            heapq.heappush(heap, page)


class SectorPool(Pool):
    """The pages of one group whose sectors come from, and return to, an arena."""

    __slots__ = ("_arena", "_busy", "_full", "_masks", "_owned", "_partial", "_per")

    def __init__(self, arena: Arena, group: int, page_size: int, pages: int, per_sector: int) -> None:
        super().__init__(arena.tier, pages, group, page_size)
        self.free = deque()
        self._arena = arena
        self._per = per_sector
        self._full = (1 << per_sector) - 1
        # Free pages of each lent sector, as bits; and the lent sectors by how many those are, from 1 on.
        self._masks: dict[int, int] = {}
        self._partial: list[dict[int, None]] = [{} for _ in range(per_sector + 1)]
        self._owned = 0
        self._busy = 0

    @property
    def owned(self) -> int:
        return self._owned

    @property
    def busy(self) -> int:
        return self._busy

    def free_pages(self) -> tuple[int, ...]:
        masks = self._masks
        return tuple(
            sector * self._per + slot
            for sector in sorted(masks)
            for slot in range(self._per)
            if masks[sector] >> slot & 1
        )

    def free_count(self) -> int:
        return sum(count * len(sectors) for count, sectors in enumerate(self._partial))

    def sectors_changed(self, owning: Sequence[int], releasing: Sequence[int]) -> int:
        used = self._arena.used
        more = Counter(page // self._per for page in owning)
        more.subtract(page // self._per for page in releasing)
        return sum((used[sector] + change > 0) - (used[sector] > 0) for sector, change in more.items())

    def grant(self, count: int) -> list[int]:
        granted: list[int] = []
        while len(granted) < count:
            sector = next((s for sectors in self._partial[1:] for s in sectors), None)
            if sector is None:
                sector = self._borrow()
            mask = self._masks[sector]
            take = min(count - len(granted), mask.bit_count())
            for _ in range(take):
                slot = (mask & -mask).bit_length() - 1
                mask &= mask - 1
                granted.append(sector * self._per + slot)
            self._set_mask(sector, mask)
            self._use(sector, take)
        for page in granted:
            self.owners[page] = 1
        granted.sort()
        return granted

    def _borrow(self) -> int:
        """Take the lowest empty sector; its pages begin with the fences it carries."""
        sector = self._arena.lend(self.group)
        first = sector * self._per
        self.fences[first : first + self._per] = [self._arena.carried[sector]] * self._per
        self._masks[sector] = self._full
        self._partial[self._per][sector] = None
        return sector

    def _set_mask(self, sector: int, mask: int) -> None:
        before = self._masks[sector]
        self._masks[sector] = mask
        if before:
            del self._partial[before.bit_count()][sector]
        if mask:
            self._partial[mask.bit_count()][sector] = None

    def _use(self, sector: int, pages: int) -> None:
        """Note that so many more pages of a sector are owned."""
        used = self._arena.used
        was = used[sector]
        used[sector] = was + pages
        self._owned += pages
        self._busy += (was + pages > 0) - (was > 0)

    def _taken(self, page: int) -> None:
        self._use(page // self._per, 1)

    def _keep(self, pages: Sequence[int]) -> None:
        super()._keep(pages)
        for page in pages:
            self._use(page // self._per, -1)

    def _return(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._use(page // self._per, -1)
        self._return_cached(pages)

    def _return_cached(self, pages: Sequence[int]) -> None:
        """Make ownerless pages free; a sector without anything else goes back at once."""
        for page in pages:
            self.sealed[page] = 0
            sector, slot = divmod(page, self._per)
            mask = self._masks[sector] | 1 << slot
            self._set_mask(sector, mask)
            if mask == self._full:
                self._give_back(sector)

    def _give_back(self, sector: int) -> None:
        del self._masks[sector]
        del self._partial[self._per][sector]
        first = sector * self._per
        self._arena.take_back(sector, self.fence_of(range(first, first + self._per)))


class Arena:
    """Every page of a tier: one pool per group.

    Parameters
    ----------
    tier, geometry
        Which tier of what.
    """

    __slots__ = ("carried", "empty", "lent", "per_sector", "pools", "sectors", "tier", "used")

    def __init__(self, tier: Tier, geometry: Geometry) -> None:
        self.tier = tier
        self.per_sector = geometry.pages_per_sector
        self.sectors = geometry.pages if tier is Tier.DEVICE else geometry.host_pages
        # Per sector: the group it is lent to, its owned pages, and the fences it carries while it is empty.
        self.lent: list[int | None] = [None] * self.sectors
        self.used = [0] * self.sectors
        self.carried: list[Clock] = [NOTHING] * self.sectors
        self.empty = list(range(self.sectors))
        size = geometry.page_size
        self.pools: tuple[Pool, ...]
        if len(geometry.groups) == 1:
            self.empty = []
            self.pools = ((Pool if tier is Tier.DEVICE else SortedPool)(tier, self.sectors, 0, size),)
        else:
            self.pools = tuple(
                SectorPool(self, group, size, self.sectors * per, per) for group, per in enumerate(self.per_sector)
            )

    # -- sectors

    def lend(self, group: int) -> int:
        """Lend the lowest empty sector to `group`. The caller has made room."""
        sector = heapq.heappop(self.empty)
        self.lent[sector] = group
        return sector

    def take_back(self, sector: int, fence: Clock) -> None:
        """Take back a sector whose pages are all free; it carries their fences."""
        self.lent[sector] = None
        self.carried[sector] = fence
        heapq.heappush(self.empty, sector)

    def fences(self, group: int) -> tuple[Clock, ...]:
        """Return the fence of every page of `group`; where another group has the sector, the merge of its pages'."""
        own, per = self.pools[group].fences, self.per_sector[group]
        found: list[Clock] = []
        for sector, lent in enumerate(self.lent):
            if len(self.pools) == 1 or lent == group:
                found.extend(own[sector * per : (sector + 1) * per])
            elif lent is None:
                found.extend([self.carried[sector]] * per)
            else:
                other, pages = self.pools[lent], self.per_sector[lent]
                found.extend([other.fence_of(range(sector * pages, (sector + 1) * pages))] * per)
        return tuple(found)

    # -- what fits

    def short(self, wanted: Sequence[int], owning: Changes = (), releasing: Changes = ()) -> tuple[int, ...] | None:
        """Return pages short per group when `wanted` cannot be granted, else None.

        Exact and atomic over the groups: what nobody owns is available, cached pages included; a sector without owned
        pages to any group, the rest of one with owned pages to its own. Groups are served in their order.

        Parameters
        ----------
        wanted
            Pages per group.
        owning, releasing
            Counted as if these had got, or lost, their only owner.
        """
        left = self.sectors
        loose = []
        for group, (pool, per) in enumerate(zip(self.pools, self.per_sector, strict=True)):
            owned, busy = pool.owned, pool.busy
            if owning or releasing:
                more = owning[group] if owning else ()
                less = releasing[group] if releasing else ()
                owned += len(more) - len(less)
                busy += pool.sectors_changed(more, less)
            left -= busy
            loose.append(per * busy - owned)
        short = []
        for want, per, own in zip(wanted, self.per_sector, loose, strict=True):
            need = max(0, want - own)
            taken = min(-(-need // per), left)
            left -= taken
            short.append(max(0, need - taken * per))
        return tuple(short) if any(short) else None

    def fragmented(self, wanted: Sequence[int], owning: Changes = (), releasing: Changes = ()) -> bool:
        """Tell whether `wanted` pages would fit by their bytes into what nobody owns; parameters as of `short`."""
        # In units of a sector over the product of all that a sector may hold: whole numbers, whatever the page sizes.
        unit = 1
        for per in self.per_sector:
            unit *= per
        asked = 0
        for group, (want, pool, per) in enumerate(zip(wanted, self.pools, self.per_sector, strict=True)):
            more = len(owning[group]) if owning else 0
            less = len(releasing[group]) if releasing else 0
            asked += (want + pool.owned + more - less) * (unit // per)
        return asked <= self.sectors * unit

    def free(self) -> tuple[int, ...]:
        """Return the pages that each group alone could be granted without evicting a cached one."""
        empty = len(self.empty)
        return tuple(per * empty + pool.free_count() for pool, per in zip(self.pools, self.per_sector, strict=True))

    def available(self) -> tuple[int, ...]:
        """Return the pages that each group alone could be granted."""
        left = self.sectors - sum(pool.busy for pool in self.pools)
        return tuple(
            per * (left + pool.busy) - pool.owned for pool, per in zip(self.pools, self.per_sector, strict=True)
        )

    def make_room(self, wanted: Sequence[int]) -> None:
        """Evict cached pages, the oldest first and no more than needed, until `wanted` pages per group are free.

        The caller has checked that they can be had, and owns what it must not lose. A cached page helps when its group
        is short of pages, or when nobody owns a page of its sector, which another group can then have.
        """
        needs = self._needs(wanted)
        while needs is not None:
            pool, pages = self._oldest(needs)
            for page in pages:
                pool.evict(page)
            needs = self._needs(wanted)

    def _needs(self, wanted: Sequence[int]) -> list[int] | None:
        """Return the pages per group that its lent sectors lack, or None when free pages and empty sectors do."""
        needs = []
        sectors = 0
        for want, pool, per in zip(wanted, self.pools, self.per_sector, strict=True):
            need = max(0, want - pool.free_count()) if want else 0
            needs.append(need)
            sectors += -(-need // per)
        return needs if sectors > len(self.empty) else None

    def _oldest(self, needs: Sequence[int]) -> tuple[Pool, list[int]]:
        """Return the cached page that has waited longest of those that help, groups in their order.

        One that helps through its sector only comes with what else is cached there.
        """
        for pool, need, per in zip(self.pools, needs, self.per_sector, strict=True):
            for page in pool.cached:
                if need:
                    return pool, [page]
                sector = page // per
                if not self.used[sector]:
                    return pool, [page for page in range(sector * per, (sector + 1) * per) if page in pool.cached]
        raise AssertionError("the capacity test promised pages that are not there")

    def drop(self, pages: Sequence[Iterable[int]], uses: Clock) -> int:
        """Drop pages per group (see Pool.drop); return how many nobody owns now."""
        return sum(pool.drop(own, uses) for pool, own in zip(self.pools, pages, strict=True))

    # -- content keys

    def match(self, keys: Sequence[Key], geometry: Geometry) -> int:
        """Return the pages of the longest match: every group finds what it needs at that border."""
        size = geometry.page_size
        longest = len(keys)
        for group, pool in enumerate(self.pools):
            if geometry.groups[group].window is None:
                found = next((at for at, key in enumerate(keys[:longest]) if key not in pool.places), longest)
                longest = min(longest, found)
        if geometry.windowed:
            windows = [(g, pool) for g, pool in enumerate(self.pools) if geometry.groups[g].window is not None]
            while longest and not all(
                key in pool.places for g, pool in windows for key in keys[geometry.skipped(g, longest * size) : longest]
            ):
                longest -= 1
        return longest

    def forget_keys(self) -> int:
        """Make nothing findable any more; return how many pages were."""
        count = sum(pool.forget_keys() for pool in self.pools)
        events = self.pools[0].events
        if events is not None:
            events.append(AllBlocksCleared())
        return count
