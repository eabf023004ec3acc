"""Why: every decision of the scheduler and of eviction has a reason that a person can ask for."""

from __future__ import annotations

import enum

import attrs

from kvstate.refusals import Refusal
from kvstate.scheduler.requests import Work


class Reason(enum.Enum):
    """What was decided about one sample of a request, and why."""

    # In the step.
    DECODES = "it decodes its next token"
    PREFILLS = "it computes the next chunk of its tokens"
    STARTS = "it starts: there is room, and its turn has come"
    RESTORED = "it came back from the host, with room for this step"

    # Active, and not in the step.
    LAST_IN_FLIGHT = "the token in flight is the last that it may have"
    BUDGET_SPENT = "the step's token budget is spent"
    BATCH_FULL = "the step has as many requests as it may"
    NOT_READY = "its step was refused, and may be admitted later"
    STARVED = "it is short of pages: it starves"

    # Waiting, and not admitted.
    BARRED = "nobody is admitted after an eviction until an active request finishes, is cancelled or fails"
    OTHERS_STARVE = "an active request starves, so nobody is admitted"
    NO_ROOM = "it is short of pages, and nobody overtakes it"
    BEHIND = "it waits for its turn"
    RELOAD_FAILED = "its copy from the host failed; it stays there and is tried again"
    FORKS_LATER = "it is forked from its prompt's first sample once that has its prompt"

    # Evicted.
    OFFLOADED = "it was the newest that starved: its pages go to the host"
    RESET_HOST_FULL = "it was the newest that starved and the host has no room: it computes its tokens anew later"
    RESET_NO_HOST = "it was the newest that starved and there is no host pool: it computes its tokens anew later"
    RESET_COPY_FAILED = "it was the newest that starved and its copy failed: it computes its tokens anew later"
    RESET_RELOAD_FAILED = "its copy from the host failed again and again: it computes its tokens anew"
    RESET_FORK_FAILED = "the copy of its fork failed: it computes its prompt itself"
    RESET_REFUSED = "it could not be moved: it computes its tokens anew later"

    # Alone, in too many sectors.
    MOVED_TOGETHER = (
        "it is the last that is active, and fits once its pages lie together: they went to the host and back"
    )
    RESET_SCATTERED = "it is the last that is active, and fits once its pages lie together: it computes its tokens anew"
    STARTS_ANEW = "what the prefix cache has of it lies in too many sectors: it starts without"

    # Spared.
    ENOUGH = "those evicted before it were enough"
    LAST_ACTIVE = "it is the last that is active"
    OLDEST = "it is the oldest that is active, and others get on meanwhile"
    NO_GAIN = "evicting it would free nothing"

    # Forks.
    FORK_TOO_LARGE = "its prompt fits alone but not with all its forks: its other samples start on their own"

    # Ended.
    EXPELLED = "its step was refused for good: it fails alone"


@attrs.frozen
class Decision:
    """One decision: about which sample of which request, the reason, and the refusal behind it where there is one."""

    request: str
    sample: int
    reason: Reason
    refusal: Refusal | None = None

    def __str__(self) -> str:
        because = f" ({self.refusal})" if self.refusal is not None else ""
        return f"{self.request}[{self.sample}]: {self.reason.value}{because}"


Notes = list[tuple[Work, Reason, Refusal | None]]
"""Decisions while a step is put together; made into `Decision` values when somebody asks."""


def decisions(notes: Notes) -> tuple[Decision, ...]:
    """Return notes as decisions."""
    return tuple(Decision(work.request.id, work.sample, reason, refusal) for work, reason, refusal in notes)
