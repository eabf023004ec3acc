"""The scheduler: what a step is made of, who waits, what is delivered; and the loop around it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from kvstate.errors import Refused
from kvstate.manager import KVManager
from kvstate.ops import CopyIn, Plan, StepBegin
from kvstate.refusals import ManagerClosed
from kvstate.scheduler import Scheduler
from kvstate.scheduler.batch import Batch, BatchOutOfOrder, Blocked, Idle, InFlight
from kvstate.scheduler.demand import largest_chunk, largest_fork, pages_at_most
from kvstate.scheduler.loop import Sampled, Stopped, serve
from kvstate.scheduler.reasons import Reason
from kvstate.scheduler.requests import Finish, GenerationRequest, Output, Phase, Work
from kvstate.scheduler.waiting import Waiting
from kvstate.testing.engine import StampModel, expected, logprob_of
from kvstate.testing.memory import MemoryBackend
from kvstate.types import Geometry, Group, RequestConfig, RetentionPolicy
from tests.bugs.scheduling import Serving

# -- requests


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": ""},
        {"prompt": ("word",)},
        {"prompt": (1 << 64,)},
        {"tokens_max": 1.5},
        {"samples": True},
        {"stop": ("end",)},
        {"config": "none"},
    ],
    ids=str,
)
def test_a_request_is_valid_or_is_not_built(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError if "config" not in wrong else TypeError):
        GenerationRequest(**{"id": "a", "prompt": (1,), "tokens_max": 1, **wrong})


@pytest.mark.parametrize("options", [{"budget": 0}, {"batch": 0}, {"policy": "random"}], ids=str)
def test_a_scheduler_takes_no_options_that_mean_nothing(options: dict[str, Any]) -> None:
    geometry = Geometry(pages=2)
    with pytest.raises(ValueError):
        Scheduler(KVManager(geometry, MemoryBackend(geometry)), **options)


# -- what a step is made of


def parts(batch: Any) -> list[tuple[str, int, int, int]]:
    return [(entry.request, entry.start, entry.span, entry.draws) for entry in batch.entries]


def test_a_prompt_is_computed_in_chunks_and_the_last_one_draws() -> None:
    serving = Serving(pages=20, budget=4)
    serving.add("a", 10, 3)
    assert [parts(serving.step()) for _ in range(4)] == [
        [("a", 0, 4, 0)],
        [("a", 4, 4, 0)],
        [("a", 8, 2, 1)],
        [("a", 10, 1, 1)],
    ]
    serving.run()


@pytest.mark.parametrize(("policy", "first"), [("decode-first", "a"), ("prefill-first", "b")])
def test_the_policy_says_who_comes_first_in_a_step(policy: str, first: str) -> None:
    serving = Serving(pages=30, budget=4, policy=policy)
    serving.add("a", 3, 9)
    serving.step()
    serving.add("b", 9, 2)
    serving.step()
    assert parts(serving.step())[0][0] == first
    serving.run()


def test_a_step_takes_no_more_requests_and_tokens_than_it_may() -> None:
    serving = Serving(pages=30, budget=6, batch=3)
    for id in "abcd":
        serving.add(id, 4, 3)
    assert parts(serving.step()) == [("a", 0, 4, 1), ("b", 0, 2, 0)]
    assert serving.scheduler.why("c").reason is Reason.BUDGET_SPENT
    assert parts(serving.step()) == [("a", 4, 1, 1), ("b", 2, 2, 1), ("c", 0, 3, 0)]
    assert serving.scheduler.why("d").reason is Reason.BATCH_FULL
    serving.run()


def test_a_steady_step_is_the_same_object_until_somebody_comes_or_goes() -> None:
    serving = Serving(pages=30)
    serving.add("a", 3, 9)
    serving.add("b", 3, 4)
    serving.step()
    first, second = serving.step(), serving.step()
    assert first.plain and first.lease.step is second.lease.step and first.works is second.works
    serving.add("c", 3, 2)
    third = serving.step()
    assert not third.plain and len(third) == 3
    serving.run()


def test_those_who_wait_come_in_turn_those_on_the_host_first() -> None:
    waiting = Waiting()
    for rank, (id, phase) in enumerate([("d", Phase.WAITING), ("b", Phase.OFFLOADED), ("a", Phase.OFFLOADED)]):
        work = Work(GenerationRequest(id, (1,), 1), 0, rank, 1, 0.0)
        work.phase = phase
        waiting.join(work)
    assert [work.key for work in waiting] == ["b", "d", "a"] and len(waiting) == 3
    waiting.leave(next(iter(waiting)))
    assert [work.key for work in waiting] == ["a", "d"]


def test_victims_wait_behind_those_who_wait_and_the_oldest_in_front() -> None:
    serving = Serving(pages=7, host_pages=0)
    serving.add("a", 6, 8)
    serving.add("b", 6, 8)
    serving.add("c", 2, 8)
    serving.add("d", 1, 1)
    serving.until(lambda: len(serving.evicted) == 2)
    assert serving.evicted == ["c", "b"]
    assert [work.key for work in serving.scheduler.roster.waiting] == ["d", "b", "c"]
    serving.run()


def test_nobody_overtakes_one_that_does_not_fit() -> None:
    serving = Serving(pages=5)
    serving.add("a", 4, 4)
    serving.add("large", 7, 2)
    serving.add("small", 1, 1)
    serving.step()
    assert serving.scheduler.why("large").reason is Reason.NO_ROOM
    assert serving.scheduler.why("small").reason is Reason.BEHIND
    serving.run()


def test_a_decision_reads_as_a_sentence() -> None:
    serving = Serving(pages=5)
    serving.add("a", 4, 4)
    serving.add("b", 7, 2)
    batch = serving.step()
    assert str(batch.decisions[0]) == "a[0]: it starts: there is room, and its turn has come"
    assert str(serving.scheduler.why("b")).startswith("b[0]: it is short of pages, and nobody overtakes it (kv: Pages")
    assert serving.scheduler.why("nobody") is None
    serving.run()


# -- one ahead


def test_a_step_ahead_is_fed_the_token_that_the_step_in_flight_draws() -> None:
    serving = Serving(pages=20, asynchronous=True)
    serving.add("a", 3, 5)
    serving.add("b", 4, 5)
    serving.schedule()
    ahead = serving.schedule()
    assert [(entry.tokens, entry.feeds) for entry in ahead.entries] == [((None,), 0), ((None,), 1)]
    assert isinstance(serving.schedule(), InFlight)
    serving.update()
    assert [(len(entry.tokens), entry.feeds) for entry in ahead.entries] == [(1, None), (1, None)]
    assert None not in ahead.entries[0].tokens
    serving.run()


def test_one_by_one_nothing_is_scheduled_before_the_update() -> None:
    serving = Serving(pages=20)
    serving.add("a", 3, 5)
    serving.schedule()
    assert isinstance(serving.schedule(), InFlight)
    serving.update()
    serving.run()


def test_batches_are_updated_once_in_order_after_their_launch_with_all_their_tokens() -> None:
    serving = Serving(pages=20, asynchronous=True)
    serving.add("a", 3, 5)
    first = serving.scheduler.schedule()
    with pytest.raises(Refused):
        serving.scheduler.update(first, [1])
    with pytest.raises(ValueError, match="draws 1 tokens, got 2"):
        serving.scheduler.update(first, [1, 2])
    second = serving.scheduler.schedule()
    with pytest.raises(BatchOutOfOrder):
        serving.scheduler.update(second, [1])
    serving.scheduler.abort(second)
    with pytest.raises(BatchOutOfOrder):
        serving.scheduler.promote(second)
    with pytest.raises(BatchOutOfOrder):
        serving.scheduler.abort(second)
    serving.scheduler.abort(first)
    serving.run()


# -- what is delivered


def test_timings_are_of_the_first_life_whatever_came_in_between() -> None:
    serving = Serving(pages=5, host_pages=0)
    now = iter(range(10_000))
    serving.scheduler.clock = serving.scheduler.roster._clock = lambda: float(next(now))
    serving.add("a", 3, 6)
    serving.add("b", 3, 6)
    serving.until(lambda: serving.evicted)
    [before] = serving.scheduler.outputs("b")
    serving.run()
    after = serving.outputs["b", 0]
    assert after.counts.soft_resets == 1
    for name in ("arrival_s", "first_scheduled_s", "first_token_s"):
        assert getattr(after.timings, name) == getattr(before.timings, name) is not None
    assert before.timings.finished_s is None and after.timings.finished_s is not None


def test_log_probabilities_are_delivered_with_their_tokens() -> None:
    geometry = Geometry(pages=5, page_size=2, host_pages=0)
    backend = MemoryBackend(geometry)
    scheduler = Scheduler(KVManager(geometry, backend))
    requests = [GenerationRequest(id, (1, 2, 3), 6) for id in "ab"]
    for output in serve(scheduler, StampModel(backend, geometry, logprobs=True), requests):
        assert output.logprobs == tuple(map(logprob_of, output.tokens)) and len(output.tokens) == 6


def test_an_update_shows_a_snapshot_of_everybody_who_got_a_token() -> None:
    serving = Serving(pages=20)
    serving.add("a", 3, 2)
    serving.add("b", 3, 5)
    serving.step()
    serving.schedule()
    update = serving.update()
    assert [(out.request, len(out.tokens), out.finish) for out in update.outputs] == [
        ("a", 2, Finish.LENGTH),
        ("b", 2, None),
    ]
    serving.run()


def test_cached_tokens_are_not_computed_again() -> None:
    serving = Serving(pages=20, prefix_cache=True)
    serving.add("a", 8, 3)
    serving.run()
    serving.add("b", 8, 3)
    batch = serving.step()
    assert parts(batch) == [("b", 6, 2, 1)]
    serving.run()
    assert serving.outputs["b", 0].counts.cached_tokens == 6
    assert serving.outputs["a", 0].counts.cached_tokens == 0


def test_what_was_generated_is_found_too_and_another_salt_finds_nothing() -> None:
    serving = Serving(pages=20, prefix_cache=True)
    serving.add("a", 4, 6)
    serving.run()
    again = (*range(4), *serving.outputs["a", 0].tokens)
    for id, config, found in (("b", None, 8), ("c", RequestConfig(cache_salt="other"), 0)):
        serving.requests[id] = GenerationRequest(id, again, 1, config=config)
        serving.scheduler.add(serving.requests[id])
        serving.run()
        assert serving.outputs[id, 0].counts.cached_tokens == found


def test_a_soft_reset_request_starts_on_what_the_cache_has_of_it() -> None:
    serving = Serving(pages=6, host_pages=0, prefix_cache=True)
    serving.add("a", 4, 6)
    serving.add("b", 5, 7)
    serving.run()
    assert serving.evicted == ["b"]
    assert serving.outputs["b", 0].counts.soft_resets == 1


def test_a_request_whose_tokens_are_retained_in_part_runs() -> None:
    serving = Serving(pages=4)
    config = RequestConfig(retention={"main": RetentionPolicy(context_budget=3)})
    assert serving.scheduler.add(GenerationRequest("a", tuple(range(9)), 30, config=config))
    for _ in range(100):
        if isinstance(serving.step(), Idle):
            break
    assert len(serving.outputs["a", 0].tokens) == 30


# -- demand


def test_a_window_holds_the_window_and_what_is_computed() -> None:
    geometry = Geometry(pages=99, page_size=4, groups=(Group("full"), Group("window", window=6)))
    assert pages_at_most(geometry, prompt=100, tokens_max=1, chunk=1) == (25, 3)
    assert pages_at_most(geometry, prompt=100, tokens_max=1, chunk=16) == (25, 6)
    assert pages_at_most(geometry, prompt=3, tokens_max=2, chunk=16) == (1, 1)


@pytest.mark.parametrize("window", range(1, 8))
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8])
def test_no_length_holds_more_of_a_window_than_is_said(window: int, chunk: int) -> None:
    geometry = Geometry(pages=99, page_size=3, groups=(Group("window", window=window),))
    for total in range(1, 25):
        held = max(
            geometry.pages_for(start + span) - geometry.skipped(0, start)
            for start in range(total)
            for span in range(1, min(chunk, total - start) + 1)
        )
        assert pages_at_most(geometry, total, 1, chunk) == (held,)


def test_a_chunk_shrinks_only_where_a_window_makes_that_useful() -> None:
    assert largest_chunk(Geometry(pages=4, page_size=4), 16, 1, 64) == 64
    assert largest_chunk(Geometry(pages=4, page_size=4), 17, 1, 64) == 0
    windowed = Geometry(pages=4, page_size=4, groups=(Group("window", window=4),))
    assert largest_chunk(windowed, 1000, 1000, 64) == 8
    assert largest_fork(windowed, 1000, 3, 8) == 4 and largest_fork(windowed, 1000, 5, 8) == 0


# -- the loop


class Engine:
    """A pool, a scheduler and a model that can be made to fail."""

    def __init__(self, asynchronous: bool = False, **sizes: int) -> None:
        self.geometry = Geometry(**{"pages": 20, "page_size": 2, "host_pages": 20, **sizes})
        self.backend = MemoryBackend(self.geometry)
        self.manager = KVManager(self.geometry, self.backend, debug=True)
        self.scheduler = Scheduler(self.manager, asynchronous=asynchronous)
        self.inner = StampModel(self.backend, self.geometry)
        self.raise_at: dict[int, str] = {}

    def launch(self, batch: Batch, plan: Plan) -> None:
        if self.raise_at.get(batch.serial) == "launch":
            raise RuntimeError("out of luck")
        self.inner.launch(batch, plan)

    def result(self, batch: Batch) -> Sampled:
        if self.raise_at.get(batch.serial) == "result":
            raise RuntimeError("out of luck")
        return self.inner.result(batch)

    def serve(self, requests: Iterable[GenerationRequest], **more: Any) -> dict[tuple[str, int], Output]:
        return {(out.request, out.sample): out for out in serve(self.scheduler, self, requests, **more)}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_loop_serves_everybody_and_refuses_alone(asynchronous: bool) -> None:
    engine = Engine(asynchronous, pages=7)
    requests = [GenerationRequest(f"r{n}", tuple(range(n, n + 4)), 6, samples=1 + n % 2) for n in range(6)]
    outputs = engine.serve([*requests, GenerationRequest("large", (1,) * 99, 1)])
    for request in requests:
        for sample, wanted in enumerate(expected(request, engine.geometry)):
            assert (outputs[request.id, sample].tokens, outputs[request.id, sample].finish) == wanted
    assert outputs["large", 0].finish is Finish.REFUSED and "TooLarge" in outputs["large", 0].error
    assert not engine.manager.view().requests


@pytest.mark.parametrize("where", ["launch", "result"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_model_that_raises_fails_its_batch_and_nobody_else(where: str, asynchronous: bool) -> None:
    engine = Engine(asynchronous, pages=6)
    engine.raise_at = {2: where}
    requests = [GenerationRequest(id, tuple(range(5)), 4) for id in "abc"]
    outputs = engine.serve(requests)
    failed = [id for (id, _), output in outputs.items() if output.finish is Finish.FAILED]
    assert failed and all(outputs[id, 0].error == "RuntimeError: out of luck" for id in failed)
    assert len(failed) < 3 and len(outputs) == 3
    assert not engine.manager.view().requests


def test_a_launch_that_fails_is_tried_again() -> None:
    engine = Engine()
    engine.backend.fail_next(StepBegin)
    request = GenerationRequest("a", (1, 2), 3)
    assert engine.serve([request])["a", 0].tokens == expected(request, engine.geometry)[0][0]


def test_launches_that_fail_again_and_again_fail_their_requests() -> None:
    engine = Engine()
    engine.backend.fail = lambda op: isinstance(op, StepBegin)
    output = engine.serve([GenerationRequest("a", (1, 2), 3)])["a", 0]
    assert output.finish is Finish.FAILED and "made to fail" in output.error


def test_a_reload_that_fails_once_is_tried_again() -> None:
    engine = Engine(pages=5)
    engine.backend.fail_next(CopyIn)
    requests = [GenerationRequest(id, (1, 2, 3), 6) for id in "ab"]
    outputs = engine.serve(requests)
    assert outputs["b", 0].tokens == expected(requests[1], engine.geometry)[0][0]
    assert (outputs["b", 0].counts.offloads, outputs["b", 0].counts.soft_resets) == (1, 0)


def test_between_passes_requests_come_and_go() -> None:
    engine = Engine()
    script = [
        lambda: (engine.scheduler.add(GenerationRequest("b", (1, 2), 30)), ())[1],
        tuple,
        lambda: engine.scheduler.cancel("b"),
    ]
    outputs = engine.serve([GenerationRequest("a", (1, 2), 8)], between=lambda: script.pop(0)() if script else ())
    assert outputs["b", 0].finish is Finish.CANCELLED and len(outputs["b", 0].tokens) == 2
    assert outputs["a", 0].finish is Finish.LENGTH


def test_the_loop_stops_when_the_manager_is_closed() -> None:
    engine = Engine()
    with pytest.raises(Stopped) as stopped:
        engine.serve([GenerationRequest("a", (1, 2), 8)], between=lambda: engine.manager.close() or ())
    assert isinstance(stopped.value.blocked, Blocked)
    assert isinstance(stopped.value.blocked.refusal, ManagerClosed)


def test_nobody_who_waits_is_overtaken_by_a_reload_behind_it() -> None:
    serving = Serving(pages=6, page_size=1)
    serving.add("a", 2, 4)
    serving.add("x", 1, 4)
    serving.add("y", 1, 4)
    serving.until(lambda: len(set(serving.evicted)) == 2)
    serving.add("f", 2, 2)
    while not serving.restored:
        batch = serving.step()
    assert serving.restored == ["y"]
    assert [(d.request, d.reason) for d in batch.decisions if d.request in "fx"] == [
        ("f", Reason.STARTS),
        ("x", Reason.NO_ROOM),
    ]
    serving.run()
