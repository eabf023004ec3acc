"""Pools of several groups: rows Q1, Q8, Q10 and Q14 of the known bugs, one schedule each, and their siblings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstate.arena import Arena
from kvstate.errors import DoubleFree
from kvstate.ops import Tier
from kvstate.ordering import NOTHING
from kvstate.refusals import ClaimEnded, HostExhausted, LeaseEnded, PagesExhausted, TooLarge
from kvstate.state import Lease
from kvstate.transitions.offload import Offloaded
from kvstate.transitions.reload import Reloaded
from kvstate.types import Geometry, Group, RequestConfig, RetentionPolicy, Segment, Step, StreamFork, StreamId

TWO = (Group("full", 256), Group("small", 128))
"""Two groups that keep everything: a sector is one page of the first, or two of the second."""

WINDOW = (Group("full", 256), Group("window", 128, window=3))

LAST = (Group("full", 256), Group("last", 128, window=1))
"""A window of the token itself: when its page is full, the second group holds nothing."""

ODD = (Group("full", 384), Group("window", 256, window=5))
"""A sector is two pages of the first group, or three of the second, and their borders do not agree."""


def sectors(kv: Any, group: int, tier: str = "device") -> set[int]:
    """Return the sectors that are lent to a group."""
    now = kv.manager.view()
    lent = now.device_lent if tier == "device" else now.host_lent
    return {sector for sector, has in enumerate(lent) if has == group}


# -- Q1


def test_Q1_four_host_pages_given_back_are_counted_before_six_are_refused(machines: Callable[..., Any]) -> None:
    kv = machines(host_pages=4)
    kv.ingest("r", "s")
    kv.run(Segment("r", span=8))
    tokens = kv.tokens("r")
    assert kv.offload("r") == Offloaded("r", 4)
    assert kv.reload("r") == Reloaded("r", 4)
    kv.run(Segment("r", span=4))
    before = kv.manager.view()

    assert kv.offload("r") == HostExhausted(request="r", short=(2,))
    assert kv.manager.view() == before
    assert kv.tokens("r")[:8] == tokens
    kv.run(Segment("s", span=3))
    assert kv.offload("s") == Offloaded("s", 2), "the loop goes on"


def test_Q1_sibling_sectors_given_back_by_one_group_are_there_for_the_other(machines: Callable[..., Any]) -> None:
    kv = machines(pages=16, host_pages=4, groups=TWO)
    kv.ingest("r", "s")
    kv.run(Segment("r", span=4))
    kv.offload("r")
    assert (sectors(kv, 0, "host"), sectors(kv, 1, "host")) == ({0, 1}, {2})
    kv.reload("r")
    assert sectors(kv, 0, "host") | sectors(kv, 1, "host") == set()
    kv.run(Segment("s", span=6))

    assert kv.offload("s") == HostExhausted(request="s", short=(0, 1))
    kv.reset("s")
    kv.run(Segment("s", span=4))
    tokens = kv.tokens("s")
    assert kv.offload("s") == Offloaded("s", 4)
    assert kv.tokens("s") == tokens


def test_Q1_sibling_what_is_refused_and_what_fits_is_exact_to_the_last_page(machines: Callable[..., Any]) -> None:
    kv = machines(pages=6, host_pages=0, groups=TWO)
    kv.ingest("r", "s")
    for _ in range(3):
        kv.run(Segment("r", span=8))
        assert kv.manager.pages_available()["device"] == (0, 0)
        assert kv.admit(Segment("s", span=1)) == PagesExhausted(request="s", label="main", short=(1, 1))
        kv.reset("r")
        assert kv.manager.pages_available()["device"] == (6, 12)


def test_Q1_sibling_a_request_that_no_sectors_could_ever_hold_is_refused_for_good(machines: Callable[..., Any]) -> None:
    kv = machines(pages=6, groups=TWO)
    kv.ingest("r")
    assert kv.admit(Segment("r", span=9)) == TooLarge(request="r", label="main", wanted=8, capacity=6)
    kv.run(Segment("r", span=8))
    assert len(kv.tokens("r")) == 8


# -- Q8


def test_Q8_one_victim_is_enough_when_its_pages_are_of_another_group(machines: Callable[..., Any]) -> None:
    kv = machines(pages=6, host_pages=6, groups=LAST)
    kv.ingest("a", "b", "new")
    for _ in range(4):
        kv.run(Segment("a", span=2))
    kv.run(Segment("b", span=1))
    assert (len(kv.pages("a")), len(kv.pages("a", group=1))) == (4, 0)
    assert (len(sectors(kv, 0)), len(sectors(kv, 1))) == (5, 1)
    wanted = Step([Segment("new", span=3)])
    assert kv.manager.probe(wanted) == PagesExhausted(request="new", label="main", short=(2, 1))

    assert kv.offload("a") == Offloaded("a", 4)
    lease = kv.manager.admit(wanted)
    assert isinstance(lease, Lease), "what the victim had in the first group is invisible to the second"
    assert (len(sectors(kv, 0)), len(sectors(kv, 1))) == (3, 2)
    assert kv.stream("b").residency == "OnDevice"


def test_Q8_sibling_a_window_that_slides_makes_room_for_the_other_group(machines: Callable[..., Any]) -> None:
    kv = machines(pages=5, page_size=2, host_pages=0, groups=(Group("full", 256), Group("window", 256, window=1)))
    kv.ingest("r")
    kv.run(Segment("r", span=2))
    tokens = kv.tokens("r")
    for turn in range(3):
        # The page that the window has left is one of the two that this step is granted.
        kv.run(Segment("r", span=2))
        assert kv.tokens("r")[: len(tokens)] == tokens, turn
        tokens = kv.tokens("r")
    assert (len(kv.pages("r")), kv.pages("r", group=1)) == (4, ())


def test_Q8_sibling_cached_pages_of_one_group_are_room_for_another(machines: Callable[..., Any]) -> None:
    kv = machines(pages=6, host_pages=0, groups=TWO)
    kv.ingest("r", "s")
    kv.run(Segment("r", span=8))
    kv.key("r", range(8))
    kv.remove("r")
    assert kv.manager.pages_free()["device"] == (0, 0)
    assert kv.manager.pages_available()["device"] == (6, 12)
    kv.run(Segment("s", span=8))
    assert len(kv.tokens("s")) == 8


def test_Q8_sibling_room_in_sectors_of_other_groups_is_named_fragmented(machines: Callable[..., Any]) -> None:
    kv = machines(pages=10, host_pages=0, groups=LAST)
    small = [f"s{place}" for place in range(6)]
    kv.ingest(*small, "r", "filler")
    for request in small:
        kv.run(Segment(request, span=1))
    assert (len(sectors(kv, 0)), len(sectors(kv, 1))) == (6, 3)
    for request in small[::2]:
        kv.remove(request)
    kv.run(Segment("r", span=2))
    for _ in range(3):
        kv.run(Segment("filler", span=2))
    assert kv.manager.pages_available()["device"] == (0, 3)

    refused = kv.admit(Segment("r", span=2))
    assert refused == PagesExhausted(request="r", label="main", short=(1, 0), fragmented=True)
    assert kv.admit(Segment("r", span=5)) == PagesExhausted(request="r", label="main", short=(3, 0))
    kv.remove(small[1])
    kv.run(Segment("r", span=2))


# -- Q10


def arenas(tier: Tier) -> list[Arena]:
    """Return an arena of every kind of pool."""
    return [Arena(tier, Geometry(pages=6, host_pages=6, groups=groups)) for groups in ((Group(),), TWO, ODD)]


@pytest.mark.parametrize("tier", list(Tier))
def test_Q10_a_page_given_back_twice_is_an_error_at_the_call_and_is_granted_once(tier: Tier) -> None:
    for arena in arenas(tier):
        for pool in arena.pools:
            before = arena.free()
            [page, other] = pool.grant(2)
            pool.drop([page], NOTHING)
            with pytest.raises(DoubleFree, match=f"{tier.value} page {page}"):
                pool.drop([page], NOTHING)
            pool.drop([other], NOTHING)
            assert arena.free() == before
            everything = pool.grant(before[pool.group])
            assert len(set(everything)) == len(everything)
            pool.drop(everything, NOTHING)


@pytest.mark.parametrize("tier", list(Tier))
def test_Q10_sibling_a_page_without_an_owner_is_shared_with_nobody(tier: Tier) -> None:
    for arena in arenas(tier):
        for pool in arena.pools:
            [page] = pool.grant(1)
            pool.drop([page], NOTHING)
            with pytest.raises(DoubleFree):
                pool.share([page])


def test_Q10_sibling_what_has_ended_gives_nothing_back_again(machines: Callable[..., Any]) -> None:
    kv = machines(groups=WINDOW)
    kv.ingest("r", "s")
    lease = kv.admit(Segment("r", span=3))
    kv.abort(lease)
    kv.run(Segment("r", span=3))
    claim = kv.claim_offload("r")
    kv.abandon(claim)
    back = kv.claim_offload("r")
    kv.commit_claim(back)
    before = kv.manager.view()

    assert isinstance(kv.abort(lease), LeaseEnded)
    for ended in (claim, back):
        assert isinstance(kv.abandon(ended), ClaimEnded)
        assert isinstance(kv.commit_claim(ended), ClaimEnded)
    assert kv.manager.view() == before


# -- Q14


@pytest.mark.parametrize("tier", list(Tier))
def test_Q14_the_same_page_twice_in_one_list_is_an_error_and_counts_once(tier: Tier) -> None:
    for arena in arenas(tier):
        for pool in arena.pools:
            before = arena.free()
            [page] = pool.grant(1)
            with pytest.raises(DoubleFree):
                pool.drop([page, page], NOTHING)
            assert arena.free() == before


def test_Q14_sibling_a_page_with_two_owners_may_be_dropped_by_both_at_once() -> None:
    for arena in arenas(Tier.DEVICE):
        for pool in arena.pools:
            [page] = pool.grant(1)
            pool.share([page])
            assert pool.drop([page, page], NOTHING) == 1


def test_Q14_sibling_a_window_that_slid_past_a_page_does_not_come_back_for_it(machines: Callable[..., Any]) -> None:
    kv = machines(pages=24, groups=(Group("full", 256), Group("window", 128, window=7)))
    kv.ingest("r")
    kv.run(Segment("r", span=12))
    assert kv.stream("r").skipped == (0, 3)
    # Retention shortens the stream: its window, measured anew, would begin in front of where it was.
    policy = RetentionPolicy(context_budget=1, protected_prefix=4)
    kv.run(Segment("r", span=1), retention={"main": policy})
    after = kv.stream("r")
    assert (after.length, after.released, kv.geometry.skipped(1, after.length)) == (5, 8, 0)
    assert after.skipped == (0, 2)
    kv.run(Segment("r", span=1), accepted=(0,))
    kv.run(Segment("r", span=6))
    assert len(kv.tokens("r")) == 11


def test_Q14_sibling_retention_and_window_let_go_of_a_page_once(machines: Callable[..., Any]) -> None:
    kv = machines(pages=16, groups=ODD)
    kv.ingest("r", config=RequestConfig(retention={"main": RetentionPolicy(context_budget=4, protected_prefix=2)}))
    for span in (7, 1, 5, 2, 6):
        kv.run(Segment("r", span=span))
        kv.tokens("r")
        available, held = kv.manager.pages_available()["device"], [len(kv.pages("r", group=g)) for g in (0, 1)]
        assert available == kv.manager.pages_free()["device"]
        now = kv.manager.view()
        for pool, own in zip(now.device, held, strict=True):
            assert sum(pool.owners) == own


def test_Q14_sibling_a_page_shared_by_fork_leaves_each_window_once(machines: Callable[..., Any]) -> None:
    kv = machines(pages=16, groups=WINDOW)
    kv.ingest("r", "s")
    kv.run(Segment("r", span=4), post_forks=[StreamFork(StreamId("r"), StreamId("s"))])
    for request in ("r", "s", "r", "s"):
        kv.run(Segment(request, span=2))
    assert kv.tokens("r")[:4] == kv.tokens("s")[:4]
    kv.remove("r")
    assert len(kv.tokens("s")) == 8
