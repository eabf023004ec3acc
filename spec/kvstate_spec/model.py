"""What the reference remembers: plain records, no rule of change. Numbers are sentences of spec/README.md."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, TypeAlias

import attrs

from kvstate.prefix import Key
from kvstate.types import Record, RequestConfig, Segment, Step, StreamFork, StreamId

Token: TypeAlias = Hashable


class Page(NamedTuple):
    """One page: a serial number that nobody reuses, and the group that it is of."""

    group: int
    serial: int


# Where in a step pages are asked for: ("pre" | "segment" | "post", place).
Ask: TypeAlias = tuple[str, int]

# Per group: pages, one per place of the table; None where a window has left the place.
Table: TypeAlias = list[list[Page | None]]

# Per group: pages in no place.
Pages: TypeAlias = list[list[Page]]

ON_DEVICE, OFFLOADING, ON_HOST, RELOADING = "OnDevice", "Offloading", "OnHost", "Reloading"
FETCHING, FETCH_FAILED = "Fetching", "FetchFailed"
AWAY = (OFFLOADING, ON_HOST, RELOADING)


def pages_in(table: Table) -> list[Page]:
    """Return the pages of a table, of every group."""
    return [page for pages in table for page in pages if page is not None]


def loose(pages: Pages) -> list[Page]:
    """Return the pages of every group in one list."""
    return [page for own in pages for page in own]


def skipped(table: Table) -> tuple[int, ...]:
    """Return the places at the front that a window has left, per group (33)."""
    return tuple(sum(page is None for page in pages) for pages in table)


@attrs.define
class Image:
    """What a stream holds, stored or simulated (2). `keys` are those of its first pages (34)."""

    content: Table
    surplus: Pages
    opened: bool = False
    released: int = 0
    tokens: list[Token] = attrs.Factory(list)
    keys: list[Key] = attrs.Factory(list)
    stale: bool = False

    @classmethod
    def blank(cls, groups: int) -> Image:
        """Return the image of a stream that was never opened."""
        return cls([[] for _ in range(groups)], [[] for _ in range(groups)])

    def copy(self) -> Image:
        """Return an image that can be changed without changing this one."""
        return Image(
            [list(pages) for pages in self.content],
            [list(pages) for pages in self.surplus],
            self.opened,
            self.released,
            list(self.tokens),
            list(self.keys),
            self.stale,
        )

    def pages(self) -> list[Page]:
        """Return all pages, content and surplus."""
        return pages_in(self.content) + loose(self.surplus)

    def result(self) -> tuple[bool, int, int]:
        """Return what a row above assumes (12)."""
        return self.opened, len(self.tokens), self.released


@attrs.define(eq=False)
class Stream:
    """One token history, of one incarnation."""

    id: StreamId
    image: Image
    host: Table
    residency: str = ON_DEVICE
    error: str = ""
    rows: list[Row] = attrs.Factory(list)

    @classmethod
    def of(cls, id: StreamId, groups: int) -> Stream:
        """Return a stream that was never opened."""
        return cls(id, Image.blank(groups), [[] for _ in range(groups)])

    def counting(self) -> list[Row]:
        """Return the rows that still count, oldest first."""
        return [row for row in self.rows if not row.void]


@attrs.define(eq=False)
class Request:
    """One incarnation. Its streams are in the order in which they were first named."""

    id: str
    config: RequestConfig
    groups: int
    streams: dict[str, Stream] = attrs.Factory(dict)

    def stream(self, label: str) -> Stream:
        """Return the stream of `label`, which begins to exist, unopened."""
        return self.streams.setdefault(label, Stream.of(StreamId(self.id, label), self.groups))

    def residency(self, label: str) -> str:
        """Return where a stream is; one that does not exist is where the request is (4)."""
        if label in self.streams:
            return self.streams[label].residency
        return next((s.residency for s in self.streams.values() if s.residency in AWAY), ON_DEVICE)

    def tidy(self) -> None:
        """Forget streams that were never opened, own nothing and have no row (3)."""
        for label, s in list(self.streams.items()):
            owns = s.image.pages() or pages_in(s.host) or s.residency in (FETCHING, FETCH_FAILED)
            if not (s.image.opened or s.rows or owns):
                del self.streams[label]


@attrs.frozen
class Hit:
    """What a segment with a prefix starts on (38): a table, the tokens that it stands for, and the keys."""

    content: Table
    tokens: tuple[Token, ...]
    keys: tuple[Key, ...]


@attrs.define(eq=False)
class Row:
    """One lease on one stream (12)."""

    lease: Lease
    stream: Stream
    assumes: tuple[bool, int, int]
    leaves: Image
    sources: list[Row] = attrs.Factory(list)
    post_target: bool = False
    void: bool = False

    def above(self) -> tuple[Row, ...]:
        """Return the rows above this one."""
        return tuple(self.stream.rows[self.stream.rows.index(self) + 1 :])


@attrs.define(eq=False)
class Lease:
    """An admitted step. `told`: the void rows that its owner knows of; `seen`: those that its newest plan left out."""

    handle: int
    step: Step
    granted: dict[Ask, Pages]
    # What pre-forks share, per target, and what prefixes start on: the lease owns these too until it ends.
    shared: dict[StreamId, list[Page]]
    hits: dict[StreamId, Hit]
    # The post-forks that do something (9).
    posted: list[StreamFork]
    rows: list[Row] = attrs.Factory(list)
    status: str = "admitted"
    plan: int | None = None
    told: list[Row] = attrs.Factory(list)
    seen: list[Row] = attrs.Factory(list)
    abort_at_exit: bool = False
    # The stream that each page was granted for.
    names: dict[Ask, StreamId] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.names = {ask: asked_for(self.step, ask) for ask in self.granted}

    def counting(self) -> list[Row]:
        """Return the rows that still count."""
        return [row for row in self.rows if not row.void]

    def void(self) -> list[Row]:
        """Return the rows that will not count."""
        return [row for row in self.rows if row.void]

    def void_places(self) -> tuple[int, ...]:
        """Return the places of the segments that will not count."""
        void = {row.stream.id for row in self.void()}
        return tuple(i for i, segment in enumerate(self.step.segments) if stream_id(segment) in void)

    def pages(self) -> list[tuple[StreamId, list[Page]]]:
        """Return the pages that the lease owns, by the stream that they are for."""
        granted = [(self.names[ask], loose(pages)) for ask, pages in self.granted.items()]
        return granted + list(self.shared.items()) + [(name, pages_in(hit.content)) for name, hit in self.hits.items()]


@attrs.define(eq=False)
class Claim:
    """An offload, reload or fetch that has not ended, and the pages that it owns."""

    kind: str
    request: Request
    device: list[Page] = attrs.Factory(list)
    host: list[Page] = attrs.Factory(list)
    # The other tier's page of each content page of the request (offload, reload), and what `extra` asked for (23).
    moved: dict[Page, Page] = attrs.Factory(dict)
    extra: dict[str, Pages] = attrs.Factory(dict)
    # What is fetched, into which stream, the table behind the own pages, and what the stream's own table loses.
    label: str = ""
    record: Record | None = None
    fresh: Table = attrs.Factory(list)
    error: str | None = None
    orphaned: bool = False


@attrs.frozen
class Findable:
    """A page that a key finds (34): the page, and how many keys are in front of its own."""

    page: Page
    depth: int


def stream_id(segment: Segment) -> StreamId | None:
    """Return the stream of a segment, None for padding."""
    return None if segment.request is None else StreamId(segment.request, segment.label)


def named(step: Step) -> list[StreamId]:
    """Return the streams that a step names, in order; of a fork the source first (5, 6)."""
    names: list[StreamId] = []
    for fork in step.stream_forks(step.pre_forks):
        names += [fork.source, fork.target]
    names += [name for segment in step.segments if (name := stream_id(segment)) is not None]
    for fork in step.stream_forks(step.post_forks):
        names += [fork.source, fork.target]
    return list(dict.fromkeys(names))


def asked_for(step: Step, ask: Ask) -> StreamId:
    """Return the stream that pages are granted for."""
    phase, place = ask
    if phase == "segment":
        name = stream_id(step.segments[place])
        assert name is not None, "padding asks for no page"
        return name
    return step.stream_forks(step.pre_forks if phase == "pre" else step.post_forks)[place].target
