"""The guards that steps, offload, reload and retrieve share, and how claims end.

A claim is an object. Its commit or abandon asks each stream whether it is still held by this very claim: a stream that
was reset, removed or ingested anew is not, and nothing but the claim's own pages is touched.
"""

from __future__ import annotations

from kvstate.refusals import (
    ClaimEnded,
    CopyFailed,
    FetchPending,
    Refusal,
    StreamBusy,
    StreamNotOnDevice,
    UnknownRequest,
)
from kvstate.refusals import FetchFailed as FetchFailedRefusal
from kvstate.state import (
    FetchFailed,
    Fetching,
    OffloadClaim,
    Offloading,
    OnDevice,
    OnHost,
    ReloadClaim,
    Reloading,
    Request,
    State,
    Stream,
)


def known(state: State, request: str) -> Request | Refusal:
    """Return the live incarnation of `request`."""
    found = state.requests.get(request)
    return found if found is not None else UnknownRequest(request=request)


def off_device(stream: Stream) -> Refusal | None:
    """Return why a stream is not ready on the device, or None."""
    residency = stream.residency
    request, label = stream.request.id, stream.label
    if isinstance(residency, Fetching):
        return FetchPending(request=request, label=label)
    if isinstance(residency, FetchFailed):
        return FetchFailedRefusal(request=request, label=label, error=residency.error)
    if not isinstance(residency, OnDevice):
        return StreamNotOnDevice(request=request, label=label, residency=residency.name)
    return None


def away(request: Request) -> str | None:
    """Return the residency of a request that is not on the device, else None. All labels move together."""
    for stream in request.streams.values():
        if isinstance(stream.residency, (Offloading, OnHost, Reloading)):
            return stream.residency.name
    return None


def fetch_in_the_way(request: Request) -> Refusal | None:
    """Return why a request cannot move because of a fetch, or None."""
    for stream in request.streams.values():
        if isinstance(stream.residency, (Fetching, FetchFailed)):
            return off_device(stream)
    return None


def lease_in_the_way(request: Request) -> Refusal | None:
    """Return StreamBusy when an open lease counts on a stream of the request, or None."""
    for stream in request.streams.values():
        if stream.rows:
            return StreamBusy(request=request.id, label=stream.label)
    return None


def ended(state: State, claim: OffloadClaim | ReloadClaim) -> Refusal | None:
    """Return ClaimEnded when `claim` has ended, else None."""
    if not claim.open:
        return ClaimEnded(request=claim.request.id)
    state.own(claim)
    return None


def not_committable(state: State, claim: OffloadClaim | ReloadClaim) -> Refusal | None:
    """Return why `claim` cannot commit, or None."""
    refusal = ended(state, claim)
    if refusal is None and claim.failure is not None:
        return CopyFailed(request=claim.request.id, error=claim.failure)
    return refusal


def end_claim(state: State, claim: OffloadClaim | ReloadClaim) -> None:
    """Take `claim` off the list of open claims."""
    claim.open = False
    del state.claims[claim.serial]
