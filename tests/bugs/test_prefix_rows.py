"""The prefix cache: rows Q9, Q13, Q15, Q16, Q18, O14 and O15 of the known bugs, one schedule each, and siblings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstate.ops import CopyIn
from kvstate.prefix import AllBlocksCleared, BlockRemoved, BlockStored, Key, page_keys
from kvstate.refusals import NotStored, PagesExhausted, PrefixLost
from kvstate.state import Lease
from kvstate.transitions.offload import Offloaded
from kvstate.transitions.prefix import Keyed
from kvstate.transitions.reload import Reloaded
from kvstate.types import Group, LabelFork, RequestConfig, Segment, Step, StreamFork, StreamId

WINDOW = (Group("full", 256), Group("window", 128, window=3))


def prompt(name: str, tokens: int) -> list[int]:
    """Return tokens that no other name has."""
    first = 1000 * sum(map(ord, name))
    return list(range(first, first + tokens))


def keys(name: str, pages: int, salt: str = "") -> tuple[Key, ...]:
    """Return the keys of the first pages of a prompt."""
    return page_keys(prompt(name, 2 * pages), 2, salt)


def stored(kv: Any, request: str, tokens: int, name: str | None = None) -> None:
    """Compute a prompt and let others find its whole pages."""
    kv.ingest(request)
    kv.run(Segment(request, span=tokens))
    kv.key(request, prompt(name or request, tokens))


def cached(kv: Any, name: str, tokens: int) -> list[str]:
    """Leave the pages of a prompt behind; return what they hold."""
    stored(kv, name, tokens)
    tokens_held: list[str] = kv.tokens(name)
    kv.remove(name)
    return tokens_held


def found(kv: Any, name: str, pages: int) -> int:
    """Return how many of the first pages of a prompt can be found."""
    return int(kv.manager.match(keys(name, pages)))


# -- Q9


def test_Q9_a_shortage_evicts_as_many_pages_as_it_needs(kv: Any) -> None:
    cached(kv, "a", 8)
    kv.ingest("s")
    kv.run(Segment("s", span=10))

    assert found(kv, "a", 4) == 3, "a shortage of one page cost more than one"
    assert kv.manager.pages_free()["device"] == (0,)
    assert kv.manager.pages_available()["device"] == (3,)


def test_Q9_sibling_a_chain_is_eaten_from_its_end(kv: Any) -> None:
    cached(kv, "a", 8)
    kv.ingest("s")
    kv.run(Segment("s", span=8))
    for left in (3, 2, 1, 0):
        kv.run(Segment("s", span=2))
        assert found(kv, "a", 4) == left


def test_Q9_sibling_what_was_used_last_leaves_last(kv: Any) -> None:
    cached(kv, "a", 4)
    cached(kv, "b", 4)
    kv.ingest("s", "t")
    kv.run(Segment("t", prefix=keys("a", 2)))
    kv.remove("t")
    kv.run(Segment("s", span=10))
    assert (found(kv, "a", 2), found(kv, "b", 2)) == (2, 1)


def test_Q9_sibling_what_is_refused_evicts_nothing_and_a_lookup_is_no_use(kv: Any) -> None:
    cached(kv, "a", 8)
    cached(kv, "b", 2)
    for _ in range(3):
        assert found(kv, "a", 4) == 4
    kv.ingest("s", "t")
    kv.run(Segment("s", span=2))
    before = kv.manager.view()
    assert kv.admit(Segment("t", span=16)) == PagesExhausted(request="t", label="main", short=(1,))
    assert kv.manager.view() == before
    kv.run(Segment("s", span=6))
    assert (found(kv, "a", 4), found(kv, "b", 1)) == (3, 1), "looked up is not used: a is the older"


def test_Q9_sibling_offload_reload_and_fetch_evict_no_more_than_they_need(machines: Callable[..., Any]) -> None:
    kv = machines(pages=6)
    kv.ingest("r")
    kv.run(Segment("r", span=6))
    kv.offload("r")
    cached(kv, "a", 10)
    assert kv.reload("r") == Reloaded("r", 3)
    assert found(kv, "a", 5) == 3


def test_Q9_sibling_groups_evict_what_helps_and_leave_the_rest(machines: Callable[..., Any]) -> None:
    kv = machines(pages=7, host_pages=0, groups=WINDOW)
    cached(kv, "a", 4)
    cached(kv, "b", 4)
    kv.ingest("s")
    kv.run(Segment("s", span=4))
    assert found(kv, "b", 2) == 2
    assert found(kv, "a", 2) < 2


# -- Q13


def test_Q13_nothing_of_the_old_weights_is_found_after_a_change(kv: Any) -> None:
    stored(kv, "r", 4)
    cached(kv, "a", 4)
    kv.ingest("s")
    assert (found(kv, "r", 2), found(kv, "a", 2)) == (2, 2)

    assert kv.reset_prefix_cache() == 4
    assert (found(kv, "r", 2), found(kv, "a", 2)) == (0, 0)
    assert kv.manager.pages_free()["device"] == (6,), "cached pages are free"
    assert kv.admit(Segment("s", prefix=keys("a", 1))) == PrefixLost(request="s", label="main", matched=0)
    assert kv.events[-1] == AllBlocksCleared()


def test_Q13_sibling_tokens_of_the_old_weights_get_no_keys_until_a_reset(kv: Any) -> None:
    stored(kv, "r", 4)
    kv.reset_prefix_cache()
    kv.run(Segment("r", span=4))
    assert kv.key("r", prompt("r", 8)) == Keyed("r", 0, 0)
    assert found(kv, "r", 4) == 0
    kv.reset("r")
    kv.run(Segment("r", span=4))
    assert kv.key("r", prompt("r", 4)) == Keyed("r", 2, 0)
    assert found(kv, "r", 2) == 2


def test_Q13_sibling_a_step_in_flight_stores_tokens_of_the_old_weights(kv: Any) -> None:
    kv.ingest("r")
    lease = kv.launched(Segment("r", span=4))
    kv.reset_prefix_cache()
    kv.commit(lease)
    assert kv.key("r", prompt("r", 4)) == Keyed("r", 0, 0)
    assert found(kv, "r", 2) == 0


def test_Q13_sibling_a_step_that_started_on_old_pages_spreads_nothing(kv: Any) -> None:
    cached(kv, "a", 4)
    kv.ingest("s", "t")
    lease = kv.launched(Segment("s", span=3, prefix=keys("a", 2)))
    kv.reset_prefix_cache()
    kv.commit(lease)
    assert kv.key("s", prompt("more", 2)) == Keyed("s", 0, 0)
    kv.run(Segment("s"), post_forks=[StreamFork(StreamId("s"), StreamId("t"))])
    assert kv.key("t", prompt("more", 2)) == Keyed("t", 0, 0)
    assert found(kv, "a", 2) == 0


def test_Q13_sibling_the_host_keeps_no_keys_over_a_change(kv: Any) -> None:
    stored(kv, "r", 4)
    kv.offload("r")
    kv.reset_prefix_cache()
    assert kv.reload("r") == Reloaded("r", 2)
    assert found(kv, "r", 2) == 0
    assert kv.key("r", prompt("r", 4)) == Keyed("r", 0, 0)


def test_Q13_sibling_a_copy_in_flight_keeps_no_keys_over_a_change(kv: Any) -> None:
    stored(kv, "r", 4)
    kv.offload("r")
    claim = kv.claim_reload("r")
    kv.reset_prefix_cache()
    kv.commit_claim(claim)
    assert found(kv, "r", 2) == 0


def test_Q13_sibling_a_fork_of_old_tokens_is_old(kv: Any) -> None:
    stored(kv, "r", 4)
    kv.ingest("s")
    kv.reset_prefix_cache()
    forks = [LabelFork("main", "cfg"), StreamFork(StreamId("r"), StreamId("s"))]
    kv.run(Segment("r"), post_forks=forks)
    assert kv.key("r", prompt("r", 4), "cfg") == Keyed("r", 0, 0)
    assert kv.key("s", prompt("r", 4)) == Keyed("s", 0, 0)
    assert found(kv, "r", 2) == 0


def test_Q13_sibling_what_is_being_fetched_is_of_the_old_weights(machines: Callable[..., Any]) -> None:
    publisher, kv = machines(address="one"), machines(address="two")
    for one in (publisher, kv):
        one.ingest("r")
    publisher.run(Segment("r", span=4))
    [fetch] = kv.claim_retrieve("r", publisher.publish("r")).fetches
    kv.reset_prefix_cache()
    kv.transport.copy(fetch)
    kv.transport.finish(fetch)
    kv.poll()
    assert kv.tokens("r") == publisher.tokens("r")
    assert kv.key("r", prompt("r", 4)) == Keyed("r", 0, 0)


# -- Q15


def test_Q15_a_page_is_counted_by_its_owners_however_it_was_found(kv: Any) -> None:
    held = cached(kv, "a", 4)
    kv.ingest("r", "s")
    before = kv.manager.view()
    for _ in range(3):
        assert found(kv, "a", 2) == 2
    assert kv.manager.view() == before, "a lookup owns nothing"

    kv.run(Segment("r", span=3, prefix=keys("a", 2)))
    dropped = kv.admit(Segment("s", span=3, prefix=keys("a", 2)))
    kv.abort(dropped)
    [pool] = kv.manager.view().device
    assert [pool.owners[page] for page in kv.pages("r")] == [1, 1, 1, 1]
    kv.run(Segment("s", span=8))
    assert kv.tokens("r")[:4] == held, "an abort took a page from under its reader"


def test_Q15_sibling_an_aborted_hit_is_cached_again(kv: Any) -> None:
    held = cached(kv, "a", 4)
    kv.ingest("s")
    for end in (kv.abort, lambda lease: kv.reset("s") and kv.abort(lease)):
        lease = kv.admit(Segment("s", span=1, prefix=keys("a", 2)))
        assert kv.manager.view().device[0].cached == ()
        end(lease)
        assert (found(kv, "a", 2), len(kv.manager.view().device[0].cached)) == (2, 2)
    kv.run(Segment("s", span=1, prefix=keys("a", 2)))
    assert kv.tokens("s")[:4] == held


def test_Q15_sibling_a_page_is_not_evicted_under_a_step_that_reads_it(kv: Any) -> None:
    held = cached(kv, "a", 4)
    kv.ingest("r", "s")
    lease, plan = kv.staged(Segment("r", span=2, prefix=keys("a", 2)))
    assert isinstance(kv.admit(Segment("s", span=12)), PagesExhausted)
    with kv.manager.launch(plan):
        kv.remove("r")
        assert isinstance(kv.admit(Segment("s", span=12)), PagesExhausted)
        kv.run(Segment("s", span=10))
        assert kv.compute(plan) == [held]
    kv.abort(lease)
    kv.run(Segment("s", span=2))
    assert (found(kv, "a", 2), kv.manager.pages_free()["device"]) == (2, (0,))


def test_Q15_sibling_readers_of_one_page_leave_one_by_one(kv: Any) -> None:
    held = cached(kv, "a", 4)
    kv.ingest("r", "s", "t")
    kv.run(*(Segment(request, span=1, prefix=keys("a", 2)) for request in "rst"))
    [pool] = kv.manager.view().device
    shared = kv.pages("r")[:2]
    assert [pool.owners[page] for page in shared] == [3, 3]
    for request, left in (("s", 2), ("r", 1)):
        kv.remove(request)
        assert [kv.manager.view().device[0].owners[page] for page in shared] == [left, left]
        assert kv.tokens("t")[:4] == held
    kv.reset("t", free=False)
    assert kv.manager.view().device[0].cached == (shared[1], shared[0])
    assert len(kv.pages("t")) == 1, "only what nobody can find stays as surplus"


def test_Q15_sibling_a_reader_orders_itself_behind_what_wrote_the_page(kv: Any) -> None:
    stored(kv, "a", 4)
    kv.ingest("r")
    lease = kv.launched(Segment("r", span=1, prefix=keys("a", 2)))
    kv.commit(lease)
    assert kv.conflicts_without_the_edges_of(kv.step_of(lease)) == [], "one queue orders steps"
    kv.offload("a")
    kv.remove("r")
    kv.ingest("s")
    kv.run(Segment("s", span=16))
    kv.remove("s")
    kv.reload("a")
    assert found(kv, "a", 2) == 2
    kv.ingest("t")
    reader = kv.launched(Segment("t", span=1, prefix=keys("a", 2)))
    copy_in = kv.last(CopyIn)
    conflicts = kv.conflicts_without_the_edges_of(kv.step_of(reader))
    assert {conflict.first.number for conflict in conflicts} == {copy_in.number}


# -- Q16


def test_Q16_an_evicted_page_is_not_found_by_what_it_held(kv: Any) -> None:
    cached(kv, "a", 8)
    kv.ingest("s", "t")
    kv.run(Segment("s", span=16))
    assert found(kv, "a", 4) == 0
    assert kv.admit(Segment("t", prefix=keys("a", 1))) == PrefixLost(request="t", label="main", matched=0)
    kv.key("s", prompt("s", 16))
    assert (found(kv, "a", 4), found(kv, "s", 8)) == (0, 8)


def test_Q16_sibling_between_lookup_and_admission_the_pages_may_go(kv: Any) -> None:
    cached(kv, "a", 8)
    kv.ingest("s", "t")
    matched = found(kv, "a", 4)
    kv.run(Segment("s", span=12))
    before = kv.manager.view()
    assert kv.admit(Segment("t", prefix=keys("a", matched))) == PrefixLost(request="t", label="main", matched=2)
    assert kv.manager.view() == before
    assert isinstance(kv.admit(Segment("t", span=1, prefix=keys("a", 1))), Lease)


def test_Q16_sibling_a_page_that_is_written_again_is_found_by_nothing(kv: Any) -> None:
    stored(kv, "r", 5)
    kv.reset("r", free=False)
    assert found(kv, "r", 2) == 2
    kv.run(Segment("r", span=6))
    assert found(kv, "r", 2) == 2, "its old pages are cached, its new tokens went elsewhere"
    kv.ingest("s")
    kv.run(Segment("s", span=1, prefix=keys("r", 2)))
    assert kv.tokens("s")[:4] != kv.tokens("r")[:4]


def test_Q16_sibling_one_page_of_two_salts_has_one_key_and_loses_it_whole(kv: Any) -> None:
    kv.ingest("a", config=RequestConfig(cache_salt="A"))
    kv.ingest("b", config=RequestConfig(cache_salt="B"))
    kv.run(Segment("a", span=4), post_forks=[StreamFork(StreamId("a"), StreamId("b"))])
    assert kv.key("a", prompt("x", 4)) == Keyed("a", 2, 0)
    assert kv.key("b", prompt("x", 4)) == Keyed("b", 0, 2)
    assert (kv.manager.match(keys("x", 2, "A")), kv.manager.match(keys("x", 2, "B"))) == (2, 0)
    kv.remove("a")
    kv.remove("b")
    kv.ingest("s")
    kv.run(Segment("s", span=16))
    assert (kv.manager.match(keys("x", 2, "A")), kv.manager.match(keys("x", 2, "B"))) == (0, 0)


def test_Q16_sibling_no_prefix_is_found_under_another_salt(kv: Any) -> None:
    kv.ingest("a", config=RequestConfig(cache_salt="A"))
    kv.run(Segment("a", span=4))
    kv.key("a", prompt("x", 4))
    assert [kv.manager.match(keys("x", 2, salt)) for salt in ("A", "B", "")] == [2, 0, 0]


def test_Q16_sibling_a_publication_does_not_outlive_its_request_although_the_bytes_do(
    machines: Callable[..., Any],
) -> None:
    publisher, kv = machines(address="one"), machines(address="two")
    stored(publisher, "r", 4)
    kv.ingest("r")
    publication = publisher.publish("r")
    publisher.remove("r")
    assert found(publisher, "r", 2) == 2
    [fetch] = kv.claim_retrieve("r", publication).fetches
    kv.transport.copy(fetch)
    kv.transport.finish(fetch)
    kv.poll()
    assert kv.stream("r").residency == "FetchFailed"


def test_Q16_sibling_only_stored_tokens_get_keys(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    kv.run(Segment("r", span=3), accepted=(1,))
    assert kv.key("r", prompt("r", 6)) == NotStored(request="r", label="main", stored=4)
    assert found(kv, "r", 3) == 0
    assert kv.key("r", prompt("r", 4)) == Keyed("r", 2, 0)
    lease = kv.launched(Segment("r", span=4))
    assert isinstance(kv.key("r", prompt("more", 4)), NotStored)
    kv.commit(lease)


# -- Q18


def test_Q18_a_host_page_is_not_found_by_the_key_of_the_device_page_of_its_number(kv: Any) -> None:
    stored(kv, "r", 4)
    device = kv.pages("r")
    held = kv.tokens("r")
    assert kv.offload("r") == Offloaded("r", 2)
    assert kv.stream("r").host[0] == device == (0, 1), "the schedule needs equal numbers in both tiers"
    now = kv.manager.view()
    assert (now.device[0].cached, now.host[0].keys) == ((1, 0), ())
    kv.ingest("s")
    kv.run(Segment("s", span=14))
    assert found(kv, "r", 2) == 1
    kv.run(Segment("s", span=2))

    assert found(kv, "r", 2) == 0, "the copy on the host is private"
    kv.remove("s")
    assert kv.reload("r") == Reloaded("r", 2)
    assert kv.tokens("r") == held
    assert found(kv, "r", 2) == 2, "what came back can be found again"


def test_Q18_sibling_a_reload_shares_what_the_device_still_has_and_copies_the_rest(kv: Any) -> None:
    stored(kv, "r", 7)
    held = kv.tokens("r")
    kv.offload("r")
    kv.ingest("s")
    kv.run(Segment("s", span=12))
    assert found(kv, "r", 3) == 2
    kv.remove("s")
    shared = kv.manager.view().device[0].keys
    kv.reload("r")
    [copies] = kv.last(CopyIn).copies
    assert (len(copies), len(shared)) == (2, 2), "the third page, which had left, and the partly filled fourth"
    assert kv.pages("r")[:2] == tuple(page for page, _ in sorted(shared))
    assert kv.tokens("r") == held


def test_Q18_sibling_events_speak_of_the_device_and_of_one_group_each(machines: Callable[..., Any]) -> None:
    kv = machines(pages=12, groups=WINDOW)
    stored(kv, "r", 6)
    kv.offload("r")
    kv.reset_prefix_cache()
    told = kv.events
    first, second, third = keys("r", 3)
    assert [(e.group_idx, e.parent_block_hash, e.block_hashes) for e in told if isinstance(e, BlockStored)] == [
        (0, None, (first,)), (0, first, (second,)), (0, second, (third,)), (1, second, (third,)),
    ]  # fmt: skip
    assert {e.medium for e in told if isinstance(e, (BlockStored, BlockRemoved))} == {"GPU"}
    assert told[-1] == AllBlocksCleared()


def test_Q18_sibling_a_prefix_ends_where_every_group_has_what_it_needs(machines: Callable[..., Any]) -> None:
    kv = machines(pages=16, groups=WINDOW)
    kv.ingest("r")
    kv.run(Segment("r", span=4))
    kv.key("r", prompt("r", 4))
    kv.run(Segment("r", span=4))
    held = kv.tokens("r")
    assert found(kv, "r", 2) == 2, "pages that a window left stay findable until somebody needs them"
    kv.key("r", prompt("r", 8)[4:])
    kv.remove("r")
    kv.ingest("s")
    kv.run(Segment("s", span=2, prefix=keys("r", 4)))
    assert kv.tokens("s")[:8] == held
    assert kv.stream("s").skipped == (0, 4)


# -- O14


def test_O14_pages_that_a_copy_is_filling_are_neither_found_nor_evicted(kv: Any) -> None:
    stored(kv, "r", 8)
    held = kv.tokens("r")
    kv.offload("r")
    kv.ingest("s", "t")
    kv.run(Segment("s", span=16))
    kv.remove("s")
    claim = kv.claim_reload("r")

    assert found(kv, "r", 4) == 0, "found before the bytes are good"
    assert kv.admit(Segment("t", span=9)) == PagesExhausted(request="t", label="main", short=(1,))
    kv.commit_claim(claim)
    assert (found(kv, "r", 4), kv.tokens("r")) == (4, held)


def test_O14_sibling_pages_that_an_offload_reads_are_not_evicted(kv: Any) -> None:
    stored(kv, "r", 8)
    held = kv.tokens("r")
    kv.ingest("t")
    claim = kv.claim_offload("r")
    assert found(kv, "r", 4) == 4
    assert kv.admit(Segment("t", span=9)) == PagesExhausted(request="t", label="main", short=(1,))
    kv.commit_claim(claim)
    kv.run(Segment("t", span=9))
    assert (found(kv, "r", 4), kv.tokens("r")) == (3, held)


def test_O14_sibling_an_abandoned_reload_leaves_nothing_to_find(kv: Any) -> None:
    stored(kv, "r", 4)
    kv.offload("r")
    kv.ingest("s")
    kv.run(Segment("s", span=16))
    kv.remove("s")
    kv.backend.fail_next(CopyIn)
    kv.reload("r")
    assert found(kv, "r", 2) == 0
    assert kv.manager.pages_free()["device"] == (8,)


# -- O15


def test_O15_a_match_is_owned_before_anything_is_evicted(kv: Any) -> None:
    held = cached(kv, "a", 8)
    cached(kv, "b", 4)
    kv.ingest("s")
    kv.run(Segment("s", span=8, prefix=keys("a", 4)))
    assert kv.tokens("s")[:8] == held, "it evicted what it was about to read: the oldest"
    assert found(kv, "b", 2) == 0


def test_O15_sibling_what_a_step_starts_on_makes_no_room_for_it(kv: Any) -> None:
    cached(kv, "a", 8)
    kv.ingest("s", "t")
    kv.run(Segment("t", span=6))
    before = kv.manager.view()
    refused = kv.admit(Segment("s", span=4, prefix=keys("a", 4)))
    assert refused == PagesExhausted(request="s", label="main", short=(1,))
    assert kv.manager.view() == before
    kv.run(Segment("s", span=2, prefix=keys("a", 4)))
    assert len(kv.tokens("s")) == 10


def test_O15_sibling_a_reload_evicts_nothing_that_it_brings_back(machines: Callable[..., Any]) -> None:
    kv = machines(pages=8, host_pages=8)
    stored(kv, "r", 8)
    held = kv.tokens("r")
    kv.offload("r")
    cached(kv, "b", 8)
    assert found(kv, "r", 4) == 4
    assert kv.reload("r", Step([Segment("r", span=4)])) == Reloaded("r", 6)
    assert kv.tokens("r") == held
    [copies] = kv.last(CopyIn).copies
    assert list(copies) == [], "everything was still on the device"
    assert found(kv, "b", 4) == 2


def test_O15_sibling_two_streams_of_a_step_start_on_one_page(kv: Any) -> None:
    held = cached(kv, "a", 4)
    cached(kv, "b", 4)
    kv.ingest("r", "s")
    kv.run(Segment("r", span=6, prefix=keys("a", 2)), Segment("s", span=6, prefix=keys("a", 2)))
    assert (kv.tokens("r")[:4], kv.tokens("s")[:4]) == (held, held)
    assert found(kv, "b", 2) == 0


@pytest.mark.parametrize("spare", [0, 1])
def test_O15_sibling_groups_own_a_match_before_sectors_change_hands(machines: Callable[..., Any], spare: int) -> None:
    kv = machines(pages=9 + spare, host_pages=0, groups=WINDOW)
    held = cached(kv, "a", 6)
    cached(kv, "b", 4)
    kv.ingest("s")
    kv.run(Segment("s", span=6, prefix=keys("a", 3)))
    assert kv.tokens("s")[:6] == held
