"""A reference scheduler: continuous batching over a KVManager, with eviction, soft reset and restore.

One pass puts one step together::

    active      decoding, then prefilling (or prefilling first), each by arrival, while the token budget lasts
    starved     active ones refused for pages; the newest of them make room for the others (`eviction`)
    waiting     offloaded and fresh in turn, offloaded first; nobody overtakes one that does not fit

The scheduler decides by what it was told and by what the manager answers, never by a clock or a hash, so that every
tensor-parallel rank decides alike.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from kvstate.errors import Refused
from kvstate.eviction import relieve
from kvstate.manager import KVManager
from kvstate.ops import Plan
from kvstate.refusals import NotLaunched, OutOfOrder, PagesExhausted, Refusal
from kvstate.scheduler.batch import Batch, BatchOutOfOrder, Blocked, Idle, InFlight, Scheduled, Update
from kvstate.scheduler.drafting import Draft
from kvstate.scheduler.passes import Chosen, Pass
from kvstate.scheduler.reasons import Decision, Notes, Reason, decisions
from kvstate.scheduler.requests import Added, Finish, GenerationRequest, Output, Phase, Work
from kvstate.scheduler.roster import Roster
from kvstate.scheduler.settling import settle
from kvstate.scheduler.steady import Steady
from kvstate.state import Lease
from kvstate.transitions.offload import Abandoned, Offloaded
from kvstate.transitions.reload import Reloaded
from kvstate.types import Step


class Scheduler:
    """Decides what each step computes, who waits and who leaves.

    Used by one thread. Requests are added; then, over and over, `schedule` gives a batch, its plan is launched and the
    tokens that were sampled go to `update`; `kvstate.serve` is that loop. Asynchronously, a batch may be scheduled
    and launched while the one before it is in flight.

    Parameters
    ----------
    manager
        Nobody else ends, moves or resets what this scheduler has added to it.
    budget
        Tokens of one step.
    batch
        Requests of one step, and active at once; samples that are forked may be more.
    policy
        Who comes first in a step.
    prefix_cache
        Start on cached pages where a prompt begins as an earlier one did, and make full pages findable.
    asynchronous
        Whether the next batch may be scheduled while one is in flight.
    clock
        Seconds; for timings only.
    """

    def __init__(
        self,
        manager: KVManager,
        *,
        budget: int = 2048,
        batch: int = 256,
        policy: Literal["decode-first", "prefill-first"] = "decode-first",
        prefix_cache: bool = False,
        asynchronous: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if budget < 1 or batch < 1:
            raise ValueError(f"a step has a budget of at least one token and one request, got {budget} and {batch}")
        if policy not in ("decode-first", "prefill-first"):
            raise ValueError(f"policy must be 'decode-first' or 'prefill-first', got {policy!r}")
        self.manager = manager
        self.budget = budget
        self.batch = batch
        self.policy: str = policy
        self.prefix_cache = prefix_cache
        self.asynchronous = asynchronous
        self.clock = clock
        self.roster = Roster(manager, clock)
        self._flight: deque[Batch] = deque()
        self._batches = 0
        self._steady: Steady | None = None
        self._ended: list[Output] = []
        self._last: Scheduled | None = None

    # -- requests

    def add(self, request: GenerationRequest) -> Added | Refusal:
        """Accept a request, or refuse it alone.

        Refused: EmptyPrompt, NothingToGenerate, DuplicateRequest (of a live id), TooLarge (it could never be stored,
        alone neither), and what the manager's `ingest` refuses.
        """
        return self.roster.add(request, self.budget)

    def cancel(self, id: str) -> tuple[Output, ...]:
        """End a request in whatever it is doing; return what each of its live samples has generated."""
        return self.roster.end_all(id, Finish.CANCELLED)

    def fail(self, id: str, error: str) -> tuple[Output, ...]:
        """End a request because of an `error`; return what each of its live samples has generated."""
        return self.roster.end_all(id, Finish.FAILED, error)

    def outputs(self, id: str) -> tuple[Output, ...]:
        """Return what each live sample of a request has generated so far."""
        return tuple(work.output() for work in self.roster.samples(id))

    def why(self, id: str, sample: int = 0) -> Decision | None:
        """Return what was decided last about a live sample, and why; None when it is not live."""
        found = [work for work in self.roster.samples(id) if work.sample == sample]
        if not found:
            return None
        for decision in reversed(self._last.decisions if self._last is not None else ()):
            if (decision.request, decision.sample) == (id, sample):
                return decision
        if found[0].phase is Phase.FORKING:
            return Decision(id, sample, Reason.FORKS_LATER)
        return Decision(id, sample, Reason.BARRED if self.roster.waiting.barred else Reason.BEHIND)

    @property
    def live(self) -> tuple[Work, ...]:
        """The live samples, in order of arrival."""
        return tuple(self.roster.live.values())

    @property
    def in_flight(self) -> tuple[Batch, ...]:
        """The batches that were scheduled and not yet updated, oldest first."""
        return tuple(self._flight)

    # -- schedule

    def schedule(self) -> Scheduled:
        """Put the next step together.

        Returns
        -------
        A Batch to launch; Idle when nothing is live; InFlight when a batch must be updated first; Blocked when nothing
        can run and nothing is in flight. Each says in `decisions` why, and has in `ended` what failed alone meanwhile.
        """
        try:
            self._last = self._schedule()
        except Refused as refused:
            # Closed, or lost, by another thread between an admit and its plan.
            self._last = Blocked(refused.refusal, self._take_ended())
        return self._last

    def _schedule(self) -> Scheduled:
        if len(self._flight) > self._ahead:
            return InFlight()
        notes = self.roster.take_notes()
        while self.roster.live:
            trial = Pass(self.manager, self.roster, self, self._flight, notes)
            batch, starved = self._try(trial)
            self._ended += trial.ended
            # Whoever starves is helped now, whether others were scheduled or not.
            getting_on = batch is not None or bool(self._flight)
            released = bool(starved) and self._relieve(starved, notes, getting_on=getting_on)
            if batch is not None:
                batch.ended = self._take_ended()
                return batch
            if released or (trial.ended and not trial.dead):
                continue
            if self._flight and not trial.dead:
                return InFlight(self._take_ended(), decisions(notes))
            if trial.dead or not (trial.reload_failed or self._last_resort(trial, starved)):
                return Blocked(trial.refusal, self._take_ended(), decisions(notes))
        return Idle(self._take_ended(), decisions(notes))

    @property
    def _ahead(self) -> bool:
        """Whether a step may be prepared while one is in flight; of one that began anew, it would scatter the pages."""
        active = self.roster.active
        return self.asynchronous and not (len(active) == 1 and active[0].anew)

    def _take_ended(self) -> tuple[Output, ...]:
        ended, self._ended = tuple(self._ended), []
        return ended

    def _try(self, trial: Pass) -> tuple[Batch | None, Sequence[Draft]]:
        """Put one step together as things are; return it, if anything can run, and those who starve."""
        steady = self._steady
        if steady is not None and not steady.holds(self.roster, self._flight):
            steady = self._steady = None
        lease = self.manager.admit(steady.step) if steady is not None else None
        chosen: Chosen | None = None
        if steady is None or not isinstance(lease, Lease):
            steady = None
            chosen = trial.active()
            lease = chosen.lease
            self._steady = Steady.of(chosen, self.roster)
        if len(self.roster.waiting) and not trial.dead:
            entered = self._enter(trial, lease, chosen, steady)
            if entered is not None:
                steady, chosen = None, entered
                lease = entered.lease
        if lease is None:
            return None, chosen.starved if chosen is not None else ()
        if steady is not None:
            return self._batch(lease, steady.works, None, trial.notes), ()
        assert chosen is not None
        works = tuple(one.work for one in chosen.drafts)
        if self._steady is not None and lease.step is self._steady.step:
            return self._batch(lease, self._steady.works, None, trial.notes), ()
        return self._batch(lease, works, chosen.drafts, trial.notes), chosen.starved

    def _enter(self, trial: Pass, lease: Lease | None, chosen: Chosen | None, steady: Steady | None) -> Chosen | None:
        """Let those who wait into the step, as far as budget, batch and pages go; None when nobody gets in.

        The lease of the active ones is held while those who wait try, so that they take nothing from them; then one
        step of all takes its place.
        """
        barring = trial.barring(chosen.starved if chosen is not None else ())
        if barring is not None:
            trial.notes.append((next(iter(self.roster.waiting)), barring, None))
            return None
        drafts = chosen.drafts if chosen is not None else ()
        held = len(steady.works) if steady is not None else len(drafts)
        spent = held if steady is not None else sum(one.span for one in drafts)
        fresh, claims = trial.enter(self.budget - spent, held)
        if steady is not None and (fresh or claims):
            drafts = trial.active_drafts()
        back = [one for one, claim in claims if trial.restore(one, claim)]
        if not (fresh or back):
            return None
        if lease is not None:
            self.manager.abort(lease)
        return trial.admit_all([*drafts, *back, *fresh])

    def _batch(
        self, lease: Lease, works: tuple[Work, ...], drafts: Sequence[Draft] | None, notes: Notes
    ) -> Batch:  # fmt: skip
        previous = self._flight[-1] if self._flight else None
        self._batches += 1
        batch = Batch(self._batches, lease, self._plan(lease), works, drafts, previous, notes)
        self._flight.append(batch)
        return batch

    def _plan(self, lease: Lease) -> Plan:
        plan = self.manager.plan(lease)
        if isinstance(plan, Refusal):
            # StalePlan says once per change what went void; planning again sends that to the sink.
            plan = self.manager.plan(lease)
        if isinstance(plan, Refusal):
            raise Refused(plan)
        return plan

    # -- eviction

    def _relieve(
        self, starved: Sequence[Draft], notes: Notes, together: bool = False, getting_on: bool = False
    ) -> bool:
        """Make room for those who starve; tell whether anybody left. Who did waits at the tail, the oldest in front."""
        works = {one.work.key: one.work for one in starved}
        active = self.roster.active
        relief = relieve(
            self.manager,
            [one.starved() for one in starved],
            len(active),
            together=together,
            oldest=active[0].key if getting_on else None,
        )
        notes += [(works[verdict.request], verdict.reason, verdict.refusal) for verdict in relief.verdicts]
        for key in reversed(relief.offloaded):
            self.roster.offloaded(works[key])
        for key in reversed(relief.reset):
            self.roster.begin_again(works[key])
        if relief.released:
            self.roster.waiting.barred = True
        return relief.released

    def _last_resort(self, trial: Pass, starved: Sequence[Draft]) -> bool:
        """Find a way on when nothing was scheduled, nobody left and nothing is in flight; tell whether there is one.

        Those who share all their pages leave together. One that is alone, and short of pages for its forks, does not
        wait for them: its other samples start on their own. One that is alone, and fits but for how its pages lie in
        the sectors, starts without found pages, or has its own moved together.
        """
        if starved and self._relieve(starved, trial.notes, together=True):
            return True
        alone = starved or ([trial.turned_away] if trial.turned_away is not None else [])
        for one in alone:
            if one.forks:
                self.roster.unfork(one.work)
                trial.notes += self.roster.take_notes()
                return True
            if one.segment.prefix:
                one.work.anew = True
                trial.notes.append((one.work, Reason.STARTS_ANEW, trial.refusal))
                return True
        return len(self.roster.active) == len(starved) == 1 and self._move_together(starved[0], trial.notes)

    def _move_together(self, one: Draft, notes: Notes) -> bool:
        """Move the pages of the last active request into as few sectors as can be; tell whether that was tried.

        Others have left the sectors that they shared with it, or cached pages lie between its own: those go, for that
        is all that still takes room. To the host and back, or else computed anew.
        """
        work = one.work
        refusal = self.manager.probe(Step((one.segment,)))
        at = (len(work.tokens), work.stored)
        if not isinstance(refusal, PagesExhausted) or not refusal.fragmented or work.moved_at == at:
            return False
        work.moved_at = at
        back: Offloaded | Reloaded | Abandoned | Refusal = self.manager.offload(work.key)
        if not isinstance(back, Refusal):
            work.offloads += 1
            self._forget_cached()
            back = self.manager.reload(work.key, Step((one.segment,)))
        if isinstance(back, Refusal):
            self.manager.reset(work.key)
            self._forget_cached()
            self.roster.restart(work)
            notes.append((work, Reason.RESET_SCATTERED, back))
        else:
            work.anew = True
            notes.append((work, Reason.MOVED_TOGETHER, refusal))
        return True

    def _forget_cached(self) -> None:
        if self.prefix_cache:
            self.manager.reset_prefix_cache()

    # -- batches

    def promote(self, batch: Batch) -> Plan | None:
        """Return the plan to launch for `batch`: a new one if it went stale; None when nothing in it counts any more.

        Then the batch has ended, and is neither launched nor updated.

        Raises
        ------
        BatchOutOfOrder
            When the batch is not in flight.
        """
        if batch not in self._flight:
            raise BatchOutOfOrder(batch)
        if batch.lease.void == len(batch.lease.rows):
            self.abort(batch)
            return None
        if batch.lease.void != batch.plan.void:
            batch.plan = self._plan(batch.lease)
        return batch.plan

    def abort(self, batch: Batch) -> None:
        """Give up a batch, launched or not: what it was to compute is scheduled again.

        Raises
        ------
        BatchOutOfOrder
            When the batch is not in flight.
        """
        if batch not in self._flight:
            raise BatchOutOfOrder(batch)
        self.manager.abort(batch.lease)
        self._flight.remove(batch)
        self._steady = None
        if self._flight:
            self._flight[0].previous = None

    def update(self, batch: Batch, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> Update:
        """Commit a batch and hand out what it sampled. Tokens for those who left meanwhile are ignored.

        Parameters
        ----------
        tokens
            For each entry that draws, in order, as many as it draws.
        logprobs
            One per token, if the model gives them.

        Raises
        ------
        BatchOutOfOrder
            When the batch is not the oldest in flight.
        ValueError
            When the tokens are not as many as the batch draws; nothing was changed.
        Refused
            When the batch was not launched.
        """
        if not self._flight or self._flight[0] is not batch:
            raise BatchOutOfOrder(batch)
        batch.check(tokens, logprobs)
        committed = self.manager.commit(batch.lease)
        if isinstance(committed, Refusal):
            if isinstance(committed, (NotLaunched, OutOfOrder)):
                raise Refused(committed)
            self.abort(batch)
            return Update((), (), len(tokens))
        self._flight.popleft()
        if self._flight:
            self._flight[0].previous = None
        if self._steady is not None:
            self._steady.slack -= 1
        return settle(self, batch, committed.dropped, tokens, logprobs)
