"""Commands for a backend, and what a step may touch.

Transitions append ops to the outbox; the manager hands them to the backend in number order. An op says which pages and
tokens it reads and writes per tier, and what it follows (``after``, see ``kvstate.ordering``). Bytes of a page beyond
an op's tokens may be moved and are undefined.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import attrs

from kvstate.ordering import Clock, Queue

if TYPE_CHECKING:
    from kvstate.state import Lease, Stream, Table
    from kvstate.types import Record


class Tier(enum.Enum):
    """Where a page lies."""

    DEVICE = "device"
    HOST = "host"


class Access(NamedTuple):
    """Tokens ``start … stop`` of one page."""

    tier: Tier
    group: int
    page: int
    start: int
    stop: int


PageCopy = tuple[int, int, int]
"""(source page, target page, tokens): the first `tokens` tokens of a page."""


@attrs.frozen(eq=False)
class PageCopies:
    """Page copies as three columns, which is what a backend coalesces; iterating yields them one by one."""

    sources: list[int]
    targets: list[int]
    tokens: list[int]

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[PageCopy]:
        return zip(self.sources, self.targets, self.tokens, strict=True)

    def __contains__(self, copy: object) -> bool:
        return any(copy == own for own in self)


Copies = tuple[Collection[PageCopy], ...]
"""Page copies per group."""


@attrs.frozen
class PlanView:
    """What one segment of a planned step reads and writes.

    Parameters
    ----------
    request, label
        The stream; `request` is None for padding.
    tables
        Pages per group, exactly ``ceil(length / page_size)`` of them.
    start
        Stored tokens in front of the segment: the first slot it writes.
    length
        ``start + span``.
    span
        Tokens computed.
    position
        Of the first computed token in the request's history; retention does not shrink it.
    generation
        Of the stream when the step was admitted.
    sink
        True when the row writes to the sink: padding, and segments that went void before this plan.
    skipped
        Leading pages that are not held, per group: the window has left them, and `tables` names the sink there.
    sources
        The tables that `tables` were read from, per group; empty for a sink row. A backend that keeps rows uploads what
        a table has beyond the one it uploaded last (``Table.extends``).
    """

    request: str | None
    label: str
    tables: tuple[tuple[int, ...], ...]
    start: int
    length: int
    span: int
    position: int
    generation: int
    sink: bool
    skipped: tuple[int, ...] = (0,)
    sources: tuple[Table, ...] = ()

    @property
    def pages(self) -> tuple[int, ...]:
        """The table of the first group."""
        return self.tables[0]


@attrs.define(eq=False, slots=False)
class Plan:
    """A lease made addressable: views per plan label, and where each computed token goes.

    Everything a plan shows was fixed under the lock when its step was admitted; views are built when first asked for.
    `void` rows were known when it was made; the segments in `sunk` go to the sink.
    """

    lease: Lease
    page_size: int
    sinks: tuple[int, ...]
    sunk: frozenset[int]
    void: int
    serial: int

    @cached_property
    def in_step_order(self) -> tuple[PlanView, ...]:
        """One view per segment, in the step's order."""
        return tuple(self._view(place) for place in range(len(self.lease.step.segments)))

    @cached_property
    def views(self) -> dict[str, tuple[PlanView, ...]]:
        """Views per plan label: combined labels are packed label by label, batch order inside."""
        combined = {
            label: (plan, labels) for labels, plan in self.lease.step.combined_labels.items() for label in labels
        }
        packed: dict[str, dict[str, list[PlanView]]] = {}
        for view in self.in_step_order:
            plan_label, labels = combined.get(view.label, (view.label, (view.label,)))
            packed.setdefault(plan_label, {label: [] for label in labels})[view.label].append(view)
        return {name: tuple(view for views in parts.values() for view in views) for name, parts in packed.items()}

    def addresses(self, plan_label: str, group: int = 0) -> list[tuple[int, int]]:
        """Return (page, slot in the page) of every token that the views of `plan_label` compute, in packed order.

        Raises
        ------
        KeyError
            When the step has no such plan label.
        """
        size = self.page_size
        return [
            (view.tables[group][token // size], token % size)
            for view in self.views[plan_label]
            for token in range(view.start, view.length)
        ]

    def _view(self, place: int) -> PlanView:
        segment = self.lease.step.segments[place]
        row, start = self.lease.placed(place)
        if row is None or place in self.sunk:
            pages = -(-segment.span // self.page_size)
            tables = tuple((sink,) * pages for sink in self.sinks)
            return PlanView(
                segment.request, segment.label, tables, 0, segment.span, segment.span, 0, 0, True,
                (0,) * len(tables),
            )  # fmt: skip
        length = start + segment.span
        count = -(-length // self.page_size)
        return PlanView(
            segment.request,
            segment.label,
            tuple(table.first(count, sink) for table, sink in zip(row.step_tables, self.sinks, strict=True)),
            start,
            length,
            segment.span,
            row.released_before + start,
            row.generation,
            False,
            tuple(table.skip for table in row.step_tables),
            row.step_tables,
        )


@attrs.frozen(eq=False)
class Op:
    """One command. `number` is its place in the one total order; `owner` is the lease or claim it works for."""

    queue: ClassVar[Queue | None] = None
    number: int
    after: Clock
    owner: Any

    def reads(self) -> Iterator[Access]:
        """Yield what the op reads."""
        return iter(())

    def writes(self) -> Iterator[Access]:
        """Yield what the op writes."""
        return iter(())


@attrs.frozen(eq=False)
class StepBegin(Op):
    """The compute queue waits for what the step follows; its kernels come next."""

    queue = Queue.COMPUTE


@attrs.frozen(eq=False)
class StepEnd(Op):
    """The step's kernels have been submitted; its event is recorded here, in the order of its number.

    `after` repeats what its StepBegin (number `begin`) waited for.
    """

    queue = Queue.COMPUTE
    begin: int
    plan: Plan

    def reads(self) -> Iterator[Access]:
        for view in self.plan.in_step_order:
            if not view.sink:
                yield from self._touch(view, 0, view.length)

    def writes(self) -> Iterator[Access]:
        for view in self.plan.in_step_order:
            if not view.sink:
                yield from self._touch(view, view.start, view.length)

    def _touch(self, view: PlanView, start: int, stop: int) -> Iterator[Access]:
        size = self.plan.page_size
        for group, (table, skip) in enumerate(zip(view.tables, view.skipped, strict=True)):
            for place in range(max(start // size, skip), -(-stop // size)):
                first = place * size
                yield Access(Tier.DEVICE, group, table[place], max(start - first, 0), min(stop - first, size))


@attrs.frozen(eq=False)
class _PageCopies(Op):
    """Copies page to page, per group."""

    source_tier: ClassVar[Tier] = Tier.DEVICE
    target_tier: ClassVar[Tier] = Tier.DEVICE
    copies: Copies

    def reads(self) -> Iterator[Access]:
        for group, copies in enumerate(self.copies):
            for source, _, tokens in copies:
                yield Access(self.source_tier, group, source, 0, tokens)

    def writes(self) -> Iterator[Access]:
        for group, copies in enumerate(self.copies):
            for _, target, tokens in copies:
                yield Access(self.target_tier, group, target, 0, tokens)


@attrs.frozen(eq=False)
class ForkCopy(_PageCopies):
    """Partly filled last pages, device to device, for the targets of forks.

    `committed` are the targets of post-forks, which hold the copied content already, each with its epoch.
    """

    queue = Queue.COMPUTE
    committed: tuple[tuple[Stream, int], ...] = ()


@attrs.frozen(eq=False)
class CopyOut(_PageCopies):
    """Device to host, for an offload claim."""

    queue = Queue.COPY_OUT
    target_tier = Tier.HOST


@attrs.frozen(eq=False)
class CopyIn(_PageCopies):
    """Host to device, for a reload claim."""

    queue = Queue.COPY_IN
    source_tier = Tier.HOST


@attrs.frozen(eq=False)
class FetchBegin(Op):
    """A transport may write tokens ``start … stop`` of a stream, once `after` has completed. It ends by a FetchEnd.

    `tables` has the consumer's pages per group: page ``firsts[g]`` of the stream's table first. A window group has none
    in front of what its window needs once all has landed.
    """

    fetch: Any
    record: Record
    tables: tuple[tuple[int, ...], ...]
    firsts: tuple[int, ...]
    start: int
    stop: int
    page_size: int

    def writes(self) -> Iterator[Access]:
        for group, (table, base) in enumerate(zip(self.tables, self.firsts, strict=True)):
            for place, page in enumerate(table, start=base):
                first = place * self.page_size
                low, high = max(self.start - first, 0), min(self.stop - first, self.page_size)
                yield Access(Tier.DEVICE, group, page, low, high)


@attrs.frozen(eq=False)
class FetchEnd(Op):
    """The host has seen fetch op `begin` end (landed, failed or cancelled): everything emitted later follows it."""

    begin: int
