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
from kvstate.transitions.prefix import Keyed
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
    "pages keyed",
    "key taken",
    "started on a prefix",
    "started on cached pages",
    "prefix returned by an abort",
    "cached page evicted",
    "cached page evicted, others stay",
    "keys forgotten under open streams",
    "reload found pages by their keys",
    "reload made pages findable again",
    "window let pages go",
    "sectors of two groups",
    "sector changed hands",
    "refused in fragments",
    "page granted behind a copy",
    "page granted behind a step",
)


def seen(verb: str, result: Any, before: StateView, now: StateView) -> Iterator[str]:
    """Yield what one call reached."""
    if isinstance(result, Refusal):
        yield f"refused {type(result).__name__}"
        if getattr(result, "fragmented", False):
            yield "refused in fragments"
        return
    yield from _by_result(verb, result, before)
    yield from _by_keys(verb, result, before, now)
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
        if any(
            back.count > copied.count
            for part in result.parts
            for back, copied in zip(part.device, part.host, strict=True)
        ):
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


def _by_keys(verb: str, result: Any, before: StateView, now: StateView) -> Iterator[str]:
    """Yield what became of content keys, windows and sectors."""
    if isinstance(result, Keyed):
        if result.pages:
            yield "pages keyed"
        if result.taken:
            yield "key taken"
    was = {(group, key) for group, pool in enumerate(before.device) for _, key in pool.keys}
    found = {(group, key) for group, pool in enumerate(now.device) for _, key in pool.keys}
    gone = was - found
    if verb == "reset_prefix_cache":
        if any(stream.stale for stream in now.streams):
            yield "keys forgotten under open streams"
    elif gone:
        yield "cached page evicted"
        if any(pool.cached for pool in now.device):
            yield "cached page evicted, others stay"
    waiting, then = (sum(len(pool.cached) for pool in view.device) for view in (now, before))
    if verb == "abort" and waiting > then:
        yield "prefix returned by an abort"
    if isinstance(result, Lease) and any(segment.prefix for segment in result.step.segments):
        yield "started on a prefix"
        if then > waiting + len(gone):
            yield "started on cached pages"
    if isinstance(result, ReloadClaim) and result.op is not None:
        copied = sum(len(copies) for copies in result.op.copies)
        host = {(group, page) for part in result.parts for group, table in enumerate(part.host) for page in table}
        if copied < len(host):
            yield "reload found pages by their keys"
    if verb == "commit_claim" and found - was:
        yield "reload made pages findable again"
    passed = {(stream.incarnation, stream.label): sum(stream.skipped) for stream in before.streams}
    if any(sum(s.skipped) > passed.get((s.incarnation, s.label), 0) for s in now.streams) and verb == "commit":
        yield "window let pages go"
    if len(set(now.device_lent) - {None}) > 1:
        yield "sectors of two groups"
    for old, new in zip(before.device_lent, now.device_lent, strict=True):
        if old is not None and new is not None and old != new:
            yield "sector changed hands"
            return


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
    device: dict[tuple[int, int], tuple[int, str]] = {}
    host: set[tuple[int, int]] = set()
    for stream in now.streams:
        yield f"a stream is {stream.residency}"
        content = [-(-stream.length // now.page_size) - skipped for skipped in stream.skipped]
        if stream.held:
            yield "pages held behind open leases"
        if stream.device and any(len(own) > count for own, count in zip(stream.device, content, strict=True)):
            yield "surplus pages"
        for name in [(group, page) for group, own in enumerate(stream.device) for page in own]:
            other = device.setdefault(name, (stream.incarnation, stream.label))
            if other != (stream.incarnation, stream.label):
                yield "device page shared by streams"
                if other[0] != stream.incarnation:
                    yield "page shared across requests"
        for name in [(group, page) for group, own in enumerate(stream.host) for page in own]:
            if name in host:
                yield "host page shared by labels"
            host.add(name)
    incarnations = {incarnation for _, incarnation in now.requests}
    for claim in now.claims:
        if claim.kind == "retrieve" and claim.incarnation not in incarnations:
            yield "fetch outlives its request"


def missing(reached: Any) -> tuple[str, ...]:
    """Return what is required and not in `reached`."""
    return tuple(name for name in REQUIRED if not reached[name])
