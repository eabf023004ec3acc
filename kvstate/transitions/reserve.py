"""What a step needs, found by simulating its lengths in declaration order: pre-forks, spans, post-forks.

The simulation decides on lengths and page counts alone and keeps a short list of what to build; nothing of the state
changes until every guard has passed. Then `build` carries the list out with granted pages, and nothing can fail.

Of each stream's table, in each group::

    | left: a window's | content: up to page ceil(length / page_size) | surplus: used before anything is granted |
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstate.arena import Changes
from kvstate.ordering import NOTHING, merge
from kvstate.prefix import Key as ContentKey
from kvstate.refusals import ForkPending, NotEmpty, PrefixLost, Refusal, StreamNotOnDevice, UnknownRequest
from kvstate.state import Fork, Lease, Request, Row, State, Stream, Table, WideRow
from kvstate.transitions.claim import away, off_device
from kvstate.transitions.retention import retain
from kvstate.types import LabelFork, Segment, Step, StreamFork

Key = tuple[str, str]
"""(request, label)."""


class Draft:
    """One stream while a step is simulated.

    `length` runs through the step, from `start` on; `kept` is what lasts when nothing, and `most` when everything, is
    accepted. `content` are the pages that `length` reaches, the same in every group; `surplus`, `fork_granted` and
    `span_granted` are pages per group, the latter those that must be granted.
    """

    __slots__ = (
        "base", "content", "exists", "fork_granted", "kept", "length", "most", "named", "opens", "prefix", "shared",
        "skips", "span_granted", "start", "stream", "surplus",
    )  # fmt: skip

    def __init__(self, state: State, stream: Stream) -> None:
        self.stream = stream
        base = stream.rows[-1] if stream.rows else None
        self.base = base
        self.length = base.length if base is not None else stream.length
        self.content = -(-self.length // state.page_size)
        tables = base.tables if base is not None else stream.residency.tables
        groups = range(len(state.device.pools))
        self.surplus = [tables[group].count - self.content if tables else 0 for group in groups]
        self.skips = [tables[group].skip if tables else 0 for group in groups]
        self.start = self.kept = self.most = self.length
        self.fork_granted = [0 for _ in groups]
        self.span_granted = [0 for _ in groups]
        # The full pages per group that a pre-fork or a prefix shares, when this is its target; and that prefix.
        self.shared: list[list[int]] | None = None
        self.prefix: tuple[ContentKey, ...] = ()
        # `opens`: by a span or a pre-fork of this step; `exists` also by one of its post-forks.
        self.opens = False
        self.exists = False
        self.named = False

    def base_pages(self, page_size: int) -> list[list[int]]:
        """Return the pages per group that the step starts from: the stream's own, or those that are shared with it."""
        if self.shared is not None:
            return self.shared
        tables = self.base.tables if self.base is not None else self.stream.residency.tables
        count = -(-self.start // page_size)
        return [table.part(0, count) for table in tables] if tables else [[] for _ in self.surplus]

    def starts_on(self, shared: list[list[int]], skips: list[int], length: int, page_size: int) -> None:
        """Start on full pages that others have too."""
        self.opens = True
        self.shared = shared
        self.skips = skips
        self.length = self.start = self.kept = self.most = length
        self.content = length // page_size

    def want(self, pages: int) -> list[int]:
        """Take `pages` from the surplus first; return how many must be granted, per group."""
        granted = []
        for group, surplus in enumerate(self.surplus):
            mine = min(pages, surplus)
            self.surplus[group] = surplus - mine
            granted.append(pages - mine)
        self.content += pages
        return granted


class Reservation:
    """A step simulated on a state that it does not change.

    With `returning`, only this request's part of the step is simulated, as if it were back on the device without
    surplus: what a reload claims for the step that comes next.

    Attributes
    ----------
    wanted, owning
        Per group: how many pages must be granted, and the cached ones that prefixes own.
    """

    def __init__(self, state: State, step: Step, returning: Request | None = None) -> None:
        self.state = state
        self.step = step
        self.returning = returning
        self.drafts: dict[Key, Draft] = {}
        self.new: list[Stream] = []
        self.pre: list[tuple[Draft, Draft]] = []
        self.post: list[tuple[Draft, Draft, list[int]]] = []
        self.places: list[tuple[Draft | None, int]] = []
        groups = range(len(state.device.pools))
        self.wanted = [0 for _ in groups]
        self.owning: list[list[int]] = [[] for _ in groups]
        # Who asked for pages, in this order.
        self.asked: list[tuple[Draft, list[int]]] = []
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

    def wants_per_label(self) -> dict[str, list[int]]:
        """Return the pages per group to be granted per label, where there are any."""
        wants: dict[str, list[int]] = {}
        for draft, granted in self.asked:
            own = wants.setdefault(draft.stream.label, [0 for _ in granted])
            wants[draft.stream.label] = [a + b for a, b in zip(own, granted, strict=True)]
        return wants

    def without_prefixes(self, leaving: Changes) -> Changes:
        """Return the pages of `leaving` that the step does not start on."""
        if not leaving:
            return leaving
        own: list[set[int]] = [set() for _ in self.wanted]
        for draft in self.drafts.values():
            if draft.prefix and draft.shared is not None:
                for mine, pages in zip(own, draft.shared, strict=True):
                    mine.update(pages)
        return [[page for page in pages if page not in mine] for pages, mine in zip(leaving, own, strict=True)]

    def first_short(self, leaving: Changes = ()) -> Stream:
        """Return the stream at which the pages asked for so far are more than there are."""
        wanted = [0 for _ in self.wanted]
        for draft, granted in self.asked:
            wanted = [a + b for a, b in zip(wanted, granted, strict=True)]
            if self.state.device.short(wanted, self.owning, leaving) is not None:
                return draft.stream
        raise AssertionError("the whole step is short of pages and no part of it is")

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
        draft = self.drafts[key] = Draft(self.state, stream)
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

    def _ask(self, draft: Draft, granted: list[int]) -> None:
        if any(granted):
            self.wanted = [a + b for a, b in zip(self.wanted, granted, strict=True)]
            self.asked.append((draft, granted))

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
        full, tail = divmod(one.length, self.state.page_size)
        shared = [
            [page for place, page in enumerate(pages, start=skip) if place < full]
            for pages, skip in zip(one.base_pages(self.state.page_size), one.skips, strict=True)
        ]
        two.starts_on(shared, list(one.skips), one.length, self.state.page_size)
        if tail:
            two.fork_granted = two.want(1)
            self._ask(two, two.fork_granted)
        self.pre.append((one, two))
        return None

    def segment(self, segment: Segment) -> Refusal | None:
        """Simulate one segment."""
        if segment.request is None:
            self.places.append((None, 0))
            return None
        draft = self._draft((segment.request, segment.label))
        if isinstance(draft, Refusal):
            return draft
        if segment.prefix and self.returning is None:
            refusal = self._start_on(draft, segment.prefix)
            if refusal is not None:
                return refusal
        draft.named = draft.named or segment.span > 0
        self.places.append((draft, draft.length))
        draft.length += segment.span
        need = -(-draft.length // self.state.page_size) - draft.content
        if need > 0:
            granted = draft.want(need)
            draft.span_granted = [a + b for a, b in zip(draft.span_granted, granted, strict=True)]
            self._ask(draft, granted)
        if self.step.commit and segment.span:
            draft.opens = True
            draft.most = draft.length
        return None

    def _start_on(self, draft: Draft, prefix: tuple[ContentKey, ...]) -> Refusal | None:
        """Start a stream on the findable pages of `prefix`, which the step's row will own."""
        stream, state = draft.stream, self.state
        if draft.length or draft.shared is not None:
            return NotEmpty(request=stream.request.id, label=stream.label, length=draft.length)
        matched = state.device.match(prefix, state.geometry)
        if matched < len(prefix):
            return PrefixLost(request=stream.request.id, label=stream.label, matched=matched)
        length = len(prefix) * state.page_size
        skips = [state.geometry.skipped(group, length) for group in range(len(state.device.pools))]
        shared = [
            [pool.places[key] for key in prefix[skip:]] for pool, skip in zip(state.device.pools, skips, strict=True)
        ]
        for own, pages, pool in zip(self.owning, shared, state.device.pools, strict=True):
            own.extend(page for page in pages if not pool.owners[page] and page not in own)
        draft.prefix = prefix
        draft.starts_on(shared, skips, length, state.page_size)
        return None

    def _post_fork(self, source: Key, target: Key) -> Refusal | None:
        pair = self._pair(source, target)
        if isinstance(pair, Refusal):
            return pair
        if not self._exists(source):
            return None
        one, two = pair
        size = self.state.page_size
        tails = [0 for _ in two.surplus]
        if size > 1 and (one.most > one.kept or one.kept % size):
            tails = [0 if surplus else 1 for surplus in two.surplus]
            two.surplus = [surplus - 1 + tail for surplus, tail in zip(two.surplus, tails, strict=True)]
            self._ask(two, tails)
        two.kept, two.most = one.kept, one.most
        two.exists = True
        self.post.append((one, two, tails))
        return None

    def largest(self) -> tuple[str, str, int]:
        """Return (request, label, sectors) of the request that asks for most; pages its streams share count once."""
        groups = range(len(self.wanted))
        pages: dict[str, list[int]] = {}
        labels: dict[str, str] = {}
        known: dict[str, list[set[int]]] = {}
        for (request, label), draft in self.drafts.items():
            total = pages.setdefault(request, [0 for _ in groups])
            mine = known.setdefault(request, [set() for _ in groups])
            for group, own in enumerate(draft.base_pages(self.state.page_size)):
                total[group] += len(set(own) - mine[group]) + draft.content - draft.skips[group] - len(own)
                mine[group].update(own)
            labels.setdefault(request, label)
        for _, two, tails in self.post:
            total = pages[two.stream.request.id]
            pages[two.stream.request.id] = [a + b for a, b in zip(total, tails, strict=True)]
        sectors = {request: self.state.geometry.sectors_for(own) for request, own in pages.items()}
        request = max(sectors, key=lambda r: sectors[r])
        return request, labels[request], sectors[request]

    # -- build

    def build(self, lease: Lease) -> list[Row]:
        """Carry out what was simulated: own and grant pages, make the rows and forks of `lease`."""
        state = self.state
        for stream in self.new:
            stream.request.streams[stream.label] = stream
            state.topology += 1
        # What the step starts on is owned before anything is evicted to make room for the rest.
        for draft in self.drafts.values():
            if draft.prefix:
                assert draft.shared is not None
                for pool, pages in zip(state.device.pools, draft.shared, strict=True):
                    pool.own(pages)
        state.device.make_room(self.wanted)
        rows: dict[int, WideRow] = {}
        forks: list[Fork] = []
        for draft in self.drafts.values():
            rows[id(draft)] = self._row(lease, draft)
        for one, two in self.pre:
            forks.append(self._build_pre_fork(rows, one, two))
        for draft in self.drafts.values():
            self._build_growth(rows[id(draft)], draft)
        for one, two, tails in self.post:
            row = rows[id(two)]
            row.tails = tuple(pool.grant(tail) for pool, tail in zip(state.device.pools, tails, strict=True))
            forks.append(Fork(rows[id(one)], row, False, ()))
            row.room = 0
            row.stream.pending_fork = lease
        lease.forks = tuple(forks)
        lease.places = [(rows[id(draft)] if draft is not None else None, start) for draft, start in self.places]
        return list(rows.values())

    def _row(self, lease: Lease, draft: Draft) -> WideRow:
        stream, base, state = draft.stream, draft.base, self.state
        tables = base.tables if base is not None else stream.residency.tables
        released = base.released if base is not None else stream.released
        row = WideRow(stream, lease, draft.start, 0, released, tables, 0, stream.generation)
        row.takes, row.temps, row.tails = state.no_pages(), state.no_pages(), state.no_pages()
        row.entered = NOTHING
        row.released_before = released
        row.forked = False
        row.opens = draft.opens
        row.policy = None
        row.prefix = draft.prefix
        if draft.prefix:
            assert draft.shared is not None
            started = []
            for group, (pool, shared) in enumerate(zip(state.device.pools, draft.shared, strict=True)):
                row.takes[group].extend(shared)
                row.entered = merge(row.entered, pool.ready_of(shared))
                started.append(Table.of([*shared, *tables[group]], draft.skips[group], pool.sink))
            row.tables = tuple(started)
            row.forked = True
        row.step_tables = row.tables
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
            source_table = source.step_tables[group]
            shared = source_table.part(0, length // size)
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
                origin = self.origins.get((id(one), group), source_table[length // size])
                self.origins[id(two), group] = origin
                copied.append((origin, tail, length % size))
            pages.extend(surplus)
            tables.append(Table.of(pages, two.skips[group], pool.sink))
            copies.append(copied)
        row.step_tables = row.tables = tuple(tables)
        row.released = row.released_before = source.released_before
        row.forked = True
        return Fork(source, row, True, tuple(copies))

    def _build_growth(self, row: WideRow, draft: Draft) -> None:
        """Give the row the pages its spans need and say what it leaves when everything is accepted."""
        state = self.state
        size = state.page_size
        row.stop = draft.length
        covered = -(-draft.start // size)
        wanted = -(-draft.length // size)
        tables: list[Table] = []
        for group, pool in enumerate(state.device.pools):
            granted = pool.grant(draft.span_granted[group])
            (row.takes if self.step.commit else row.temps)[group].extend(granted)
            table = row.step_tables[group].extended(granted)
            row.entered = merge(row.entered, pool.fence_of(table.part(covered, wanted)))
            tables.append(table)
        row.step_tables = tuple(tables)
        lasting = row.step_tables if self.step.commit else row.tables
        length = draft.length if self.step.commit else draft.start
        if self.step.commit:
            row.tables, row.length, row.released, _ = retain(state, lasting, length, row.released, row.policy)
        else:
            row.tables, row.length = lasting, length
        row.room = state.room(row.length, row.stream.retention)
