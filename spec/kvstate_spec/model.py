"""What the reference remembers: plain records, no rule of change. Numbers are sentences of spec/README.md."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import attrs

from kvstate.types import Record, RequestConfig, Segment, Step, StreamFork, StreamId

Page: TypeAlias = int
Token: TypeAlias = Hashable
# Where in a step a page is asked for: ("pre" | "segment" | "post", place).
Key: TypeAlias = tuple[str, int]

ON_DEVICE, OFFLOADING, ON_HOST, RELOADING = "OnDevice", "Offloading", "OnHost", "Reloading"
FETCHING, FETCH_FAILED = "Fetching", "FetchFailed"
AWAY = (OFFLOADING, ON_HOST, RELOADING)


@attrs.define
class Image:
    """What a stream holds, stored or simulated (2)."""

    opened: bool = False
    released: int = 0
    tokens: list[Token] = attrs.Factory(list)
    content: list[Page] = attrs.Factory(list)
    surplus: list[Page] = attrs.Factory(list)

    def copy(self) -> Image:
        """Return an image that can be changed without changing this one."""
        return Image(self.opened, self.released, list(self.tokens), list(self.content), list(self.surplus))

    def result(self) -> tuple[bool, int, int]:
        """Return what a row above assumes (12)."""
        return self.opened, len(self.tokens), self.released


@attrs.define(eq=False)
class Stream:
    """One token history, of one incarnation."""

    id: StreamId
    image: Image = attrs.Factory(Image)
    host: list[Page] = attrs.Factory(list)
    residency: str = ON_DEVICE
    error: str = ""
    rows: list[Row] = attrs.Factory(list)

    def counting(self) -> list[Row]:
        """Return the rows that still count, oldest first."""
        return [row for row in self.rows if not row.void]


@attrs.define(eq=False)
class Request:
    """One incarnation. Its streams are in the order in which they were first named."""

    id: str
    config: RequestConfig
    streams: dict[str, Stream] = attrs.Factory(dict)

    def stream(self, label: str) -> Stream:
        """Return the stream of `label`, which begins to exist, unopened."""
        return self.streams.setdefault(label, Stream(StreamId(self.id, label)))

    def residency(self, label: str) -> str:
        """Return where a stream is; one that does not exist is where the request is (4)."""
        if label in self.streams:
            return self.streams[label].residency
        return next((s.residency for s in self.streams.values() if s.residency in AWAY), ON_DEVICE)

    def tidy(self) -> None:
        """Forget streams that were never opened, own nothing and have no row (3)."""
        for label, s in list(self.streams.items()):
            owns = s.image.surplus or s.image.content or s.host or s.residency in (FETCHING, FETCH_FAILED)
            if not (s.image.opened or s.rows or owns):
                del self.streams[label]


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


@attrs.define(eq=False)
class Lease:
    """An admitted step. `told`: the void rows that its owner knows of; `seen`: those that its newest plan left out."""

    handle: int
    step: Step
    granted: dict[Key, list[Page]]
    # What pre-forks share, per target: the lease owns these too until it ends.
    shared: dict[StreamId, list[Page]]
    # The post-forks that do something (9).
    posted: list[StreamFork]
    rows: list[Row] = attrs.Factory(list)
    status: str = "admitted"
    plan: int | None = None
    told: list[Row] = attrs.Factory(list)
    seen: list[Row] = attrs.Factory(list)
    abort_at_exit: bool = False

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


@attrs.define(eq=False)
class Claim:
    """An offload, reload or fetch that has not ended, and the pages that it owns."""

    kind: str
    request: Request
    device: list[Page] = attrs.Factory(list)
    host: list[Page] = attrs.Factory(list)
    # The other tier's page of each content page of the request (offload, reload), and what `extra` asked for (23).
    moved: dict[Page, Page] = attrs.Factory(dict)
    extra: dict[str, list[Page]] = attrs.Factory(dict)
    # What is fetched, into which stream, and the new pages for it.
    label: str = ""
    record: Record | None = None
    fresh: list[Page] = attrs.Factory(list)
    error: str | None = None
    orphaned: bool = False


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
