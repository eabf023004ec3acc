"""Lifecycle: ingest, reset, remove, clear."""

from __future__ import annotations

import attrs

from kvstate.ops import ForkCopy, Op
from kvstate.refusals import ConfigConflict, Refusal
from kvstate.state import (
    GONE,
    Fetch,
    OffloadClaim,
    Offloading,
    ReloadClaim,
    Request,
    State,
    Stream,
)
from kvstate.transitions.claim import known
from kvstate.transitions.leaving import device_tables, empty, forget
from kvstate.transitions.offload import abandon_offload
from kvstate.transitions.prefix import reset_prefix_cache
from kvstate.transitions.reload import abandon_reload
from kvstate.transitions.retrieve import failed
from kvstate.transitions.step import abort
from kvstate.types import MAIN, RequestConfig


@attrs.frozen
class Ingested:
    """A live request; `joined` when it was there already."""

    request: str
    incarnation: int
    joined: bool


@attrs.frozen
class Emptied:
    """A request that was reset or removed: device pages that nobody owns now, and those it kept."""

    request: str
    pages_released: int
    pages_kept: int


def ingest(state: State, request: str, config: RequestConfig | None = None) -> Ingested | Refusal:
    """Ingest a request: a new incarnation with the stream "main", or join the live one.

    — → OnDevice
    """
    # Guard.
    found = state.requests.get(request)
    if found is not None:
        if config is not None and config != found.config:
            return ConfigConflict(request=request)
        return Ingested(request, found.incarnation, True)
    if not isinstance(request, str) or not request:
        raise ValueError(f"a request id is a non-empty string, got {request!r}")
    # Effect.
    made = Request(request, state.serial(), config if config is not None else RequestConfig())
    main = Stream(made, MAIN, len(state.device.pools))
    main.opened = True
    made.streams[MAIN] = main
    state.requests[request] = made
    state.incarnations[made.incarnation] = made
    state.topology += 1
    return Ingested(request, made.incarnation, False)


def _owned_alone(state: State, request: Request) -> list[set[int]]:
    """Return the pages per group that exactly one stream of `request` and nobody else owns, and that no key finds."""
    alone: list[set[int]] = [set() for _ in state.device.pools]
    for stream in request.streams.values():
        for own, pool, table in zip(alone, state.device.pools, device_tables(stream), strict=False):
            own.update(page for page in table if pool.owners[page] == 1 and page not in pool.keys)
    return alone


def reset(state: State, request: str, free: bool = True) -> Emptied | Refusal:
    """Reset a request: its content is gone, legal in every state. `free=False` keeps pages that nobody else has.

    any → OnDevice
    """
    # Guard.
    found = known(state, request)
    if isinstance(found, Refusal):
        return found
    # Effect.
    released = kept = 0
    keep = [] if free else _owned_alone(state, found)
    for stream in list(found.streams.values()):
        freed, stayed = empty(state, stream, keep)
        released += freed
        kept += stayed
        forget(state, stream)
    return Emptied(request, released, kept)


def remove(state: State, request: str) -> Emptied | Refusal:
    """Remove a request, legal in every state; claims are orphaned, steps in flight keep their pages until they end.

    any → Gone
    """
    # Guard.
    found = known(state, request)
    if isinstance(found, Refusal):
        return found
    # Effect.
    released = 0
    for stream in found.streams.values():
        released += empty(state, stream, ())[0]
        stream.residency = GONE
    del state.requests[request]
    del state.incarnations[found.incarnation]
    state.topology += 1
    return Emptied(request, released, 0)


def clear(state: State) -> tuple[Fetch, ...]:
    """Clear everything: no requests, leases or claims. What a running launch or fetch holds returns when it ends.

    any → Gone

    Returns
    -------
    The fetches that are still running; their transports must be told to cancel.
    """
    for request in list(state.requests):
        remove(state, request)
    for lease in list(state.leases.values()):
        if not lease.abort_requested:
            abort(state, lease)
    fetches = []
    for claim in list(state.claims.values()):
        if isinstance(claim, Fetch):
            claim.cancel_requested = True
            fetches.append(claim)
        elif isinstance(claim, OffloadClaim):
            abandon_offload(state, claim)
        else:
            abandon_reload(state, claim)
    reset_prefix_cache(state)
    return tuple(fetches)


def op_failed(state: State, op: Op, error: str) -> None:
    """Record that `op` failed at submit on the claim or lease it worked for; its owner ends that.

    A post-fork's copy fails after its step was committed: the targets it was for are emptied, as by a reset of those
    streams, unless they hold something else by now. One that an offload has claimed meanwhile, its own copy not yet
    submitted, is emptied when that claim is abandoned, which is all that can become of it.
    """
    owner = op.owner
    if isinstance(owner, Fetch):
        if owner.open:
            failed(state, owner, error)
    elif isinstance(op, ForkCopy) and op.committed:
        for stream, epoch in op.committed:
            residency = stream.residency
            if stream.epoch != epoch or residency is GONE:
                continue
            if isinstance(residency, Offloading):
                residency.claim.failure = error
                residency.claim.spoiled.append(stream)
            else:
                empty(state, stream, ())
    else:
        owner.failure = error
        if isinstance(owner, (OffloadClaim, ReloadClaim)):
            owner.copy_failed = True
