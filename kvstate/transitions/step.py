"""Steps: admit, plan, launch, commit, abort.

One step costs what it changes. A segment that stays inside its stream's last content page takes a short path through
every transition; whatever grows, forks, retains or stores nothing takes the general one (``reserve``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import attrs

from kvstate.arena import Changes
from kvstate.errors import AcceptedMismatch
from kvstate.ops import ForkCopy, Plan, StepBegin, StepEnd
from kvstate.ordering import NOTHING, Clock, Queue, elsewhere, merge
from kvstate.prefix import Key
from kvstate.refusals import (
    AlreadyLaunched,
    CopyFailed,
    LeaseEnded,
    NotLaunched,
    OutOfOrder,
    PagesExhausted,
    Refusal,
    StalePlan,
    TooLarge,
)
from kvstate.state import Fork, Lease, OnDevice, Row, State, Status, Stream, WideRow
from kvstate.transitions.fork import apply_post_forks, keys_shared
from kvstate.transitions.leaving import (
    content_pages,
    end_row,
    end_without_effect,
    leave,
    open_above,
    pages_leaving,
    release,
    stop_holding,
    void_above,
)
from kvstate.transitions.reserve import Reservation
from kvstate.transitions.retention import retain
from kvstate.types import Step


@attrs.frozen
class SegmentOutcome:
    """What became of one segment: `stored` tokens, or dropped because its stream changed under the step."""

    request: str | None
    label: str
    stored: int
    dropped: bool


@attrs.frozen(eq=False)
class Committed:
    """A committed step. `dropped` are the places of the segments that did not count."""

    lease: Lease
    accepted: tuple[int, ...] | None
    dropped: tuple[int, ...]

    @property
    def segments(self) -> tuple[SegmentOutcome, ...]:
        """One outcome per segment, in the step's order; padding is neither stored nor dropped."""
        step = self.lease.step
        outcomes = []
        for place, segment in enumerate(step.segments):
            dropped = place in self.dropped
            stored = segment.span if self.accepted is None else self.accepted[place]
            if dropped or segment.request is None or not step.commit:
                stored = 0
            outcomes.append(SegmentOutcome(segment.request, segment.label, stored, dropped))
        return tuple(outcomes)


@attrs.frozen(eq=False)
class Aborted:
    """An aborted lease; `pending` when its launch is running and the abort takes effect at its exit."""

    lease: Lease
    pending: bool


def _streams(state: State, step: Step) -> list[Stream | None]:
    """Return the open streams of a plain step, remembered by the step until the set of streams changes."""
    resolved = step._resolved
    if resolved is not None and resolved[0] is state and resolved[1] == state.topology:
        return resolved[2]  # type: ignore[no-any-return]
    streams: list[Stream | None] = []
    for segment in step.segments:
        request = state.requests.get(segment.request or "")
        stream = request.streams.get(segment.label) if request is not None else None
        streams.append(stream if stream is not None and stream.opened else None)
    object.__setattr__(step, "_resolved", (state, state.topology, streams))
    return streams


def admit(state: State, step: Step) -> Lease | Refusal:
    """Admit a step: reserve everything it needs, or refuse and hold nothing.

    — → admitted
    """
    # Guard.
    lease = Lease(0, step)
    rows, asking, refusal = _simulated(state, lease)
    if refusal is None and asking is not None:
        refusal = _short(state, step, asking)
    if refusal is not None:
        return refusal
    # Effect.
    if asking is not None:
        wide = asking.build(lease)
        if step.plain:
            lease.places = None
            more = iter(wide)
            wide = [row if row is not None else next(more) for row in rows]
        lease.rows = wide
    else:
        lease.rows = cast("list[Row]", rows)
    for row in lease.rows:
        row.stream.rows.append(row)
    lease.serial = state.serial()
    state.leases[lease.serial] = lease
    return lease


def probe(state: State, step: Step, leaving: bool = False) -> Refusal | None:
    """Return why `step` would be refused now, or None; nothing changes.

    With `leaving`, as if every open offload claim had committed and every lease with void rows had ended: what those
    give up counts as available.
    """
    _, asking, refusal = _simulated(state, Lease(0, step))
    if refusal is None and asking is not None:
        refusal = _short(state, step, asking, pages_leaving(state) if leaving else ())
    return refusal


def _simulated(state: State, lease: Lease) -> tuple[list[Row] | list[Row | None], Reservation | None, Refusal | None]:
    """Return rows as far as they are plain, what must be reserved, and why the step cannot run, pages aside."""
    if lease.step.plain:
        return _plain_rows(state, lease)
    asking = Reservation(state, lease.step)
    return [], asking, asking.simulate()


