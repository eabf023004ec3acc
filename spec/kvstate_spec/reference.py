"""The semantics of spec/README.md as a slow, obvious program; numbers in docstrings are that file's sentences.

Nothing here knows about ordering, page numbers or copies. A page is a serial number that nobody reuses, and a page is
free when nobody owns it and no key finds it: `owners` asks every possible owner each time. A driver runs the machine
first and then calls the method of the same name here, with the same arguments and with the integer handle under which
it will name the lease, claim or fetch later. A method returns the refusal that it expects, or an outcome.

Two things are the machine's to choose, and the driver shows them: it calls `look` with the view before each call, since
with several groups it matters which sectors the owned pages lie in, and `settle` with the view after it, which says
whether the choice of evicted pages and the order of cached ones was legal, and takes them over. A driver of one group
that makes no keys needs neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import attrs

from kvstate.prefix import Key, chain, root
from kvstate.refusals import (
    AlreadyLaunched,
    ClaimEnded,
    ConfigConflict,
    CopyFailed,
    FetchFailed,
    FetchPending,
    ForkPending,
    HostExhausted,
    LayoutMismatch,
    LeaseEnded,
    NoHostPool,
    NotEmpty,
    NotLaunched,
    NotOnHost,
    NotStored,
    OnRemoteHost,
    OutOfOrder,
    PagesExhausted,
    PrefixLost,
    Refusal,
    StalePlan,
    StreamBusy,
    StreamNotOnDevice,
    TooLarge,
    UnknownRequest,
    WorldSizeMismatch,
)
from kvstate.types import MAIN, Geometry, Publication, Record, RequestConfig, Segment, Step, StreamFork, StreamId
from kvstate.view import StateView
from kvstate_spec import capacity
from kvstate_spec.abstract import Abstract, Classes, StreamAbstract, agrees
from kvstate_spec.capacity import Tier
from kvstate_spec.model import (
    AWAY,
    FETCH_FAILED,
    FETCHING,
    OFFLOADING,
    ON_DEVICE,
    ON_HOST,
    RELOADING,
    Ask,
    Claim,
    Findable,
    Hit,
    Image,
    Lease,
    Page,
    Pages,
    Request,
    Row,
    Stream,
    Table,
    Token,
    asked_for,
    loose,
    named,
    pages_in,
    skipped,
    stream_id,
)
from kvstate_spec.walk import Walked, slide, walk

__all__ = ["Abstract", "Reference", "StreamAbstract", "agrees"]

F = TypeVar("F", bound=Callable[..., Any])


def verb(function: F) -> F:
    """Let a method that changes something note, at its end, which pages only a key keeps now (36)."""

    @wraps(function)
    def call(self: Reference, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        self._sweep()
        return result

    return call  # type: ignore[return-value]


@attrs.define
class Reference:
    """The state that spec/README.md speaks of. `rank`, `world_size` and `address` are this worker's, for retrieves."""

    geometry: Geometry
    rank: int = 0
    world_size: int = 1
    address: str = ""
    requests: dict[str, Request] = attrs.Factory(dict)
    leases: dict[int, Lease] = attrs.Factory(dict)
    claims: dict[int, Claim] = attrs.Factory(dict)
    # Pages that left a stream, each with the rows behind which it stays taken (20).
    kept: list[tuple[Page, Stream, tuple[Row, ...]]] = attrs.Factory(list)
    # The targets of the newest commit's post-forks whose last page is copied.
    copied: list[Stream] = attrs.Factory(list)
    # What keys find (34), what the page of a key holds, and the pages that only a key keeps, the next to leave first
    # (36); of each, the call in which that came about.
    findable: dict[tuple[int, Key], Findable] = attrs.Factory(dict)
    means: dict[Key, tuple[Token, ...]] = attrs.Factory(dict)
    cached: list[tuple[Page, int]] = attrs.Factory(list)
    key_epoch: int = 0
    parents: dict[Key, Key] = attrs.Factory(dict)
    _calls: int = 0
    _serial: int = 0
    _view: StateView | None = None
    # What the newest call was granted, per group, and which pages it started on: what evictions are judged by (37).
    _granted: tuple[list[int], list[Page]] | None = None
    # The tables before the newest call, and after it.
    _tables: list[list[Page]] = attrs.Factory(list)
    _next_tables: list[list[Page]] = attrs.Factory(list)
    # True when the newest call may have let pages of one table go in several steps: a commit has retention, windows,
    # forks, and what waited for the lease.
    _in_steps: bool = False
    # True in what `probe` asks: owners that are leaving do not count (41).
    _leaving: bool = False

    # ---------------------------------------------------------------------------------------------------------------
    # What the driver shows

    def look(self, view: StateView) -> None:
        """Take the view as it is before a call: with several groups it says where owned pages lie (32)."""
        self._view, self._granted = view, None

    def settle(self, view: StateView) -> str | None:
        """Take over what the machine chose in a call: evictions of several groups, and orders that are not fixed (37).

        Returns what was wrong with the choice, else None.
        """
        keys = [dict(pool.keys) for pool in view.device]
        if self._groups > 1 and (wrong := self._evicted(keys)):
            return wrong
        pages = [{(key, group): page for page, key in found.items()} for group, found in enumerate(keys)]
        names = {found.page: (key.hex(), group) for (group, key), found in self.findable.items()}
        order: dict[Page, int] = {}
        for page, _ in self.cached:
            number = pages[page.group].get(names[page])
            line = view.device[page.group].cached
            if number not in line:
                return f"{names[page]} has no owner and its page {number} is not among the cached {line}"
            order[page] = line.index(number)
        depth = {found.page: found.depth for found in self.findable.values()}
        calls = dict(self.cached)
        for group in range(self._groups):
            leaving = sorted((page for page, _ in self.cached if page.group == group), key=lambda page: order[page])
            for one, two in itertools.pairwise(leaving):
                if calls[one] > calls[two]:
                    return f"{names[one]} was cached after {names[two]} and leaves before it"
                if calls[one] == calls[two] and depth[one] < depth[two] and self._together(one, two):
                    return f"{names[one]} is in front of {names[two]}, was cached with it, and leaves before it"
        # One group: the order is the whole order. Several: it is compared per group, and used for nothing else.
        self.cached.sort(key=lambda entry: (entry[1], order[entry[0]]))
        return None

    def _together(self, page: Page, other: Page) -> bool:
        """Tell whether one table alone had both pages before the call: it let them go at once."""
        both = [(page in table, other in table) for table in self._tables if page in table or other in table]
        return both == [(True, True)]

    def _evicted(self, keys: Sequence[Mapping[int, str]]) -> str | None:
        """Judge which keys the machine let go for a grant, with several groups, and forget them (37)."""
        here = {(group, key) for group, found in enumerate(keys) for key in found.values()}
        gone = [name for name in self.findable if (name[0], name[1].hex()) not in here]
        if not gone:
            return None
        assert self._view is not None, "with several groups the driver calls look before and settle after every call"
        wanted, own = self._granted or ([0] * self._groups, [])
        waiting = [page for page, _ in self.cached]
        tier = self._device(own)
        before = [{key: page for page, key in pool.keys} for pool in self._view.device]
        cached: list[list[int]] = [list(pool.cached) for pool in self._view.device]
        left: list[list[int]] = [[] for _ in range(self._groups)]
        for group, key in gone:
            page = self.findable[group, key].page
            if key.hex() not in before[group]:
                return f"{key.hex()} of group {group} finds nothing"
            if page not in waiting or page in own:
                return f"{key.hex()} of group {group} was let go, and somebody owns its page"
            left[group].append(before[group][key.hex()])
        if tier.with_owned(cached).short(wanted) is None:
            return f"{len(gone)} cached pages were let go and everything fits without"
        kept = tier.with_owned([set(pages) - set(out) for pages, out in zip(cached, left, strict=True)])
        if kept.short(wanted) is not None:
            return f"only {len(gone)} cached pages were let go and the grant does not fit"
        emptied = set(kept.empty())
        for group, out in enumerate(left):
            per = self.geometry.pages_per_sector[group]
            beside = [page for page in out if page // per not in emptied]
            free = [page for page in tier.with_owned(cached).loose(group) if page // per not in emptied]
            short = wanted[group] - len(free)
            if len(beside) > max(0, short):
                return f"group {group} was {max(0, short)} pages short and {len(beside)} cached ones were let go beside"
        for name in gone:
            del self.findable[name]
        self.cached = [entry for entry in self.cached if any(entry[0] == f.page for f in self.findable.values())]
        return None

    # ---------------------------------------------------------------------------------------------------------------
    # Who owns which page

    @property
    def _groups(self) -> int:
        return len(self.geometry.groups)

    def owners(self) -> list[tuple[object, list[Page]]]:
        """Return every owner of device pages with its pages."""
        owners: list[tuple[object, list[Page]]] = []
        for s in self.streams():
            if not (self._leaving and s.residency == OFFLOADING):
                owners.append((s, s.image.pages()))
        for lease in self.leases.values():
            void = {row.stream.id for row in lease.void()} if self._leaving else set()
            owners.append((lease, [page for name, own in lease.pages() if name not in void for page in own]))
        owners += [("kept", [page]) for page, _, _ in self._kept()]
        for claim in self.claims.values():
            if not (self._leaving and claim.kind == "offload"):
                owners.append((claim, claim.device))
        return owners

    def _kept(self) -> list[tuple[Page, Stream, tuple[Row, ...]]]:
        """Return the pages that left a stream and are still taken (20)."""
        return [
            entry
            for entry in self.kept
            if any(row in row.stream.rows and not (self._leaving and row.lease.void()) for row in entry[2])
        ]

    def _owned(self) -> set[Page]:
        return {page for _, own in self.owners() for page in own}

    def _owned_on_host(self) -> set[Page]:
        own = [pages_in(s.host) for s in self.streams()] + [claim.host for claim in self.claims.values()]
        return {page for pages in own for page in pages}

    def _numbers(self, pages: Iterable[Page]) -> dict[Page, int]:
        """Return the numbers that the view gives to pages that keys find."""
        assert self._view is not None, "with several groups the driver calls look before every call"
        number = [{key: page for page, key in pool.keys} for pool in self._view.device]
        names = {found.page: key.hex() for (_, key), found in self.findable.items()}
        return {page: number[page.group][names[page]] for page in pages}

    def _device(self, also: Iterable[Page] = ()) -> Tier:
        """Return the device with the pages that have an owner, and `also` those, which keys find (32, 38)."""
        if self._groups == 1:
            return capacity.tier(self.geometry, self.geometry.pages, [range(len(self._owned().union(also)))])
        assert self._view is not None, "with several groups the driver calls look before every call"
        more: list[list[int]] = [[] for _ in range(self._groups)]
        for page, number in self._numbers(also).items():
            more[page.group].append(number)
        return capacity.device_tier(self.geometry, self._view, self._leaving).with_owned(more)

    def _host(self) -> Tier:
        """Return the host with the pages that have an owner (32)."""
        if self._groups == 1:
            return capacity.tier(self.geometry, self.geometry.host_pages, [range(len(self._owned_on_host()))])
        assert self._view is not None, "with several groups the driver calls look before every call"
        return capacity.host_tier(self.geometry, self._view)

    @property
    def device_free(self) -> int:
        """Device pages that a grant could get: without owner, cached ones included. Of one group."""
        return self.geometry.pages - len(self._owned())

    @property
    def host_free(self) -> int:
        """Host pages that nobody owns. Of one group."""
        return self.geometry.host_pages - len(self._owned_on_host())

    def streams(self) -> list[Stream]:
        """Return every stream of every live request."""
        return [s for request in self.requests.values() for s in request.streams.values()]

    def _new(self, group: int, count: int) -> list[Page]:
        self._serial += count
        return [Page(group, self._serial - count + i) for i in range(count)]

    def _blank(self) -> Table:
        return [[] for _ in range(self._groups)]

    def _counts(self, pages: Iterable[Page]) -> list[int]:
        """Return how many of `pages` are of each group."""
        groups = [page.group for page in pages]
        return [groups.count(group) for group in range(self._groups)]

    def _leave(self, stream: Stream, pages: Sequence[Page]) -> None:
        """Let go of pages that a stream no longer holds: leases with rows on it keep them taken (20)."""
        if behind := tuple(stream.rows):
            self.kept += [(page, stream, behind) for page in pages]

    # ---------------------------------------------------------------------------------------------------------------
    # Keys

    def _sweep(self) -> None:
        """Note which pages have nobody but a key (36): those that came to that in one call, the deepest first."""
        self._calls += 1
        self._tables = [] if self._in_steps else self._next_tables
        self._in_steps = False
        self.kept = self._kept()
        self._next_tables = [own for owner, own in self.owners() if not isinstance(owner, Lease)]
        self._next_tables += [own for lease in self.leases.values() for _, own in lease.pages()]
        # A claim lets go of its streams' tables one by one: what it has, no table has alone.
        self._next_tables += [claim.device for claim in self.claims.values()]
        owned, known = self._owned(), {page for page, _ in self.cached}
        self.cached = [entry for entry in self.cached if entry[0] not in owned]
        new = [found for found in self.findable.values() if found.page not in owned and found.page not in known]
        new.sort(key=lambda found: -found.depth)
        self.cached += [(found.page, self._calls) for found in new]

    def _evict(self, wanted: Sequence[int], own: Iterable[Page]) -> None:
        """Let the oldest cached pages go, as many as a grant needs (37); with several groups `settle` hears which."""
        own = list(own)
        self._granted = (list(wanted), own)
        if self._groups > 1:
            return
        kept = [page for page, _ in self.cached if page not in own]
        many = wanted[0] - (self.geometry.pages - len(self._owned().union(own, kept)))
        for page in kept[: max(0, many)]:
            self.findable = {name: found for name, found in self.findable.items() if found.page != page}
        self.cached = [entry for entry in self.cached if entry[0] not in kept[: max(0, many)]]

    def match(self, keys: Sequence[Key]) -> int:
        """Return at how many of `keys`, at most, every group has what it needs (35)."""
        for count in range(len(keys), 0, -1):
            needed = [
                (group, keys[place])
                for group in range(self._groups)
                for place in range(self.geometry.skipped(group, count * self.geometry.page_size), count)
            ]
            if all(name in self.findable for name in needed):
                return count
        return 0

    def _hit(self, keys: tuple[Key, ...]) -> Hit:
        """Return what a segment starts on whose prefix matches (38)."""
        content = self._blank()
        for group, table in enumerate(content):
            first = self.geometry.skipped(group, len(keys) * self.geometry.page_size)
            table += [None] * first + [self.findable[group, key].page for key in keys[first:]]
        return Hit(content, tuple(token for key in keys for token in self.means[key]), keys)

    @verb
    def key(self, request: str, tokens: Sequence[int], label: str = MAIN) -> Refusal | tuple[int, int]:
        """Give the whole pages of `tokens`, which continue the keyed ones, their keys (34).

        Returns how many places have what their key finds, in each group, and of how many a key or page was taken.
        """
        if request not in self.requests:
            return UnknownRequest(request=request)
        held, size = self.requests[request], self.geometry.page_size
        image = held.streams[label].image if label in held.streams else Image.blank(self._groups)
        residency = held.residency(label)
        if residency == FETCHING:
            return FetchPending(request=request, label=label)
        if residency == FETCH_FAILED:
            return FetchFailed(request=request, label=label, error=held.streams[label].error)
        if residency in AWAY:
            return StreamNotOnDevice(request=request, label=label, residency=residency)
        stored = len(image.tokens) - len(image.keys) * size
        if image.stale or image.released:
            return 0, 0
        if len(tokens) > stored:
            return NotStored(request=request, label=label, stored=stored)
        found = taken = 0
        for i in range(len(tokens) // size):
            place = len(image.keys)
            parent = image.keys[-1] if image.keys else root(held.config.cache_salt)
            image.keys.append(chain(parent, tokens[i * size : (i + 1) * size]))
            self.parents[image.keys[-1]] = parent
            self.means[image.keys[-1]] = tuple(image.tokens[place * size : (place + 1) * size])
            if self._find(image, place):
                found += 1
            else:
                taken += 1
        return found, taken

    def _find(self, image: Image, place: int) -> bool:
        """Let the key of a place find its page, in each group that holds it; False when one was taken (34)."""
        everywhere = True
        for group, table in enumerate(image.content):
            page = table[place] if place < len(table) else None
            name = (group, image.keys[place])
            if page is None or (name in self.findable and self.findable[name].page == page):
                continue
            if name in self.findable or any(found.page == page for found in self.findable.values()):
                everywhere = False
            else:
                self.findable[name] = Findable(page, place)
        return everywhere

    @verb
    def reset_prefix_cache(self) -> int:
        """Forget every key: the weights changed (39). Return how many pages could be found."""
        found = len(self.findable)
        self.findable, self.means, self.parents, self.cached = {}, {}, {}, []
        for s in self.streams():
            if s.image.tokens or s.residency == FETCHING or s.counting():
                s.image.stale, s.image.keys = True, []
        self.key_epoch += 1
        return found

    # ---------------------------------------------------------------------------------------------------------------
    # Steps

    def _walk(
        self,
        step: Step,
        images: Mapping[StreamId, Image],
        granted: dict[Ask, Pages],
        tokens: Sequence[Sequence[Token]],
        accepted: Sequence[int],
        void: frozenset[StreamId] = frozenset(),
        doing: Sequence[StreamFork] | None = None,
        hits: Mapping[StreamId, Hit] | None = None,
    ) -> Walked:
        configs = {name: self.requests[name.request].config for name in images.keys() - void}
        return walk(step, self.geometry, configs, self._new, images, granted, tokens, accepted, void, doing, hits)

    def _base(self, name: StreamId) -> Image:
        """Return what the youngest row that counts will leave on a stream, else what is stored (5)."""
        stream = self.requests[name.request].streams.get(name.label)
        if stream is None:
            return Image.blank(self._groups)
        counting = stream.counting()
        return (counting[-1].leaves if counting else stream.image).copy()

    def _stands(self, name: StreamId) -> Refusal | None:
        """Refuse a step that names a stream on which none can run now (6)."""
        request = self.requests.get(name.request)
        if request is None:
            return UnknownRequest(request=name.request)
        residency = request.residency(name.label)
        if residency == FETCHING:
            return FetchPending(request=name.request, label=name.label)
        if residency == FETCH_FAILED:
            return FetchFailed(request=name.request, label=name.label, error=request.streams[name.label].error)
        if residency in AWAY:
            return StreamNotOnDevice(request=name.request, label=name.label, residency=residency)
        if name.label in request.streams and any(r.post_target for r in request.streams[name.label].counting()):
            return ForkPending(request=name.request, label=name.label)
        return None

    def _prefix_stands(self, step: Step, segment: Segment) -> Refusal | None:
        """Refuse a prefix that is no longer there, or on a stream that stores something when it begins (6, 38)."""
        name = stream_id(segment)
        assert name is not None, "padding has no prefix"
        forked, length = self._forked(step).get(name), len(self._base(name).tokens)
        if forked is not None or length:
            return NotEmpty(request=name.request, label=name.label, length=length if forked is None else forked)
        matched = self.match(segment.prefix)
        if matched < len(segment.prefix):
            return PrefixLost(request=name.request, label=name.label, matched=matched)
        return None

    def _forked(self, step: Step) -> dict[StreamId, int]:
        """Return what the targets of the step's pre-forks that do something store in front of its segments."""
        growing = [stream_id(segment) for segment in step.segments if segment.span and step.commit]
        lengths: dict[StreamId, int] = {}
        for fork in step.stream_forks(step.pre_forks):
            base = self._base(fork.source)
            if fork.source in lengths or base.opened or fork.source in growing:
                lengths[fork.target] = lengths.get(fork.source, len(base.tokens))
        return lengths

    @verb
    def admit(self, step: Step, *, handle: int = -1) -> Refusal | None:
        """Reserve by simulating, or refuse and change nothing (5, 6, 11, 12, 38)."""
        asked = self._ask(step)
        if isinstance(asked, Refusal):
            return asked
        images, granted, hits, walked = asked
        own = [page for hit in hits.values() for page in pages_in(hit.content)]
        self._evict(self._counts(page for pages in granted.values() for page in loose(pages)), own)
        lease = self.leases[handle] = Lease(handle, step, granted, walked.shared, hits, walked.posted)
        rows: dict[StreamId, Row] = {}
        for name, image in images.items():
            stream = self.requests[name.request].stream(name.label)
            rows[name] = Row(lease, stream, self._base(name).result(), image)
        for name, row in rows.items():
            lease.rows.append(row)
            self.requests[name.request].stream(name.label).rows.append(row)
        for fork in walked.forked:
            rows[fork.target].sources.append(rows[fork.source])
        for fork in walked.posted:
            rows[fork.target].post_target = True
        return None

    def probe(self, step: Step, leaving: bool = False) -> Refusal | None:
        """Return what `admit` would answer; `leaving`: what is leaving counts as available (41)."""
        self._leaving = leaving
        asked = self._ask(step)
        self._leaving = False
        return asked if isinstance(asked, Refusal) else None

    def _ask(self, step: Step) -> Refusal | tuple[dict[StreamId, Image], dict[Ask, Pages], dict[StreamId, Hit], Walked]:
        """Return what a step's streams become, and what it is granted and starts on; or why it cannot be admitted."""
        pre, post = step.stream_forks(step.pre_forks), step.stream_forks(step.post_forks)
        for name in [name for fork in pre for name in (fork.source, fork.target)]:
            if refusal := self._stands(name):
                return refusal
        for segment in step.segments:
            if (named_here := stream_id(segment)) is not None:
                if refusal := self._stands(named_here):
                    return refusal
                if segment.prefix and (refusal := self._prefix_stands(step, segment)):
                    return refusal
        for name in [name for fork in post for name in (fork.source, fork.target)]:
            if refusal := self._stands(name):
                return refusal
        hits = {StreamId(s.request or "", s.label): self._hit(s.prefix) for s in step.segments if s.prefix}
        images = {name: self._base(name) for name in named(step)}
        granted: dict[Ask, Pages] = {}
        spans = [segment.span for segment in step.segments]
        walked = self._walk(step, images, granted, [[None] * span for span in spans], spans, hits=hits)
        own = [page for hit in hits.values() for page in pages_in(hit.content)]
        if refusal := self._too_few(step, list(images), walked.tables, granted, own):
            return refusal
        return images, granted, hits, walked

    def _too_few(
        self,
        step: Step,
        names: list[StreamId],
        tables: dict[StreamId, list[Page]],
        granted: dict[Ask, Pages],
        own: list[Page],
    ) -> Refusal | None:
        """Refuse when the available pages do not suffice, those of prefixes taken out (11, 32, 38)."""
        tier = self._device(own)
        wanted = self._counts(page for pages in granted.values() for page in loose(pages))
        short = tier.short(wanted)
        if short is None:
            return None
        distinct: dict[str, set[Page]] = {}
        for name in names:
            distinct.setdefault(name.request, set()).update(tables[name])
        for ask, pages in granted.items():
            if ask[0] == "post":
                distinct[asked_for(step, ask).request].update(loose(pages))
        asked = {request: capacity.sectors_for(self.geometry, self._counts(own)) for request, own in distinct.items()}
        largest = max(asked, key=lambda request: asked[request])
        if asked[largest] > self.geometry.pages:
            label = next(name.label for name in names if name.request == largest)
            return TooLarge(request=largest, label=label, wanted=asked[largest], capacity=self.geometry.pages)
        total = [0] * self._groups
        for ask, pages in granted.items():
            total = [one + two for one, two in zip(total, self._counts(loose(pages)), strict=True)]
            if tier.short(total) is not None:
                name = asked_for(step, ask)
                return PagesExhausted(
                    request=name.request, label=name.label, short=short, fragmented=tier.fragmented(wanted)
                )
        raise AssertionError("more is wanted than is free, but nobody wants it")

    def _void(self, row: Row) -> None:
        """Make a row void, the rows above it, and those that pre-forks of its step made from it (13)."""
        if row.void:
            return
        row.void = True
        for above in row.stream.rows[row.stream.rows.index(row) + 1 :]:
            self._void(above)
        for other in row.lease.rows:
            if row in other.sources:
                self._void(other)

    @verb
    def plan(self, lease: int, *, handle: int) -> Refusal | None:
        """Plan; the owner hears of void rows once (14)."""
        if lease not in self.leases:
            return StalePlan(ended=True)
        held = self.leases[lease]
        if held.status in ("launching", "launched"):
            return AlreadyLaunched()
        void = held.void()
        if any(row not in held.told for row in void):
            held.told = void
            return StalePlan(void=held.void_places())
        held.plan, held.seen, held.status = handle, void, "planned"
        return None

    @verb
    def launch_enter(self, lease: int, *, plan: int) -> Refusal | None:
        """Enter a launch, in order on every stream (14, 15)."""
        if lease not in self.leases:
            return StalePlan(ended=True)
        held = self.leases[lease]
        if held.status in ("launching", "launched"):
            return AlreadyLaunched()
        if held.plan != plan:
            return StalePlan(ended=True)
        void = held.void()
        if any(row not in held.seen for row in void):
            held.told = void
            return StalePlan(void=held.void_places())
        for row in held.counting():
            for older in row.stream.rows[: row.stream.rows.index(row)]:
                if older.lease.status == "launching" or not (older.void or older.lease.status == "launched"):
                    return OutOfOrder(request=row.stream.id.request, label=row.stream.id.label)
        held.status = "launching"
        return None

    @verb
    def launch_exit(self, lease: int, *, failed: bool = False) -> None:
        """Leave the launch: launched, or aborted when it failed or was aborted inside (15, 18)."""
        held = self.leases[lease]
        assert held.status == "launching", "a launch that was not entered cannot exit"
        if failed or held.abort_at_exit:
            self._abort(held)
        else:
            held.status = "launched"

    @verb
    def commit(
        self, lease: int, tokens: Sequence[Sequence[Token]], accepted: Sequence[int] | None = None
    ) -> Refusal | tuple[int, ...]:
        """Store what every row that counts was to store (16, 17); return the places of the segments that were dropped.

        `tokens` are what each segment computed, `accepted` how many of them count, padding included in both.
        """
        if lease not in self.leases:
            return LeaseEnded()
        held = self.leases[lease]
        if held.status != "launched":
            return NotLaunched()
        for row in held.counting():
            if any(not older.void for older in row.stream.rows[: row.stream.rows.index(row)]):
                return OutOfOrder(request=row.stream.id.request, label=row.stream.id.label)

        counting = held.counting()
        images = {
            row.stream.id: Image.blank(self._groups) if row.void else row.stream.image.copy() for row in held.rows
        }
        assert all(images[row.stream.id].result() == row.assumes for row in counting), "a row counts on what is not so"
        counts = [segment.span for segment in held.step.segments] if accepted is None else list(accepted)
        void = frozenset(row.stream.id for row in held.void())
        dropped = held.void_places()
        reserved = {ask: [list(own) for own in pages] for ask, pages in held.granted.items()}
        walked = self._walk(held.step, images, held.granted, tokens, counts, void, held.posted, held.hits)
        assert held.granted == reserved, "a commit takes no page that its admission did not reserve"
        for row in counting:
            row.stream.image = images[row.stream.id]
        partly = {name for name, image in images.items() if len(image.tokens) % self.geometry.page_size}
        names = {fork.target for fork in walked.posted} & partly
        self._in_steps = True
        self.copied = [row.stream for row in counting if row.stream.id in names]
        self._end(held)
        for row in counting:
            self._leave(row.stream, walked.left[row.stream.id])
        for row in counting:
            if row.stream.image.result() != row.leaves.result():
                for above in row.stream.counting():
                    self._void(above)
        self._tidy()
        return dropped

    @verb
    def abort(self, lease: int) -> Refusal | None:
        """Return everything and make the rows above void (18)."""
        if lease not in self.leases:
            return LeaseEnded()
        held = self.leases[lease]
        if held.status == "launching":
            held.abort_at_exit = True
        else:
            self._abort(held)
        return None

    def _abort(self, lease: Lease) -> None:
        for row in lease.rows:
            self._void(row)
        self._end(lease)
        self._tidy()

    def _end(self, lease: Lease) -> None:
        """Take a lease away; what it had and no stream has now waits for the rows above that may use it (18)."""
        del self.leases[lease.handle]
        stored = {page for s in self.streams() for page in s.image.pages()}
        rows = {row.stream.id: row for row in lease.rows}
        for name, own in lease.pages():
            row = rows[name]
            mine = own if row.void else [page for page in own if page not in stored]
            self.kept += [(page, row.stream, above) for page in mine if (above := row.above())]
        for row in lease.rows:
            row.stream.rows.remove(row)

    def _tidy(self) -> None:
        for request in self.requests.values():
            request.tidy()

    # ---------------------------------------------------------------------------------------------------------------
    # Offload and reload

    @verb
    def claim_offload(self, request: str, discard_in_flight: bool = False, *, handle: int = -1) -> Refusal | None:
        """Claim a request that is to leave the device (21)."""
        if request not in self.requests:
            return UnknownRequest(request=request)
        if not self.geometry.host_pages:
            return NoHostPool(request=request)
        held = self.requests[request]
        streams = list(held.streams.values())
        for s in streams:
            if s.residency == FETCHING:
                return FetchPending(request=request, label=s.id.label)
            if s.residency == FETCH_FAILED:
                return FetchFailed(request=request, label=s.id.label, error=s.error)
        for s in streams:
            if s.residency != ON_DEVICE:
                return StreamNotOnDevice(request=request, label=s.id.label, residency=s.residency)
        for s in streams:
            if s.counting() and not discard_in_flight:
                return StreamBusy(request=request, label=s.id.label)
        distinct = list(dict.fromkeys(page for s in streams for page in pages_in(s.image.content)))
        wanted, tier = self._counts(distinct), self._host()
        if (short := tier.short(wanted)) is not None:
            return HostExhausted(request=request, short=short, fragmented=tier.fragmented(wanted))

        for s in streams:
            for row in s.counting():
                self._void(row)
            s.residency = OFFLOADING
        moved = {page: self._new(page.group, 1)[0] for page in distinct}
        device = [page for s in streams for page in s.image.pages()]
        self.claims[handle] = Claim("offload", held, device, list(moved.values()), moved)
        return None

    @verb
    def commit_offload(self, claim: int) -> Refusal | None:
        """Move the content to the host (22, 25)."""
        return self._end_claim(claim, commit=True)

    @verb
    def abandon_offload(self, claim: int) -> Refusal | None:
        """Put everything back on the device (22, 25)."""
        return self._end_claim(claim, commit=False)

    @verb
    def claim_reload(self, request: str, extra: Step | None = None, *, handle: int = -1) -> Refusal | None:
        """Claim a request that is to come back, with the pages that its next step asks for (23)."""
        if request not in self.requests:
            return UnknownRequest(request=request)
        held = self.requests[request]
        for s in held.streams.values():
            if s.residency != ON_HOST:
                return NotOnHost(request=request, label=s.id.label, residency=s.residency)
        distinct = list(dict.fromkeys(page for s in held.streams.values() for page in pages_in(s.host)))
        found: dict[Page, Page] = {}
        for s in held.streams.values():
            for table in s.host:
                for page, key in zip(table, s.image.keys, strict=False):
                    if page is not None and (page.group, key) in self.findable:
                        found.setdefault(page, self.findable[page.group, key].page)
        owned = self._owned()
        for keys_find in (found, {page: there for page, there in found.items() if there in owned}):
            found = keys_find
            moved = {page: found[page] if page in found else self._new(page.group, 1)[0] for page in distinct}
            asked = self._extra(held, moved, extra) if extra is not None else {}
            fresh = [page for page in distinct if page not in found]
            more = [page for pages in asked.values() for page in loose(pages)]
            wanted, tier = self._counts(fresh + more), self._device(found.values())
            if (short := tier.short(wanted)) is None:
                break
        if short is not None:
            everything = capacity.sectors_for(self.geometry, self._counts(distinct + more))
            if everything > self.geometry.pages:
                return TooLarge(request=request, wanted=everything, capacity=self.geometry.pages)
            return PagesExhausted(request=request, short=short, fragmented=tier.fragmented(wanted))

        self._evict(wanted, found.values())
        self.claims[handle] = Claim("reload", held, list(moved.values()) + more, distinct, moved, asked)
        for s in held.streams.values():
            s.residency = RELOADING
        return None

    def _extra(self, request: Request, moved: Mapping[Page, Page], step: Step) -> dict[str, Pages]:
        """Return the pages that `step` asks for on the returned streams, per label; other requests ignored (23)."""

        def mine(fork: StreamFork) -> bool:
            return fork.source.request == fork.target.request == request.id

        # Any: mypy cannot see through attrs' `converter=tuple`.
        segments: Any = tuple(segment for segment in step.segments if segment.request == request.id)
        only = Step(
            segments,
            [fork for fork in step.stream_forks(step.pre_forks) if mine(fork)],
            [fork for fork in step.stream_forks(step.post_forks) if mine(fork)],
            commit=step.commit,
            retention=step.retention,
        )
        images = {name: Image.blank(self._groups) for name in named(only)}
        for name, image in images.items():
            if name.label in request.streams:
                s = request.streams[name.label]
                image.opened, image.released, image.tokens = s.image.opened, s.image.released, list(s.image.tokens)
                image.content = move(s.host, moved)
        spans = [segment.span for segment in only.segments]
        granted: dict[Ask, Pages] = {}
        self._walk(only, images, granted, [[None] * span for span in spans], spans)
        asked: dict[str, Pages] = {}
        for ask, pages in granted.items():
            own = asked.setdefault(asked_for(only, ask).label, [[] for _ in range(self._groups)])
            for group in range(self._groups):
                own[group] += pages[group]
        return asked

    @verb
    def commit_reload(self, claim: int) -> Refusal | None:
        """Bring everything back (24, 25)."""
        return self._end_claim(claim, commit=True)

    @verb
    def abandon_reload(self, claim: int) -> Refusal | None:
        """Leave it on the host (24, 25)."""
        return self._end_claim(claim, commit=False)

    @verb
    def op_failed(self, claim: int, error: str) -> None:
        """Note that a claim's copy failed (25)."""
        if claim in self.claims and self.claims[claim].error is None:
            self.claims[claim].error = error

    def _end_claim(self, handle: int, *, commit: bool) -> Refusal | None:
        """End an offload or reload; an orphan returns its own pages only (22, 24, 25)."""
        if handle not in self.claims:
            return ClaimEnded()
        claim = self.claims[handle]
        if commit and claim.error is not None:
            return CopyFailed(error=claim.error)
        del self.claims[handle]
        if claim.orphaned:
            return None
        for s in claim.request.streams.values():
            offloaded = (claim.kind == "offload") == commit
            if commit and offloaded:
                self._leave(s, s.image.pages())
                s.host = move(s.image.content, claim.moved)
                s.image.content, s.image.surplus = self._blank(), [[] for _ in range(self._groups)]
            elif commit:
                s.image.content, s.host = move(s.host, claim.moved), self._blank()
                for place in range(len(s.image.keys)):
                    self._find(s.image, place)
            s.residency = ON_HOST if offloaded else ON_DEVICE
        if commit:
            for label, pages in claim.extra.items():
                for group, own in enumerate(claim.request.stream(label).image.surplus):
                    own += pages[group]
        self._tidy()
        return None

    # ---------------------------------------------------------------------------------------------------------------
    # Retrieve

    @verb
    def claim_retrieve(
        self, request: str, publication: Publication, labels: Sequence[str], *, handles: Mapping[str, int]
    ) -> Refusal | tuple[str, ...]:
        """Begin to fetch the needed labels that are published longer (27); return which, each under its handle."""
        if request not in self.requests:
            return UnknownRequest(request=request)
        if publication.world_size != self.world_size:
            return WorldSizeMismatch(request=request, published=publication.world_size, expected=self.world_size)
        held = self.requests[request]
        size = self.geometry.page_size
        fetches: dict[str, Record] = {}
        for label in dict.fromkeys(labels):
            stream = held.streams.get(label, Stream.of(StreamId(request, label), self._groups))
            residency = held.residency(label)
            if residency == FETCHING:
                return FetchPending(request=request, label=label)
            if residency == FETCH_FAILED:
                return FetchFailed(request=request, label=label, error=stream.error)
            if residency in AWAY:
                return StreamNotOnDevice(request=request, label=label, residency=residency)
            if stream.rows:
                return StreamBusy(request=request, label=label)
            record = publication.ranks.get(self.rank, {}).get(label)
            if record is None or record.address == self.address or record.length <= len(stream.image.tokens):
                continue
            if record.on_host:
                return OnRemoteHost(request=request, label=label)
            if record.page_size != size or (stream.image.tokens and record.released != stream.image.released):
                return LayoutMismatch(request=request, label=label)
            fetches[label] = record
        own = {
            label: held.streams[label].image if label in held.streams else Image.blank(self._groups)
            for label in fetches
        }
        fresh = {label: self._fetched(own[label], record) for label, record in fetches.items()}
        new = [page for table in fresh.values() for page in pages_in(table)]
        wanted, tier = self._counts(new), self._device()
        if (short := tier.short(wanted)) is not None:
            tables = [page for label in fetches for page in pages_in(own[label].content)]
            everything = capacity.sectors_for(self.geometry, self._counts(tables + new))
            if everything > self.geometry.pages:
                return TooLarge(request=request, wanted=everything, capacity=self.geometry.pages)
            return PagesExhausted(request=request, short=short, fragmented=tier.fragmented(wanted))

        self._evict(wanted, ())
        for label, record in fetches.items():
            if label in handles:
                stream = held.stream(label)
                stream.residency = FETCHING
                device = self._half_filled(stream.image, record) + pages_in(fresh[label])
                self.claims[handles[label]] = Claim(
                    "retrieve", held, device=device, label=label, record=record, fresh=fresh[label]
                )
        return tuple(fetches)

    def _first_fetched(self, group: int, record: Record) -> int:
        """Return the first place that a stream of this record holds in `group` (28)."""
        theirs = record.skipped[group] if record.skipped else 0
        return max(theirs, self.geometry.skipped(group, record.length))

    def _fetched(self, image: Image, record: Record) -> Table:
        """Return the places behind the own ones that a fetch fills, with new pages where they are held (28)."""
        first, last = self.geometry.pages_for(len(image.tokens)), self.geometry.pages_for(record.length)
        fresh = self._blank()
        for group, table in enumerate(fresh):
            for place in range(first, last):
                table += self._new(group, 1) if place >= self._first_fetched(group, record) else [None]
        return fresh

    def _half_filled(self, image: Image, record: Record) -> list[Page]:
        """Return the own last pages that a fetch writes into: partly filled, and still held when it has landed (28)."""
        whole, rest = divmod(len(image.tokens), self.geometry.page_size)
        groups = [group for group in range(self._groups) if rest and whole >= self._first_fetched(group, record)]
        return pages_in([image.content[group][whole:] for group in groups])

    @verb
    def landed(self, fetch: int, tokens: Sequence[Token]) -> Refusal | None:
        """Store the fetched tokens (28)."""
        if fetch not in self.claims:
            return ClaimEnded()
        claim = self.claims.pop(fetch)
        if not claim.orphaned:
            assert claim.record is not None, "a fetch has a record"
            stream = claim.request.streams[claim.label]
            image = stream.image
            image.opened, image.released, stream.residency = True, claim.record.released, ON_DEVICE
            image.tokens += tokens
            image.content = [own + new for own, new in zip(image.content, claim.fresh, strict=True)]
            slide(image, self.geometry)
            assert len(image.tokens) == claim.record.length, "not the tokens that were published"
        return None

    @verb
    def failed(self, fetch: int, error: str) -> Refusal | None:
        """Latch the error until reset; the own tokens stay (28)."""
        if fetch not in self.claims:
            return ClaimEnded()
        claim = self.claims.pop(fetch)
        if not claim.orphaned:
            stream = claim.request.streams[claim.label]
            stream.residency, stream.error = FETCH_FAILED, error
        return None

    @verb
    def cancelled(self, fetch: int) -> Refusal | None:
        """Be as before: the transport confirmed that nothing is written any more (28)."""
        if fetch not in self.claims:
            return ClaimEnded()
        claim = self.claims.pop(fetch)
        if not claim.orphaned:
            claim.request.streams[claim.label].residency = ON_DEVICE
            self._tidy()
        return None

    def cancel_retrieve(self, request: str) -> Refusal | tuple[int, ...]:
        """Return the fetches whose cancel is to be asked for; nothing changes before it is confirmed (28)."""
        if request not in self.requests:
            return UnknownRequest(request=request)
        held = self.requests[request]
        return tuple(h for h, c in self.claims.items() if c.kind == "retrieve" and c.request is held and not c.orphaned)

    # ---------------------------------------------------------------------------------------------------------------
    # Lives

    @verb
    def ingest(self, request: str, config: RequestConfig | None = None) -> Refusal | None:
        """Begin an incarnation, or join the live one (1)."""
        if request not in self.requests:
            self.requests[request] = Request(request, RequestConfig() if config is None else config, self._groups)
            self.requests[request].stream(MAIN).image.opened = True
        elif config is not None and config != self.requests[request].config:
            return ConfigConflict(request=request)
        return None

    @verb
    def reset(self, request: str, free: bool = True) -> Refusal | None:
        """Empty every stream, in every residency (29, 13, 20, 25)."""
        if request not in self.requests:
            return UnknownRequest(request=request)
        self._empty(self.requests[request], free)
        self._tidy()
        return None

    @verb
    def remove(self, request: str) -> Refusal | None:
        """Empty every stream and forget the request (30)."""
        if request not in self.requests:
            return UnknownRequest(request=request)
        self._empty(self.requests.pop(request), free=True)
        return None

    @verb
    def fork_failed(self) -> None:
        """Empty the targets of the newest commit's post-forks whose last page was to be copied (31)."""
        for s in self.copied:
            self._empty_stream(s, [])
        self._tidy()

    def _empty(self, request: Request, free: bool) -> None:
        owned = [page for _, pages in self.owners() for page in set(pages)]
        owned += [found.page for found in self.findable.values()]
        for claim in self.claims.values():
            claim.orphaned |= claim.request is request
        for s in request.streams.values():
            self._empty_stream(s, [page for page in s.image.pages() if not free and owned.count(page) == 1])

    def _empty_stream(self, s: Stream, stay: list[Page]) -> None:
        for row in s.counting():
            self._void(row)
        table = s.image.pages()
        surplus = [[page for page in stay if page.group == group] for group in range(self._groups)]
        s.image = Image(self._blank(), surplus, opened=s.image.opened)
        s.host, s.residency, s.error = self._blank(), ON_DEVICE, ""
        self._leave(s, [page for page in table if page not in stay])

    # ---------------------------------------------------------------------------------------------------------------
    # Questions

    def readiness(self, request: str, labels: Sequence[str]) -> Refusal | str:
        """Answer "failed" when a fetch into a needed label failed, "pending" while one is open, else "ready" (28)."""
        if request not in self.requests:
            return UnknownRequest(request=request)
        residencies = [self.requests[request].residency(label) for label in labels]
        return "failed" if FETCH_FAILED in residencies else "pending" if FETCHING in residencies else "ready"

    def reclaimable(self, request: str) -> int:
        """Return the device pages that only this request's streams own; 0 where it could not be offloaded as it is."""
        if request not in self.requests or not self.geometry.host_pages:
            return 0
        mine = list(self.requests[request].streams.values())
        if any(s.residency != ON_DEVICE or s.counting() for s in mine):
            return 0
        mine = [s for s in mine if not s.rows]
        others = {page for owner, pages in self.owners() if owner not in mine for page in pages}
        return len({page for s in mine for page in s.image.pages()} - others)

    def gain(self, request: str) -> int:
        """Return the device pages that nobody keeps but this request: its streams, and rows on them (40)."""
        if request not in self.requests:
            return 0
        mine = list(self.requests[request].streams.values())
        own: list[Page] = []
        others: list[Page] = []
        for s in self.streams():
            (own if s in mine else others).extend(s.image.pages())
        for lease in self.leases.values():
            rows = {row.stream.id: row.stream for row in lease.rows}
            for name, pages in lease.pages():
                (own if rows[name] in mine else others).extend(pages)
        for page, stream, _ in self._kept():
            (own if stream in mine else others).append(page)
        for claim in self.claims.values():
            others += claim.device
        return len(set(own) - set(others))

    def pages_available(self) -> dict[str, tuple[int, ...]]:
        """Return how many pages each group alone could be granted, per tier (32, 37)."""
        return {"device": self._device().available(), "host": self._host().available()}

    def publishable(self, request: str) -> dict[str, tuple[int, int, bool]] | None:
        """Return length, released and on_host of every label that `publish` describes (26); None if unknown."""
        if request not in self.requests:
            return None
        return {
            label: (len(s.image.tokens), s.image.released, s.residency != ON_DEVICE)
            for label, s in self.requests[request].streams.items()
            if s.image.opened and s.residency not in (FETCHING, FETCH_FAILED)
        }

    def contents(self) -> dict[tuple[str, str], tuple[Token, ...]]:
        """Return what every opened stream stores."""
        return {(s.id.request, s.id.label): tuple(s.image.tokens) for s in self.streams() if s.image.opened}

    def abstract(self) -> Abstract:
        """Return what machine and reference must agree on."""
        opened = sorted((s for s in self.streams() if s.image.opened), key=lambda s: (s.id.request, s.id.label))
        device, host = Classes(), Classes()
        streams = {
            (s.id.request, s.id.label): StreamAbstract(
                length=len(s.image.tokens),
                released=s.image.released,
                residency=s.residency,
                content_pages=tuple(len(pages_in([table])) for table in s.image.content),
                surplus_pages=tuple(map(len, s.image.surplus)),
                device=tuple(device.of(pages_in([table])) for table in s.image.content),
                host=tuple(host.of(pages_in([table])) for table in s.host),
                skipped=skipped(s.host) if s.residency in (ON_HOST, RELOADING) else skipped(s.image.content),
                keyed=len(s.image.keys),
                stale=s.image.stale,
            )
            for s in opened
        }
        names = {found.page: key.hex() for (_, key), found in self.findable.items()}
        return Abstract(
            device_owned=tuple(self._counts(self._owned())),
            host_owned=tuple(self._counts(self._owned_on_host())),
            streams=streams,
            leases={handle: (lease.status, lease.void_places()) for handle, lease in self.leases.items()},
            claims={handle: claim.kind for handle, claim in self.claims.items()},
            findable={(g, key.hex()): device.known(found.page) for (g, key), found in self.findable.items()},
            cached=tuple(
                tuple(names[page] for page, _ in self.cached if page.group == group) for group in range(self._groups)
            ),
            key_epoch=self.key_epoch,
        )


def move(table: Table, moved: Mapping[Page, Page]) -> Table:
    """Return a table with each page's counterpart in the other tier."""
    return [[None if page is None else moved[page] for page in pages] for pages in table]
