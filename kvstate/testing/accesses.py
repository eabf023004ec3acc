"""What the edge judge remembers: per page and token who wrote and read last, and what a sector's former users left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstate.ops import Tier
from kvstate.ordering import NOTHING, Clock, merge
from kvstate.types import Geometry

Left = tuple[Clock, int, Clock]
"""The newest writes per queue, the newest fetch, and the newest reads per queue: of what other groups left behind."""

NOTHING_LEFT: Left = (NOTHING, 0, NOTHING)


class Reach:
    """What op `number` follows: a clock, and fetches that ended before `issue`, those up to `floor` for certain."""

    __slots__ = ("clock", "floor", "issue", "number")

    def __init__(self, number: int, clock: Clock, floor: int) -> None:
        self.number = self.issue = number
        self.clock = clock
        self.floor = floor

    def covers(self, left: Left) -> bool:
        """Tell whether the op follows all of `left` for certain."""
        writes, fetched, reads = left
        c, o, i = self.clock
        return (
            writes[0] <= c and writes[1] <= o and writes[2] <= i and fetched <= self.floor
            and reads[0] <= c and reads[1] <= o and reads[2] <= i
        )  # fmt: skip


class Pool:
    """Accesses of one group in one tier, by page; a page has a tuple with an op number per token, 0 is none.

    `top` has the newest write per page and writer (queue or fetch), `written` and `read` the newest of all pages: they
    only decide whether a page must be looked at. For op `judged` everything `written` is known to be ordered when
    `writes_calm`, everything `read` when `reads_calm`; and everything that other groups left in its `sectors` (None:
    there is no other group), when `left_calm`.
    """

    __slots__ = (
        "group", "judged", "left_calm", "read", "reads", "reads_calm", "sectors", "sink", "size", "tier", "top",
        "writes", "writes_calm", "written",
    )  # fmt: skip

    def __init__(self, tier: Tier, group: int, size: int, sink: int | None, sectors: Sectors | None) -> None:
        self.tier = tier
        self.group = group
        self.size = size
        self.sink = sink
        self.sectors = sectors
        self.left_calm = True
        self.writes: list[tuple[int, ...]] = []
        self.reads: tuple[list[tuple[int, ...]], ...] = ([], [], [])
        self.top: tuple[list[int], ...] = ([], [], [], [])
        self.written = [0, 0, 0, 0]
        self.read = [0, 0, 0]
        self.judged = 0
        self.writes_calm = self.reads_calm = True

    def grow(self, page: int) -> None:
        """Make place for pages up to `page`."""
        more = page + 1 - len(self.writes)
        none = (0,) * self.size
        for slots in (self.writes, *self.reads):
            slots.extend([none] * more)
        for numbers in self.top:
            numbers.extend([0] * more)
        if self.sectors is not None:
            self.sectors.grow(page // self.sectors.per_sector[self.group])

    def judge(self, reach: Reach) -> None:
        """Note, before its first access, what the op of `reach` need not be compared with."""
        self.judged = reach.number
        (c, o, i), written, read = reach.clock, self.written, self.read
        self.writes_calm = written[0] <= c and written[1] <= o and written[2] <= i and written[3] <= reach.floor
        self.reads_calm = read[0] <= c and read[1] <= o and read[2] <= i
        if self.sectors is not None:
            self.left_calm = reach.covers(self.sectors.left_most)

    def suspect(self, page: int, reach: Reach) -> bool:
        """Tell whether `page` has a write that the op may not follow."""
        compute, copy_out, copy_in, fetch = self.top
        c, o, i = reach.clock
        return compute[page] > c or copy_out[page] > o or copy_in[page] > i or fetch[page] > reach.floor

    def suspects(self, table: Sequence[int], reach: Reach) -> list[int]:
        """Return the pages of `table` with a write that the op may not follow."""
        for top, newest, limit in zip(self.top, self.written, (*reach.clock, reach.floor), strict=True):
            if newest > limit and max(map(top.__getitem__, table)) > limit:
                return [page for page in table if self.suspect(page, reach)]
        return []

    def did(self, page: int) -> Left:
        """Return the newest of all that was done on `page`."""
        (c, o, i, fetched), (rc, ro, ri) = self.top, self.reads
        return (c[page], o[page], i[page]), fetched[page], (max(rc[page]), max(ro[page]), max(ri[page]))

    def numbers(self) -> set[int]:
        """Return every op number that is kept."""
        numbers: set[int] = set()
        for slots in (self.writes, *self.reads):
            # Pages read by one op share a tuple.
            for own in {id(own): own for own in slots}.values():
                numbers.update(own)
        return numbers


class Sectors:
    """The bytes of one tier that several groups share.

    `user` is the group that touched a sector last (-1: none), `left` what the others had done there by then;
    `left_most` is the newest of all that was ever left in any sector.
    """

    __slots__ = ("left", "left_most", "page_bytes", "per_sector", "pools", "user")

    def __init__(self, geometry: Geometry) -> None:
        self.per_sector = geometry.pages_per_sector
        self.page_bytes = tuple(group.page_bytes for group in geometry.groups)
        self.pools: dict[int, Pool] = {}
        self.user: list[int] = []
        self.left: list[Left] = []
        self.left_most = NOTHING_LEFT

    def grow(self, sector: int) -> None:
        """Make place for sectors up to `sector`."""
        more = sector + 1 - len(self.user)
        self.user.extend([-1] * more)
        self.left.extend([NOTHING_LEFT] * more)

    def enter(self, sector: int, group: int) -> None:
        """Let `group` use `sector`, which another group has used, or nobody: sum up what the others did there."""
        self.user[sector] = group
        left = NOTHING_LEFT
        for other, pool in self.pools.items():
            if other != group:
                count = self.per_sector[other]
                for page in range(sector * count, min((sector + 1) * count, len(pool.writes))):
                    left = _more(left, pool.did(page))
        self.left[sector] = left
        self.left_most = _more(self.left_most, left)

    def overlapping(self, group: int, page: int) -> Iterator[tuple[Pool, int]]:
        """Yield the pages of other groups that were touched, and share bytes with `page` of `group`."""
        sector, place = divmod(page, self.per_sector[group])
        start = place * self.page_bytes[group]
        stop = start + self.page_bytes[group]
        for other, pool in self.pools.items():
            if other != group:
                size, count = self.page_bytes[other], self.per_sector[other]
                for index in range(sector * count + start // size, sector * count - (-stop // size)):
                    if index < len(pool.writes):
                        yield pool, index


def _more(one: Left, two: Left) -> Left:
    return merge(one[0], two[0]), max(one[1], two[1]), merge(one[2], two[2])