def _plain_rows(state: State, lease: Lease) -> tuple[list[Row | None], Reservation | None, Refusal | None]:
    """Return a row per segment of a plain step; None for one that leaves its last content page, which is reserved."""
    rows: list[Row | None] = []
    asking: Reservation | None = None
    step = lease.step
    for segment, stream in zip(step.segments, _streams(state, step), strict=True):
        if stream is not None and not stream.voided:
            above = stream.rows
            if above:
                top = above[-1]
                start = top.length
                length = start + segment.span
                room = top.room
                if length <= room:
                    rows.append(Row(stream, lease, start, length, top.released, top.tables, room, stream.generation))
                    continue
            else:
                start = stream.length
                length = start + segment.span
                residency = stream.residency
                room = residency.room
                if length <= room:
                    rows.append(
                        Row(stream, lease, start, length, stream.released, residency.tables, room, stream.generation)
                    )
                    continue
        if asking is None:
            asking = Reservation(state, step)
        refusal = asking.segment(segment)
        if refusal is not None:
            return rows, asking, refusal
        rows.append(None)
    return rows, asking, None


def _short(state: State, step: Step, asking: Reservation, leaving: Changes = ()) -> Refusal | None:
    """Return the refusal of a step that wants more pages than there are."""
    leaving = asking.without_prefixes(leaving)
    short = state.device.short(asking.wanted, asking.owning, leaving)
    if short is None:
        return None
    whole = Reservation(state, step)
    whole.simulate()
    request, label, pages = whole.largest()
    if pages > state.geometry.pages:
        return TooLarge(request=request, label=label, wanted=pages, capacity=state.geometry.pages)
    first = whole.first_short(leaving)
    fragmented = state.device.fragmented(asking.wanted, asking.owning, leaving)
    return PagesExhausted(request=first.request.id, label=first.label, short=short, fragmented=fragmented)


def plan(state: State, lease: Lease) -> Plan | Refusal:
    """Plan an admitted step: fix its views and addresses. Planning again after StalePlan sends void rows to the sink.

    admitted → planned
    """
    # Guard.
    if not lease.open:
        return _outdated(lease)
    state.own(lease)
    if lease.status in (Status.ENTERED, Status.LAUNCHED):
        return AlreadyLaunched(**_who(lease))
    if lease.void > lease.told:
        return _stale(lease)
    # Effect.
    sinks = tuple(pool.sink for pool in state.device.pools)
    lease.plan = Plan(lease, state.page_size, sinks, frozenset(lease.void_places()), lease.void, state.serial())
    lease.status = Status.PLANNED
    return lease.plan


def _stale(lease: Lease) -> StalePlan:
    """Say which segments are void. That the caller was told is remembered: it is no part of the cache's state."""
    lease.told = lease.void
    first = next(row.stream for row in lease.rows if row.void)
    return StalePlan(request=first.request.id, label=first.label, void=lease.void_places())


def _outdated(lease: Lease) -> StalePlan:
    """Say that a plan's lease has ended, or that a newer plan replaced it."""
    who = _who(lease)
    return StalePlan(request=who["request"], label=who["label"], ended=True)


def _who(lease: Lease) -> dict[str, str]:
    """Return the first stream that a lease names, for a refusal of the whole lease."""
    if not lease.rows:
        return {"request": "", "label": ""}
    first = lease.rows[0].stream
    return {"request": first.request.id, "label": first.label}


def launch_enter(state: State, planned: Plan) -> StepBegin | Refusal:
    """Enter a launch: fix what the step follows and emit the copies of its pre-forks.

    planned → launching
    """
    # Guard.
    lease = planned.lease
    if not lease.open:
        return _outdated(lease)
    state.own(lease)
    if lease.status in (Status.ENTERED, Status.LAUNCHED):
        return AlreadyLaunched(**_who(lease))
    if lease.plan is not planned:
        return _outdated(lease)
    if lease.void != planned.void:
        return _stale(lease)
    after: Clock = NOTHING
    last: Clock = NOTHING
    for row in lease.rows:
        if row.void:
            continue
        stream = row.stream
        if (stream.rows[0] is not row or stream.voided) and not _launches_next(row):
            return OutOfOrder(request=stream.request.id, label=stream.label)
        written = stream.written
        if written is not last:
            after = merge(after, written)
            last = written
        if isinstance(row, WideRow):
            after = merge(after, row.entered)
    # Effect.
    after = elsewhere(after, Queue.COMPUTE)
    lease.status = Status.ENTERED
    # Emit.
    copies = tuple(
        [copy for fork in lease.forks if fork.pre and not fork.target.void for copy in fork.copies[group]]
        for group in range(len(state.device.pools))
    )
    if any(copies):
        state.outbox.append(ForkCopy(state.number(), after, lease, copies))
    begin = StepBegin(state.number(), after, lease)
    state.outbox.append(begin)
    lease.began = begin
    return begin


