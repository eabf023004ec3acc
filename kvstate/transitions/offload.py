"""Offload: a request's pages go to the host."""

from __future__ import annotations

import attrs

from kvstate.ops import CopyOut, PageCopies
from kvstate.ordering import NOTHING, Clock, Queue, at, elsewhere, merge
from kvstate.refusals import HostExhausted, NoHostPool, Refusal, StreamNotOnDevice
from kvstate.state import OffloadClaim, Offloading, OnDevice, OnHost, Part, State, Table
from kvstate.transitions.claim import away, end_claim, ended, fetch_in_the_way, known, lease_in_the_way, not_committable
from kvstate.transitions.leaving import content_pages, empty, forget, leave_claim, void_from


@attrs.frozen
class Offloaded:
    """An offload that is done: nobody owns `pages_released` device pages any more."""

    request: str
    pages_released: int


@attrs.frozen
class Abandoned:
    """A claim given up; `orphaned` when its request had gone, been reset or ingested anew.

    A fetch is given up by asking its transport for a cancel: it is `pending` until that is confirmed.
    """

    request: str
    orphaned: bool
    pending: bool = False


def claim_offload(
    state: State, request: str, discard_in_flight: bool = False, now_s: float = 0.0
) -> OffloadClaim | Refusal:
    """Claim a request for offload: all its streams or none, each page copied once.

    OnDevice → Offloading
    """
    # Guard.
    found = known(state, request)
    if isinstance(found, Refusal):
        return found
    if not state.geometry.host_pages:
        return NoHostPool(request=request)
    refusal = fetch_in_the_way(found)
    if refusal is not None:
        return refusal
    streams = list(found.streams.values())
    for stream in streams:
        if not isinstance(stream.residency, OnDevice):
            return StreamNotOnDevice(request=request, label=stream.label, residency=stream.residency.name)
    refusal = None if discard_in_flight else lease_in_the_way(found)
    if refusal is not None:
        return refusal
    size = state.page_size
    groups = range(len(state.host.pools))
    distinct: list[dict[int, int]] = [{} for _ in groups]
    for stream in streams:
        full, rest = divmod(stream.length, size)
        for group in groups:
            pages = distinct[group]
            table = stream.residency.tables[group]
            pages.update(dict.fromkeys(table.part(0, full), size))
            if rest:
                pages[table[full]] = rest
    wanted = [len(pages) for pages in distinct]
    short = state.host.short(wanted)
    if short is not None:
        return HostExhausted(request=request, short=short, fragmented=state.host.fragmented(wanted))
    # Effect.
    for stream in streams:
        if stream.rows:
            void_from(stream, 0)
    moved = [
        dict(zip(pages, pool.grant(len(pages)), strict=True))
        for pages, pool in zip(distinct, state.host.pools, strict=True)
    ]
    claim = OffloadClaim(state.serial(), found, (), now_s)
    after: Clock = NOTHING
    parts = []
    shared_by_labels = len(streams) > 1
    for group, pool in enumerate(state.host.pools):
        after = merge(after, pool.fence_of(moved[group].values()))
    for stream in streams:
        after = merge(after, stream.written)
        host = []
        for group in groups:
            target, table = moved[group], stream.residency.tables[group]
            content = table.part(0, content_pages(state, stream))
            host.append(Table.of([target[page] for page in content], table.skip))
        parts.append(Part(stream, stream.residency.tables, tuple(host)))
        stream.residency = Offloading(claim)
    claim.parts = tuple(parts)
    if shared_by_labels:
        _count_sharing(state, claim)
    state.claims[claim.serial] = claim
    # Emit.
    copies = tuple(
        PageCopies(list(pages), list(target.values()), list(pages.values()))
        for pages, target in zip(distinct, moved, strict=True)
    )
    claim.op = CopyOut(state.number(), elsewhere(after, Queue.COPY_OUT), claim, copies)
    state.outbox.append(claim.op)
    return claim


def _count_sharing(state: State, claim: OffloadClaim) -> None:
    """Give host pages that several labels share one owner each, as their device pages have."""
    for group, pool in enumerate(state.host.pools):
        seen: set[int] = set()
        for part in claim.parts:
            again = [page for page in part.host[group] if page in seen]
            pool.share(again)
            seen.update(part.host[group])


def commit_offload(state: State, claim: OffloadClaim) -> Offloaded | Abandoned | Refusal:
    """Commit an offload: the device pages leave, the host pages hold the content.

    Offloading → OnHost
    """
    # Guard.
    refusal = not_committable(state, claim)
    if refusal is not None:
        return refusal
    # Effect.
    assert claim.op is not None
    copy = at(Queue.COPY_OUT, claim.op.number)
    end_claim(state, claim)
    released = 0
    orphaned = False
    for part in claim.parts:
        stream = part.stream
        stream.used = merge(stream.used, copy)
        if isinstance(stream.residency, Offloading) and stream.residency.claim is claim:
            stream.residency = OnHost(part.host, copy, NOTHING)
            stream.generation += 1
            stream.epoch += 1
            forget(state, stream)
        else:
            orphaned = True
            state.host.drop(part.host, copy)
        released += leave_claim(state, stream, part.device, claim.serial)
    return Abandoned(claim.request.id, True) if orphaned else Offloaded(claim.request.id, released)


def abandon_offload(state: State, claim: OffloadClaim) -> Abandoned | Refusal:
    """Abandon an offload: the streams are on the device as before, but those lost meanwhile; the host pages return.

    Offloading → OnDevice
    """
    # Guard.
    refusal = ended(state, claim)
    if refusal is not None:
        return refusal
    # Effect.
    end_claim(state, claim)
    assert claim.op is not None
    copy = NOTHING if claim.copy_failed else at(Queue.COPY_OUT, claim.op.number)
    orphaned = False
    for part in claim.parts:
        stream = part.stream
        stream.used = merge(stream.used, copy)
        state.host.drop(part.host, copy)
        if isinstance(stream.residency, Offloading) and stream.residency.claim is claim:
            stream.residency = OnDevice(part.device, state.room(stream.length, stream.retention))
            if stream in claim.spoiled:
                empty(state, stream, ())
            forget(state, stream)
        else:
            orphaned = True
            leave_claim(state, stream, part.device, claim.serial)
    return Abandoned(claim.request.id, orphaned)


def reclaimable(state: State, request: str) -> int:
    """Return the device pages that an offload of `request` would free now; 0 when it would be refused or is unknown.

    How full the host pool is does not matter here: that may change before the claim.
    """
    found = state.requests.get(request)
    if (
        found is None
        or not state.geometry.host_pages
        or fetch_in_the_way(found) is not None
        or lease_in_the_way(found) is not None
    ):
        return 0
    total = 0
    for group, pool in enumerate(state.device.pools):
        mine: dict[int, int] = {}
        for stream in found.streams.values():
            if not isinstance(stream.residency, OnDevice):
                return 0
            if not stream.voided:  # else its pages are held until that lease has ended
                for page in stream.residency.tables[group]:
                    mine[page] = mine.get(page, 0) + 1
        total += sum(1 for page, count in mine.items() if pool.owners[page] == count)
    return total


def is_offloaded(state: State, request: str) -> bool:
    """Tell whether `request` is off the device: from its claim until that is abandoned, or a reload commits."""
    found = state.requests.get(request)
    return found is not None and away(found) is not None
