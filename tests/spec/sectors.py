"""A driver of the reference that plays the machine of several groups: it deals out sectors, and shows views."""

from __future__ import annotations

from typing import Any

import attrs

from kvstate.refusals import Refusal
from kvstate.types import Geometry, Group, RequestConfig, Segment, Step
from kvstate.view import PoolView, StateView
from kvstate_spec.abstract import Abstract, StreamAbstract
from kvstate_spec.model import Page
from kvstate_spec.reference import Reference

FULL = Group("full", 256)
WINDOW = Group("window", 128, window=6)


class Sectors:
    """Page numbers for the pages of one tier of a reference: the first place that serves, by the rules of 32 and 37."""

    def __init__(self, geometry: Geometry, sectors: int) -> None:
        self.per = geometry.pages_per_sector
        self.sectors = sectors
        self.numbers: dict[Page, int] = {}

    def _sector(self, page: Page) -> int:
        return self.numbers[page] // self.per[page.group]

    def keep(self, pages: set[Page]) -> None:
        """Forget the numbers of all other pages."""
        self.numbers = {page: number for page, number in self.numbers.items() if page in pages}

    def place(self, pages: list[Page], cached: list[Page]) -> list[Page]:
        """Give numbers to `pages`; return the cached ones that had to leave, without which it did not fit."""
        before = dict(self.numbers)
        if self._place(pages):
            return []
        self.numbers = before
        gone: list[Page] = []
        for group in range(len(self.per)):
            wanted = sum(page.group == group for page in pages)
            lent = {self._sector(p) for p in self.numbers if p.group == group and p not in cached}
            taken = {n for p, n in self.numbers.items() if p.group == group}
            free = sum(s * self.per[group] + i not in taken for s in lent for i in range(self.per[group]))
            beside = [p for p in cached if p.group == group and self._sector(p) in lent]
            gone += beside[: max(0, wanted - free)]
        rest = [page for page in cached if page not in gone]
        while True:
            for page in gone:
                self.numbers.pop(page, None)
            if self._place(pages):
                return gone
            assert rest, "the reference said that it fits"
            owners = {self._sector(p) for p in self.numbers if p not in cached}
            sector = next(self._sector(p) for p in rest if self._sector(p) not in owners)
            gone += [p for p in rest if self._sector(p) == sector]
            rest = [p for p in rest if p not in gone]

    def _place(self, pages: list[Page]) -> bool:
        before = dict(self.numbers)
        for page in pages:
            per = self.per[page.group]
            taken = {number for other, number in self.numbers.items() if other.group == page.group}
            mine = sorted({number // per for number in taken})
            theirs = {self._sector(other) for other in self.numbers}
            sectors = mine + [sector for sector in range(self.sectors) if sector not in theirs]
            places = [s * per + i for s in sectors for i in range(per) if s * per + i not in taken]
            if not places:
                self.numbers = before
                return False
            self.numbers[page] = places[0]
        return True


class Driver:
    """A reference with handles chosen and tokens made up, so that a test reads like a script."""

    def __init__(
        self, pages: int = 16, page_size: int = 4, host_pages: int = 0, groups: tuple[Group, ...] = (Group(),),
        **worker: Any,
    ) -> None:  # fmt: skip
        geometry = Geometry(pages=pages, page_size=page_size, host_pages=host_pages, groups=groups)
        self.ref = Reference(geometry, **worker)
        self.serial = 0
        self.token = 0
        self.device = Sectors(geometry, pages)
        self.host = Sectors(geometry, host_pages)
        self.evicted: list[Page] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.ref, name)
        if not callable(found) or name in ("abstract", "contents", "streams"):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self.ref.look(self.view())
            answer = found(*args, **kwargs)
            self.deal()
            return answer

        return call

    def deal(self) -> None:
        """Give the pages of the newest call their numbers, evicting what has to leave, and let the reference judge."""
        if len(self.ref.geometry.groups) == 1:
            return
        owned, cached = self.ref._owned(), [page for page, _ in self.ref.cached]
        self.device.keep(owned.union(cached))
        self.host.keep(self.ref._owned_on_host())
        gone = self.device.place(sorted(owned - set(self.device.numbers)), cached)
        self.host.place(sorted(self.ref._owned_on_host() - set(self.host.numbers)), [])
        self.evicted += gone
        assert self.ref.settle(self.view(set(gone))) is None

    def view(self, gone: set[Page] | None = None) -> StateView:
        """Return as much of a view as a reference reads."""
        ref, geometry = self.ref, self.ref.geometry
        names = {found.page: key.hex() for (_, key), found in ref.findable.items() if found.page not in (gone or ())}
        if len(geometry.groups) == 1:
            self.device.numbers.update({page: page.serial for page in names})
        numbers = self.device.numbers
        owned, host = ref._owned(), ref._owned_on_host()

        def pool(group: int, own: Any, where: Sectors, pages: int, keys: Any) -> PoolView:
            mine = {number for page, number in where.numbers.items() if page.group == group and page in own}
            return PoolView(
                free=(),
                owners=tuple(int(number in mine) for number in range(pages)),
                sealed=(),
                fences=(),
                cached=tuple(numbers[p] for p, _ in ref.cached if p.group == group and p in keys),
                keys=tuple((numbers[p], name) for p, name in keys.items() if p.group == group),
            )

        groups = range(len(geometry.groups))
        return StateView(
            page_size=geometry.page_size,
            device=tuple(pool(g, owned, self.device, geometry.group_pages[g], names) for g in groups),
            host=tuple(pool(g, host, self.host, geometry.host_group_pages[g], {}) for g in groups),
            requests=(),
            streams=(),
            detached=(),
            leases=(),
            claims=(),
            key_epoch=ref.key_epoch,
        )

    def handle(self) -> int:
        self.serial += 1
        return self.serial

    def admitted(self, step: Step) -> int:
        handle = self.handle()
        assert self.admit(step, handle=handle) is None
        return handle

    def enter(self, lease: int) -> Refusal | None:
        plan = self.handle()
        refusal: Refusal | None = self.plan(lease, handle=plan) or self.launch_enter(lease, plan=plan)
        return refusal

    def launched(self, step: Step) -> int:
        lease = self.admitted(step)
        self.launch(lease)
        return lease

    def launch(self, lease: int) -> None:
        assert self.enter(lease) is None
        self.launch_exit(lease)

    def tokens(self, lease: int) -> list[list[int]]:
        made = []
        for segment in self.ref.leases[lease].step.segments if lease in self.ref.leases else ():
            made.append(list(range(self.token, self.token + segment.span)))
            self.token += segment.span
        return made

    def commit(self, lease: int, accepted: list[int] | None = None) -> Any:
        return self.__getattr__("commit")(lease, self.tokens(lease), accepted)

    def stored(self, step: Step, accepted: list[int] | None = None) -> None:
        outcome = self.commit(self.launched(step), accepted)
        assert not isinstance(outcome, Refusal)

    def offloaded(self, request: str, **how: bool) -> None:
        claim = self.handle()
        assert self.claim_offload(request, handle=claim, **how) is None
        assert self.commit_offload(claim) is None

    def reloaded(self, request: str) -> None:
        claim = self.handle()
        assert self.claim_reload(request, handle=claim) is None
        assert self.commit_reload(claim) is None

    def prompt(self, request: str, tokens: list[int], label: str = "main") -> None:
        """Store `tokens` on an empty stream and key all of them."""
        lease = self.launched(step(span(len(tokens), request, label)))
        self.__getattr__("commit")(lease, [tokens])
        assert self.key(request, tokens, label) == (len(tokens) // self.ref.geometry.page_size, 0)

    def length(self, request: str = "a", label: str = "main") -> int:
        return self.ref.abstract().streams[request, label].length

    def stream(self, request: str = "a", label: str = "main") -> StreamAbstract:
        return self.ref.abstract().streams[request, label]

    def found(self) -> Abstract:
        return self.ref.abstract()


def span(count: int, request: str = "a", label: str = "main", prefix: tuple[bytes, ...] = ()) -> Segment:
    return Segment(request, label, count, prefix)


def step(*segments: Segment, **rest: Any) -> Step:
    return Step(segments, **rest)


def driver(*requests: str, salts: dict[str, str] | None = None, **geometry: Any) -> Driver:
    made = Driver(**geometry)
    for request in requests or ("a",):
        salt = (salts or {}).get(request)
        assert made.ingest(request, None if salt is None else RequestConfig(cache_salt=salt)) is None
    return made


def of_one_group(
    length: int, residency: str, content: int, surplus: int, device: Any = (), host: Any = (), **more: Any
) -> StreamAbstract:
    stream = StreamAbstract(length, 0, residency, (content,), (surplus,), (device,), (host,), (0,))
    return attrs.evolve(stream, **more)