def _launches_next(row: Row) -> bool:
    """Tell whether everything older on the row's stream has left its launch; void rows never enter."""
    stream = row.stream
    older = stream.rows[: stream.rows.index(row)]
    return all(other.lease.status is Status.LAUNCHED for other in older) and not any(
        other.lease.status is Status.ENTERED for other in stream.voided if other.lease.serial < row.lease.serial
    )


def launch_exit(state: State, lease: Lease) -> StepEnd | Aborted | Refusal:
    """Leave a launch: the step takes its number. An abort asked for meanwhile takes effect.

    launching → launched
    """
    # Guard.
    if not lease.open:
        return LeaseEnded(**_who(lease))
    state.own(lease)
    if lease.status is not Status.ENTERED:
        return NotLaunched(**_who(lease))
    assert lease.plan is not None and lease.began is not None
    # Effect.
    lease.number = state.number()
    lease.status = Status.LAUNCHED
    # Emit.
    end = StepEnd(lease.number, lease.began.after, lease, lease.began.number, lease.plan)
    state.outbox.append(end)
    if lease.abort_requested:
        _end_all(state, lease)
        return Aborted(lease, False)
    return end


def commit(state: State, lease: Lease, accepted: Sequence[int] | None = None) -> Committed | Refusal:
    """Commit a launched step: lengths and tables change here, then post-forks. Segments that went void are dropped.

    launched → committed

    Raises
    ------
    AcceptedMismatch
        When `accepted` does not fit the step's segments; nothing was changed.
    """
    # Guard.
    if not lease.open:
        return LeaseEnded(**_who(lease))
    state.own(lease)
    if lease.status is not Status.LAUNCHED:
        return NotLaunched(**_who(lease))
    if lease.failure is not None:
        return CopyFailed(**_who(lease), error=lease.failure)
    rows = lease.rows
    for row in rows:
        if not row.void and row.stream.rows[0] is not row:
            return OutOfOrder(request=row.stream.request.id, label=row.stream.label)
    stored = _stored(lease, accepted) if accepted is not None else None
    # Effect.
    dropped = lease.void_places()
    number = lease.number
    clock: Clock = (number, 0, 0)
    forks = _surviving(lease)
    keys = _keys_taken(state, lease) if lease.forks else {}
    for fork in forks:
        _open(state, fork.target.stream)
    unused = [fork.target for fork in lease.forks if not fork.pre and not fork.target.void]
    lease.status = Status.COMMITTED
    serial = lease.serial
    del state.leases[serial]
    for row in rows:
        if row.void:
            end_without_effect(state, row)
        elif row.wide or stored is not None:
            _commit_row(state, row, None if stored is None else stored.get(id(row)), clock, keys.get(id(row)))
        else:
            stream = row.stream
            length = row.length
            stream.length = length
            stream.generation += 1
            stream.written = clock
            del stream.rows[0]
            if length == row.room and length % state.page_size == 0:
                _seal_last(state, row)
            if stream.held:
                stop_holding(state, stream, lease)
    lease.forks = tuple(forks)
    if forks:
        apply_post_forks(state, lease, forks)
    for target in unused:
        state.device.drop(target.tails, NOTHING)
    return Committed(lease, None if accepted is None else tuple(accepted), dropped)


def _surviving(lease: Lease) -> list[Fork]:
    """Return the post-forks that apply: a void source or target drops its fork, which drops those of its target."""
    forks: list[Fork] = []
    dropped: list[Row] = []
    for fork in lease.forks:
        if fork.pre:
            continue
        if fork.source.void or fork.target.void or fork.source in dropped:
            dropped.append(fork.target)
        else:
            forks.append(fork)
    return forks


