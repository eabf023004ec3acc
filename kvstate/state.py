"""State: everything the machine knows. No lock, no device, no clock of its own.

Who owns a page (``Arena`` counts owners, the view lists them)::

    stream table   content pages, then surplus pages (kept by a reset, or behind rejected tokens)
    lease row      `takes`: granted or shared for the stream, its own at commit · `temps`: returned at commit ·
                   `tails`: for the last page of a post-fork
    held           pages that left a stream while leases were open that may use them, until the last of those ended
    claim          the device and host pages an offload or reload moves · the pages a fetch writes

Streams, leases and claims are identities: a late commit compares objects, never names or counters.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import ClassVar

import attrs

from kvstate.arena import Arena
from kvstate.errors import ForeignHandle, TableTooShort
from kvstate.ops import CopyIn, CopyOut, FetchBegin, Op, Plan, Tier
from kvstate.ordering import NOTHING, Clock
from kvstate.prefix import Key
from kvstate.types import Geometry, Record, RequestConfig, RetentionPolicy, Step

Pages = tuple[list[int], ...]
"""Pages per group."""


class Table:
    """The pages of a stream in one group, in order: a value.

    Page i holds tokens ``i · page_size …``. The first `skip` pages are not held: a window has left them; whatever the
    buffer has at their places means nothing. `count` counts them all the same.

    Extending shares the buffer while nobody else extended it, so growing by a page does not copy the table, and a view
    that was taken earlier stays true.
    """

    __slots__ = ("_buffer", "count", "skip")

    def __init__(self, pages: list[int], count: int, skip: int = 0) -> None:
        self._buffer = pages
        self.count = count
        self.skip = skip

    @classmethod
    def of(cls, held: Sequence[int], skip: int = 0, sink: int = 0) -> Table:
        """Return a table that holds `held` behind `skip` places, at which the buffer names the sink."""
        pages = [sink] * skip
        pages.extend(held)
        return cls(pages, len(pages), skip)

    def __iter__(self) -> Iterator[int]:
        return iter(self._buffer[self.skip : self.count])

    def __getitem__(self, place: int) -> int:
        return self._buffer[place]

    def first(self, count: int, sink: int = 0) -> tuple[int, ...]:
        """Return the first `count` pages; the sink in place of those that are not held."""
        if count > self.count:
            raise TableTooShort(count, self.count)
        if not self.skip:
            return tuple(self._buffer[:count])
        skip = min(self.skip, count)
        return (sink,) * skip + tuple(self._buffer[skip:count])

    def extends(self, older: Table) -> bool:
        """Tell, without looking at pages, that this table begins with all of `older`; False decides nothing."""
        return self._buffer is older._buffer and self.count >= older.count

    def part(self, start: int, stop: int) -> list[int]:
        """Return pages ``start … stop``, those that are held."""
        return self._buffer[max(start, self.skip) : min(stop, self.count)]

    def extended(self, pages: Sequence[int]) -> Table:
        """Return this table with `pages` at its end."""
        if not pages:
            return self
        buffer = self._buffer
        if len(buffer) != self.count:
            buffer = buffer[: self.count]
        buffer.extend(pages)
        return Table(buffer, len(buffer), self.skip)

    def slid(self, skip: int) -> Table:
        """Return this table without holding the pages in front of `skip`."""
        return self if skip <= self.skip else Table(self._buffer, self.count, skip)


Tables = tuple[Table, ...]
"""One table per group."""


class OnDevice:
    """Content is in device pages. `room` is how far the last content page reaches: a step up to there needs nothing."""

    __slots__ = ("room", "tables")
    name: ClassVar[str] = "OnDevice"

    def __init__(self, tables: Tables, room: int) -> None:
        self.tables = tables
        self.room = room


class Away:
    """Base of every residency that a step cannot run on."""

    __slots__ = ()
    name: ClassVar[str] = "Away"
    room: ClassVar[int] = 0
    tables: ClassVar[Tables] = ()


class Offloading(Away):
    """An offload claim holds the device pages and the host pages they are copied to."""

    __slots__ = ("claim",)
    name = "Offloading"

    def __init__(self, claim: OffloadClaim) -> None:
        self.claim = claim


class OnHost(Away):
    """Content is in host pages. `written` is the copy that filled them, `used` their newest other uses."""

    __slots__ = ("host", "used", "written")
    name = "OnHost"

    def __init__(self, host: Tables, written: Clock, used: Clock) -> None:
        self.host = host
        self.written = written
        self.used = used


class Reloading(Away):
    """A reload claim holds the host pages and the device pages they are copied to."""

    __slots__ = ("claim",)
    name = "Reloading"

    def __init__(self, claim: ReloadClaim) -> None:
        self.claim = claim


class Fetching(Away):
    """A fetch is writing behind the stream's own content."""

    __slots__ = ("device", "fetch")
    name = "Fetching"

    def __init__(self, device: Tables, fetch: Fetch) -> None:
        self.device = device
        self.fetch = fetch


