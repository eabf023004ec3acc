"""Eviction: who leaves when active requests starve, where to, and what is held afterwards (nothing)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvstate.eviction import Relief, Starved, relieve
from kvstate.manager import KVManager
from kvstate.ops import CopyOut, Op
from kvstate.refusals import HostExhausted
from kvstate.scheduler import GenerationRequest, Output, Scheduler, serve
from kvstate.scheduler.reasons import Reason
from kvstate.testing.engine import StampModel, expected
from kvstate.testing.judge import EdgeJudge
from kvstate.testing.memory import MemoryBackend
from kvstate.types import Geometry, Segment, Step, StreamFork, StreamId
from tests.steps import store


class Pool:
    """Requests of so many pages each (of 2 tokens, all full), oldest first, in a pool that they fill."""

    def __init__(self, *pages: int, host_pages: int = 99, spare: int = 0) -> None:
        self.names = [chr(ord("a") + index) for index in range(len(pages))]
        self.geometry = Geometry(pages=sum(pages) + spare, page_size=2, host_pages=host_pages)
        self.judge = EdgeJudge.of(self.geometry)
        self.backend = MemoryBackend(self.geometry, judge=self.judge, record=True)
        self.manager = KVManager(self.geometry, self.backend, debug=True)
        for name, count in zip(self.names, pages, strict=True):
            self.manager.ingest(name)
            store(self.manager, Segment(name, span=2 * count))

    def starved(self, names: str) -> list[Starved]:
        """Return requests that each want one token more."""
        return [Starved(name, self.names.index(name), Segment(name)) for name in names]

    def relieve(self, names: str, **options: Any) -> Relief:
        """Relieve those; all requests are active."""
        return relieve(self.manager, self.starved(names), len(self.names), **options)

    def close(self) -> None:
        """Nothing may be held by a claim, and no edge may be missing."""
        assert self.manager.claims() == ()
        assert not self.judge.violations


def reasons(relief: Relief) -> dict[str, Reason]:
    return {verdict.request: verdict.reason for verdict in relief.verdicts}


def test_the_newest_leave_until_the_others_can_be_stored_and_not_one_more() -> None:
    pool = Pool(2, 1, 1, 1, 1)
    relief = pool.relieve("abcde")
    assert relief.offloaded == ("e", "d", "c") and relief.reset == ()
    assert [verdict.request for verdict in relief.verdicts] == list("edcba")
    assert reasons(relief)["c"] is Reason.OFFLOADED
    assert reasons(relief)["b"] is reasons(relief)["a"] is Reason.ENOUGH
    pool.close()


def test_age_is_the_rank_whatever_the_order_in_which_they_starve() -> None:
    pool = Pool(3, 3, 3)
    assert relieve(pool.manager, pool.starved("cab"), 3).offloaded == ("c",)
    pool.close()


def test_who_does_not_starve_stays_although_it_is_newer() -> None:
    pool = Pool(3, 3, 3)
    assert pool.relieve("ab").offloaded == ("b",)
    pool.close()


def test_the_last_active_request_stays() -> None:
    pool = Pool(3)
    relief = pool.relieve("a")
    assert not relief.released and reasons(relief) == {"a": Reason.LAST_ACTIVE}
    pool.close()


def test_all_that_starve_may_leave_when_others_are_active() -> None:
    pool = Pool(3, 1)
    relief = pool.relieve("b")
    assert relief.offloaded == ("b",) and relief.released
    pool.close()


def test_nobody_leaves_when_what_is_leaving_is_enough() -> None:
    pool = Pool(2, 2)
    claim: Any = pool.manager.claim_offload("b")
    assert reasons(pool.relieve("a")) == {"a": Reason.ENOUGH}
    pool.manager.commit_claim(claim)
    pool.close()


def test_the_host_is_tried_for_each_victim_and_a_later_smaller_one_still_fits() -> None:
    pool = Pool(6, 1, 2, host_pages=1)
    wanting = [Starved("a", 0, Segment("a", span=6)), *pool.starved("bc")]
    relief = relieve(pool.manager, wanting, 3)
    assert (relief.reset, relief.offloaded) == (("c",), ("b",))
    assert reasons(relief)["c"] is Reason.RESET_HOST_FULL
    assert isinstance(relief.verdicts[0].refusal, HostExhausted)
    assert [stream.residency for stream in pool.manager.view().streams] == ["OnDevice", "OnHost", "OnDevice"]
    pool.close()


def test_without_a_host_pool_victims_are_reset() -> None:
    pool = Pool(3, 3, host_pages=0)
    relief = pool.relieve("ab")
    assert relief.reset == ("b",) and reasons(relief)["b"] is Reason.RESET_NO_HOST
    pool.close()


def test_a_victim_whose_copy_fails_is_reset() -> None:
    pool = Pool(3, 3)
    pool.backend.fail_next(CopyOut)
    relief = pool.relieve("ab")
    assert (relief.reset, relief.offloaded) == (("b",), ())
    assert reasons(relief)["b"] is Reason.RESET_COPY_FAILED
    assert pool.manager.probe(Step((Segment("a"),))) is None
    pool.close()


def test_all_copies_of_a_relief_are_one_submission() -> None:
    pool = Pool(4, 1, 1)
    open_claims: list[int] = []

    def at_submit(op: Op) -> bool:
        if isinstance(op, CopyOut):
            open_claims.append(len(pool.manager.claims()))
        return False

    pool.backend.fail = at_submit
    relief = relieve(pool.manager, [Starved("a", 0, Segment("a", span=4)), *pool.starved("bc")], 3)
    assert relief.offloaded == ("c", "b") and open_claims == [2, 2]
    pool.close()


@pytest.mark.parametrize("together", [False, True])
def test_one_that_frees_nothing_leaves_only_together_with_those_it_shares_with(together: bool) -> None:
    pool = Pool(2, 2)
    for name, source in (("c", "a"), ("d", "b")):
        pool.manager.ingest(name)
        pool.names.append(name)
        fork(pool.manager, source, name)
    assert [pool.manager.gain(name) for name in "abcd"] == [0, 0, 0, 0]
    relief = pool.relieve("abcd", together=together)
    assert relief.offloaded == (("d", "c", "b") if together else ())
    pool.close()


def fork(manager: KVManager, source: str, target: str) -> None:
    """Fork a stream whose pages are all full: everything is shared."""
    step = Step((Segment(source, span=0),), post_forks=(StreamFork(StreamId(source), StreamId(target)),))
    lease: Any = manager.admit(step)
    with manager.launch(manager.plan(lease)):
        pass
    manager.commit(lease)


def test_a_victim_that_cannot_be_moved_is_reset() -> None:
    pool = Pool(2, 2)
    pool.manager.offload("b")
    store(pool.manager, Segment("a", span=4))
    relief = pool.relieve("ab", together=True)
    assert reasons(relief) == {"b": Reason.RESET_REFUSED, "a": Reason.LAST_ACTIVE}
    pool.close()


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