def _keys_taken(state: State, lease: Lease) -> dict[int, tuple[list[Key], bool]]:
    """Return the keys and the staleness that each target of a pre-fork takes over, by its row."""
    taken: dict[int, tuple[list[Key], bool]] = {}
    for fork in lease.forks:
        if fork.pre:
            source, target = fork.source.stream, fork.target.stream
            keys, stale = taken.get(id(fork.source), (source.keys, source.stale))
            taken[id(fork.target)] = (keys_shared(source, target, fork.target.start // state.page_size, keys), stale)
    return taken


def _open(state: State, stream: Stream) -> None:
    if not stream.opened:
        stream.opened = True
        state.topology += 1


def _seal_last(state: State, row: Row) -> None:
    place = row.length // state.page_size - 1
    for pool, table in zip(state.device.pools, row.tables, strict=True):
        pool.sealed[table[place]] = 1


def _stored(lease: Lease, accepted: Sequence[int]) -> dict[int, int]:
    """Return the tokens stored per row (by identity) after checking `accepted` against the step."""
    step = lease.step
    if len(accepted) != len(step.segments):
        raise AcceptedMismatch(
            f"accepted has {len(accepted)} entries for {len(step.segments)} segments; give one each, padding too"
        )
    stored: dict[int, int] = {}
    closed: set[int] = set()
    for place, (segment, count) in enumerate(zip(step.segments, accepted, strict=True)):
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= segment.span:
            raise AcceptedMismatch(
                f"segment {place} ({segment.request}/{segment.label}) computed {segment.span} tokens, "
                f"so it cannot accept {count!r}; give 0 … {segment.span}"
            )
        row, _ = lease.placed(place)
        if row is None:
            continue
        if id(row) in closed and count:
            raise AcceptedMismatch(
                f"segment {place} ({segment.request}/{segment.label}) follows tokens of the same stream that were not "
                "accepted; it must accept 0"
            )
        stored[id(row)] = stored.get(id(row), 0) + count
        if count < segment.span:
            closed.add(id(row))
    return stored


def _commit_row(state: State, row: Row, stored: int | None, clock: Clock, taken: tuple[list[Key], bool] | None) -> None:
    """Commit one row on the general path: take its pages, move the length, seal, retain, check the rows above."""
    stream, size = row.stream, state.page_size
    wide = row if isinstance(row, WideRow) else None
    commits = row.lease.step.commit
    forked = wide is not None and wide.forked
    if not forked and (not commits or (wide is not None and not wide.opens)):
        # Nothing lasting: a fork's source, a span of zero, a step that does not commit.
        end_row(state, row)
        if wide is not None:
            _return_temps(state, wide)
        return
    spans = row.stop - row.start if stored is None else stored
    length = row.start + spans if commits else row.start
    tables = row.step_tables if commits or wide is None else wide.tables
    for pool, table in zip(state.device.pools, tables, strict=True):
        pool.seal(table.part(row.start // size, length // size))
    before = row.released_before
    tables, length, released, gone = retain(state, tables, length, before, wide.policy if wide is not None else None)
    if (length, released) != (row.length, row.released):
        void_above(row)
    left = [table.part(0, content_pages(state, stream)) for table in stream.residency.tables] if forked else ()
    stream.residency = OnDevice(tables, state.room(length, stream.retention))
    stream.length, stream.released = length, released
    stream.generation += 1
    stream.written = clock
    if taken is not None:
        stream.keys, stream.stale = taken
    elif wide is not None and wide.prefix:
        stream.keys = [] if stream.stale else list(wide.prefix)
    if released > before:
        # What follows is no longer the history that its tokens spell.
        assert wide is not None and wide.policy is not None
        del stream.keys[-(-wide.policy.protected_prefix // size) :]
    if gone or left:
        stream.epoch += 1
    _open(state, stream)
    end_row(state, row)
    for pages in (left, gone):
        if pages:
            leave(state, stream, pages)
    if wide is not None:
        _return_temps(state, wide)


def _return_temps(state: State, row: WideRow) -> None:
    """Return the pages of a step that does not commit; what runs above may still read them."""
    if any(row.temps):
        above = open_above(row)
        release(state, row.stream, row.temps, above, row.stream.used)
        row.temps = state.no_pages()


def abort(state: State, lease: Lease) -> Aborted | Refusal:
    """Abort a lease: everything it reserved returns; while its launch runs, at the launch's exit.

    admitted, planned, launched → aborted
    """
    # Guard.
    if not lease.open:
        return LeaseEnded(**_who(lease))
    state.own(lease)
    # Effect.
    if lease.status is Status.ENTERED:
        lease.abort_requested = True
        return Aborted(lease, True)
    _end_all(state, lease)
    return Aborted(lease, False)


def _end_all(state: State, lease: Lease) -> None:
    """End every row of a lease without effect; what is planned above them is void."""
    lease.status = Status.ABORTED
    del state.leases[lease.serial]
    for row in lease.rows:
        if not row.void:
            void_above(row)
    for row in lease.rows:
        end_without_effect(state, row)