class FetchFailed(Away):
    """A fetch failed; the stream's own content is intact, and a reset clears the error."""

    __slots__ = ("device", "error")
    name = "FetchFailed"

    def __init__(self, device: Tables, error: str) -> None:
        self.device = device
        self.error = error


class Gone(Away):
    """The request was removed."""

    __slots__ = ()
    name = "Gone"


Residency = OnDevice | Offloading | OnHost | Reloading | Fetching | FetchFailed | Gone
GONE = Gone()


@attrs.define(eq=False)
class Held:
    """Pages that left a stream while leases were open that may use them: `behind` are the serials of those."""

    behind: set[int]
    pages: Pages
    uses: Clock


class Stream:
    """One token history.

    `length` tokens are stored, in every residency; `released` left from the front; the next token's position is their
    sum. `keys` are the content keys of the first pages, in every group. `rows` are the open leases' claims on this
    stream, oldest first; `voided` those that will not count.
    """

    __slots__ = (
        "epoch", "generation", "held", "keys", "label", "length", "opened", "pending_fork", "released", "request",
        "residency", "retention", "rows", "stale", "used", "voided", "written",
    )  # fmt: skip

    def __init__(self, request: Request, label: str, groups: int) -> None:
        self.request = request
        self.label = label
        self.residency: Residency = OnDevice(tuple(Table([], 0) for _ in range(groups)), 0)
        self.length = 0
        self.released = 0
        self.generation = 0
        self.epoch = 0
        # Content keys of the leading pages; none any more when some of the content is of older weights.
        self.keys: list[Key] = []
        self.stale = False
        self.written: Clock = NOTHING
        self.used: Clock = NOTHING
        self.rows: list[Row] = []
        self.voided: list[Row] = []
        self.held: list[Held] = []
        self.retention: RetentionPolicy | None = request.config.retention.get(label)
        self.pending_fork: Lease | None = None
        self.opened = False

    def __str__(self) -> str:
        return f"{self.request.id}/{self.label}"


class Request:
    """One incarnation of a request id, with its streams by label. The stream "main" is there from the start."""

    __slots__ = ("config", "id", "incarnation", "streams")

    def __init__(self, id: str, incarnation: int, config: RequestConfig) -> None:
        self.id = id
        self.incarnation = incarnation
        self.config = config
        self.streams: dict[str, Stream] = {}


class Row:
    """What one lease assumes and does on one stream, when it stays inside the stream's last content page.

    `start … length` are the tokens computed; `tables` and `released` are as the lease leaves them.
    """

    __slots__ = ("generation", "lease", "length", "released", "room", "start", "stream", "tables", "void")
    wide: ClassVar[bool] = False

    def __init__(
        self, stream: Stream, lease: Lease, start: int, length: int, released: int, tables: Tables, room: int,
        generation: int,
    ) -> None:  # fmt: skip
        self.stream = stream
        self.lease = lease
        self.start = start
        self.length = length
        self.released = released
        self.tables = tables
        self.room = room
        self.generation = generation
        self.void = False

    @property
    def stop(self) -> int:
        """Tokens in the tables while the step runs."""
        return self.length

    @property
    def step_tables(self) -> Tables:
        """The tables while the step runs."""
        return self.tables

    @property
    def released_before(self) -> int:
        """Tokens that had left the front when the step runs."""
        return self.released


