"""Reload: a request's pages come back from the host, with room for its next step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import attrs

from kvstate.ops import CopyIn, PageCopies
from kvstate.ordering import NOTHING, Clock, Queue, at, elsewhere, merge
from kvstate.refusals import NotOnHost, PagesExhausted, Refusal, TooLarge
from kvstate.state import OnDevice, OnHost, Part, ReloadClaim, Reloading, Request, State, Stream, Table, Tables
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
    pools = state.device.pools
    groups = range(len(pools))
    wants: dict[str, list[int]] = {}
    if extra is not None:
        coming = Reservation(state, extra, returning=found)
        refusal = coming.simulate()
        if refusal is not None:
            return refusal
        wants = coming.wants_per_label()
    distinct = [
        dict.fromkeys(chain.from_iterable(stream.residency.host[group] for stream in found.streams.values()))  # type: ignore[union-attr]
        for group in groups
    ]
    there = _found(state, found)
    more = [sum(own[group] for own in wants.values()) for group in groups]
    wanted, owning = _asked_for(state, distinct, there, more)
    short = state.device.short(wanted, owning)
    if short is not None and any(owning):
        # Found pages may lie in more sectors than copies would: what nobody owns of them is copied instead.
        there = [{h: p for h, p in own.items() if pool.owners[p]} for own, pool in zip(there, pools, strict=True)]
        wanted, owning = _asked_for(state, distinct, there, more)
        short = state.device.short(wanted, owning)
    if short is not None:
        whole = state.geometry.sectors_for([len(pages) + ahead for pages, ahead in zip(distinct, more, strict=True)])
        if whole > state.geometry.pages:
            return TooLarge(request=request, wanted=whole, capacity=state.geometry.pages)
        return PagesExhausted(request=request, short=short, fragmented=state.device.fragmented(wanted, owning))
    # Effect.
    for label in wants:
        if label not in found.streams:
            stream = Stream(found, label, len(state.device.pools))
            stream.residency = OnHost(tuple(Table.of([]) for _ in groups), NOTHING, NOTHING)
            found.streams[label] = stream
            state.topology += 1
    streams = list(found.streams.values())
    claim = ReloadClaim(state.serial(), found, (), now_s)
    # What the device has is owned before anything is evicted to make room for the rest.
    for own, pool in zip(there, state.device.pools, strict=True):
        pool.own(dict.fromkeys(own.values()))
        claim.found = merge(claim.found, pool.ready_of(own.values()))
    state.device.make_room(wanted)
    after: Clock = NOTHING
    moved: list[dict[int, int]] = []
    for pages, own, pool in zip(distinct, there, state.device.pools, strict=True):
        copied = [page for page in pages if page not in own]
        granted = pool.grant(len(copied))
        after = merge(after, pool.fence_of(granted))
        moved.append(dict(zip(copied, granted, strict=True)))
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
            host, own, fresh = residency.host[group], there[group], moved[group]
            back = [own[page] if page in own else fresh[page] for page in host]
            if len(streams) > 1:
                pool.share([page for page in back if page in seen[group]])
                seen[group].update(back)
            tokens[group].update(dict.fromkeys(host.part(0, full), state.page_size))
            if rest:
                tokens[group][host[full]] = rest
            if stream.label in wants:
                back.extend(pool.grant(wants[stream.label][group]))
            device.append(Table.of(back, host.skip, pool.sink))
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


def _asked_for(
    state: State, distinct: Sequence[Collection[int]], there: Sequence[Mapping[int, int]], more: Sequence[int]
) -> tuple[list[int], list[list[int]]]:
    """Return, per group, how many pages must be granted, and the cached ones among those that are there."""
    wanted = [len(pages) - len(own) + ahead for pages, own, ahead in zip(distinct, there, more, strict=True)]
    owning = [
        [page for page in dict.fromkeys(own.values()) if not pool.owners[page]]
        for own, pool in zip(there, state.device.pools, strict=True)
    ]
    return wanted, owning


def _found(state: State, request: Request) -> list[dict[int, int]]:
    """Return, per group, the host pages whose content the device has by its key, each with that device page."""
    there: list[dict[int, int]] = [{} for _ in state.device.pools]
    for stream in request.streams.values():
        assert isinstance(stream.residency, OnHost)
        if not stream.stale:
            for own, pool, table in zip(there, state.device.pools, stream.residency.host, strict=True):
                for place in range(table.skip, min(len(stream.keys), table.count)):
                    page = pool.places.get(stream.keys[place])
                    if page is not None:
                        own.setdefault(table[place], page)
    return there


def _rekey(state: State, stream: Stream, tables: Tables, copy: Clock) -> None:
    """Make the pages that came back findable again, where the device has nothing of their keys."""
    if stream.stale:
        return
    for pool, table in zip(state.device.pools, tables, strict=True):
        for place in range(table.skip, len(stream.keys)):
            key = stream.keys[place]
            if key not in pool.places:
                pool.key(table[place], key, copy, stream.keys[place - 1] if place else None, ())


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
            stream.residency = OnDevice(part.device, state.room(stream.length, stream.retention))
            stream.written = merge(copy, claim.found)
            stream.generation += 1
            full = stream.length // state.page_size
            for pool, table in zip(state.device.pools, part.device, strict=True):
                pool.seal(table.part(0, full))
            _rekey(state, stream, part.device, copy)
            pages += sum(table.count - table.skip for table in part.device)
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
