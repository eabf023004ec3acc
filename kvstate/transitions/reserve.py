"""What a step needs, found by simulating its lengths in declaration order: pre-forks, spans, post-forks.

The simulation decides on lengths and page counts alone and keeps a short list of what to build; nothing of the state
changes until every guard has passed. Then `build` carries the list out with granted pages, and nothing can fail.

Of each stream's table::

    | content: ceil(length / page_size) pages | surplus: used before anything is granted |
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstate.ordering import NOTHING, merge
from kvstate.refusals import ForkPending, Refusal, StreamNotOnDevice, UnknownRequest
from kvstate.state import Fork, Lease, Request, Row, State, Stream, Table, WideRow
from kvstate.transitions.claim import away, off_device
from kvstate.transitions.retention import retain
from kvstate.types import LabelFork, Segment, Step, StreamFork

Key = tuple[str, str]
"""(request, label)."""


class Draft:
    """One stream while a step is simulated.

    `length` runs through the step, from `start` on; `kept` is what lasts when nothing, and `most` when everything, is
    accepted. `content` and `surplus` are pages; `fork_granted` and `span_granted` those that must be granted.
    """

    __slots__ = (
        "base", "content", "exists", "fork_granted", "kept", "length", "most", "named", "opens", "shared",
        "span_granted", "start", "stream", "surplus",
    )  # fmt: skip

    def __init__(self, stream: Stream, page_size: int) -> None:
        self.stream = stream
        base = stream.rows[-1] if stream.rows else None
        self.base = base
        self.length = base.length if base is not None else stream.length
        self.content = -(-self.length // page_size)
        tables = base.tables if base is not None else stream.residency.tables
        self.surplus = tables[0].count - self.content if tables else 0
        self.start = self.kept = self.most = self.length
        self.fork_granted = 0
        self.span_granted = 0
        # The full pages that a pre-fork shares, when this is its target.
        self.shared: list[int] | None = None
        # `opens`: by a span or a pre-fork of this step; `exists` also by one of its post-forks.
        self.opens = False
        self.exists = False
        self.named = False

    def base_pages(self, page_size: int) -> list[int]:
        """Return the pages that the step starts from on this stream: its own, or those a pre-fork shares."""
        if self.shared is not None:
            return self.shared
        tables = self.base.tables if self.base is not None else self.stream.residency.tables
        return tables[0].part(0, -(-self.start // page_size)) if tables else []

    def want(self, pages: int) -> int:
        """Take `pages` from the surplus first; return how many must be granted."""
        mine = min(pages, self.surplus)
        self.surplus -= mine
        self.content += pages
        return pages - mine


class Reservation:
    """A step simulated on a state that it does not change.

    With `returning`, only this request's part of the step is simulated, as if it were back on the device without
    surplus: what a reload claims for the step that comes next.
    """

    def __init__(self, state: State, step: Step, returning: Request | None = None) -> None:
        self.state = state
        self.step = step
        self.returning = returning
        self.drafts: dict[Key, Draft] = {}
        self.new: list[Stream] = []
        self.pre: list[tuple[Draft, Draft]] = []
        self.post: list[tuple[Draft, Draft, int]] = []
        self.places: list[tuple[Draft | None, int]] = []
        self.wanted = 0
        self.first_short: Draft | None = None
        # Where the last page of a pre-fork's target is copied from, by draft and group.
        self.origins: dict[tuple[int, int], int] = {}

    # -- simulate

    def simulate(self) -> Refusal | None:
        """Walk the step; return why it cannot run, pages aside."""
        step = self.step
        grows = {(s.request, s.label) for s in step.segments if s.request and s.span and step.commit}
        for source, target in self._pairs(step.pre_forks):
            refusal = self._pre_fork(source, target, grows)
            if refusal is not None:
                return refusal
        for segment in step.segments:
            if self.returning is None or segment.request == self.returning.id:
                refusal = self.segment(segment)
                if refusal is not None:
                    return refusal
        for source, target in self._pairs(step.post_forks):
            refusal = self._post_fork(source, target)
            if refusal is not None:
                return refusal
        return None

    def wants_per_label(self) -> dict[str, int]:
        """Return the pages to be granted per label, zeros left out."""
        wants: dict[str, int] = {}
        for (_, label), draft in self.drafts.items():
            wants[label] = draft.fork_granted + draft.span_granted
        for _, two, tail in self.post:
            wants[two.stream.label] += tail
        return {label: pages for label, pages in wants.items() if pages}

    def _pairs(self, forks: Sequence[LabelFork | StreamFork]) -> list[tuple[Key, Key]]:
        pairs = [
            ((fork.source.request, fork.source.label), (fork.target.request, fork.target.label))
            for fork in self.step.stream_forks(forks)
        ]
        if self.returning is not None:
            pairs = [(one, two) for one, two in pairs if one[0] == two[0] == self.returning.id]
        return pairs

    def _draft(self, key: Key) -> Draft | Refusal:
        draft = self.drafts.get(key)
        if draft is not None:
            return draft
        request = self.state.requests.get(key[0])
        if request is None:
            return UnknownRequest(request=key[0], label=key[1])
        stream = request.streams.get(key[1])
        if stream is None:
            residency = away(request)
            if residency is not None and self.returning is None:
                return StreamNotOnDevice(request=key[0], label=key[1], residency=residency)
            stream = Stream(request, key[1], len(self.state.device.pools))
            self.new.append(stream)
        elif self.returning is None:
            refusal = off_device(stream)
            if refusal is not None:
                return refusal
            if stream.pending_fork is not None:
                return ForkPending(request=key[0], label=key[1])
        draft = self.drafts[key] = Draft(stream, self.state.page_size)
        return draft

    def _exists(self, key: Key) -> bool:
        """Tell whether the stream is open, or opened by this step so far."""
        draft = self.drafts.get(key)
        if draft is not None and (draft.opens or draft.exists):
            return True
        request = self.state.requests.get(key[0])
        stream = request.streams.get(key[1]) if request is not None else None
        if stream is None:
            return False
        return stream.opened or any(isinstance(row, WideRow) and row.opens for row in stream.rows)

    def _count(self, draft: Draft, granted: int) -> None:
        self.wanted += granted
        if granted and self.first_short is None and self.wanted > len(self.state.device.pools[0].free):
            self.first_short = draft

    def _pair(self, source: Key, target: Key) -> tuple[Draft, Draft] | Refusal:
        one = self._draft(source)
        if isinstance(one, Refusal):
            return one
        two = self._draft(target)
        return two if isinstance(two, Refusal) else (one, two)

    def _pre_fork(self, source: Key, target: Key, grows: set[Key]) -> Refusal | None:
        pair = self._pair(source, target)
        if isinstance(pair, Refusal):
            return pair
        if not (self._exists(source) or source in grows):
            return None
        one, two = pair
        size = self.state.page_size
        two.opens = True
        two.shared = one.base_pages(size)[: one.length // size]
        two.length = two.start = two.kept = two.most = one.length
        two.content = one.length // size
        two.fork_granted = two.want(1 if one.length % size else 0)
        self._count(two, two.fork_granted)
        self.pre.append((one, two))
        return None

    def segment(self, segment: Segment) -> Refusal | None:
        if segment.request is None:
            self.places.append((None, 0))
            return None
        draft = self._draft((segment.request, segment.label))
        if isinstance(draft, Refusal):
            return draft
        draft.named = draft.named or segment.span > 0
        self.places.append((draft, draft.length))
        draft.length += segment.span
        need = -(-draft.length // self.state.page_size) - draft.content
        if need > 0:
            granted = draft.want(need)
            draft.span_granted += granted
            self._count(draft, granted)
        if self.step.commit and segment.span:
            draft.opens = True
            draft.most = draft.length
        return None

    def _post_fork(self, source: Key, target: Key) -> Refusal | None:
        pair = self._pair(source, target)
        if isinstance(pair, Refusal):
            return pair
        if not self._exists(source):
            return None
        one, two = pair
        size = self.state.page_size
        tail = 0
        if size > 1 and (one.most > one.kept or one.kept % size):
            tail = 1 if two.surplus == 0 else 0
            two.surplus -= 1 - tail
            self._count(two, tail)
        two.kept, two.most = one.kept, one.most
        two.exists = True
        self.post.append((one, two, tail))
        return None

    def largest(self) -> tuple[str, str, int]:
        """Return (request, label, pages) of the request that asks for most; pages its streams share count once."""
        pages: dict[str, int] = {}
        labels: dict[str, str] = {}
        known: dict[str, set[int]] = {}
        for (request, label), draft in self.drafts.items():
            own = draft.base_pages(self.state.page_size)
            mine = known.setdefault(request, set())
            more = len(set(own) - mine) + draft.content - len(own)
            mine.update(own)
            pages[request] = pages.get(request, 0) + more
            labels.setdefault(request, label)
        for _, two, tail in self.post:
            pages[two.stream.request.id] += tail
        request = max(pages, key=lambda r: pages[r])
        return request, labels[request], pages[request]

    # -- build

    def build(self, lease: Lease) -> list[Row]:
        """Carry out what was simulated: grant pages, make the rows and forks of `lease`."""
        state = self.state
        for stream in self.new:
            stream.request.streams[stream.label] = stream
            state.topology += 1
        rows: dict[int, WideRow] = {}
        forks: list[Fork] = []
        for draft in self.drafts.values():
            rows[id(draft)] = self._row(lease, draft)
        for one, two in self.pre:
            forks.append(self._build_pre_fork(rows, one, two))
        for draft in self.drafts.values():
            self._build_growth(rows[id(draft)], draft)
        for one, two, tail in self.post:
            row = rows[id(two)]
            row.tails = tuple(pool.grant(tail) for pool in state.device.pools)
            forks.append(Fork(rows[id(one)], row, False, ()))
            row.room = 0
            row.stream.pending_fork = lease
        lease.forks = tuple(forks)
        lease.places = [(rows[id(draft)] if draft is not None else None, start) for draft, start in self.places]
        return list(rows.values())

    def _row(self, lease: Lease, draft: Draft) -> WideRow:
        stream, base = draft.stream, draft.base
        tables = base.tables if base is not None else stream.residency.tables
        released = base.released if base is not None else stream.released
        row = WideRow(stream, lease, draft.start, 0, released, tables, 0, stream.generation)
        row.takes, row.temps, row.tails = self.state.no_pages(), self.state.no_pages(), self.state.no_pages()
        row.entered = NOTHING
        row.released_before = released
        row.step_tables = tables
        row.forked = False
        row.opens = draft.opens
        row.policy = None
        if draft.named and self.step.commit:
            row.policy = self.step.retention.get(stream.label, stream.retention)
        return row

    def _build_pre_fork(self, rows: dict[int, WideRow], one: Draft, two: Draft) -> Fork:
        """Share the source's full pages with the target's row; a partly filled last page gets a page and a copy."""
        size = self.state.page_size
        source, row = rows[id(one)], rows[id(two)]
        length = two.start
        base_length = two.base.length if two.base is not None else two.stream.length
        tables: list[Table] = []
        copies: list[list[tuple[int, int, int]]] = []
        for group, pool in enumerate(self.state.device.pools):
            shared = source.step_tables[group].part(0, length // size)
            pool.share(shared)
            row.takes[group].extend(shared)
            surplus = row.step_tables[group].part(-(-base_length // size), row.step_tables[group].count)
            pages = shared
            copied: list[tuple[int, int, int]] = []
            if length % size:
                if surplus:
                    tail = surplus.pop(0)
                else:
                    [tail] = pool.grant(1)
                    row.takes[group].append(tail)
                pages.append(tail)
                row.entered = merge(row.entered, pool.fences[tail])
                # Of a chain, the first page: a copy reads nothing that another copy of the same op writes.
                origin = self.origins.get((id(one), group), source.step_tables[group][length // size])
                self.origins[id(two), group] = origin
                copied.append((origin, tail, length % size))
            pages.extend(surplus)
            tables.append(Table(pages, len(pages)))
            copies.append(copied)
        row.step_tables = row.tables = tuple(tables)
        row.released = row.released_before = source.released_before
        row.forked = True
        return Fork(source, row, True, tuple(copies))

    def _build_growth(self, row: WideRow, draft: Draft) -> None:
        """Give the row the pages its spans need and say what it leaves when everything is accepted."""
        size = self.state.page_size
        row.stop = draft.length
        covered = -(-draft.start // size)
        wanted = -(-draft.length // size)
        tables: list[Table] = []
        for group, pool in enumerate(self.state.device.pools):
            granted = pool.grant(draft.span_granted)
            (row.takes if self.step.commit else row.temps)[group].extend(granted)
            table = row.step_tables[group].extended(granted)
            row.entered = merge(row.entered, pool.fence_of(table.part(covered, wanted)))
            tables.append(table)
        row.step_tables = tuple(tables)
        lasting = row.step_tables if self.step.commit else row.tables
        length = draft.length if self.step.commit else draft.start
        row.tables, row.length, row.released, _ = retain(lasting, length, row.released, row.policy, size)
        row.room = self.state.room(row.stream, row.length, row.stream.retention)
