"""What fits into a tier: sentences 11 and 32 of spec/README.md, page by page and sector by sector, slow and obvious.

The reference gives its pages no numbers. With one group none are needed: a sector is a page. With several groups it
matters which sectors the owned pages lie in, and that is read from the view before the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from kvstate.types import Geometry
from kvstate.view import StateView


@attrs.frozen
class Tier:
    """The pages of one tier that have an owner, by number, per group; nothing else keeps a sector from anybody."""

    sectors: int
    per_sector: tuple[int, ...]
    page_bytes: tuple[int, ...]
    owned: tuple[frozenset[int], ...]

    def with_owned(self, more: Sequence[Iterable[int]]) -> Tier:
        """Return the tier once `more` pages per group have an owner."""
        owned = tuple(pages.union(others) for pages, others in zip(self.owned, more, strict=True))
        return attrs.evolve(self, owned=owned)

    def lent(self, group: int) -> list[int]:
        """Return the sectors in which a page of `group` has an owner: they serve no other group."""
        per = self.per_sector[group]
        return [s for s in range(self.sectors) if any(s * per + i in self.owned[group] for i in range(per))]

    def loose(self, group: int) -> list[int]:
        """Return the pages of `group` without owner that lie beside one with an owner."""
        per = self.per_sector[group]
        return [s * per + i for s in self.lent(group) for i in range(per) if s * per + i not in self.owned[group]]

    def empty(self) -> list[int]:
        """Return the sectors in which no page of any group has an owner."""
        lent = [sector for group in range(len(self.owned)) for sector in self.lent(group)]
        return [sector for sector in range(self.sectors) if sector not in lent]

    def short(self, wanted: Sequence[int]) -> tuple[int, ...] | None:
        """Return what is missing per group when `wanted` pages per group are too many, None when they fit.

        Groups are served in order: each takes its loose pages, then empty sectors, one after the other.
        """
        empty, short = len(self.empty()), []
        for group, count in enumerate(wanted):
            missing = count - len(self.loose(group))
            while missing > 0 and empty:
                empty -= 1
                missing -= self.per_sector[group]
            short.append(max(0, missing))
        return tuple(short) if any(short) else None

    def fragmented(self, wanted: Sequence[int]) -> bool:
        """Tell whether `wanted` would fit if bytes without owner could be used wherever they lie."""
        free = self.sectors * self.per_sector[0] * self.page_bytes[0]
        free -= sum(len(pages) * size for pages, size in zip(self.owned, self.page_bytes, strict=True))
        return sum(count * size for count, size in zip(wanted, self.page_bytes, strict=True)) <= free

    def available(self) -> tuple[int, ...]:
        """Return how many pages each group alone could be granted."""
        empty = len(self.empty())
        return tuple(len(self.loose(group)) + empty * per for group, per in enumerate(self.per_sector))


def sectors_for(geometry: Geometry, pages: Sequence[int]) -> int:
    """Return the sectors that `pages` pages per group fill when nothing else is there.

    >>> from kvstate.types import Group
    >>> sectors_for(Geometry(4, groups=(Group("a", 256), Group("b", 128))), (1, 3))
    3
    """
    return sum(-(-count // per) for count, per in zip(pages, geometry.pages_per_sector, strict=True))


def tier(geometry: Geometry, sectors: int, owned: Sequence[Iterable[int]]) -> Tier:
    """Return a tier of `sectors` in which the pages `owned`, per group, have an owner."""
    sizes = tuple(group.page_bytes for group in geometry.groups)
    return Tier(sectors, geometry.pages_per_sector, sizes, tuple(frozenset(pages) for pages in owned))


def device_tier(geometry: Geometry, view: StateView, leaving: bool = False) -> Tier:
    """Return the device as `view` shows it; `leaving`: without owners that are leaving (41)."""
    gone = _leaving(view) if leaving else [Counter() for _ in geometry.groups]
    owned = [
        [page for page, owners in enumerate(pool.owners) if owners > gone[group][page]]
        for group, pool in enumerate(view.device)
    ]
    return tier(geometry, geometry.pages, owned)


def host_tier(geometry: Geometry, view: StateView) -> Tier:
    """Return the host as `view` shows it."""
    owned = [[page for page, owners in enumerate(pool.owners) if owners] for pool in view.host]
    return tier(geometry, geometry.host_pages, owned)


def _leaving(view: StateView) -> list[Counter[int]]:
    """Return per group how many owners each page loses when what is leaving has left (41)."""
    gone: list[Counter[int]] = [Counter() for _ in view.device]
    void = [(lease.serial, row) for lease in view.leases for row in lease.rows if row.void]
    ending = {serial for serial, _ in void}
    for group, lost in enumerate(gone):
        for claim in view.claims:
            if claim.kind == "offload":
                lost.update(claim.device(group))
        for _, row in void:
            lost.update(row.takes[group])
            lost.update(row.temps[group])
        for stream in (*view.streams, *view.detached):
            for behind, pages in stream.held:
                if ending.issuperset(behind):
                    lost.update(pages[group])
    return gone
