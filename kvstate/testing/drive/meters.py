"""What a drive counts: around the scheduler, the backend and the judge that it is given."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from kvstate.backend import Backend
from kvstate.ops import CopyIn, CopyOut, Op
from kvstate.ordering import Clock
from kvstate.refusals import Refusal
from kvstate.scheduler import Scheduler
from kvstate.scheduler.batch import Batch, Scheduled, Update
from kvstate.scheduler.reasons import Reason
from kvstate.testing.judge import EdgeJudge

RESETS = frozenset(reason for reason in Reason if reason.name.startswith("RESET_"))


class MeteredJudge(EdgeJudge):
    """An EdgeJudge that knows what it cost."""

    cost_s = 0.0

    def observe(self, op: Op) -> None:
        """Judge the next op, in number order."""
        began = time.thread_time()
        super().observe(op)
        self.cost_s += time.thread_time() - began


class MeteredBackend:
    """Counts what a manager spends in its backend, and what it has copied. Submits come one at a time.

    Attributes
    ----------
    pages
        Pages copied, per kind of copy.
    submissions
        Runs of copies of one kind with nothing in between.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.cost_s = 0.0
        self.pages: Counter[type[Op]] = Counter()
        self.submissions = 0
        self._last: type[Op] | None = None

    def submit(self, op: Op) -> None:
        """Pass on one op."""
        kind = type(op)
        if isinstance(op, (CopyOut, CopyIn)):
            self.pages[kind] += sum(map(len, op.copies))
            self.submissions += kind is not self._last
        self._last = kind
        began = time.thread_time()
        try:
            self.inner.submit(op)
        finally:
            self.cost_s += time.thread_time() - began

    def skip(self, op: Op) -> None:
        """Pass on an op that failed at submit."""
        self.inner.skip(op)

    def completed(self) -> Clock:
        """Return what has completed."""
        return self.inner.completed()

    def wait(self, clock: Clock) -> None:
        """Wait for what `clock` names."""
        self.inner.wait(clock)

    def lose(self, why: str) -> None:
        """Wake whoever waits."""
        self.inner.lose(why)

    def close(self) -> None:
        """Release the memory."""
        self.inner.close()


class MeteredScheduler(Scheduler):
    """A Scheduler that counts what it decides. `counts` are Report's; `refused` is by reason and refusal."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def schedule(self) -> Scheduled:
        """Put the next step together, and count who was refused and why."""
        outcome = super().schedule()
        if isinstance(outcome, Batch) and outcome.plain:
            # What most steps are: everybody decodes, which needs no looking at.
            for _, reason, refusal in outcome.notes:
                self._count(reason, refusal)
        else:
            for decision in outcome.decisions:
                self._count(decision.reason, decision.refusal)
        return outcome

    def _count(self, reason: Reason, refusal: Refusal | None) -> None:
        if refusal is not None:
            self.refused[f"{reason.name.lower()}: {type(refusal).__name__}"] += 1
        if reason is Reason.RESTORED:
            self.counts["reloads"] += 1
        elif reason is Reason.OFFLOADED:
            self.counts["offloads"] += 1
        elif reason in RESETS:
            self.counts["soft_resets"] += 1

    def update(self, batch: Batch, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> Update:
        """Commit a batch, and count what it has stored."""
        counts = self.counts
        void = batch.lease.void_places()
        counts["steps"] += 1
        counts["voided"] += len(void)
        if batch.plain:
            counts["tokens_decoded"] += len(batch) - len(void)
        else:
            for place, work in enumerate(batch.works):
                if place not in void:
                    span, start = batch.span(place), batch.start(place)
                    decodes = span == 1 and start >= work.first
                    counts["tokens_decoded" if decodes else "tokens_prefilled"] += span
                    counts["tokens_recomputed"] += max(0, min(start + span, work.stored_most) - start)
                    counts["tokens_cached"] += 0 if work.soft_resets else batch.found(place)
                    counts["forks"] += len(batch.children(place)) if batch.forks(place) else 0
        done = super().update(batch, tokens, logprobs)
        counts["tokens_late"] += done.late
        for decision in done.decisions:
            self._count(decision.reason, decision.refusal)
        return done