class WideRow(Row):
    """A row that takes pages, is forked onto, stores nothing, or lets pages go when it commits.

    `stop`, `step_tables` and `released_before` describe the step while it runs; `length`, `tables` and `released` what
    is assumed above it once everything was accepted. `entered` is what a step follows because of the pages it enters.
    `prefix` are the keys of cached pages that the stream starts on.
    """

    __slots__ = (
        "entered",
        "forked",
        "opens",
        "policy",
        "prefix",
        "released_before",
        "step_tables",
        "stop",
        "tails",
        "takes",
        "temps",
    )
    wide = True

    stop: int
    step_tables: Tables
    released_before: int
    takes: Pages
    temps: Pages
    tails: Pages
    entered: Clock
    forked: bool
    opens: bool
    policy: RetentionPolicy | None
    prefix: tuple[Key, ...]

    @property
    def owned(self) -> tuple[Pages, Pages, Pages]:
        """The pages that the row owns."""
        return self.takes, self.temps, self.tails


@attrs.define(eq=False)
class Fork:
    """A fork of an open lease. `copies` are those of a pre-fork: the source's partly filled last page, per group."""

    source: WideRow
    target: WideRow
    pre: bool
    copies: tuple[list[tuple[int, int, int]], ...]


class Status(enum.Enum):
    """The life of a lease."""

    ADMITTED = "admitted"
    PLANNED = "planned"
    ENTERED = "launching"
    LAUNCHED = "launched"
    COMMITTED = "committed"
    ABORTED = "aborted"


OPEN = frozenset({Status.ADMITTED, Status.PLANNED, Status.ENTERED, Status.LAUNCHED})


class Lease:
    """What an admitted step holds until it commits or aborts."""

    __slots__ = (
        "abort_requested", "began", "failure", "forks", "number", "places", "plan", "rows", "serial", "status",
        "step", "told", "void",
    )  # fmt: skip

    def __init__(self, serial: int, step: Step) -> None:
        self.serial = serial
        self.step = step
        self.status = Status.ADMITTED
        self.rows: list[Row] = []
        # Row and first token per segment; None where segment i is simply row i.
        self.places: list[tuple[Row | None, int]] | None = None
        self.forks: Sequence[Fork] = ()
        self.plan: Plan | None = None
        self.void = 0
        self.told = 0
        self.number = 0
        self.began: Op | None = None
        self.abort_requested = False
        self.failure: str | None = None

    def __repr__(self) -> str:
        return f"<lease {self.serial} {self.status.value}>"

    @property
    def open(self) -> bool:
        """True until the lease committed or aborted."""
        return self.status in OPEN

    def placed(self, place: int) -> tuple[Row | None, int]:
        """Return the row of segment `place` (None for padding) and the first token it writes."""
        if self.places is None:
            row = self.rows[place]
            return row, row.start
        return self.places[place]

    def void_places(self) -> tuple[int, ...]:
        """Return the segments that will not count."""
        if not self.void:
            return ()
        rows = (self.placed(place)[0] for place in range(len(self.step.segments)))
        return tuple(place for place, row in enumerate(rows) if row is not None and row.void)


@attrs.define(eq=False)
class Part:
    """One stream inside an offload or reload claim, with its device and host tables per group."""

    stream: Stream
    device: Tables
    host: Tables


@attrs.define(eq=False)
class _Copying:
    """A claim whose copies are one op. `opened_s` is the caller's clock when it was made."""

    serial: int
    request: Request
    parts: tuple[Part, ...]
    opened_s: float
    op: CopyOut | CopyIn | None = None
    # Why it cannot commit; and whether it is its own copy that never ran.
    failure: str | None = None
    copy_failed: bool = False
    open: bool = True

    def __repr__(self) -> str:
        return f"<{self.verb} claim {self.serial} of {self.request.id}>"

    verb: ClassVar[str] = ""


