"""Mutants of the scheduler: rows Q of the known bugs that are one wrong line, and what eviction must not do.

Patches are made as in `tests.mutants.registry`. Each is caught by random schedules (`kvstate.testing.schedules`), or by
a program written by hand where all that goes wrong is that somebody waits too long.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable

import attrs

import kvstate.scheduler  # noqa: F401  (so that its modules are among the core's)
from kvstate.testing.schedules import Setup, schedules
from kvstate.testing.walk import Tally
from kvstate.testing.world import Violation
from tests.bugs import scheduling
from tests.mutants.registry import Patch, both, core_modules, edit


def _words(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(names.split()) if isinstance(names, str) else names


@attrs.frozen
class Mutant:
    """One bug of the scheduler, or of the machine under it.

    Attributes
    ----------
    id
        The row of `tests/bugs/`, or "promise", and a word.
    what
        What goes wrong, in a sentence.
    patch
        Puts it in.
    layers
        The witnesses of a schedule that may be first to object.
    seed, schedules
        From this seed on, so many schedules must find it.
    by_hand
        A program that must fail under the mutant; then `layers` is empty.
    """

    id: str
    what: str
    patch: Patch
    layers: tuple[str, ...] = attrs.field(default="", converter=_words)
    seed: int = 1
    schedules: int = 150
    by_hand: Callable[[], None] | None = None

    @property
    def row(self) -> str:
        """The row of `tests/bugs/`, or "promise"."""
        return self.id.split("-")[0]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "Q2-only-finish",
        "who waits behind an eviction is let in when an active request finishes, not when it is cancelled or fails",
        edit(
            "scheduler.roster.Roster.end",
            (
                "unbar_after_end(self.waiting)",
                "finish in (Finish.LENGTH, Finish.STOP) and unbar_after_end(self.waiting)",
            ),
        ),
        layers="progress",
    ),
    Mutant(
        "Q3-late",
        "the token of a step in flight is given to a request that has left, or was set back",
        edit(
            "scheduler.settling.settle",
            ("not dropped and logprobs is None", "logprobs is None"),
            ("frozenset(dropped)", "frozenset()"),
        ),
        layers="crash output",
    ),
    Mutant(
        "Q5-reentry",
        "a request that comes back counts as the newest",
        both(
            edit("eviction.newest_first", ("sorted(starved, key=lambda one: one.rank, reverse=True)", "starved[::-1]")),
            edit(
                "scheduler.roster.Roster.activate", ("insort(self.active, work, key=_rank)", "self.active.append(work)")
            ),
        ),
        by_hand=scheduling.the_restored_one_is_not_the_victim_again,
    ),
    Mutant(
        "Q17-keep",
        "an admit that is refused keeps the pages that it could get",
        edit(
            "transitions.step.admit",
            (
                "    if refusal is not None:\n        return refusal\n",
                "    if isinstance(refusal, PagesExhausted):\n"
                "        state.device.pools[0].grant(state.device.available()[0])\n"
                "    if refusal is not None:\n        return refusal\n",
            ),
        ),
        layers="crash progress empty",
    ),
    Mutant(
        "Q20-kept",
        "the token in flight of a victim counts as stored",
        edit("scheduler.roster.Roster.offloaded", ("work.ahead = 0", "work.stored += work.ahead")),
        layers="crash output",
    ),
    Mutant(
        "Q20-placeholder",
        "a restored victim is fed the placeholder of the token that was in flight",
        edit("scheduler.roster.Roster.offloaded", ("work.ahead = 0", "pass"), ("work.pending = False", "pass")),
        layers="crash output",
    ),
    Mutant(
        "Q12-forks",
        "samples that were forked in a step that did not count are taken for forked",
        edit("scheduler.settling._settle_each", ("forked.get(who.key, 0)", "work.stored")),
        layers="crash output",
    ),
    Mutant(
        "O13-gain",
        "a victim that frees nothing is taken all the same",
        edit("eviction.spared", ("not manager.gain(one.request)", "False")),
        by_hand=scheduling.a_victim_that_frees_nothing_stays,
    ),
    Mutant(
        "promise-last",
        "the last active request is evicted too",
        edit("eviction.spared", ("if active == 1:", "if active == 0:")),
        by_hand=scheduling.the_last_active_one_stays,
    ),
    Mutant(
        "promise-together",
        "requests that share all their pages each wait for the other to leave",
        edit(
            "scheduler.scheduler.Scheduler._last_resort",
            ("if starved and self._relieve(starved, trial.notes, together=True):", "if False:"),
        ),
        by_hand=scheduling.those_who_share_all_their_pages_leave_together,
    ),
    Mutant(
        "promise-reload",
        "a copy from the host that fails is tried again for ever",
        edit("scheduler.passes.Pass.restore", ("work.reload_failures < RELOADS_FAILED_MAX", "True")),
        by_hand=scheduling.a_copy_that_always_fails_is_given_up,
    ),
    Mutant(
        "promise-limit",
        "one token more is computed ahead than is allowed",
        edit("scheduler.drafting.draft", ("known + 1 >= work.limit", "known >= work.limit")),
        by_hand=scheduling.nothing_is_computed_behind_the_last_token,
    ),
)


@attrs.frozen
class Caught:
    """A mutant and how schedules met it."""

    mutant: Mutant
    world: Setup
    violation: Violation
    schedules: int
    seconds: float


def hunt(mutant: Mutant) -> Caught | None:
    """Play schedules on the mutated core, from the mutant's seed on; return what was met."""
    tally = Tally("mutants")
    with mutant.patch():
        met = schedules(mutant.seed, float("inf"), tally, schedules_max=mutant.schedules)
    return None if met is None else Caught(mutant, *met, tally.programs, tally.seconds)


# Sources are read while they are what was imported: an editor may be at work.
for _module in core_modules():
    if getattr(_module, "__file__", None):
        linecache.getlines(str(_module.__file__))
