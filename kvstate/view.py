"""The view: everything a state holds, as one immutable value.

Promises, debug mode, digests and refinement read it. Left out is what says nothing of pages and contents: what a
lease's owner was told about void rows, what a step would fork or retain when it commits, ops not yet handed on.
"""

from __future__ import annotations

import hashlib

import attrs

from kvstate.arena import Arena
from kvstate.ops import CopyIn
from kvstate.ordering import Clock
from kvstate.state import (
    Fetch,
    FetchFailed,
    Fetching,
    Lease,
    Offloading,
    OnHost,
    Pages,
    Reloading,
    Row,
    State,
    Stream,
    Tables,
    WideRow,
)

PagesView = tuple[tuple[int, ...], ...]
"""Pages per group."""


@attrs.frozen
class PoolView:
    """One group's pages in one tier; `owners`, `sealed` and `fences` are by page.

    `free` are those of the sectors lent to the group, `cached` those that nobody owns and a key finds, the next one to
    leave first. `keys` are (page, key in hexadecimal) of everything that is findable. The fence of a page whose sector
    is not lent to the group is what it would begin with.
    """

    free: tuple[int, ...]
    owners: tuple[int, ...]
    sealed: tuple[bool, ...]
    fences: tuple[Clock, ...]
    cached: tuple[int, ...] = ()
    keys: tuple[tuple[int, str], ...] = ()


@attrs.frozen
class StreamView:
    """One stream. `rows` and `voided` are serials of open leases; `holder` the claim or fetch it waits for, else 0.

    `device` and `host` are the pages it holds: behind the first `skipped` ones of a group, which a window has left.
    `keyed` leading pages have content keys; a `stale` stream holds content of older weights.
    """

    request: str
    label: str
    incarnation: int
    opened: bool
    residency: str
    length: int
    released: int
    generation: int
    epoch: int
    device: PagesView
    host: PagesView
    holder: int
    error: str
    rows: tuple[int, ...]
    voided: tuple[int, ...]
    held: tuple[tuple[tuple[int, ...], PagesView], ...]
    fork_pending: bool
    written: Clock
    used: Clock
    skipped: tuple[int, ...] = (0,)
    keyed: int = 0
    stale: bool = False


@attrs.frozen
class RowView:
    """What one lease holds on one stream; `reads` are its tables while the step runs, behind `skipped` pages each."""

    request: str
    label: str
    incarnation: int
    start: int
    stop: int
    length: int
    released: int
    void: bool
    reads: PagesView
    takes: PagesView
    temps: PagesView
    skipped: tuple[int, ...] = (0,)


@attrs.frozen
class LeaseView:
    """One open lease. `number` is 0 until its launch was left."""

    serial: int
    status: str
    number: int
    abort_requested: bool
    rows: tuple[RowView, ...]
    void_places: tuple[int, ...]


@attrs.frozen
class PartView:
    """What an open claim owns of one stream, behind `skipped` pages per group."""

    label: str
    device: PagesView
    host: PagesView
    skipped: tuple[int, ...] = (0,)


@attrs.frozen
class ClaimView:
    """One open claim or fetch; `fills` are device pages it writes. A page that two labels share is in both parts."""

    serial: int
    kind: str
    request: str
    incarnation: int
    parts: tuple[PartView, ...]
    failure: str
    fills: PagesView = ()

    def device(self, group: int) -> tuple[int, ...]:
        """Return the device pages it owns in `group`."""
        return tuple(page for part in self.parts for page in part.device[group])

    def host(self, group: int) -> tuple[int, ...]:
        """Return the host pages it owns in `group`."""
        return tuple(page for part in self.parts for page in part.host[group])


