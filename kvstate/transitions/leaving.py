"""How pages leave a stream, how segments go void, how a lease's row ends. Shared by every transition that takes away.

The one rule: pages that leave while leases are open that may use them are held until the last of those has ended, and
only then dropped, with the uses of the stream so far and of those leases that were launched. A lease admitted later
never saw them and holds nothing up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvstate.ordering import NOTHING, Clock, Queue, at, merge
from kvstate.state import (
    FetchFailed,
    Fetching,
    Held,
    Lease,
    OffloadClaim,
    OnDevice,
    OnHost,
    Row,
    State,
    Stream,
    Table,
    Tables,
    WideRow,
)


def release(state: State, stream: Stream, pages: Sequence[Iterable[int]], behind: set[int], uses: Clock) -> int:
    """Drop `pages` with `uses`, or hold them while the leases `behind` are open; return how many became free."""
    if behind:
        stream.held.append(Held(behind, tuple(list(own) for own in pages), uses))
        return 0
    return state.device.drop(pages, uses)


def open_on(stream: Stream) -> set[int]:
    """Return the serials of the open leases on a stream, void rows included."""
    return {row.lease.serial for row in stream.rows} | {row.lease.serial for row in stream.voided}


def open_above(row: Row) -> set[int]:
    """Return the serials of the open leases on the row's stream that were admitted after its lease."""
    return {serial for serial in open_on(row.stream) if serial > row.lease.serial}


def leave(state: State, stream: Stream, pages: Sequence[Iterable[int]]) -> int:
    """End the stream's ownership of `pages`; return how many became free."""
    behind = open_on(stream) if stream.rows or stream.voided else set()
    return release(state, stream, pages, behind, merge(stream.used, stream.written))


def leave_claim(state: State, stream: Stream, pages: Sequence[Iterable[int]], serial: int) -> int:
    """End the ownership of a stream's pages by claim `serial`: only leases older than the claim may use them."""
    behind = {lease for lease in open_on(stream) if lease < serial}
    return release(state, stream, pages, behind, merge(stream.used, stream.written))


def device_tables(stream: Stream) -> Tables:
    """Return the tables of device pages that the stream itself owns."""
    residency = stream.residency
    return residency.device if isinstance(residency, (Fetching, FetchFailed)) else residency.tables


