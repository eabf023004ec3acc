"""The steady step: what a decode phase repeats, so that it need not be put together again and again."""

from __future__ import annotations

from collections.abc import Sequence

from kvstate.scheduler.batch import Batch
from kvstate.scheduler.passes import Chosen
from kvstate.scheduler.reasons import Reason
from kvstate.scheduler.requests import Work
from kvstate.scheduler.roster import Roster
from kvstate.types import Step


class Steady:
    """The step in which all that are active decode one token each: the same again, until who is active changes.

    `slack` is how many more tokens the first of them to reach its limit may get, at least: every update takes one away.
    """

    __slots__ = ("changes", "slack", "step", "works")

    def __init__(self, works: tuple[Work, ...], step: Step, changes: int) -> None:
        self.works = works
        self.step = step
        self.changes = changes
        self.slack = min(work.limit - len(work.tokens) for work in works)

    @classmethod
    def of(cls, chosen: Chosen, roster: Roster) -> Steady | None:
        """Return what is steady about a step, or None."""
        drafts = chosen.drafts
        if chosen.lease is None or len(drafts) != len(roster.active):
            return None
        if any(one.reason is not Reason.DECODES for one in drafts):
            return None
        return cls(tuple(one.work for one in drafts), chosen.lease.step, roster.changes)

    def holds(self, roster: Roster, flight: Sequence[Batch]) -> bool:
        """Tell whether the same step is the next one: asynchronously, each must be allowed one more than in flight."""
        if self.changes != roster.changes:
            return False
        if not flight:
            return True
        last = flight[-1]
        return last.works is self.works and not last.lease.void and self.slack > 1
