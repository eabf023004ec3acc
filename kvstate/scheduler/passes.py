"""One pass: it puts one step together from those who are active and those who wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from kvstate.manager import KVManager
from kvstate.prefix import Key
from kvstate.refusals import Kind, ManagerClosed, ManagerPoisoned, PagesExhausted, PrefixLost, Refusal
from kvstate.scheduler.batch import Batch
from kvstate.scheduler.drafting import Draft, draft, fit, step_of
from kvstate.scheduler.reasons import Notes, Reason
from kvstate.scheduler.requests import Finish, Output, Phase, Work
from kvstate.scheduler.roster import Roster
from kvstate.state import Lease, ReloadClaim
from kvstate.types import Step

RELOADS_FAILED_MAX = 3
"""Copies from the host that fail in a row before a request begins again instead."""


class Rules(Protocol):
    """What of a Scheduler a pass goes by."""

    budget: int
    batch: int
    policy: str
    prefix_cache: bool


@attrs.define(eq=False)
class Chosen:
    """A step that was admitted, or None: who is in it, and who starves."""

    lease: Lease | None
    drafts: Sequence[Draft]
    starved: Sequence[Draft] = ()


class Pass:
    """One try at a step. `notes` are its decisions, `ended` who failed alone, `refusal` what stood in the way first."""

    def __init__(self, manager: KVManager, roster: Roster, rules: Rules, flight: Sequence[Batch], notes: Notes) -> None:
        self.manager = manager
        self.roster = roster
        self.rules = rules
        self.flight = flight
        self.notes = notes
        self.ended: list[Output] = []
        self.refusal: Refusal | None = None
        self.reload_failed = False
        # The next one who waits, when it was refused.
        self.turned_away: Draft | None = None

    @property
    def dead(self) -> bool:
        """True when the manager refuses everything."""
        return isinstance(self.refusal, (ManagerClosed, ManagerPoisoned))

    # -- the active ones

    def active(self) -> Chosen:
        """Admit a step of those that are active, as far as budget, batch and pages go."""
        return self.admit(self.active_drafts())

    def active_drafts(self) -> list[Draft]:
        """Draft a step of those that are active: by policy, then by arrival."""
        decoding, prefilling = self.by_phase()
        rules = self.rules
        drafts: list[Draft] = []
        budget = rules.budget
        for work in decoding + prefilling if rules.policy == "decode-first" else prefilling + decoding:
            if not budget or len(drafts) >= rules.batch:
                self.notes.append((work, Reason.BATCH_FULL if budget else Reason.BUDGET_SPENT, None))
                continue
            one = self.draft(work, budget)
            if isinstance(one, Reason):
                self.notes.append((work, one, None))
            else:
                drafts.append(one)
                budget -= one.span
        return drafts

    def by_phase(self) -> tuple[list[Work], list[Work]]:
        """Return the active requests that decode, and those that have tokens to compute before they do."""
        look_ahead(self.roster.active, self.flight)
        decoding: list[Work] = []
        prefilling: list[Work] = []
        for work in self.roster.active:
            known = len(work.tokens)
            decodes = work.pending or (work.stored + work.ahead == known - 1 and known > work.first)
            (decoding if decodes else prefilling).append(work)
        return decoding, prefilling

    def full(self, budget: int, drafted: int) -> Reason | None:
        """Return why a step takes nobody more, or None."""
        if drafted >= self.rules.batch:
            return Reason.BATCH_FULL
        return None if budget else Reason.BUDGET_SPENT

    def draft(self, work: Work, budget: int) -> Draft | Reason:
        """Draft the next piece of `work`, on what the prefix cache has of it, and with its forks."""
        if not self.rules.prefix_cache or work.anew or work.stored or work.ahead:
            return draft(work, budget, (), 1)
        return draft(work, budget, self.lookup(work), self.manager.geometry.page_size)

    def lookup(self, work: Work) -> tuple[Key, ...]:
        """Return the keys of cached pages that `work`, which has nothing stored, can start on."""
        if work.phase is Phase.OFFLOADED:
            return ()
        keys = work.prefix_keys(self.manager.geometry.page_size)
        return keys[: self.manager.match(keys)]

    # -- admission

    def admit(self, drafts: list[Draft]) -> Chosen:
        """Admit the step of as many `drafts` as fit."""
        starved: list[Draft] = []
        while drafts:
            lease = self.manager.admit(step_of(drafts))
            if isinstance(lease, Lease):
                return Chosen(lease, drafts, starved)
            self.refusal = self.refusal or lease
            if self.dead:
                break
            drafts = self.fewer(drafts, lease, starved)
        return Chosen(None, (), starved)

    def fewer(self, drafts: list[Draft], refusal: Refusal, starved: list[Draft]) -> list[Draft]:
        """Return who is left of `drafts` when their step was refused; those that starve join `starved`."""
        if isinstance(refusal, PagesExhausted):
            left, refused = fit(self.manager, drafts)
            if not refused:
                # Another thread took pages before this refusal and gave them back after it.
                refused = [(left.pop(), refusal)]
            for one, why in refused:
                self.short(one, why, starved)
            return left
        named = [one for one in drafts if refusal.request in one.names()] or drafts[-1:]
        left = [one for one in drafts if one not in named]
        for one in named:
            if isinstance(refusal, PrefixLost):
                left.append(self.shorter(one, refusal.matched))
            elif refusal.kind is Kind.TERMINAL:
                self.expel(one.work, refusal)
            else:
                self.notes.append((one.work, Reason.NOT_READY, refusal))
        return left

    def short(self, one: Draft, refusal: Refusal, starved: list[Draft]) -> None:
        """Note a draft that was refused for pages: it starves when it is active, else it goes on waiting."""
        self.refusal = self.refusal or refusal
        if one.work.phase is Phase.ACTIVE:
            starved.append(one)
            self.notes.append((one.work, Reason.STARVED, refusal))
        else:
            self.notes.append((one.work, Reason.NO_ROOM, refusal))

    def shorter(self, one: Draft, matched: int) -> Draft:
        """Draft again what was to start on pages that another thread's step has taken meanwhile."""
        found = one.segment.prefix[: min(matched, len(one.segment.prefix) - 1)]
        again = draft(one.work, one.span, found, self.manager.geometry.page_size)
        assert isinstance(again, Draft)
        return again

    def expel(self, work: Work, refusal: Refusal) -> None:
        """Fail a request whose step can never be admitted; the others go on."""
        self.notes.append((work, Reason.EXPELLED, refusal))
        self.ended += self.roster.end_all(work.request.id, Finish.FAILED, str(refusal))

    # -- those who wait

    def barring(self, starved: Sequence[Draft]) -> Reason | None:
        """Return why nobody who waits may even try, or None."""
        if starved:
            return Reason.OTHERS_STARVE
        return Reason.BARRED if self.roster.waiting.barred else None

    def enter(self, budget: int, held: int) -> tuple[list[Draft], list[tuple[Draft, ReloadClaim]]]:
        """Find those who wait that fit behind a step that is admitted, with `budget` and `held` places taken.

        Reloads are claimed, each with room for its part of the step, so that it never holds pages while that part is
        refused; their copies are one submission. The others hold their places meanwhile, else the next reload would
        take them.
        """
        places: list[Lease] = []
        fresh: list[Draft] = []
        claims: list[tuple[Draft, ReloadClaim]] = []
        active = len(self.roster.active)
        with self.manager.batch():
            for work in self.roster.waiting:
                full = self.full(budget, max(held, active) + len(fresh) + len(claims))
                one = full if full is not None else self.draft(work, budget)
                if isinstance(one, Reason):
                    self.notes.append((work, one, None))
                    break
                refusal: Refusal | None
                if work.phase is Phase.OFFLOADED:
                    claim = self.manager.claim_reload(work.key, Step((one.segment,)))
                    if isinstance(claim, ReloadClaim):
                        claims.append((one, claim))
                    refusal = claim if isinstance(claim, Refusal) else None
                else:
                    lease = self.manager.admit(step_of([one]))
                    while isinstance(lease, PrefixLost):
                        one = self.shorter(one, lease.matched)
                        lease = self.manager.admit(step_of([one]))
                    if isinstance(lease, Lease):
                        fresh.append(one)
                        places.append(lease)
                    refusal = lease if isinstance(lease, Refusal) else None
                if refusal is not None:
                    self.turn_away(one, refusal)
                    break
                budget -= one.span
        for lease in places:
            self.manager.abort(lease)
        return fresh, claims

    def turn_away(self, one: Draft, refusal: Refusal) -> None:
        """Note why the next one who waits does not get in; what can never get in fails, alone."""
        work = one.work
        self.turned_away = one
        self.refusal = self.refusal or refusal
        if refusal.kind is Kind.TERMINAL and not self.dead:
            self.expel(work, refusal)
        else:
            self.notes.append((work, Reason.NO_ROOM, refusal))

    def restore(self, one: Draft, claim: ReloadClaim) -> bool:
        """End a reload whose copy was submitted, or failed; tell whether the request is back."""
        work = one.work
        done = self.manager.commit_claim(claim)
        if not isinstance(done, Refusal):
            one.reason = Reason.RESTORED
            work.reload_failures = 0
            self.roster.activate(work)
            return True
        self.manager.abandon(claim)
        self.refusal = self.refusal or done
        self.reload_failed = True
        work.reload_failures += 1
        if work.reload_failures < RELOADS_FAILED_MAX:
            self.notes.append((work, Reason.RELOAD_FAILED, done))
            return False
        self.notes.append((work, Reason.RESET_RELOAD_FAILED, done))
        self.manager.reset(work.key)
        self.roster.begin_again(work)
        return False

    def admit_all(self, drafts: list[Draft]) -> Chosen:
        """Admit the step of the active ones and of those who enter, in place of the one of the active ones alone."""
        for one in drafts:
            if one.work.phase is Phase.WAITING:
                one.reason = Reason.STARTS
        chosen = self.admit(drafts)
        for one in chosen.drafts:
            if one.work.phase is not Phase.ACTIVE:
                self.roster.activate(one.work)
        return chosen


def look_ahead(active: Sequence[Work], flight: Sequence[Batch]) -> None:
    """Note per active request what the steps in flight will have stored, and whether they sample a token for it."""
    for work in active:
        work.ahead = 0
        work.pending = False
    for batch in flight:
        void = batch.lease.void_places()
        for place, work in enumerate(batch.works):
            if work.phase is Phase.ACTIVE and not (void and place in void):
                one = batch.drafts[place] if batch.drafts is not None else None
                work.ahead += 1 if one is None else one.start + one.span - work.stored - work.ahead
                work.pending = one is None or one.draws > 0