def content_pages(state: State, stream: Stream) -> int:
    """Return the pages that hold the stream's tokens; what its tables have beyond is surplus."""
    return -(-stream.length // state.page_size)


def void_from(stream: Stream, place: int) -> None:
    """Make row `place` of the stream and every row above it void, and what was pre-forked from them in their steps."""
    rows = stream.rows[place:]
    del stream.rows[place:]
    for row in rows:
        row.void = True
        row.lease.void += 1
        stream.voided.append(row)
        if stream.pending_fork is row.lease:
            stream.pending_fork = None
    for row in rows:
        for fork in row.lease.forks:
            if fork.pre and fork.source is row and not fork.target.void:
                target = fork.target.stream
                void_from(target, target.rows.index(fork.target))


def void_above(row: Row) -> None:
    """Make the rows above `row` void: what it leaves is not what they assume."""
    rows = row.stream.rows
    place = rows.index(row) + 1
    if place < len(rows):
        void_from(row.stream, place)


def end_row(state: State, row: Row) -> None:
    """Take a row off its stream: record its use, drop what only it held up, forget a stream that nobody opened."""
    stream, lease = row.stream, row.lease
    (stream.voided if row.void else stream.rows).remove(row)
    if lease.number:
        stream.used = merge(stream.used, at(Queue.COMPUTE, lease.number))
    if stream.pending_fork is lease:
        stream.pending_fork = None
    if stream.held:
        stop_holding(state, stream, lease)
    forget(state, stream)


def stop_holding(state: State, stream: Stream, lease: Lease) -> None:
    """Note that `lease` has ended: what was held for it alone is dropped, with its use if it was launched."""
    held = stream.held
    stream.held = []
    for left in held:
        if lease.serial in left.behind:
            left.behind.discard(lease.serial)
            if lease.number:
                left.uses = merge(left.uses, at(Queue.COMPUTE, lease.number))
        if left.behind:
            stream.held.append(left)
        else:
            state.device.drop(left.pages, left.uses)


def forget(state: State, stream: Stream) -> None:
    """Take a stream out of its request when it was never opened, owns nothing, and no lease or claim names it."""
    residency = stream.residency
    if stream.opened or stream.rows or stream.voided or not isinstance(residency, (OnDevice, OnHost)):
        return
    if any(table.count for table in residency.tables) or stream.request.streams.get(stream.label) is not stream:
        return
    del stream.request.streams[stream.label]
    state.topology += 1


def give_back(state: State, row: Row) -> None:
    """Return what an ended row had taken; the rows above it, void by now, may still use it.

    A grant never used gives its fences back unchanged.
    """
    if not isinstance(row, WideRow):
        return
    stream, lease = row.stream, row.lease
    above = open_above(row)
    for pages in row.owned:
        if any(pages):
            release(state, stream, pages, set(above), stream.used if lease.number else NOTHING)


def end_without_effect(state: State, row: Row) -> None:
    """End a row that changes nothing: aborted, or void at commit."""
    end_row(state, row)
    give_back(state, row)


def pages_leaving(state: State) -> list[list[int]]:
    """Return the device pages per group that nobody will own once open offload claims and void leases have ended."""
    mine = _Owned(state)
    for claim in state.claims.values():
        if isinstance(claim, OffloadClaim):
            for part in claim.parts:
                mine.add(part.device)
    ending = {lease.serial for lease in state.leases.values() if lease.void}
    seen: dict[int, Stream] = {}
    for serial in ending:
        for row in state.leases[serial].rows:
            seen[id(row.stream)] = row.stream
            if row.void and isinstance(row, WideRow):
                mine.add(*row.owned)
    for stream in seen.values():
        mine.add(*(held.pages for held in stream.held if held.behind <= ending))
    return mine.alone()


class _Owned:
    """Adds up ownerships of device pages, to tell which pages have no owner besides."""

    def __init__(self, state: State) -> None:
        self._pools = state.device.pools
        self._counts: list[Counter[int]] = [Counter() for _ in self._pools]

    def add(self, *several: Sequence[Iterable[int]]) -> None:
        """Add an ownership of each of these pages per group; nothing is added for a stream that has no tables."""
        for pages in several:
            for count, own in zip(self._counts, pages, strict=False):
                count.update(own)

    def alone(self) -> list[list[int]]:
        """Return the pages per group that have no owners but those added."""
        return [
            [page for page, count in own.items() if pool.owners[page] == count]
            for own, pool in zip(self._counts, self._pools, strict=True)
        ]


def gain(state: State, request: str) -> int:
    """Return the device pages that nobody would own if `request` were reset now and its steps in flight had ended.

    An offload with `discard_in_flight` gives up the same. 0 for a request that is unknown, or off the device.
    """
    found = state.requests.get(request)
    if found is None:
        return 0
    mine = _Owned(state)
    for stream in found.streams.values():
        mine.add(device_tables(stream), *(held.pages for held in stream.held))
        for row in (*stream.rows, *stream.voided):
            if isinstance(row, WideRow):
                mine.add(*row.owned)
    return sum(map(len, mine.alone()))


def empty(state: State, stream: Stream, keep: Sequence[set[int]]) -> tuple[int, int]:
    """Take everything away from a stream but the pages in `keep` (per group), which become surplus.

    Returns
    -------
    Device pages that nobody owns now, and pages kept.
    """
    residency = stream.residency
    if stream.rows:
        void_from(stream, 0)
    stream.pending_fork = None
    stream.epoch += 1
    stream.generation += 1
    device = device_tables(stream)
    if isinstance(residency, Fetching):
        residency.fetch.cancel_requested = True
    elif isinstance(residency, OnHost):
        state.host.drop(residency.host, merge(residency.written, residency.used))
    content = content_pages(state, stream)
    uses = merge(stream.used, stream.written)
    kept: list[list[int]] = [[] for _ in state.device.pools]
    gone: list[list[int]] = [[] for _ in state.device.pools]
    for group, (pool, table) in enumerate(zip(state.device.pools, device, strict=False)):
        for place, page in enumerate(table, start=table.skip):
            if not keep or page not in keep[group]:
                gone[group].append(page)
                continue
            # Kept is dropped and granted anew: what used the page goes into its fence.
            if place < content:
                pool.fences[page] = merge(pool.fences[page], uses)
            pool.sealed[page] = 0
            kept[group].append(page)
    stream.length = stream.released = 0
    stream.keys = []
    stream.stale = False
    stream.residency = OnDevice(tuple(Table.of(pages) for pages in kept), 0)
    return leave(state, stream, gone), sum(map(len, kept))
