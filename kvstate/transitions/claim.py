"""The guard that offload, reload and retrieve share, and how their claims end.

A claim is an object. Its commit or abandon asks each stream whether it is still held by this very claim: a stream that
was reset, removed or ingested anew is not, and nothing but the claim's own pages is touched.
"""

from __future__ import annotations

from kvstate.refusals import ClaimEnded, CopyFailed, FetchPending, Refusal, StreamBusy, UnknownRequest
from kvstate.refusals import FetchFailed as FetchFailedRefusal
from kvstate.state import FetchFailed, Fetching, OffloadClaim, ReloadClaim, Request, State


def known(state: State, request: str) -> Request | Refusal:
    """Return the live incarnation of `request`."""
    found = state.requests.get(request)
    return found if found is not None else UnknownRequest(request=request)


def fetch_in_the_way(request: Request) -> Refusal | None:
    """Return why a request cannot move because of a fetch, or None."""
    for stream in request.streams.values():
        residency = stream.residency
        if isinstance(residency, Fetching):
            return FetchPending(request=request.id, label=stream.label)
        if isinstance(residency, FetchFailed):
            return FetchFailedRefusal(request=request.id, label=stream.label, error=residency.error)
    return None


def lease_in_the_way(request: Request) -> Refusal | None:
    """Return StreamBusy when an open lease counts on a stream of the request, or None."""
    for stream in request.streams.values():
        if stream.rows:
            return StreamBusy(request=request.id, label=stream.label)
    return None


def committable(claim: OffloadClaim | ReloadClaim) -> Refusal | None:
    """Return why `claim` cannot commit, or None."""
    if not claim.open:
        return ClaimEnded(request=claim.request.id)
    if claim.failure is not None:
        return CopyFailed(request=claim.request.id, error=claim.failure)
    return None


def end_claim(state: State, claim: OffloadClaim | ReloadClaim) -> None:
    """Take `claim` off the list of open claims."""
    claim.open = False
    del state.claims[claim.serial]
