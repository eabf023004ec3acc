"""The scheduler: rows Q2–Q7, Q11, Q12, Q17, Q20 and O13 of the known bugs, and their siblings."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from kvstate.refusals import PagesExhausted, TooLarge
from kvstate.scheduler.batch import Batch, Blocked, Idle, InFlight
from kvstate.scheduler.reasons import Reason
from kvstate.scheduler.requests import (
    Added,
    DuplicateRequest,
    EmptyPrompt,
    Finish,
    GenerationRequest,
    NothingToGenerate,
    Phase,
)
from kvstate.types import Segment
from tests.bugs import scheduling
from tests.bugs.scheduling import Serving
from tests.steps import store

# -- Q2


def one_offloaded(asynchronous: bool = False) -> Serving:
    """a is active, b is on the host and nobody is admitted, c has never run."""
    serving = Serving(pages=5, asynchronous=asynchronous)
    serving.add("a", 3, 6)
    serving.add("b", 3, 6)
    serving.until(lambda: serving.evicted)
    serving.add("c", 2, 2)
    serving.step()
    assert serving.evicted == ["b"] and serving.scheduler.why("c").reason is Reason.BARRED
    return serving


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_Q2_the_last_active_request_is_cancelled_or_fails_and_those_who_wait_go_on(
    how: str, asynchronous: bool
) -> None:
    serving = one_offloaded(asynchronous)
    getattr(serving, how)("a")
    serving.run()
    assert [serving.outputs[id, 0].finish for id in ("b", "c")] == [Finish.LENGTH, Finish.LENGTH]


def test_Q2_sibling_nobody_is_admitted_before_an_active_request_ends() -> None:
    serving = one_offloaded()
    serving.until(lambda: ("a", 0) in serving.outputs)
    assert not serving.restored and serving.work("c").first_scheduled_s is None
    serving.step()
    assert serving.restored == ["b"]
    serving.run()


def test_Q2_sibling_the_end_of_one_who_waits_lets_nobody_in() -> None:
    serving = one_offloaded()
    serving.cancel("c")
    serving.schedule()
    assert serving.scheduler.why("b").reason is Reason.BARRED
    serving.update()
    serving.run()


# -- Q3


def test_Q3_a_request_is_cancelled_while_its_step_is_in_flight() -> None:
    serving = Serving(pages=9, asynchronous=True)
    serving.add("a", 3, 6)
    serving.add("b", 3, 6)
    serving.schedule()
    serving.schedule()
    [output] = serving.cancel("a")
    assert (output.finish, output.tokens) == (Finish.CANCELLED, ())
    assert serving.update().late == 1
    assert serving.update().late == 1
    serving.run()
    assert serving.outputs["b", 0].finish is Finish.LENGTH


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_Q3_a_request_is_ended_right_after_its_restore_and_before_its_first_token(how: str) -> None:
    serving = Serving(pages=5, asynchronous=True)
    serving.add("a", 3, 6)
    serving.add("b", 3, 6)
    serving.until(lambda: serving.evicted)
    while not serving.restored:
        if not isinstance(serving.schedule(), Batch):
            serving.update()
    had = tuple(serving.work("b").tokens[3:])
    [output] = getattr(serving, how)("b")
    assert output.tokens == had and len(had) > 0
    serving.run()


def test_Q3_sibling_what_stops_is_ignored_in_the_step_that_was_prepared_for_it() -> None:
    serving = Serving(pages=20, asynchronous=True)
    serving.add("a", 3, 9, stop=tuple(range(0, 1 << 16)))
    serving.add("b", 3, 3)
    serving.schedule()
    serving.schedule()
    assert [output.request for output in serving.update().ended] == ["a"]
    assert serving.update().late == 1
    serving.run()
    assert (serving.outputs["a", 0].finish, len(serving.outputs["a", 0].tokens)) == (Finish.STOP, 1)


def test_Q3_sibling_a_step_in_which_nothing_counts_any_more_is_not_launched() -> None:
    serving = Serving(pages=9)
    serving.add("a", 3, 6)
    batch = serving.scheduler.schedule()
    serving.cancel("a")
    assert serving.scheduler.promote(batch) is None
    assert serving.scheduler.in_flight == ()
    assert isinstance(serving.scheduler.schedule(), Idle)


# -- Q4


def test_Q4_a_request_larger_than_the_pool_is_refused_alone() -> None:
    serving = Serving(pages=4)
    serving.add("a", 3, 3)
    assert serving.add("whale", 5, 5) == TooLarge(request="whale", label="main", wanted=5, capacity=4)
    assert serving.add("long", 1, 100) == TooLarge(request="long", label="main", wanted=50, capacity=4)
    assert isinstance(serving.add("fits", 5, 4), Added)
    serving.run()
    assert {id for id, _ in serving.outputs} == {"a", "fits"}


# -- Q5


def test_Q5_a_restored_request_is_as_old_as_its_arrival() -> None:
    scheduling.the_restored_one_is_not_the_victim_again()


def test_Q5_sibling_a_soft_reset_changes_neither_age_nor_timings() -> None:
    serving = Serving(pages=7, host_pages=0)
    serving.add("a", 3, 5)
    serving.add("b", 3, 12)
    serving.add("c", 2, 12)
    serving.run()
    assert serving.evicted == ["b", "c"]
    assert serving.outputs["b", 0].counts.soft_resets == 1


# -- Q6


@pytest.mark.parametrize("how", ["cancel", "fail"])
@pytest.mark.parametrize("host_pages", [9, 0])
def test_Q6_a_victim_that_ends_keeps_what_it_had_generated(how: str, host_pages: int) -> None:
    serving = Serving(pages=5, host_pages=host_pages)
    serving.add("a", 3, 6)
    serving.add("b", 3, 6)
    serving.until(lambda: serving.evicted)
    victim = serving.work("b")
    assert victim.phase is (Phase.OFFLOADED if host_pages else Phase.WAITING)
    had = tuple(victim.tokens[3:])
    [output] = getattr(serving, how)("b")
    assert output.tokens == had and len(had) > 1
    serving.run()


def test_Q6_sibling_the_output_of_a_soft_reset_request_starts_at_its_first_prompt() -> None:
    serving = Serving(pages=5, host_pages=0)
    serving.add("a", 3, 6)
    serving.add("b", 3, 6)
    serving.run()
    output = serving.outputs["b", 0]
    assert output.counts.soft_resets == 1 and len(output.tokens) == 6
    assert output.counts.recomputed_tokens > 3
    assert output.timings.first_token_s is not None


# -- Q7


def test_Q7_an_id_is_taken_while_it_is_live() -> None:
    serving = Serving(pages=9)
    serving.add("a", 3, 3, samples=2)
    assert serving.scheduler.add(GenerationRequest("a", (1,), 1)) == DuplicateRequest(request="a", id="a")
    assert serving.scheduler.add(GenerationRequest("a#1", (1,), 1)) == DuplicateRequest(request="a#1", id="a#1")
    serving.run()
    assert isinstance(serving.add("a", 3, 3), Added)
    serving.run()


def test_Q7_sibling_an_id_that_somebody_else_has_ingested_is_refused_and_left_alone() -> None:
    serving = Serving(pages=9)
    serving.manager.ingest("a#1")
    assert serving.scheduler.add(GenerationRequest("a", (1,), 1, samples=3)) == DuplicateRequest(request="a", id="a#1")
    assert [request for request, _ in serving.manager.view().requests] == ["a#1"]
    serving.manager.remove("a#1")
    serving.run()


def test_Q7_added_cancelled_added_while_the_first_life_is_in_flight() -> None:
    serving = Serving(pages=9, asynchronous=True)
    serving.add("a", 3, 4)
    serving.schedule()
    serving.cancel("a")
    serving.add("a", 5, 2)
    serving.schedule()
    assert serving.update().late == 1
    assert serving.update().late == 0
    serving.run()
    assert len(serving.outputs["a", 0].tokens) == 2


# -- Q11


def test_Q11_decisions_do_not_depend_on_the_hashes_of_strings() -> None:
    program = (
        "from kvstate.testing.schedules import play\n"
        "print('\\n'.join(line for index in range(12) for line in play(3, index).script))"
    )
    transcripts = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert transcripts[0] == transcripts[1] and "schedule()" in transcripts[0]


# -- Q12


def test_Q12_one_token_left_to_prefill_with_samples_to_fork() -> None:
    serving = Serving(pages=20, budget=4)
    serving.add("a", 5, 3, samples=3)
    serving.step()
    assert serving.work("a").stored == 4
    batch = serving.schedule()
    assert [(entry.start, entry.span, entry.draws) for entry in batch.entries] == [(4, 1, 3)]
    serving.update()
    assert [serving.work("a", sample).phase for sample in range(3)] == [Phase.ACTIVE] * 3
    serving.run()


def test_Q12_an_empty_prompt_and_nothing_to_generate_are_refused() -> None:
    serving = Serving(pages=9)
    add = serving.scheduler.add
    assert add(GenerationRequest("a", (), 3)) == EmptyPrompt(request="a")
    assert add(GenerationRequest("a", (1,), 0)) == NothingToGenerate(request="a", tokens_max=0, samples=1)
    assert add(GenerationRequest("a", (1,), 1, 0)) == NothingToGenerate(request="a", tokens_max=1, samples=0)
    serving.run()


def test_Q12_sibling_samples_of_one_token_need_no_fork() -> None:
    serving = Serving(pages=2)
    serving.add("a", 4, 1, samples=5)
    serving.run()
    assert serving.scheduler.live == () and len(serving.outputs) == 5


def test_Q12_sibling_samples_that_do_not_fit_beside_the_prompt_start_on_their_own() -> None:
    serving = Serving(pages=4)
    serving.add("a", 5, 3, samples=3)
    assert [serving.work("a", sample).phase for sample in range(3)] == [Phase.WAITING] * 3
    serving.run()


def test_Q12_sibling_samples_of_a_soft_reset_request_are_forked_when_it_has_its_prompt_again() -> None:
    serving = Serving(pages=9, host_pages=0, budget=4)
    serving.add("a", 6, 6)
    serving.add("b", 12, 3, samples=2)
    serving.run()
    assert serving.evicted == ["b"]
    assert [serving.outputs["b", sample].counts.soft_resets for sample in range(2)] == [1, 0]


# -- Q17


def test_Q17_who_starves_holds_no_more_than_before() -> None:
    serving = Serving(pages=4, host_pages=0)
    serving.add("a", 4, 3)
    serving.add("b", 4, 3)
    serving.step()
    before = serving.manager.pages_available()
    refused = serving.manager.probe(scheduling.Step((Segment("a"), scheduling.Segment("b"))))
    assert isinstance(refused, PagesExhausted)
    assert isinstance(serving.manager.admit(scheduling.Step((Segment("a"),))), PagesExhausted)
    assert serving.manager.pages_available() == before
    serving.run()
    assert serving.evicted == ["b"]


# -- Q20


def evict_in_flight(serving: Serving) -> None:
    """Go on to the step whose pass evicts somebody; the step before it is in flight."""
    while True:
        outcome = serving.schedule()
        if serving.evicted:
            return
        if not isinstance(outcome, Batch) or len(serving.launched) > 1:
            serving.update()


def test_Q20_the_token_in_flight_of_a_victim_is_taken_back() -> None:
    serving = Serving(pages=5, asynchronous=True)
    serving.add("a", 3, 6)
    serving.add("b", 3, 6)
    evict_in_flight(serving)
    victim = serving.work("b")
    assert [victim in batch.works for batch in serving.launched] == [True, False]
    known = list(victim.tokens)
    assert serving.update().late == 1
    assert victim.tokens == known and victim.stored == len(known) - 1

    serving.until(lambda: serving.restored)
    back = [batch for batch in serving.batches if any(d.reason is Reason.RESTORED for d in batch.decisions)]
    [entry] = [entry for entry in back[0].entries if entry.request == "b"]
    assert (entry.start, entry.tokens[:1]) == (len(known) - 1, (known[-1],))
    serving.run()
    assert serving.outputs["b", 0].counts.late_tokens == 1


# -- O13


def test_O13_a_victim_that_frees_nothing_is_not_taken() -> None:
    scheduling.a_victim_that_frees_nothing_stays()


def test_O13_sibling_while_pages_are_leaving_nobody_more_is_evicted() -> None:
    serving = Serving(pages=5, asynchronous=True)
    serving.add("a", 3, 6)
    serving.add("b", 3, 6)
    evict_in_flight(serving)
    outcome = serving.schedule()
    assert isinstance(outcome, (InFlight, Batch))
    assert serving.evicted == ["b"]
    while serving.launched:
        serving.update()
    serving.run()


def test_O13_sibling_those_who_share_all_their_pages_leave_together_when_nothing_else_can_happen() -> None:
    scheduling.those_who_share_all_their_pages_leave_together()


# -- blocked


def test_pages_that_somebody_else_holds_are_a_typed_outcome_and_never_a_loop() -> None:
    serving = Serving(pages=4)
    serving.manager.ingest("foreign")
    store(serving.manager, Segment("foreign", span=6))
    serving.add("a", 4, 3)
    outcome: Any = serving.schedule()
    assert isinstance(outcome, Blocked) and isinstance(outcome.refusal, PagesExhausted)
    serving.manager.remove("foreign")
    serving.run()


def test_a_request_moved_behind_the_schedulers_back_waits_until_it_is_moved_back() -> None:
    serving = Serving(pages=9)
    serving.add("a", 3, 5)
    serving.step()
    serving.manager.offload("a")
    outcome: Any = serving.schedule()
    assert isinstance(outcome, Blocked) and serving.scheduler.why("a").reason is Reason.NOT_READY
    serving.manager.reload("a")
    serving.run()


def test_a_request_removed_behind_the_schedulers_back_fails_alone() -> None:
    serving = Serving(pages=9)
    serving.add("a", 3, 5)
    serving.add("b", 3, 5)
    serving.step()
    serving.manager.remove("a")
    serving.until(lambda: not serving.scheduler.live)
    assert serving.outputs["a", 0].finish is Finish.FAILED and "UnknownRequest" in serving.outputs["a", 0].error
    assert len(serving.outputs["a", 0].tokens) == 1
    serving.run()
