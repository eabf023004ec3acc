"""How pages leave a stream, how segments go void, how a lease's row ends. Shared by every transition that takes away.

The one rule: pages that leave a stream while leases are open on it are held for the youngest of them; when that lease
ends, for the youngest open one older than it (a younger one never saw them); the last to end drops them, with every use
the stream knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstate.ordering import NOTHING, Queue, at, merge
from kvstate.state import Row, State, Stream, WideRow


def hold(state: State, stream: Stream, serial: int, pages: Sequence[Iterable[int]]) -> None:
    """Keep `pages` for lease `serial`."""
    held = stream.held.get(serial)
    if held is None:
        held = stream.held[serial] = state.no_pages()
    for mine, own in zip(held, pages, strict=True):
        mine.extend(own)


def leave(state: State, stream: Stream, pages: Sequence[Iterable[int]]) -> int:
    """End the stream's ownership of `pages`; return how many became free."""
    if stream.rows or stream.voided:
        hold(state, stream, max(row.lease.serial for row in (*stream.rows, *stream.voided)), pages)
        return 0
    return state.device.drop(pages, merge(stream.used, stream.written))


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
    """Take a row off its stream: record its use, pass on what it held, drop a stream that nobody opened."""
    stream, lease = row.stream, row.lease
    (stream.voided if row.void else stream.rows).remove(row)
    if lease.number:
        stream.used = merge(stream.used, at(Queue.COMPUTE, lease.number))
    if stream.pending_fork is lease:
        stream.pending_fork = None
    pass_on(state, stream, lease.serial)
    if not stream.opened and not stream.rows and not stream.voided:
        forget(state, stream)


def pass_on(state: State, stream: Stream, serial: int) -> None:
    """Hand what was held for lease `serial` to the youngest open lease older than it, or drop it."""
    held = stream.held.pop(serial, None)
    if held is None:
        return
    older = [row.lease.serial for row in (*stream.rows, *stream.voided) if row.lease.serial < serial]
    if older:
        hold(state, stream, max(older), held)
    else:
        state.device.drop(held, merge(stream.used, stream.written))


def forget(state: State, stream: Stream) -> None:
    """Take an unopened stream that owns nothing out of its request."""
    if stream.request.streams.get(stream.label) is stream and not any(t.count for t in stream.residency.tables):
        del stream.request.streams[stream.label]
        state.topology += 1


def give_back(state: State, row: Row) -> None:
    """Return what an ended row had taken: held for the youngest lease above it, else dropped.

    A grant never used gives its fences back unchanged.
    """
    if not isinstance(row, WideRow):
        return
    stream, lease = row.stream, row.lease
    above = [other.lease.serial for other in (*stream.rows, *stream.voided) if other.lease.serial > lease.serial]
    for pages in (row.takes, row.temps, row.tails):
        if above:
            hold(state, stream, max(above), pages)
        else:
            state.device.drop(pages, stream.used if lease.number else NOTHING)


def end_without_effect(state: State, row: Row) -> None:
    """End a row that changes nothing: aborted, or void at commit."""
    end_row(state, row)
    give_back(state, row)