@attrs.frozen
class StateView:
    """All of a state. `streams` are those of live requests; `detached` are removed ones that leases still name.

    `device_lent` and `host_lent` say of each sector which group has it, None of an empty one; of one group they are
    empty. A sector of group g has ``pages_per_sector[g]`` pages.
    """

    page_size: int
    device: tuple[PoolView, ...]
    host: tuple[PoolView, ...]
    requests: tuple[tuple[str, int], ...]
    streams: tuple[StreamView, ...]
    detached: tuple[StreamView, ...]
    leases: tuple[LeaseView, ...]
    claims: tuple[ClaimView, ...]
    device_lent: tuple[int | None, ...] = ()
    host_lent: tuple[int | None, ...] = ()
    pages_per_sector: tuple[int, ...] = (1,)
    windows: tuple[int | None, ...] = (None,)
    key_epoch: int = 0

    def unordered(self) -> StateView:
        """Return the view with the order of free pages forgotten."""
        return attrs.evolve(
            self,
            device=tuple(attrs.evolve(pool, free=tuple(sorted(pool.free))) for pool in self.device),
            host=tuple(attrs.evolve(pool, free=tuple(sorted(pool.free))) for pool in self.host),
        )

    def digest(self) -> str:
        """Return a short hash that is equal exactly for equal views."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def _arena(arena: Arena) -> tuple[PoolView, ...]:
    return tuple(
        PoolView(
            pool.free_pages(),
            tuple(pool.owners),
            tuple(map(bool, pool.sealed)),
            arena.fences(group),
            tuple(pool.cached),
            tuple(sorted((page, key.hex()) for key, page in pool.places.items())),
        )
        for group, pool in enumerate(arena.pools)
    )


def _lent(arena: Arena) -> tuple[int | None, ...]:
    return tuple(arena.lent) if len(arena.pools) > 1 else ()


def _tables(tables: Tables) -> PagesView:
    return tuple(tuple(table) for table in tables)


def _pages(*pages: Pages) -> PagesView:
    return tuple(tuple(page for part in parts for page in part) for parts in zip(*pages, strict=True))


def _stream(stream: Stream) -> StreamView:
    residency = stream.residency
    device: Tables = residency.tables
    host: Tables = ()
    holder, error = 0, ""
    places: Tables = ()
    if isinstance(residency, OnHost):
        host = residency.host
    elif isinstance(residency, (Offloading, Reloading)):
        holder = residency.claim.serial
        places = next(part.device for part in residency.claim.parts if part.stream is stream)
    elif isinstance(residency, Fetching):
        device, holder = residency.device, residency.fetch.serial
    elif isinstance(residency, FetchFailed):
        device, error = residency.device, residency.error
    return StreamView(
        request=stream.request.id,
        label=stream.label,
        incarnation=stream.request.incarnation,
        opened=stream.opened,
        residency=residency.name,
        length=stream.length,
        released=stream.released,
        generation=stream.generation,
        epoch=stream.epoch,
        device=_tables(device),
        host=_tables(host),
        holder=holder,
        error=error,
        rows=tuple(row.lease.serial for row in stream.rows),
        voided=tuple(row.lease.serial for row in stream.voided),
        held=tuple((tuple(sorted(held.behind)), _pages(held.pages)) for held in stream.held),
        fork_pending=stream.pending_fork is not None,
        written=stream.written,
        used=stream.used,
        skipped=tuple(table.skip for table in places or host or device),
        keyed=len(stream.keys),
        stale=stream.stale,
    )


def _row(row: Row, groups: int) -> RowView:
    nothing: PagesView = ((),) * groups
    return RowView(
        request=row.stream.request.id,
        label=row.stream.label,
        incarnation=row.stream.request.incarnation,
        start=row.start,
        stop=row.stop,
        length=row.length,
        released=row.released,
        void=row.void,
        reads=_tables(row.step_tables),
        skipped=tuple(table.skip for table in row.step_tables),
        takes=_pages(row.takes) if isinstance(row, WideRow) else nothing,
        temps=_pages(row.temps, row.tails) if isinstance(row, WideRow) else nothing,
    )


def _lease(lease: Lease, groups: int) -> LeaseView:
    return LeaseView(
        lease.serial,
        lease.status.value,
        lease.number,
        lease.abort_requested,
        tuple(_row(row, groups) for row in lease.rows),
        lease.void_places(),
    )


def view(state: State) -> StateView:
    """Return the view of `state`. The caller holds the lock."""
    groups = len(state.device.pools)
    attached = [stream for request in state.requests.values() for stream in request.streams.values()]
    known = {id(stream) for stream in attached}
    detached: dict[int, Stream] = {}
    for lease in state.leases.values():
        for row in lease.rows:
            if id(row.stream) not in known:
                detached[id(row.stream)] = row.stream
    claims = []
    for claim in state.claims.values():
        parts: tuple[PartView, ...]
        fills: PagesView
        if isinstance(claim, Fetch):
            stream = claim.stream
            fetched = PartView(stream.label, _pages(claim.owned), ((),) * groups, claim.firsts)
            request, parts, failure, fills = stream.request, (fetched,), "", fetched.device
        else:
            request, failure, fills = claim.request, claim.failure or "", ()
            if isinstance(claim.op, CopyIn):
                fills = tuple(tuple(target for _, target, _ in copies) for copies in claim.op.copies)
            parts = tuple(
                PartView(p.stream.label, _tables(p.device), _tables(p.host), tuple(table.skip for table in p.device))
                for p in claim.parts
            )
        claims.append(ClaimView(claim.serial, claim.verb, request.id, request.incarnation, parts, failure, fills))
    return StateView(
        page_size=state.page_size,
        pages_per_sector=state.geometry.pages_per_sector,
        windows=tuple(group.window for group in state.geometry.groups),
        key_epoch=state.key_epoch,
        device=_arena(state.device),
        host=_arena(state.host),
        device_lent=_lent(state.device),
        host_lent=_lent(state.host),
        requests=tuple((request.id, request.incarnation) for request in state.requests.values()),
        streams=tuple(_stream(stream) for stream in attached),
        detached=tuple(_stream(stream) for stream in detached.values()),
        leases=tuple(_lease(lease, groups) for lease in state.leases.values()),
        claims=tuple(claims),
    )
