"""The oldest request gets on, however many newer ones come and go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstate.manager import KVManager
from kvstate.scheduler import Scheduler
from kvstate.scheduler.loop import serve
from kvstate.scheduler.reasons import Reason
from kvstate.scheduler.requests import GenerationRequest, Output
from kvstate.testing.engine import StampModel, expected
from kvstate.testing.memory import MemoryBackend
from kvstate.types import Geometry
from tests.bugs.scheduling import Serving


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("pages", "host_pages", "prompt"), [(4, 0, 2), (7, 3, 5)])
def test_the_oldest_is_not_evicted_again_and_again_for_newer_ones_that_are_served_before_it(
    pages: int, host_pages: int, prompt: int, asynchronous: bool
) -> None:
    geometry = Geometry(pages=pages, page_size=1, host_pages=host_pages)
    backend = MemoryBackend(geometry)
    scheduler = Scheduler(
        KVManager(geometry, backend, debug=True), budget=3, policy="prefill-first", asynchronous=asynchronous
    )
    oldest = GenerationRequest("oldest", range(prompt), 2)
    scheduler.add(oldest)
    newer = (GenerationRequest(f"newer{turn}", (100, 101), 2) for turn in range(60))

    def arrivals() -> Iterator[Output]:
        while scheduler.outputs("oldest") and len(scheduler.live) < 3:
            scheduler.add(next(newer))
        return iter(())

    ended = list(serve(scheduler, StampModel(backend, geometry), between=arrivals))
    place = [output.request for output in ended].index("oldest")
    assert place < 5 and ended[place].tokens == expected(oldest, geometry)[0][0]


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
