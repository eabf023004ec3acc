"""Publish and retrieve: what other workers may read, and tokens that a transport writes behind a stream's own.

A fetch is on no queue. It ends by what the host sees: landed, failed, or a cancel that the transport confirms. Until
then its pages stay owned by it, whatever became of the request.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvstate.ops import FetchBegin, FetchEnd
from kvstate.ordering import NOTHING, Clock, merge
from kvstate.refusals import (
    ClaimEnded,
    LayoutMismatch,
    OnRemoteHost,
    PagesExhausted,
    Refusal,
    StreamBusy,
    StreamNotOnDevice,
    TooLarge,
    WorldSizeMismatch,
)
from kvstate.state import Fetch, FetchFailed, Fetching, OnDevice, Request, State, Stream, Table
from kvstate.transitions.claim import away, known, off_device
from kvstate.transitions.leaving import content_pages, forget, leave
from kvstate.transitions.offload import Abandoned
from kvstate.types import Publication, Record


@attrs.frozen(eq=False)
class Retrieval:
    """The fetches that were started; none when there was nothing to fetch."""

    request: str
    fetches: tuple[Fetch, ...]


@attrs.frozen
class FetchEnded:
    """A fetch that ended; `orphaned` when its stream had gone or been reset."""

    request: str
    label: str
    outcome: str
    orphaned: bool


@attrs.frozen
class Readiness:
    """Whether the labels of a request may be used: `failed` names errors per label, `pending` the labels in flight."""

    request: str
    pending: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]

    @property
    def ready(self) -> bool:
        """True when nothing is pending and nothing failed."""
        return not self.pending and not self.failed


@attrs.frozen(eq=False)
class Snapshot:
    """What a publication will say once the host has seen `after` complete."""

    serial: int
    request: Request
    after: Clock
    records: dict[str, tuple[Stream, Record]]


def claim_retrieve(
    state: State,
    request: str,
    publication: Publication | None,
    labels: Sequence[str] | None = None,
    now_s: float = 0.0,
) -> Retrieval | Refusal:
    """Claim pages for the tokens that `publication` has beyond this request's own, per needed label.

    OnDevice → Fetching
    """
    # Guard.
    found = known(state, request)
    if isinstance(found, Refusal):
        return found
    records = {} if publication is None else publication.ranks.get(state.rank, {})
    if publication is not None and publication.world_size != state.world_size:
        return WorldSizeMismatch(request=request, published=publication.world_size, expected=state.world_size)
    groups = range(len(state.device.pools))
    wanted = [0 for _ in groups]
    plans: list[tuple[str, Record, Stream]] = []
    for label in dict.fromkeys(labels if labels is not None else found.config.labels_needed()):
        stream = found.streams.get(label)
        if stream is None:
            residency = away(found)
            if residency is not None:
                return StreamNotOnDevice(request=request, label=label, residency=residency)
            stream = Stream(found, label, len(state.device.pools))
        refusal = off_device(stream)
        if refusal is not None:
            return refusal
        if stream.rows or stream.voided:
            return StreamBusy(request=request, label=label)
        record = records.get(label)
        if record is None or record.address == state.address or record.length <= stream.length:
            continue
        if record.on_host:
            return OnRemoteHost(request=request, label=label)
        if (
            record.page_size != state.page_size
            or len(record.pages) != len(groups)
            or (stream.length and record.released != stream.released)
        ):
            return LayoutMismatch(request=request, label=label)
        plans.append((label, record, stream))
        wanted = [
            count + len(_pages_fetched(state, stream, record, group))
            for group, count in zip(groups, wanted, strict=True)
        ]
    short = state.device.short(wanted)
    if short is not None:
        whole = state.geometry.sectors_for(
            [own + more for own, more in zip(_held(state, [stream for _, _, stream in plans]), wanted, strict=True)]
        )
        if whole > state.geometry.pages:
            return TooLarge(request=request, label=plans[0][0], wanted=whole, capacity=state.geometry.pages)
        fragmented = state.device.fragmented(wanted)
        return PagesExhausted(request=request, label=plans[0][0], short=short, fragmented=fragmented)
    # Effect.
    state.device.make_room(wanted)
    fetches = []
    for label, record, stream in plans:
        if label not in found.streams:
            found.streams[label] = stream
            state.topology += 1
        fetches.append(_fetch(state, stream, record, now_s))
    return Retrieval(request, tuple(fetches))


def _held(state: State, streams: Sequence[Stream]) -> list[int]:
    """Return the content pages per group that streams hold, until a landing lets go of what its window has left."""
    return [
        sum(len(stream.residency.tables[group].part(0, content_pages(state, stream))) for stream in streams)
        for group in range(len(state.device.pools))
    ]


def _skip(state: State, record: Record, group: int) -> int:
    """Return the leading pages that a group does not hold once `record` has landed."""
    there = record.skipped[group] if record.skipped else 0
    return max(there, state.geometry.skipped(group, record.length))


def _pages_fetched(state: State, stream: Stream, record: Record, group: int) -> range:
    """Return the places in the table of `group` for which a fetch needs pages: behind the content, in the window."""
    first = max(content_pages(state, stream), _skip(state, record, group))
    return range(first, -(-record.length // state.page_size))


def _fetch(state: State, stream: Stream, record: Record, now_s: float) -> Fetch:
    content = content_pages(state, stream)
    after = merge(stream.used, stream.written)
    firsts: list[int] = []
    owned: list[list[int]] = []
    for group, (pool, table) in enumerate(zip(state.device.pools, stream.residency.tables, strict=True)):
        places = _pages_fetched(state, stream, record, group)
        # A partly filled last page is written too, unless the window will have left it.
        last = stream.length // state.page_size
        tail = table.part(last, content) if _skip(state, record, group) <= last else []
        pool.share(tail)
        granted = pool.grant(len(places))
        after = merge(after, pool.fence_of(granted))
        owned.append(tail + granted)
        firsts.append(places.start - len(tail))
    fetch = Fetch(state.serial(), stream, record, stream.length, record.length, tuple(firsts), tuple(owned), now_s)
    stream.residency = Fetching(stream.residency.tables, fetch)
    state.claims[fetch.serial] = fetch
    # Emit.
    fetch.op = FetchBegin(
        state.number(), after, fetch, fetch, record, tuple(tuple(pages) for pages in owned), fetch.firsts, fetch.start,
        fetch.stop, state.page_size,
    )  # fmt: skip
    state.outbox.append(fetch.op)
    return fetch


def _awaited(fetch: Fetch) -> bool:
    """Tell whether the stream of a fetch still waits for it; otherwise the fetch is orphaned."""
    residency = fetch.stream.residency
    return isinstance(residency, Fetching) and residency.fetch is fetch


def _end(state: State, fetch: Fetch) -> bool:
    """End a fetch; return whether its stream still waits for it."""
    fetch.open = False
    del state.claims[fetch.serial]
    assert fetch.op is not None
    state.outbox.append(FetchEnd(state.number(), NOTHING, fetch, fetch.op.number))
    return _awaited(fetch)


def landed(state: State, fetch: Fetch) -> FetchEnded | Refusal:
    """Land a fetch: the host has seen the bytes, the length moves. Orphaned, the pages return.

    Fetching → OnDevice
    """
    # Guard.
    stream = fetch.stream
    if not fetch.open:
        return ClaimEnded(request=stream.request.id, label=stream.label)
    state.own(fetch)
    # Effect.
    if not _end(state, fetch):
        state.device.drop(fetch.owned, NOTHING)
        return FetchEnded(stream.request.id, stream.label, "landed", True)
    assert isinstance(stream.residency, Fetching)
    content = content_pages(state, stream)
    full = fetch.stop // state.page_size
    tables = []
    gone = state.no_pages()
    for group, (pool, own, first, table) in enumerate(
        zip(state.device.pools, fetch.owned, fetch.firsts, stream.residency.device, strict=True)
    ):
        tail = content - first if first < content else 0
        pool.drop(own[:tail], NOTHING)
        skip = max(table.skip, _skip(state, fetch.record, group))
        gone[group].extend(table.part(0, min(skip, content)))
        pages = table.part(skip, content) + own[tail:] + table.part(content, table.count)
        tables.append(Table.of(pages, skip, pool.sink))
        pool.seal(tables[-1].part(0, full))
    stream.length, stream.released = fetch.stop, fetch.record.released
    stream.residency = OnDevice(tuple(tables), state.room(stream.length, stream.retention))
    stream.generation += 1
    if any(gone):
        stream.epoch += 1
        leave(state, stream, gone)
    if not stream.opened:
        stream.opened = True
        state.topology += 1
    return FetchEnded(stream.request.id, stream.label, "landed", False)


def failed(state: State, fetch: Fetch, error: str) -> FetchEnded | Refusal:
    """Fail a fetch: the transport ended without all bytes. The error stays until a reset; the stream's own tokens too.

    Fetching → FetchFailed
    """
    # Guard.
    stream = fetch.stream
    if not fetch.open:
        return ClaimEnded(request=stream.request.id, label=stream.label)
    state.own(fetch)
    # Effect.
    waiting = _end(state, fetch)
    state.device.drop(fetch.owned, NOTHING)
    if waiting:
        assert isinstance(stream.residency, Fetching)
        stream.residency = FetchFailed(stream.residency.device, error)
    return FetchEnded(stream.request.id, stream.label, "failed", not waiting)


def cancelled(state: State, fetch: Fetch) -> FetchEnded | Refusal:
    """End a fetch whose cancel the transport has confirmed: the stream is as before it.

    Fetching → OnDevice
    """
    # Guard.
    stream = fetch.stream
    if not fetch.open:
        return ClaimEnded(request=stream.request.id, label=stream.label)
    state.own(fetch)
    # Effect.
    waiting = _end(state, fetch)
    state.device.drop(fetch.owned, NOTHING)
    if waiting:
        assert isinstance(stream.residency, Fetching)
        tables = stream.residency.device
        stream.residency = OnDevice(tables, state.room(stream.length, stream.retention))
        forget(state, stream)
    return FetchEnded(stream.request.id, stream.label, "cancelled", not waiting)


def abandon_fetch(state: State, fetch: Fetch) -> Abandoned | Refusal:
    """Give up a fetch: its transport is asked for a cancel, and until that is confirmed its pages stay taken.

    Fetching → Fetching
    """
    # Guard.
    stream = fetch.stream
    if not fetch.open:
        return ClaimEnded(request=stream.request.id, label=stream.label)
    state.own(fetch)
    # Effect.
    fetch.cancel_requested = True
    return Abandoned(stream.request.id, not _awaited(fetch), pending=True)


def cancel_retrieve(state: State, request: str, labels: Sequence[str] | None = None) -> tuple[Fetch, ...] | Refusal:
    """Ask for the cancel of a request's fetches (of `labels` only); each is pending until its transport confirms.

    Fetching → Fetching
    """
    # Guard.
    found = known(state, request)
    if isinstance(found, Refusal):
        return found
    # Effect.
    fetches = [s.residency.fetch for s in found.streams.values() if isinstance(s.residency, Fetching)]
    for fetch in fetches:
        fetch.cancel_requested = True
    return tuple(fetches)


def readiness(state: State, request: str, labels: Sequence[str] | None = None) -> Readiness | Refusal:
    """Say for all needed labels whether fetches are pending or failed."""
    found = known(state, request)
    if isinstance(found, Refusal):
        return found
    pending, broken = [], []
    for label in labels if labels is not None else found.config.labels_needed():
        residency = found.streams[label].residency if label in found.streams else None
        if isinstance(residency, Fetching):
            pending.append(label)
        elif isinstance(residency, FetchFailed):
            broken.append((label, residency.error))
    return Readiness(request, tuple(pending), tuple(broken))


def snapshot(state: State, request: str) -> Snapshot | None:
    """Snapshot what a request could publish, and what the host must see complete first. None when it is unknown.

    OnDevice, OnHost → same
    """
    found = state.requests.get(request)
    if found is None:
        return None
    after = NOTHING
    records: dict[str, tuple[Stream, Record]] = {}
    for label, stream in found.streams.items():
        if not stream.opened or isinstance(stream.residency, (Fetching, FetchFailed)):
            continue
        record = _record(state, found, stream)
        records[label] = (stream, record)
        if not record.on_host:
            after = merge(after, stream.written)
    return Snapshot(state.serial(), found, after, records)


def _record(state: State, request: Request, stream: Stream) -> Record:
    on_device = isinstance(stream.residency, OnDevice)
    count = content_pages(state, stream)
    pages: tuple[tuple[int, ...], ...] = ()
    skipped: tuple[int, ...] = ()
    if on_device:
        skipped = tuple(table.skip for table in stream.residency.tables)
        sinks = (pool.sink for pool in state.device.pools)
        pages = tuple(table.first(count, sink) for table, sink in zip(stream.residency.tables, sinks, strict=True))
    return Record(
        stream.length, stream.released, state.page_size, pages, not on_device, state.address, request.incarnation,
        stream.epoch, skipped,
    )  # fmt: skip


def publish(state: State, noted: Snapshot) -> Publication | None:
    """Publish what `noted` says, once the host has seen it complete.

    OnDevice, OnHost → same

    What is moving by then is published as on host; what changed otherwise, or is fetching, is left out.
    """
    request = noted.request
    if state.requests.get(request.id) is not request:
        return None
    labels: dict[str, Record] = {}
    for label, (stream, record) in noted.records.items():
        if request.streams.get(label) is not stream or isinstance(stream.residency, (Fetching, FetchFailed)):
            continue
        if stream.epoch == record.epoch and isinstance(stream.residency, OnDevice) and not record.on_host:
            labels[label] = record
        elif not isinstance(stream.residency, OnDevice):
            labels[label] = _record(state, request, stream)
    return Publication(request.id, state.world_size, {state.rank: labels})


def epoch_holds(state: State, incarnation: int, label: str, epoch: int) -> bool:
    """Tell whether what was published as (incarnation, epoch) still holds: a reader asks this after its copy."""
    found = state.incarnations.get(incarnation)
    stream = found.streams.get(label) if found is not None else None
    return stream is not None and stream.epoch == epoch
