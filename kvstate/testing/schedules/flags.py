"""SOMETIMES, for schedules: what they must have reached before it may be said that they looked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from kvstate.scheduler.batch import Batch, Idle, Update
from kvstate.scheduler.reasons import Reason
from kvstate.scheduler.requests import Finish, Phase, Work
from kvstate.types import Geometry

SCATTERED = (Reason.MOVED_TOGETHER, Reason.RESET_SCATTERED, Reason.STARTS_ANEW)

BY_HAND = (Reason.EXPELLED, Reason.NOT_READY, Reason.RESET_REFUSED, *SCATTERED)
"""Decisions about what others do to a scheduler's requests behind its back, and about requests in too many sectors,
which need more room than these worlds have: tests of their own make them."""

ASKED = (Reason.BEHIND, Reason.FORKS_LATER)
"""What `Scheduler.why` says of those that no pass had a word on."""

PHASES = (Phase.WAITING, Phase.FORKING, Phase.ACTIVE, Phase.OFFLOADED)

RESETS = (Reason.RESET_HOST_FULL, Reason.RESET_NO_HOST, Reason.RESET_COPY_FAILED)

REQUIRED: tuple[str, ...] = (
    *("added a request", "added an id again", "added during another life of its id"),
    *(f"refused {name}" for name in ("EmptyPrompt", "NothingToGenerate", "TooLarge", "DuplicateRequest")),
    *(f"decided {reason.name}" for reason in Reason if reason not in BY_HAND + ASKED),
    *(f"{verb} while {phase.name}" for verb in ("cancelled", "failed") for phase in PHASES),
    *("cancelled in flight", "failed in flight", "cancelled what is not live"),
    *(f"ended by {finish.name}" for finish in (Finish.LENGTH, Finish.STOP)),
    *(f"bar lifted by {how}" for how in ("finish", "cancel", "fail", "the last active one")),
    *("late token ignored", "token in flight taken back"),
    *("scheduled one ahead", "launched one ahead", "fed a token in flight", "nothing before the batch in flight"),
    *("plan promoted anew", "batch that no longer counts", "batch aborted", "launch failed", "idle"),
    *("forked into new requests", "fork dropped with its source", "forked after a soft reset"),
    *("started on cached pages", "started on cached pages after a soft reset"),
    *("several restored at once", "several evicted at once", "offloaded and reset in one relief"),
    *("prefill victim restored", "decode victim restored"),
    *("weights changed", "several groups", "window"),
)


def of_world(geometry: Geometry) -> Iterator[str]:
    """Yield what a world is."""
    if len(geometry.groups) > 1:
        yield "several groups"
    if geometry.windowed:
        yield "window"


def of_schedule(outcome: Any, live: Sequence[Work], flying: Sequence[Work], flight: int) -> Iterator[str]:
    """Yield what a pass reached: `flying` had a step in flight before it, `flight` batches are in flight behind it."""
    decided = Counter(decision.reason for decision in outcome.decisions)
    yield from (f"decided {reason.name}" for reason in decided)
    resets = sum(decided[reason] for reason in RESETS)
    if decided[Reason.RESTORED] > 1:
        yield "several restored at once"
    if decided[Reason.OFFLOADED] + resets > 1:
        yield "several evicted at once"
    if decided[Reason.OFFLOADED] and resets:
        yield "offloaded and reset in one relief"
    works = {(work.request.id, work.sample): work for work in live}
    for decision in outcome.decisions:
        work = works.get((decision.request, decision.sample))
        if work is None:
            continue
        if decision.reason is Reason.RESTORED:
            decoding = work.generated and len(work.tokens) - work.stored == 1
            yield f"{'decode' if decoding else 'prefill'} victim restored"
        elif decision.reason in (Reason.OFFLOADED, *RESETS) and work in flying:
            yield "token in flight taken back"
    if isinstance(outcome, Idle):
        yield "idle"
    elif not isinstance(outcome, Batch):
        yield "nothing before the batch in flight"
    else:
        if flight > 1:
            yield "scheduled one ahead"
        yield from _of_batch(outcome)


def _of_batch(batch: Batch) -> Iterator[str]:
    for place, work in enumerate(batch.works):
        if batch.found(place):
            yield "started on cached pages" + " after a soft reset" * bool(work.soft_resets)
        if batch.forks(place) and work.soft_resets:
            yield "forked after a soft reset"


def of_update(batch: Batch, update: Update) -> Iterator[str]:
    """Yield what an update reached."""
    if update.late:
        yield "late token ignored"
    yield from (f"decided {decision.reason.name}" for decision in update.decisions)
    got = {work.key for work in update.advanced}
    for place in range(len(batch)):
        if batch.forks(place):
            forked = any(child.key in got for child in batch.children(place))
            yield "forked into new requests" if forked else "fork dropped with its source"


def missing(reached: Counter[str]) -> tuple[str, ...]:
    """Return what is required and was not reached."""
    return tuple(name for name in REQUIRED if not reached[name])
