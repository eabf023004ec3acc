"""A decoder with full and sliding-window layers behind the scheduler generates what its whole histories say."""

import warnings

import pytest

with warnings.catch_warnings():
    # A torch without numpy says so when it is first imported.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    pytest.importorskip("torch")

from kvstate.ordering import Queue
from kvstate.scheduler.requests import Finish

from .model import Service
from .test_decoder import KINDS


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["", "prefix cache"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["one by one", "a step ahead"])
@pytest.mark.parametrize(("kind", "pages"), [("full", 12), ("windows and full", 9), ("two windows", 11)])
def test_requests_that_come_go_and_are_evicted_are_answered_as_if_alone(
    kind: str, pages: int, asynchronous: bool, prefix_cache: bool
) -> None:
    """Tokens are compared, not logits: the scheduler puts batches together as it likes, and sums with them."""
    service = Service(
        KINDS[kind], seed=1, pages=pages, host_pages=6, asynchronous=asynchronous, prefix_cache=prefix_cache
    )
    outputs = list(service.run())
    assert len(outputs) == sum(request.samples for request in service.requests.values())
    wrong = [output for output in outputs if not service.right(output)]
    assert not wrong
    finishes = [output.finish for output in outputs]
    assert finishes.count(Finish.CANCELLED) > 0 and finishes.count(Finish.LENGTH) > 8
    assert service.backend.copier.pages[Queue.COPY_IN] > 0
    assert service.judge.violations == []
    service.kv.reset_prefix_cache()
    geometry = service.kv.geometry
    assert service.kv.pages_available() == {"device": geometry.group_pages, "host": geometry.host_group_pages}
