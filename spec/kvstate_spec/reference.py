"""The semantics of spec/README.md as a slow, obvious program; numbers in docstrings are that file's sentences.

Nothing here knows about ordering, page numbers or copies. A page is a serial number that nobody reuses, and a page is
free when nobody owns it: `device_free` asks every possible owner each time. A driver runs the machine first and then
calls the method of the same name here, with the same arguments and with the integer handle under which it will name the
lease, claim or fetch later. A method returns the refusal that it expects, or an outcome.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvstate.refusals import (
    AlreadyLaunched,
    ClaimEnded,
    ConfigConflict,
    CopyFailed,
    FetchFailed,
    FetchPending,
    ForkPending,
    HostExhausted,
    LayoutMismatch,
    LeaseEnded,
    NoHostPool,
    NotLaunched,
    NotOnHost,
    OnRemoteHost,
    OutOfOrder,
    PagesExhausted,
    Refusal,
    StalePlan,
    StreamBusy,
    StreamNotOnDevice,
    TooLarge,
    UnknownRequest,
    WorldSizeMismatch,
)
from kvstate.types import MAIN, Geometry, Publication, Record, RequestConfig, Step, StreamFork, StreamId
from kvstate_spec.abstract import Abstract, StreamAbstract, agrees, classes
from kvstate_spec.model import (
    AWAY,
    FETCH_FAILED,
    FETCHING,
    OFFLOADING,
    ON_DEVICE,
    ON_HOST,
    RELOADING,
    Claim,
    Image,
    Key,
    Lease,
    Page,
    Request,
    Row,
    Stream,
    Token,
    named,
    stream_id,
)
from kvstate_spec.walk import Walked, walk

__all__ = ["Abstract", "Reference", "StreamAbstract", "agrees"]


@attrs.define
class Reference:
    """The state that spec/README.md speaks of. `rank`, `world_size` and `address` are this worker's, for retrieves."""

    geometry: Geometry
    rank: int = 0
    world_size: int = 1
    address: str = ""
    requests: dict[str, Request] = attrs.Factory(dict)
    leases: dict[int, Lease] = attrs.Factory(dict)
    claims: dict[int, Claim] = attrs.Factory(dict)
    # Pages that left a stream, each with the leases behind which it stays taken (20).
    kept: list[tuple[Page, frozenset[int]]] = attrs.Factory(list)
    # The targets of the newest commit's post-forks whose last page is copied.
    copied: list[Stream] = attrs.Factory(list)
    _serial: Iterator[int] = attrs.Factory(itertools.count)

    # ---------------------------------------------------------------------------------------------------------------
    # Who owns which page

    def owners(self) -> list[tuple[object, list[Page]]]:
        """Return every owner of device pages with its pages."""
        owners: list[tuple[object, list[Page]]] = []
        for s in self.streams():
            owners.append((s, s.image.content + s.image.surplus))
        for lease in self.leases.values():
            owners.append(
                (lease, [page for pages in (*lease.granted.values(), *lease.shared.values()) for page in pages])
            )
        for page, behind in self.kept:
            if any(handle in self.leases for handle in behind):
                owners.append(("kept", [page]))
        for claim in self.claims.values():
            owners.append((claim, claim.device))
        return owners

    @property
    def device_free(self) -> int:
        """Device pages that nobody owns."""
        return self.geometry.pages - len({page for _, pages in self.owners() for page in pages})

    @property
    def host_free(self) -> int:
        """Host pages that nobody owns."""
        owned = [s.host for s in self.streams()] + [claim.host for claim in self.claims.values()]
        return self.geometry.host_pages - len({page for pages in owned for page in pages})

    def streams(self) -> list[Stream]:
        """Return every stream of every live request."""
        return [s for request in self.requests.values() for s in request.streams.values()]

    def _new(self, count: int) -> list[Page]:
        return list(itertools.islice(self._serial, count))

    def _leave(self, stream: Stream, pages: Sequence[Page]) -> None:
        """Let go of pages that a stream no longer holds: leases with rows on it keep them taken (20)."""
        if behind := frozenset(row.lease.handle for row in stream.rows):
            self.kept += [(page, behind) for page in pages]

    # ---------------------------------------------------------------------------------------------------------------
    # Steps

    def _walk(
        self,
        step: Step,
        images: Mapping[StreamId, Image],
        granted: dict[Key, list[Page]],
        tokens: Sequence[Sequence[Token]],
        accepted: Sequence[int],
        void: frozenset[StreamId] = frozenset(),
        doing: Sequence[StreamFork] | None = None,
    ) -> Walked:
        policies = {name: self.requests[name.request].config.retention.get(name.label) for name in images.keys() - void}
        return walk(step, self.geometry.page_size, policies, self._new, images, granted, tokens, accepted, void, doing)

    def _base(self, name: StreamId) -> Image:
        """Return what the youngest row that counts will leave on a stream, else what is stored (5)."""
        stream = self.requests[name.request].streams.get(name.label)
        if stream is None:
            return Image()
        counting = stream.counting()
        return (counting[-1].leaves if counting else stream.image).copy()

    def admit(self, step: Step, *, handle: int = -1) -> Refusal | None:
        """Reserve by simulating, or refuse and change nothing (5, 6, 11, 12)."""
        names = named(step)
        for name in names:
            request = self.requests.get(name.request)
            if request is None:
                return UnknownRequest(request=name.request)
            residency = request.residency(name.label)
            if residency == FETCHING:
                return FetchPending(request=name.request, label=name.label)
            if residency == FETCH_FAILED:
                return FetchFailed(request=name.request, label=name.label, error=request.streams[name.label].error)
            if residency in AWAY:
                return StreamNotOnDevice(request=name.request, label=name.label, residency=residency)
            if name.label in request.streams and any(r.post_target for r in request.streams[name.label].counting()):
                return ForkPending(request=name.request, label=name.label)

        images = {name: self._base(name) for name in names}
        assumed = {name: image.result() for name, image in images.items()}
        granted: dict[Key, list[Page]] = {}
        spans = [segment.span for segment in step.segments]
        walked = self._walk(step, images, granted, [[None] * span for span in spans], spans)
        if refusal := self._too_few(step, names, walked.tables, granted):
            return refusal

        lease = self.leases[handle] = Lease(handle, step, granted, walked.shared, walked.posted)
        rows: dict[StreamId, Row] = {}
        for name in names:
            stream = self.requests[name.request].stream(name.label)
            rows[name] = Row(lease, stream, assumed[name], images[name])
            lease.rows.append(rows[name])
            stream.rows.append(rows[name])
        for fork in walked.forked:
            rows[fork.target].sources.append(rows[fork.source])
        for fork in walked.posted:
            rows[fork.target].post_target = True
        return None

    def _asked_for(self, step: Step, key: Key) -> StreamId:
        """Return the stream that a page is granted for."""
        phase, place = key
        if phase == "segment":
            name = stream_id(step.segments[place])
            assert name is not None, "padding asks for no page"
            return name
        return step.stream_forks(step.pre_forks if phase == "pre" else step.post_forks)[place].target

    def _too_few(
        self, step: Step, names: list[StreamId], tables: dict[StreamId, list[Page]], granted: dict[Key, list[Page]]
    ) -> Refusal | None:
        """Refuse when the free pages do not suffice (11)."""
        free, wanted = self.device_free, sum(map(len, granted.values()))
        if wanted <= free:
            return None
        distinct: dict[str, set[Page]] = {}
        for name in names:
            distinct.setdefault(name.request, set()).update(tables[name])
        asked = {request: len(own) for request, own in distinct.items()}
        for key, pages in granted.items():
            if key[0] == "post":
                asked[self._asked_for(step, key).request] += len(pages)
        largest = max(asked, key=lambda request: asked[request])
        if asked[largest] > self.geometry.pages:
            label = next(name.label for name in names if name.request == largest)
            return TooLarge(request=largest, label=label, wanted=asked[largest], capacity=self.geometry.pages)
        total = 0
        for key, pages in granted.items():
            total += len(pages)
            if total > free:
                name = self._asked_for(step, key)
                return PagesExhausted(request=name.request, label=name.label, short=(wanted - free,))
        raise AssertionError("more is wanted than is free, but nobody wants it")

    def _void(self, row: Row) -> None:
        """Make a row void, the rows above it, and those that pre-forks of its step made from it (13)."""
        if row.void:
            return
        row.void = True
        for above in row.stream.rows[row.stream.rows.index(row) + 1 :]:
            self._void(above)
        for other in row.lease.rows:
            if row in other.sources:
                self._void(other)

    def plan(self, lease: int, *, handle: int) -> Refusal | None:
        """Plan; the owner hears of void rows once (14)."""
        if lease not in self.leases:
            return StalePlan(ended=True)
        held = self.leases[lease]
        if held.status in ("launching", "launched"):
            return AlreadyLaunched()
        void = held.void()
        if any(row not in held.told for row in void):
            held.told = void
            return StalePlan(void=held.void_places())
        held.plan, held.seen, held.status = handle, void, "planned"
        return None

    def launch_enter(self, lease: int, *, plan: int) -> Refusal | None:
        """Enter a launch, in order on every stream (14, 15)."""
        if lease not in self.leases:
            return StalePlan(ended=True)
        held = self.leases[lease]
        if held.status in ("launching", "launched"):
            return AlreadyLaunched()
        if held.plan != plan:
            return StalePlan(ended=True)
        void = held.void()
        if any(row not in held.seen for row in void):
            held.told = void
            return StalePlan(void=held.void_places())
        for row in held.counting():
            for older in row.stream.rows[: row.stream.rows.index(row)]:
                if older.lease.status == "launching" or not (older.void or older.lease.status == "launched"):
                    return OutOfOrder(request=row.stream.id.request, label=row.stream.id.label)
        held.status = "launching"
        return None

    def launch_exit(self, lease: int, *, failed: bool = False) -> None:
        """Leave the launch: launched, or aborted when it failed or was aborted inside (15, 18)."""
        held = self.leases[lease]
        assert held.status == "launching", "a launch that was not entered cannot exit"
        if failed or held.abort_at_exit:
            self._abort(held)
        else:
            held.status = "launched"

    def commit(
        self, lease: int, tokens: Sequence[Sequence[Token]], accepted: Sequence[int] | None = None
    ) -> Refusal | tuple[int, ...]:
        """Store what every row that counts was to store (16, 17); return the places of the segments that were dropped.

        `tokens` are what each segment computed, `accepted` how many of them count, padding included in both.
        """
        if lease not in self.leases:
            return LeaseEnded()
        held = self.leases[lease]
        if held.status != "launched":
            return NotLaunched()
        for row in held.counting():
            if any(not older.void for older in row.stream.rows[: row.stream.rows.index(row)]):
                return OutOfOrder(request=row.stream.id.request, label=row.stream.id.label)

        counting = held.counting()
        images = {row.stream.id: Image() if row.void else row.stream.image.copy() for row in held.rows}
        assert all(images[row.stream.id].result() == row.assumes for row in counting), "a row counts on what is not so"
        counts = [segment.span for segment in held.step.segments] if accepted is None else list(accepted)
        void = frozenset(row.stream.id for row in held.void())
        dropped, reserved = held.void_places(), set(held.granted)
        walked = self._walk(held.step, images, held.granted, tokens, counts, void, held.posted)
        assert set(held.granted) == reserved, "a commit takes no page that its admission did not reserve"
        for row in counting:
            row.stream.image = images[row.stream.id]
        partly = {name for name, image in images.items() if len(image.tokens) % self.geometry.page_size}
        names = {fork.target for fork in walked.posted} & partly
        self.copied = [row.stream for row in counting if row.stream.id in names]
        self._end(held)
        for row in counting:
            self._leave(row.stream, walked.left[row.stream.id])
        for row in counting:
            if row.stream.image.result() != row.leaves.result():
                for above in row.stream.counting():
                    self._void(above)
        self._tidy()
        return dropped

    def abort(self, lease: int) -> Refusal | None:
        """Return everything and make the rows above void (18)."""
        if lease not in self.leases:
            return LeaseEnded()
        held = self.leases[lease]
        if held.status == "launching":
            held.abort_at_exit = True
        else:
            self._abort(held)
        return None

    def _abort(self, lease: Lease) -> None:
        for row in lease.rows:
            self._void(row)
        self._end(lease)
        self._tidy()

    def _end(self, lease: Lease) -> None:
        """Take a lease away; what it was granted and no stream has now waits for the rows above (18)."""
        del self.leases[lease.handle]
        stored = {page for s in self.streams() for page in s.image.content + s.image.surplus}
        for key, granted in lease.granted.items():
            name = self._asked_for(lease.step, key)
            row = next(row for row in lease.rows if row.stream.id == name)
            rows = row.stream.rows
            above = frozenset(other.lease.handle for other in rows[rows.index(row) + 1 :])
            if above:
                self.kept += [(page, above) for page in granted if page not in stored]
        for row in lease.void():
            above = frozenset(other.lease.handle for other in row.stream.rows[row.stream.rows.index(row) + 1 :])
            self.kept += [(page, above) for page in lease.shared.get(row.stream.id, []) if above]
        for row in lease.rows:
            row.stream.rows.remove(row)

    def _tidy(self) -> None:
        for request in self.requests.values():
            request.tidy()

    # ---------------------------------------------------------------------------------------------------------------
    # Offload and reload

    def claim_offload(self, request: str, discard_in_flight: bool = False, *, handle: int = -1) -> Refusal | None:
        """Claim a request that is to leave the device (21)."""
        if request not in self.requests:
            return UnknownRequest(request=request)
        if not self.geometry.host_pages:
            return NoHostPool(request=request)
        held = self.requests[request]
        streams = list(held.streams.values())
        for s in streams:
            if s.residency == FETCHING:
                return FetchPending(request=request, label=s.id.label)
            if s.residency == FETCH_FAILED:
                return FetchFailed(request=request, label=s.id.label, error=s.error)
        for s in streams:
            if s.residency != ON_DEVICE:
                return StreamNotOnDevice(request=request, label=s.id.label, residency=s.residency)
        for s in streams:
            if s.counting() and not discard_in_flight:
                return StreamBusy(request=request, label=s.id.label)
        distinct = list(dict.fromkeys(page for s in streams for page in s.image.content))
        if len(distinct) > self.host_free:
            return HostExhausted(request=request, short=(len(distinct) - self.host_free,))

        for s in streams:
            for row in s.counting():
                self._void(row)
            s.residency = OFFLOADING
        host = self._new(len(distinct))
        device = [page for s in streams for page in s.image.content + s.image.surplus]
        self.claims[handle] = Claim("offload", held, device, host, dict(zip(distinct, host, strict=True)))
        return None

    def commit_offload(self, claim: int) -> Refusal | None:
        """Move the content to the host (22, 25)."""
        return self._end_claim(claim, commit=True)

    def abandon_offload(self, claim: int) -> Refusal | None:
        """Put everything back on the device (22, 25)."""
        return self._end_claim(claim, commit=False)

    def claim_reload(self, request: str, extra: Step | None = None, *, handle: int = -1) -> Refusal | None:
        """Claim a request that is to come back, with the pages that its next step asks for (23)."""
        if request not in self.requests:
            return UnknownRequest(request=request)
        held = self.requests[request]
        for s in held.streams.values():
            if s.residency != ON_HOST:
                return NotOnHost(request=request, label=s.id.label, residency=s.residency)
        distinct = list(dict.fromkeys(page for s in held.streams.values() for page in s.host))
        moved = dict(zip(distinct, self._new(len(distinct)), strict=True))
        asked = self._extra(held, moved, extra) if extra is not None else {}
        wanted = len(distinct) + sum(map(len, asked.values()))
        if wanted > self.geometry.pages:
            return TooLarge(request=request, wanted=wanted, capacity=self.geometry.pages)
        if wanted > self.device_free:
            return PagesExhausted(request=request, short=(wanted - self.device_free,))

        device = list(moved.values()) + [page for pages in asked.values() for page in pages]
        self.claims[handle] = Claim("reload", held, device, distinct, moved, asked)
        for s in held.streams.values():
            s.residency = RELOADING
        return None

    def _extra(self, request: Request, moved: Mapping[Page, Page], step: Step) -> dict[str, list[Page]]:
        """Return the pages that `step` asks for on the returned streams, per label; other requests ignored (23)."""

        def mine(fork: StreamFork) -> bool:
            return fork.source.request == fork.target.request == request.id

        # Any: mypy cannot see through attrs' `converter=tuple`.
        segments: Any = tuple(segment for segment in step.segments if segment.request == request.id)
        only = Step(
            segments,
            [fork for fork in step.stream_forks(step.pre_forks) if mine(fork)],
            [fork for fork in step.stream_forks(step.post_forks) if mine(fork)],
            commit=step.commit,
            retention=step.retention,
        )
        images = {name: Image() for name in named(only)}
        for name, image in images.items():
            if name.label in request.streams:
                s = request.streams[name.label]
                image.opened, image.released, image.tokens = s.image.opened, s.image.released, list(s.image.tokens)
                image.content = [moved[page] for page in s.host]
        spans = [segment.span for segment in only.segments]
        granted: dict[Key, list[Page]] = {}
        self._walk(only, images, granted, [[None] * span for span in spans], spans)
        asked: dict[str, list[Page]] = {}
        for key, pages in granted.items():
            asked.setdefault(self._asked_for(only, key).label, []).extend(pages)
        return asked

    def commit_reload(self, claim: int) -> Refusal | None:
        """Bring everything back (24, 25)."""
        return self._end_claim(claim, commit=True)

    def abandon_reload(self, claim: int) -> Refusal | None:
        """Leave it on the host (24, 25)."""
        return self._end_claim(claim, commit=False)

    def op_failed(self, claim: int, error: str) -> None:
        """Note that a claim's copy failed (25)."""
        if claim in self.claims and self.claims[claim].error is None:
            self.claims[claim].error = error

    def _end_claim(self, handle: int, *, commit: bool) -> Refusal | None:
        """End an offload or reload; an orphan returns its own pages only (22, 24, 25)."""
        if handle not in self.claims:
            return ClaimEnded()
        claim = self.claims[handle]
        if commit and claim.error is not None:
            return CopyFailed(error=claim.error)
        del self.claims[handle]
        if claim.orphaned:
            return None
        for s in claim.request.streams.values():
            offloaded = (claim.kind == "offload") == commit
            if commit and offloaded:
                self._leave(s, s.image.content + s.image.surplus)
                s.host = [claim.moved[page] for page in s.image.content]
                s.image.content, s.image.surplus = [], []
            elif commit:
                s.image.content, s.host = [claim.moved[page] for page in s.host], []
            s.residency = ON_HOST if offloaded else ON_DEVICE
        if commit:
            for label, pages in claim.extra.items():
                claim.request.stream(label).image.surplus += pages
        self._tidy()
        return None

    # ---------------------------------------------------------------------------------------------------------------
    # Retrieve

    def claim_retrieve(
        self, request: str, publication: Publication, labels: Sequence[str], *, handles: Mapping[str, int]
    ) -> Refusal | tuple[str, ...]:
        """Begin to fetch the needed labels that are published longer (27); return which, each under its handle."""
        if request not in self.requests:
            return UnknownRequest(request=request)
        if publication.world_size != self.world_size:
            return WorldSizeMismatch(request=request, published=publication.world_size, expected=self.world_size)
        held = self.requests[request]
        size = self.geometry.page_size
        fetches: dict[str, Record] = {}
        for label in dict.fromkeys(labels):
            stream = held.streams.get(label, Stream(StreamId(request, label)))
            residency = held.residency(label)
            if residency == FETCHING:
                return FetchPending(request=request, label=label)
            if residency == FETCH_FAILED:
                return FetchFailed(request=request, label=label, error=stream.error)
            if residency in AWAY:
                return StreamNotOnDevice(request=request, label=label, residency=residency)
            if stream.rows:
                return StreamBusy(request=request, label=label)
            record = publication.ranks.get(self.rank, {}).get(label)
            if record is None or record.address == self.address or record.length <= len(stream.image.tokens):
                continue
            if record.on_host:
                return OnRemoteHost(request=request, label=label)
            if record.page_size != size or (stream.image.tokens and record.released != stream.image.released):
                return LayoutMismatch(request=request, label=label)
            fetches[label] = record
        stored = {label: len(held.streams[label].image.tokens) if label in held.streams else 0 for label in fetches}
        pages = {label: self.geometry.pages_for(record.length) for label, record in fetches.items()}
        fresh = {label: pages[label] - self.geometry.pages_for(stored[label]) for label in fetches}
        if sum(fresh.values()) > self.device_free:
            if sum(pages.values()) > self.geometry.pages:
                return TooLarge(request=request, wanted=sum(pages.values()), capacity=self.geometry.pages)
            return PagesExhausted(request=request, short=(sum(fresh.values()) - self.device_free,))

        for label, record in fetches.items():
            if label in handles:
                stream = held.stream(label)
                stream.residency = FETCHING
                new = self._new(fresh[label])
                last = stream.image.content[-1:] if stored[label] % size else []
                self.claims[handles[label]] = Claim(
                    "retrieve", held, device=last + new, label=label, record=record, fresh=new
                )
        return tuple(fetches)

    def landed(self, fetch: int, tokens: Sequence[Token]) -> Refusal | None:
        """Store the fetched tokens (28)."""
        if fetch not in self.claims:
            return ClaimEnded()
        claim = self.claims.pop(fetch)
        if not claim.orphaned:
            assert claim.record is not None, "a fetch has a record"
            stream = claim.request.streams[claim.label]
            image = stream.image
            image.opened, image.released, stream.residency = True, claim.record.released, ON_DEVICE
            image.tokens += tokens
            image.content += claim.fresh
            assert len(image.tokens) == claim.record.length, "not the tokens that were published"
        return None

    def failed(self, fetch: int, error: str) -> Refusal | None:
        """Latch the error until reset; the own tokens stay (28)."""
        if fetch not in self.claims:
            return ClaimEnded()
        claim = self.claims.pop(fetch)
        if not claim.orphaned:
            stream = claim.request.streams[claim.label]
            stream.residency, stream.error = FETCH_FAILED, error
        return None

    def cancelled(self, fetch: int) -> Refusal | None:
        """Be as before: the transport confirmed that nothing is written any more (28)."""
        if fetch not in self.claims:
            return ClaimEnded()
        claim = self.claims.pop(fetch)
        if not claim.orphaned:
            claim.request.streams[claim.label].residency = ON_DEVICE
            self._tidy()
        return None

    def cancel_retrieve(self, request: str) -> Refusal | tuple[int, ...]:
        """Return the fetches whose cancel is to be asked for; nothing changes before it is confirmed (28)."""
        if request not in self.requests:
            return UnknownRequest(request=request)
        held = self.requests[request]
        return tuple(h for h, c in self.claims.items() if c.kind == "retrieve" and c.request is held and not c.orphaned)

    # ---------------------------------------------------------------------------------------------------------------
    # Lives

    def ingest(self, request: str, config: RequestConfig | None = None) -> Refusal | None:
        """Begin an incarnation, or join the live one (1)."""
        if request not in self.requests:
            self.requests[request] = Request(request, RequestConfig() if config is None else config)
            self.requests[request].stream(MAIN).image.opened = True
        elif config is not None and config != self.requests[request].config:
            return ConfigConflict(request=request)
        return None

    def reset(self, request: str, free: bool = True) -> Refusal | None:
        """Empty every stream, in every residency (29, 13, 20, 25)."""
        if request not in self.requests:
            return UnknownRequest(request=request)
        self._empty(self.requests[request], free)
        self._tidy()
        return None

    def remove(self, request: str) -> Refusal | None:
        """Empty every stream and forget the request (30)."""
        if request not in self.requests:
            return UnknownRequest(request=request)
        self._empty(self.requests.pop(request), free=True)
        return None

    def fork_failed(self) -> None:
        """Empty the targets of the newest commit's post-forks whose last page was to be copied (31)."""
        for s in self.copied:
            self._empty_stream(s, [])
        self._tidy()

    def _empty(self, request: Request, free: bool) -> None:
        owned = [page for _, pages in self.owners() for page in set(pages)]
        for claim in self.claims.values():
            claim.orphaned |= claim.request is request
        for s in request.streams.values():
            table = s.image.content + s.image.surplus
            self._empty_stream(s, [page for page in table if not free and owned.count(page) == 1])

    def _empty_stream(self, s: Stream, stay: list[Page]) -> None:
        for row in s.counting():
            self._void(row)
        table = s.image.content + s.image.surplus
        s.image = Image(opened=s.image.opened, surplus=stay)
        s.host, s.residency, s.error = [], ON_DEVICE, ""
        self._leave(s, [page for page in table if page not in stay])

    # ---------------------------------------------------------------------------------------------------------------
    # Questions

    def readiness(self, request: str, labels: Sequence[str]) -> Refusal | str:
        """Answer "failed" when a fetch into a needed label failed, "pending" while one is open, else "ready" (28)."""
        if request not in self.requests:
            return UnknownRequest(request=request)
        residencies = [self.requests[request].residency(label) for label in labels]
        return "failed" if FETCH_FAILED in residencies else "pending" if FETCHING in residencies else "ready"

    def reclaimable(self, request: str) -> int:
        """Return the device pages that only this request's streams own; 0 where it could not be offloaded as it is."""
        if request not in self.requests or not self.geometry.host_pages:
            return 0
        mine = list(self.requests[request].streams.values())
        if any(s.residency != ON_DEVICE or s.counting() for s in mine):
            return 0
        mine = [s for s in mine if not s.rows]
        others = {page for owner, pages in self.owners() if owner not in mine for page in pages}
        return len({page for s in mine for page in s.image.content + s.image.surplus} - others)

    def publishable(self, request: str) -> dict[str, tuple[int, int, bool]] | None:
        """Return length, released and on_host of every label that `publish` describes (26); None if unknown."""
        if request not in self.requests:
            return None
        return {
            label: (len(s.image.tokens), s.image.released, s.residency != ON_DEVICE)
            for label, s in self.requests[request].streams.items()
            if s.image.opened and s.residency not in (FETCHING, FETCH_FAILED)
        }

    def contents(self) -> dict[tuple[str, str], tuple[Token, ...]]:
        """Return what every opened stream stores."""
        return {(s.id.request, s.id.label): tuple(s.image.tokens) for s in self.streams() if s.image.opened}

    def abstract(self) -> Abstract:
        """Return what machine and reference must agree on."""
        opened = sorted((s for s in self.streams() if s.image.opened), key=lambda s: (s.id.request, s.id.label))
        device, host = classes([s.image.content for s in opened]), classes([s.host for s in opened])
        return Abstract(
            device_free=self.device_free,
            host_free=self.host_free,
            streams={
                (s.id.request, s.id.label): StreamAbstract(
                    length=len(s.image.tokens),
                    released=s.image.released,
                    residency=s.residency,
                    content_pages=len(device[i]),
                    surplus_pages=len(s.image.surplus),
                    device=device[i],
                    host=host[i],
                )
                for i, s in enumerate(opened)
            },
            leases={handle: (lease.status, lease.void_places()) for handle, lease in self.leases.items()},
            claims={handle: claim.kind for handle, claim in self.claims.items()},
        )
