"""Reload: a request's pages come back from the host, with room for its next step."""

from __future__ import annotations

from itertools import chain

import attrs

from kvstate.ops import CopyIn, PageCopies
from kvstate.ordering import NOTHING, Clock, Queue, at, elsewhere, merge
from kvstate.refusals import NotOnHost, PagesExhausted, Refusal, TooLarge
from kvstate.state import OnDevice, OnHost, Part, ReloadClaim, Reloading, State, Stream, Table
from kvstate.transitions.claim import end_claim, ended, known, not_committable
from kvstate.transitions.leaving import forget
from kvstate.transitions.offload import Abandoned
from kvstate.transitions.reserve import Reservation
from kvstate.types import Step


@attrs.frozen
class Reloaded:
    """A reload that is done: `pages` device pages hold the request again, those for its next step included."""

    request: str
    pages: int


def claim_reload(state: State, request: str, extra: Step | None = None, now_s: float = 0.0) -> ReloadClaim | Refusal:
    """Claim a request for reload: all its streams, sharing kept, plus the pages that `extra` will ask for.

    OnHost → Reloading
    """
    # Guard.
    found = known(state, request)
    if isinstance(found, Refusal):
        return found
    for stream in found.streams.values():
        if not isinstance(stream.residency, OnHost):
            return NotOnHost(request=request, label=stream.label, residency=stream.residency.name)
    groups = range(len(state.device.pools))
    wants: dict[str, int] = {}
    if extra is not None:
        ahead = Reservation(state, extra, returning=found)
        refusal = ahead.simulate()
        if refusal is not None:
            return refusal
        wants = ahead.wants_per_label()
    distinct = [
        dict.fromkeys(chain.from_iterable(stream.residency.host[group] for stream in found.streams.values()))  # type: ignore[union-attr]
        for group in groups
    ]
    wanted = [len(pages) + sum(wants.values()) for pages in distinct]
    short = state.device.short(wanted)
    if short is not None:
        if max(wanted) > state.geometry.pages:
            return TooLarge(request=request, wanted=max(wanted), capacity=state.geometry.pages)
        return PagesExhausted(request=request, short=short)
    # Effect.
    for label in wants:
        if label not in found.streams:
            stream = Stream(found, label, len(state.device.pools))
            stream.residency = OnHost(tuple(Table([], 0) for _ in groups), NOTHING, NOTHING)
            found.streams[label] = stream
            state.topology += 1
    streams = list(found.streams.values())
    claim = ReloadClaim(state.serial(), found, (), now_s)
    after: Clock = NOTHING
    moved: list[dict[int, int]] = []
    for pages, pool in zip(distinct, state.device.pools, strict=True):
        granted = pool.grant(len(pages))
        after = merge(after, pool.fence_of(granted))
        moved.append(dict(zip(pages, granted, strict=True)))
    parts = []
    residencies = []
    tokens: list[dict[int, int]] = [{} for _ in groups]
    seen: list[set[int]] = [set() for _ in groups]
    for stream in streams:
        residency = stream.residency
        assert isinstance(residency, OnHost)
        after = merge(after, residency.written)
        full, rest = divmod(stream.length, state.page_size)
        device = []
        for group, pool in enumerate(state.device.pools):
            host = residency.host[group]
            back = [moved[group][page] for page in host]
            if len(streams) > 1:
                pool.share([page for page in back if page in seen[group]])
                seen[group].update(back)
            tokens[group].update(dict.fromkeys(host.part(0, full), state.page_size))
            if rest:
                tokens[group][host[full]] = rest
            back.extend(pool.grant(wants.get(stream.label, 0)))
            device.append(Table(back, len(back)))
        parts.append(Part(stream, tuple(device), residency.host))
        residencies.append(residency)
        stream.residency = Reloading(claim)
    claim.parts = tuple(parts)
    claim.residencies = tuple(residencies)
    state.claims[claim.serial] = claim
    # Emit.
    copies = tuple(
        PageCopies(list(target), list(target.values()), [counts[page] for page in target])
        for target, counts in zip(moved, tokens, strict=True)
    )
    claim.op = CopyIn(state.number(), elsewhere(after, Queue.COPY_IN), claim, copies)
    state.outbox.append(claim.op)
    return claim


def commit_reload(state: State, claim: ReloadClaim) -> Reloaded | Abandoned | Refusal:
    """Commit a reload: the streams are on the device, the host pages return. Orphaned, the claim's own pages return.

    Reloading → OnDevice
    """
    # Guard.
    refusal = not_committable(state, claim)
    if refusal is not None:
        return refusal
    # Effect.
    assert claim.op is not None
    copy = at(Queue.COPY_IN, claim.op.number)
    end_claim(state, claim)
    pages = 0
    orphaned = False
    for part, before in zip(claim.parts, claim.residencies, strict=True):
        stream = part.stream
        state.host.drop(part.host, merge(merge(before.written, before.used), copy))
        stream.used = merge(stream.used, stream.written)
        if isinstance(stream.residency, Reloading) and stream.residency.claim is claim:
            stream.residency = OnDevice(part.device, state.room(stream, stream.length, stream.retention))
            stream.written = copy
            stream.generation += 1
            full = stream.length // state.page_size
            for pool, table in zip(state.device.pools, part.device, strict=True):
                pool.seal(table.part(0, full))
            pages += sum(table.count for table in part.device)
            forget(state, stream)
        else:
            orphaned = True
            state.device.drop(part.device, copy)
    return Abandoned(claim.request.id, True) if orphaned else Reloaded(claim.request.id, pages)


def abandon_reload(state: State, claim: ReloadClaim) -> Abandoned | Refusal:
    """Abandon a reload: the request is on the host as before, the device pages return.

    Reloading → OnHost
    """
    # Guard.
    refusal = ended(state, claim)
    if refusal is not None:
        return refusal
    # Effect.
    end_claim(state, claim)
    assert claim.op is not None
    copy = NOTHING if claim.copy_failed else at(Queue.COPY_IN, claim.op.number)
    orphaned = False
    for part, before in zip(claim.parts, claim.residencies, strict=True):
        stream = part.stream
        if isinstance(stream.residency, Reloading) and stream.residency.claim is claim:
            stream.residency = OnHost(before.host, before.written, merge(before.used, copy))
            forget(state, stream)
        else:
            orphaned = True
            state.host.drop(part.host, merge(merge(before.written, before.used), copy))
        state.device.drop(part.device, copy)
    return Abandoned(claim.request.id, orphaned)
