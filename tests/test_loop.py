"""The loop, left early and taken up again."""

from __future__ import annotations

import pytest

from kvstate.manager import KVManager
from kvstate.ops import Plan
from kvstate.prefix import page_keys
from kvstate.refusals import Refusal
from kvstate.scheduler import Scheduler
from kvstate.scheduler.batch import Batch
from kvstate.scheduler.loop import Sampled, Stopped, serve
from kvstate.scheduler.requests import Finish, GenerationRequest
from kvstate.state import Lease
from kvstate.testing.engine import StampModel, expected
from kvstate.testing.memory import MemoryBackend
from kvstate.types import Geometry


class Interrupted(StampModel):
    """A model whose user interrupts the first result."""

    interrupts = 1

    def result(self, batch: Batch) -> Sampled:
        """Return the result, but the first."""
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        return super().result(batch)

    def launch(self, batch: Batch, plan: Plan) -> None:
        """Launch."""
        super().launch(batch, plan)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("how", ["closed", "interrupted"])
def test_a_loop_that_was_left_early_is_taken_up_again(how: str, asynchronous: bool) -> None:
    geometry = Geometry(pages=20, page_size=2)
    backend = MemoryBackend(geometry)
    scheduler = Scheduler(KVManager(geometry, backend, debug=True), asynchronous=asynchronous)
    requests = [GenerationRequest("a", (1, 2), 2), GenerationRequest("b", (3, 4, 5), 6)]
    model = Interrupted(backend, geometry)
    outputs = []
    if how == "closed":
        model.interrupts = 0
        left = serve(scheduler, model, requests)
        outputs.append(next(left))
        left.close()  # type: ignore[attr-defined]
    else:
        with pytest.raises(KeyboardInterrupt):
            list(serve(scheduler, model, requests))
    for turn, output in enumerate(serve(scheduler, model, between=lambda: _limited(scheduler))):
        outputs.append(output)
        assert turn < 2
    assert {o.request: (o.tokens, o.finish) for o in outputs} == {r.id: expected(r, geometry)[0] for r in requests}
    assert all(o.finish is Finish.LENGTH for o in outputs)


def _limited(scheduler: Scheduler) -> tuple[()]:
    scheduler.turns = getattr(scheduler, "turns", 0) + 1  # type: ignore[attr-defined]
    assert scheduler.turns < 50, "the loop spins"  # type: ignore[attr-defined]
    return ()


class Forgetful(KVManager):
    """A manager whose keys another thread forgets right behind a lookup."""

    race = False

    def match(self, keys: tuple[bytes, ...]) -> int:  # type: ignore[override]
        """Look up; then the other thread comes."""
        found = super().match(keys)
        if found and self.race:
            self.race = False
            self.reset_prefix_cache()
        return found


def test_one_whose_prefix_is_lost_behind_the_lookup_starts_without() -> None:
    geometry = Geometry(pages=8, page_size=2)
    backend = MemoryBackend(geometry)
    manager = Forgetful(geometry, backend, debug=True)
    scheduler = Scheduler(manager, prefix_cache=True)
    model = StampModel(backend, geometry)
    list(serve(scheduler, model, [GenerationRequest("a", (1, 2, 3, 4, 5), 2)]))
    manager.race = True
    wanted = GenerationRequest("b", (1, 2, 3, 4, 6), 2)
    [output] = serve(scheduler, model, [wanted])
    assert not manager.race and (output.tokens, output.finish) == expected(wanted, geometry)[0]
    assert manager.match(page_keys(wanted.prompt, 2)) == 2, "and leaves its pages to others"


class TooMany(StampModel):
    """A model that samples a token too many."""

    def result(self, batch: Batch) -> Sampled:
        """Return the result and one more."""
        return Sampled([*super().result(batch).tokens, 1])


def test_a_model_that_samples_another_number_of_tokens_fails_its_batch_and_nobody_else() -> None:
    geometry = Geometry(pages=20, page_size=2)
    backend = MemoryBackend(geometry)
    scheduler = Scheduler(KVManager(geometry, backend, debug=True), batch=1)
    [output] = serve(scheduler, TooMany(backend, geometry), [GenerationRequest("a", (1, 2), 2)])
    assert output.finish is Finish.FAILED and "draws 1 tokens, got 2" in output.error
    [output] = serve(scheduler, StampModel(backend, geometry), [GenerationRequest("b", (1, 2), 2)])
    assert output.finish is Finish.LENGTH


class ClosedBeforePlan(KVManager):
    """A manager that another thread closes between an admit and its plan."""

    plans = 0

    def plan(self, lease: Lease) -> Plan | Refusal:
        """Plan, the second time on a closed manager."""
        self.plans += 1
        if self.plans == 2:
            self.close()
        return super().plan(lease)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manager_that_is_closed_between_an_admit_and_its_plan_stops_the_loop(asynchronous: bool) -> None:
    geometry = Geometry(pages=20, page_size=2)
    backend = MemoryBackend(geometry)
    scheduler = Scheduler(ClosedBeforePlan(geometry, backend), asynchronous=asynchronous)
    with pytest.raises(Stopped, match="ManagerClosed"):
        list(serve(scheduler, StampModel(backend, geometry), [GenerationRequest("a", (1, 2), 4)]))
