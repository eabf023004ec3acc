"""SOMETIMES: what a checker must have reached before it may say that it looked.

Every promise of the form "always" is worth what its programs reached. `REQUIRED` names it; a run that did not reach all
of it is undecided, never a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvstate import refusals
from kvstate.refusals import Refusal
from kvstate.state import Lease, OffloadClaim, ReloadClaim
from kvstate.transitions.lifecycle import Emptied, Ingested
from kvstate.transitions.offload import Abandoned, Offloaded
from kvstate.transitions.step import Aborted, Committed
from kvstate.view import StateView

# Reached by tests of their own: a program that ends the manager says nothing afterwards.
_ENDINGS = {refusals.ManagerPoisoned, refusals.ManagerClosed}

REFUSALS = tuple(
    f"refused {cls.__name__}"
    for cls in vars(refusals).values()
    if isinstance(cls, type) and issubclass(cls, Refusal) and cls is not Refusal and cls not in _ENDINGS
)

RESIDENCIES = tuple(f"{name}" for name in ("OnDevice", "Offloading", "OnHost", "Reloading", "Fetching", "FetchFailed"))

REQUIRED: tuple[str, ...] = (
    *(f"a stream is {name}" for name in RESIDENCIES),
    *REFUSALS,
    "joined a live request",
    "device page shared by streams",
    "host page shared by labels",
    "page shared across requests",
    "step planned ahead",
    "three steps open on a stream",
    "fork before a step",
    "fork after a step",
    "fork by copy",
    "fork onto a stream with content",
    "fork opens a label",
    "step without commit",
    "fewer tokens accepted",
    "segments dropped",
    "fork dropped with its source",
    "void step sent to the sink",
    "retention let pages go",
    "padding",
    "several segments on a stream",
    "surplus pages",
    "pages held behind open leases",
    "abort inside a launch",
    "abort after a launch",
    "offload discards a step",
    "offload gained nothing",
    "orphaned claim",
    "abandoned claim",
    "reload with room for the next step",
    "offload copy failed",
    "reload copy failed",
    "fork copy failed",
    "post-fork copy failed",
    "reset kept pages",
    "reset of a moving request",
    "remove of a moving request",
    "request removed under an open step",
    "published on host",
    "fetch landed",
    "fetch failed",
    "fetch cancelled",
    "fetch outlives its request",
    "fetch continues a stream",
    "page granted behind a copy",
    "page granted behind a step",
)


def seen(verb: str, result: Any, before: StateView, now: StateView) -> Iterator[str]:
    """Yield what one call reached."""
    if isinstance(result, Refusal):
        yield f"refused {type(result).__name__}"
        return
    yield from _by_result(verb, result, before)
    yield from _by_view(now)


def _by_result(verb: str, result: Any, before: StateView) -> Iterator[str]:
    if isinstance(result, Ingested) and result.joined:
        yield "joined a live request"
    elif isinstance(result, Lease):
        yield from _admitted(result)
    elif isinstance(result, Committed):
        if result.dropped:
            yield "segments dropped"
        spans = [segment.span for segment in result.lease.step.segments]
        if result.accepted is not None and list(result.accepted) != spans:
            yield "fewer tokens accepted"
        if not result.lease.step.commit:
            yield "step without commit"
        forks = result.lease.step.stream_forks(result.lease.step.post_forks)
        if len(result.lease.forks) < len(forks) and any(row.void for row in result.lease.rows):
            yield "fork dropped with its source"
        released = {(s.incarnation, s.label): s.released for s in before.streams}
        for row in result.lease.rows:
            if not row.void and row.stream.released > released.get(
                (row.stream.request.incarnation, row.stream.label), 0
            ):
                yield "retention let pages go"
    elif isinstance(result, Aborted):
        lease = result.lease
        if result.pending:
            yield "abort inside a launch"
        elif lease.number and verb == "abort":
            yield "abort after a launch"
    elif isinstance(result, Offloaded):
        if not result.pages_released:
            yield "offload gained nothing"
    elif isinstance(result, Abandoned):
        yield "orphaned claim" if result.orphaned else "abandoned claim"
    elif isinstance(result, OffloadClaim):
        if any(part.stream.voided for part in result.parts):
            yield "offload discards a step"
        if result.op is not None and result.op.after[2]:
            yield "page granted behind a copy"
    elif isinstance(result, ReloadClaim):
        if any(part.device[0].count > part.host[0].count for part in result.parts):
            yield "reload with room for the next step"
        if result.op is not None and result.op.after[0]:
            yield "page granted behind a step"
    elif isinstance(result, Emptied):
        moving = {s.request for s in before.streams if s.residency in ("Offloading", "Reloading", "Fetching")}
        if result.pages_kept:
            yield "reset kept pages"
        if result.request in moving:
            yield f"{verb} of a moving request"
        if verb == "remove" and any(s.rows for s in before.streams if s.request == result.request):
            yield "request removed under an open step"
    elif verb == "publish" and result is not None:
        if any(record.on_host for labels in result.ranks.values() for record in labels.values()):
            yield "published on host"
    elif verb == "plan" and result is not None and result.sunk:
        yield "void step sent to the sink"
    elif verb == "claim_retrieve":
        if any(fetch.start for fetch in result.fetches):
            yield "fetch continues a stream"


def _admitted(lease: Lease) -> Iterator[str]:
    step = lease.step
    streams = [(s.request, s.label) for s in step.segments if s.request is not None]
    if len(streams) < len(step.segments):
        yield "padding"
    if len(set(streams)) < len(streams):
        yield "several segments on a stream"
    for fork in lease.forks:
        yield "fork before a step" if fork.pre else "fork after a step"
        if any(fork.copies):
            yield "fork by copy"
        if fork.target.stream.length:
            yield "fork onto a stream with content"
        if not fork.target.stream.opened:
            yield "fork opens a label"
    for row in lease.rows:
        if len(row.stream.rows) > 1:
            yield "step planned ahead"
        if len(row.stream.rows) > 2:
            yield "three steps open on a stream"


def _by_view(now: StateView) -> Iterator[str]:
    device: dict[int, tuple[int, str]] = {}
    host: set[int] = set()
    for stream in now.streams:
        yield f"a stream is {stream.residency}"
        content = -(-stream.length // now.page_size)
        if stream.held:
            yield "pages held behind open leases"
        if stream.device and len(stream.device[0]) > content:
            yield "surplus pages"
        for page in stream.device[0] if stream.device else ():
            other = device.setdefault(page, (stream.incarnation, stream.label))
            if other != (stream.incarnation, stream.label):
                yield "device page shared by streams"
                if other[0] != stream.incarnation:
                    yield "page shared across requests"
        for page in stream.host[0] if stream.host else ():
            if page in host:
                yield "host page shared by labels"
            host.add(page)
    incarnations = {incarnation for _, incarnation in now.requests}
    for claim in now.claims:
        if claim.kind == "retrieve" and claim.incarnation not in incarnations:
            yield "fetch outlives its request"


def missing(reached: Any) -> tuple[str, ...]:
    """Return what is required and not in `reached`."""
    return tuple(name for name in REQUIRED if not reached[name])