@attrs.define(eq=False, repr=False)
class OffloadClaim(_Copying):
    """Owns the device pages of a request and the host pages they are copied to.

    `spoiled` are streams whose content turned out to be lost after the claim was made; they are emptied at its end.
    """

    verb = "offload"
    spoiled: list[Stream] = attrs.field(factory=list)


@attrs.define(eq=False, repr=False)
class ReloadClaim(_Copying):
    """Owns the host pages of a request and the device pages they are copied to. `residencies` come back on abandon."""

    verb = "reload"
    residencies: tuple[OnHost, ...] = ()
    # What reads of pages that the device had by their keys follow.
    found: Clock = NOTHING


@attrs.define(eq=False)
class Fetch:
    """Tokens ``start … stop`` of one stream, which a transport writes into `owned` pages until it ended.

    ``owned[g][0]`` is page ``firsts[g]`` of the stream's table.
    """

    serial: int
    stream: Stream
    record: Record
    start: int
    stop: int
    firsts: tuple[int, ...]
    owned: Pages
    opened_s: float
    op: FetchBegin | None = None
    cancel_requested: bool = False
    started: bool = False
    cancel_told: bool = False
    open: bool = True

    verb: ClassVar[str] = "retrieve"

    def __repr__(self) -> str:
        return f"<fetch {self.serial} of {self.stream}>"


Claim = OffloadClaim | ReloadClaim | Fetch


class State:
    """All that the machine knows of one paged cache.

    Parameters
    ----------
    geometry
        Sizes.
    address
        What other managers use to reach this one; its identity in publications.
    rank, world_size
        Of this worker in its tensor-parallel group.
    """

    __slots__ = (
        "address", "claims", "device", "geometry", "host", "incarnations", "key_epoch", "leases", "next_op", "outbox",
        "page_size", "rank", "requests", "serials", "topology", "windows", "world_size",
    )  # fmt: skip

    def __init__(self, geometry: Geometry, address: str = "kv", rank: int = 0, world_size: int = 1) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}; give 0 <= rank < world_size")
        self.geometry = geometry
        self.page_size = geometry.page_size
        self.address = address
        self.rank = rank
        self.world_size = world_size
        self.device = Arena(Tier.DEVICE, geometry)
        self.host = Arena(Tier.HOST, geometry)
        # Groups that have a window.
        self.windows = tuple(g for g, group in enumerate(geometry.groups) if group.window is not None)
        # Counts changes of the weights: content keys are of one of them.
        self.key_epoch = 0
        self.requests: dict[str, Request] = {}
        self.incarnations: dict[int, Request] = {}
        self.leases: dict[int, Lease] = {}
        self.claims: dict[int, Claim] = {}
        self.outbox: list[Op] = []
        self.next_op = 1
        self.serials = 0
        # Counts changes of the set of streams: what a Step remembers of it is good until this moves.
        self.topology = 0

    def own(self, handle: Lease | Claim) -> None:
        """Raise ForeignHandle when the open `handle` is another state's: serials are per state."""
        mine = self.leases if isinstance(handle, Lease) else self.claims
        if mine.get(handle.serial) is not handle:
            raise ForeignHandle(handle)

    def serial(self) -> int:
        """Return the next serial of a lease, claim or incarnation."""
        self.serials += 1
        return self.serials

    def number(self) -> int:
        """Return the next number of the one total order of ops."""
        number = self.next_op
        self.next_op = number + 1
        return number

    def room(self, length: int, policy: RetentionPolicy | None) -> int:
        """Return how far a stream of `length` tokens reaches before pages come or go; 0 where retention must look."""
        if policy is not None:
            return 0
        room = -(-length // self.page_size) * self.page_size
        for group in self.windows:
            window = self.geometry.groups[group].window
            assert window is not None
            # The longest that needs no page less.
            room = min(room, (self.geometry.skipped(group, length) + 1) * self.page_size + window - 2)
        return room

    def no_pages(self) -> Pages:
        """Return an empty list per group."""
        return tuple([] for _ in self.device.pools)
