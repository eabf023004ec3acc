"""Requests that fit but for how their pages lie in the sectors: nobody may wait for ever because of that."""

from __future__ import annotations

from typing import Any

import pytest

from kvstate.manager import KVManager
from kvstate.refusals import Refusal
from kvstate.scheduler import Scheduler
from kvstate.scheduler.demand import pages_at_most
from kvstate.scheduler.loop import serve
from kvstate.scheduler.reasons import Reason
from kvstate.scheduler.requests import GenerationRequest, Output
from kvstate.state import ReloadClaim
from kvstate.testing.engine import StampModel, expected
from kvstate.testing.memory import MemoryBackend
from kvstate.types import Geometry, Group, Segment, Step
from tests.steps import store

WINDOW = (Group("full", 256), Group("window", 128, window=6))
HALF = (Group("full", 256), Group("half", 128))


def run(
    geometry: Geometry, *batches: list[GenerationRequest], **options: Any
) -> tuple[dict[str, Output], list[Reason]]:
    """Serve batches one after the other; every output must be right. Return them, and all that was decided."""
    backend = MemoryBackend(geometry)
    scheduler = Scheduler(KVManager(geometry, backend, debug=True), clock=lambda: 0.0, **options)
    model = StampModel(backend, geometry)
    outputs: dict[str, Output] = {}
    decided: list[Reason] = []
    schedule = scheduler.schedule

    def noted() -> Any:
        outcome = schedule()
        decided.extend(decision.reason for decision in outcome.decisions)
        return outcome

    scheduler.schedule = noted  # type: ignore[method-assign]
    for requests in batches:
        for output in serve(scheduler, model, requests):
            outputs[output.request] = output
        for request in requests:
            assert outputs[request.id].tokens == expected(request, geometry)[0][0]
    view = scheduler.manager.view()
    assert not any(owners for pool in (*view.device, *view.host) for owners in pool.owners)
    return outputs, decided


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("host_pages", "reason"), [(0, Reason.RESET_SCATTERED), (99, Reason.MOVED_TOGETHER)])
def test_the_last_active_request_gets_on_although_its_pages_lie_where_a_victims_lay(
    host_pages: int, reason: Reason, asynchronous: bool
) -> None:
    geometry = Geometry(pages=11, page_size=1, host_pages=host_pages, groups=WINDOW)
    decided: list[Reason] = []
    for tokens in range(4, 9):
        decided += run(
            geometry,
            [GenerationRequest("a", (1,), 8), GenerationRequest("b", (2,), tokens)],
            asynchronous=asynchronous,
            prefix_cache=False,
        )[1]
    assert reason in decided


def test_a_prefix_that_lies_in_too_many_sectors_is_not_waited_for() -> None:
    geometry = Geometry(pages=6, page_size=1, groups=HALF)
    a, b = GenerationRequest("a", (0,), 3), GenerationRequest("b", (50,), 3)
    [(tokens, _)] = expected(a, geometry)
    c = GenerationRequest("c", (0, *tokens[:1], 99), 2)
    assert geometry.sectors_for(pages_at_most(geometry, 3, 2, 64)) == geometry.pages
    run(geometry, [a, b], [c], prefix_cache=True, budget=2)


def test_a_reload_copies_what_the_device_has_in_too_many_sectors() -> None:
    geometry = Geometry(pages=19, page_size=1, host_pages=9, groups=HALF)
    manager = KVManager(geometry, MemoryBackend(geometry), debug=True)
    for request in ("r", "s", "t"):
        manager.ingest(request)
    for _ in range(4):
        store(manager, Segment("r"), Segment("s"))
    manager.key("r", (1, 2, 3, 4))
    manager.key("s", (5, 6, 7, 8))
    assert not isinstance(manager.offload("r"), Refusal)
    manager.remove("s")
    store(manager, Segment("t", span=7))
    claim = manager.claim_reload("r", Step((Segment("r"),)))
    assert isinstance(claim, ReloadClaim), claim
