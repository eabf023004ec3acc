"""The reference with content keys: sentences 6, 20, 23, 24, 29 and 34 – 41 of spec/README.md."""

from kvstate.prefix import page_keys
from kvstate.refusals import NotEmpty, NotStored, PagesExhausted, PrefixLost, StreamNotOnDevice, UnknownRequest
from kvstate.types import Group, LabelFork, RetentionPolicy, StreamFork
from kvstate.types import StreamId as Id
from tests.spec.sectors import FULL, WINDOW, Driver, driver, span, step

PROMPT = list(range(1000, 1040))


def keys(count: int, tokens: list[int] = PROMPT, salt: str = "") -> tuple[bytes, ...]:
    return page_keys(tokens[: 4 * count], 4, salt)


def named(d: Driver, *cached: bytes) -> bool:
    """Tell whether exactly these are cached, the next to leave first."""
    return d.found().cached[0] == tuple(key.hex() for key in cached)


# ---------------------------------------------------------------------------------------------------------------------
# 34, 35


def test_key_keys_the_whole_pages_of_tokens_that_continue_the_keyed_ones() -> None:
    d = driver()
    d.stored(step(span(14)))
    assert d.key("a", PROMPT[:6]) == (1, 0)
    assert d.key("a", PROMPT[4:12]) == (2, 0)
    assert (d.stream().keyed, d.match(keys(4))) == (3, 3)
    assert d.key("a", [7, 7, 7]) == NotStored(request="a", label="main", stored=2)
    assert d.key("a", [7, 7]) == (0, 0)
    assert d.key("a", [1], "x") == NotStored(request="a", label="x", stored=0)
    assert d.key("gone", []) == UnknownRequest(request="gone")


def test_a_taken_key_leaves_the_page_of_the_second_unkeyed() -> None:
    d = driver("a", "b")
    d.prompt("a", PROMPT[:8])
    d.stored(step(span(12, "b")))
    assert d.key("b", PROMPT[:12]) == (1, 2)
    assert {number for number in d.found().findable.values()} == {0, 1, 4}
    d.remove("b")
    assert (d.match(keys(3)), named(d, keys(3)[2]), d.device_free) == (3, True, 14)


def test_requests_of_different_salts_share_nothing() -> None:
    d = driver("a", "b", salts={"b": "tenant"})
    d.prompt("a", PROMPT[:8])
    d.prompt("b", PROMPT[:8])
    assert (d.match(keys(2)), d.match(keys(2, salt="tenant")), len(d.found().findable)) == (2, 2, 4)


def test_a_page_has_one_key() -> None:
    d = driver("a", "b", salts={"b": "tenant"})
    d.stored(step(span(4)))
    d.stored(step(pre_forks=(StreamFork(Id("a"), Id("b")),)))
    assert d.key("a", PROMPT[:4]) == (1, 0)
    assert d.key("b", PROMPT[:4]) == (0, 1)
    assert d.match(keys(1, salt="tenant")) == 0


def test_a_forks_target_takes_the_keys_and_goes_on_from_there() -> None:
    d = driver("a", "b")
    d.prompt("a", PROMPT[:8])
    d.stored(step(span(1, "b"), pre_forks=(StreamFork(Id("a"), Id("b")),)))
    assert d.stream("b").keyed == 2
    d.stored(step(span(3, "b")))
    assert d.key("b", PROMPT[8:12]) == (1, 0)
    assert d.match(keys(3)) == 3


def test_a_forks_target_of_another_salt_takes_no_keys() -> None:
    d = driver("a", "b", salts={"b": "tenant"}, host_pages=8)
    d.prompt("a", PROMPT[:8])
    d.stored(step(span(1, "b"), pre_forks=(StreamFork(Id("a"), Id("b")),)))
    assert (d.stream("b").keyed, d.key("b", PROMPT[:8])) == (0, (0, 2))


def test_nothing_is_keyed_behind_tokens_that_left() -> None:
    d = driver()
    d.prompt("a", PROMPT[:4])
    d.stored(step(span(16), retention={"main": RetentionPolicy(12)}))
    # The keyed page went with its key.
    assert (d.stream().released, d.stream().keyed) == (8, 0)
    assert d.key("a", PROMPT[:4]) == (0, 0)
    assert (d.match(keys(1)), named(d, keys(1)[0])) == (1, True)


def test_a_match_ends_where_every_group_has_what_it_needs() -> None:
    d = driver(groups=(FULL, WINDOW))
    d.stored(step(span(8)))
    d.key("a", PROMPT[:8])
    d.stored(step(span(8)))
    d.key("a", PROMPT[8:16])
    # The window of 6 tokens holds places 2 and 3; those in front of it were keyed and are cached.
    assert d.stream().skipped == (0, 2)
    assert [d.match(keys(n)) for n in range(5)] == [0, 1, 2, 3, 4]
    lease = d.admitted(step(*(span(1, label=f"x{i}") for i in range(7))))
    d.abort(lease)
    # Filling the device let the two cached pages go: behind one or two pages the window's are missing.
    assert [d.match(keys(n)) for n in range(5)] == [0, 0, 0, 0, 4]


# ---------------------------------------------------------------------------------------------------------------------
# 36, 37


def test_pages_whose_last_owner_left_are_cached_the_later_before_the_earlier() -> None:
    d = driver("a", "b")
    d.prompt("a", PROMPT[:12])
    d.stored(step(span(1, "b"), pre_forks=(StreamFork(Id("a"), Id("b")),)))
    d.remove("a")
    assert (named(d), d.device_free) == (True, 12)
    d.remove("b")
    one, two, three = keys(3)
    assert (named(d, three, two, one), d.device_free, d.match(keys(3))) == (True, 16, 3)


def test_what_was_cached_earlier_leaves_earlier_and_a_use_counts() -> None:
    d = driver("a", "b", "c")
    other = [5] * 8
    d.prompt("a", PROMPT[:8])
    d.prompt("b", other)
    d.remove("a")
    d.remove("b")
    a, b = keys(2), keys(2, other)
    assert named(d, a[1], a[0], b[1], b[0])
    lease = d.admitted(step(span(1, "c", prefix=a[:1])))
    assert named(d, a[1], b[1], b[0])
    d.abort(lease)
    assert named(d, a[1], b[1], b[0], a[0])


def test_a_lookup_and_a_refused_admission_are_no_use() -> None:
    d = driver("a", "b", "c", pages=4)
    d.prompt("a", PROMPT[:8])
    d.remove("a")
    d.stored(step(span(1, "c")))
    before = d.found()
    assert d.match(keys(2)) == 2
    assert d.admit(step(span(8, "b", prefix=keys(2)))) == PagesExhausted(request="b", label="main", short=(1,))
    assert d.found() == before


def test_a_grant_takes_free_pages_first_and_then_as_many_cached_ones_as_it_needs() -> None:
    d = driver("a", "b", pages=6)
    d.prompt("a", PROMPT[:16])
    d.remove("a")
    one, two, three, four = keys(4)
    d.stored(step(span(8, "b")))
    assert named(d, four, three, two, one)
    d.stored(step(span(1, "b")))
    assert (named(d, three, two, one), d.match(keys(4))) == (True, 3)
    d.stored(step(span(8, "b")))
    assert (named(d, one), d.device_free) == (True, 1)


def test_with_several_groups_a_sector_changes_hands_when_all_its_pages_have_left() -> None:
    d = driver("a", "b", pages=6, groups=(FULL, Group("half", 128)))
    d.prompt("a", PROMPT[:16])
    d.remove("a")
    assert (d.found().device_owned, d.pages_available()["device"]) == ((0, 0), (6, 12))
    assert d.match(keys(4)) == 4
    # Four sectors and two are held by keys: 3 pages need 3 sectors and 2, and so five of the six.
    d.stored(step(span(12, "b")))
    assert d.found().device_owned == (3, 3)
    assert len(d.evicted) == len(set(d.evicted)) > 0


# ---------------------------------------------------------------------------------------------------------------------
# 38


def test_a_segment_starts_on_the_pages_of_its_prefix() -> None:
    d = driver("a", "b")
    d.prompt("a", PROMPT[:10])
    lease = d.launched(step(span(3, "b", prefix=keys(2))))
    assert d.device_free == 16 - 3 - 1
    d.commit(lease)
    assert d.contents()["b", "main"] == (*PROMPT[:8], 0, 1, 2)
    assert (d.stream("b").device, d.stream("b").keyed) == (((0, 1, 3),), 2)
    assert d.key("b", PROMPT[8:11]) == (0, 0)


def test_a_prefix_is_owned_from_the_admission_on_and_cached_again_after_an_abort() -> None:
    d = driver("a", "b")
    d.prompt("a", PROMPT[:8])
    lease = d.admitted(step(span(1, "b", prefix=keys(2))))
    d.remove("a")
    assert (named(d), d.device_free) == (True, 13)
    d.abort(lease)
    assert (named(d, *reversed(keys(2))), d.device_free) == (True, 16)


def test_what_an_admission_starts_on_does_not_leave_for_it() -> None:
    d = driver("a", "b", pages=4)
    d.prompt("a", PROMPT[:12])
    d.remove("a")
    # The prefix is what was to leave last of all; of the two pages that are wanted, one is free and one is cached.
    assert d.admit(step(span(8, "b", prefix=keys(2))), handle=d.handle()) is None
    assert (d.match(keys(3)), d.device_free) == (2, 0)
    d = driver("a", "b", pages=4)
    d.prompt("a", PROMPT[:12])
    d.remove("a")
    assert d.admit(step(span(5, "b", prefix=keys(3)))) is not None
    assert d.match(keys(3)) == 3


def test_a_prefix_that_is_gone_or_a_stream_that_is_not_empty_refuses() -> None:
    d = driver("a", "b")
    d.prompt("a", PROMPT[:8])
    lost = d.admit(step(span(1, "b", prefix=keys(3))))
    assert lost == PrefixLost(request="b", label="main", matched=2)
    first = d.admitted(step(span(3, "b")))
    assert d.admit(step(span(1, "b", prefix=keys(2)))) == NotEmpty(request="b", label="main", length=3)
    d.abort(first)
    forked = step(span(1, "b", prefix=keys(2)), pre_forks=(StreamFork(Id("a"), Id("b")),))
    assert d.admit(forked) == NotEmpty(request="b", label="main", length=8)
    assert d.admit(step(span(1, "b", prefix=keys(2))), handle=d.handle()) is None


def test_prefixes_are_checked_after_the_streams_own_checks_and_before_pages() -> None:
    d = driver("a", "b", pages=4)
    assert isinstance(d.admit(step(span(1, "gone", prefix=keys(1)))), UnknownRequest)
    assert isinstance(d.admit(step(span(1, "a", prefix=keys(1)), span(1, "gone"))), PrefixLost)
    assert isinstance(d.admit(step(span(99, "a", prefix=keys(1)))), PrefixLost)


def test_in_a_window_a_prefix_is_only_what_the_window_holds() -> None:
    d = driver("a", "b", groups=(FULL, WINDOW))
    d.prompt("a", PROMPT[:16])
    d.stored(step(span(1, "b", prefix=keys(4))))
    assert (d.stream("b").skipped, d.stream("b").device) == ((0, 3), ((0, 1, 2, 3, 6), (5, 7)))
    assert d.contents()["b", "main"][:16] == tuple(PROMPT[:16])


def test_rows_above_count_on_a_prefix_and_keep_it() -> None:
    d = driver("a", "b")
    d.prompt("a", PROMPT[:8])
    d.remove("a")
    first = d.launched(step(span(1, "b", prefix=keys(2))))
    second = d.launched(step(span(1, "b")))
    d.abort(first)
    # The row above is void, may still read the prefix, and so keeps it.
    assert (named(d), d.device_free) == (True, 13)
    d.commit(second)
    assert (named(d, *reversed(keys(2))), d.device_free) == (True, 16)


# ---------------------------------------------------------------------------------------------------------------------
# 23, 24


def test_keys_travel_with_an_offload_and_a_reload_owns_what_is_still_there() -> None:
    d = driver("a", "b", host_pages=8)
    d.prompt("a", PROMPT[:10])
    d.offloaded("a")
    assert (named(d, *reversed(keys(2))), d.device_free, d.stream().keyed) == (True, 16, 2)
    d.stored(step(span(1, "b", prefix=keys(2))))
    free = d.device_free
    d.reloaded("a")
    assert d.device_free == free - 1
    assert (d.stream("a").device, d.stream("b").device) == (((0, 1, 2),), ((0, 1, 3),))


def test_a_reload_makes_copied_pages_findable_again() -> None:
    d = driver("a", "b", pages=3, host_pages=8)
    d.prompt("a", PROMPT[:12])
    d.offloaded("a")
    d.stored(step(span(5, "b")))
    assert d.match(keys(3)) == 1
    d.remove("b")
    claim = d.handle()
    assert d.claim_reload("a", handle=claim) is None
    assert (d.match(keys(3)), d.device_free) == (1, 0)
    d.commit_reload(claim)
    assert d.match(keys(3)) == 3


def test_an_abandoned_reload_returns_what_it_had_found_to_the_cache() -> None:
    d = driver(host_pages=8)
    d.prompt("a", PROMPT[:8])
    d.offloaded("a")
    claim = d.handle()
    d.claim_reload("a", handle=claim)
    assert (named(d), d.device_free) == (True, 14)
    d.abandon_reload(claim)
    assert (named(d, *reversed(keys(2))), d.device_free) == (True, 16)


def test_what_a_reload_finds_does_not_leave_for_it() -> None:
    d = driver("a", "b", pages=3, host_pages=8)
    d.prompt("a", PROMPT[:12])
    d.offloaded("a")
    lease = d.admitted(step(span(1, "b")))
    assert d.match(keys(3)) == 2
    assert d.claim_reload("a") == PagesExhausted(request="a", short=(1,))
    d.abort(lease)
    d.reloaded("a")
    assert d.match(keys(3)) == 3


def test_a_copy_whose_key_was_taken_meanwhile_stays_without() -> None:
    d = driver("a", "b", pages=4, host_pages=8)
    d.prompt("a", PROMPT[:4])
    d.offloaded("a")
    d.stored(step(span(16, "b")))
    d.remove("b")
    claim = d.handle()
    d.claim_reload("a", handle=claim)
    d.ingest("b")
    d.prompt("b", PROMPT[:4])
    d.commit_reload(claim)
    assert (d.stream("a").device, list(d.found().findable.values())) == (((0,),), [1])


# ---------------------------------------------------------------------------------------------------------------------
# 29, 39


def test_reset_without_freeing_keeps_no_page_that_a_key_finds() -> None:
    d = driver()
    d.prompt("a", PROMPT[:10])
    d.reset("a", free=False)
    assert (d.stream().surplus_pages, d.stream().keyed, d.device_free) == ((1,), 0, 15)
    assert named(d, *reversed(keys(2)))


def test_after_the_weights_changed_no_key_finds_anything_and_old_contents_never_do() -> None:
    d = driver("a", "b", "c", host_pages=8)
    d.prompt("a", PROMPT[:8])
    d.remove("a")
    d.prompt("b", [5] * 4)
    lease = d.launched(step(span(4, "c", prefix=keys(1))))
    assert d.reset_prefix_cache() == 3
    assert (d.match(keys(2)), named(d), d.device_free, d.found().key_epoch) == (0, True, 13, 1)
    d.commit(lease)
    for request in "bc":
        assert (d.stream(request).stale, d.stream(request).keyed, d.key(request, PROMPT[:4])) == (True, 0, (0, 0))
    d.offloaded("b")
    d.reloaded("b")
    assert d.match(keys(1)) == 0
    d.stored(step(span(0, "c"), post_forks=(LabelFork("main", "x"),)))
    assert d.stream("c", "x").stale
    d.reset("b")
    assert not d.stream("b").stale
    d.prompt("b", PROMPT[:4])
    assert d.match(keys(1)) == 1


def test_a_stream_under_an_open_row_is_stale_and_an_empty_one_is_not() -> None:
    d = driver("a", "b")
    lease = d.launched(step(span(4)))
    d.reset_prefix_cache()
    d.commit(lease)
    assert (d.stream("a").stale, d.stream("b").stale) == (True, False)


# ---------------------------------------------------------------------------------------------------------------------
# 40, 41


def test_gain_counts_what_only_this_request_keeps_with_its_open_steps() -> None:
    d = driver("a", "b")
    d.stored(step(span(7), post_forks=(StreamFork(Id("a"), Id("b")),)))
    assert (d.gain("a"), d.gain("b"), d.gain("gone")) == (1, 1, 0)
    lease = d.admitted(step(span(4), span(8, "b")))
    assert (d.gain("a"), d.gain("b"), d.reclaimable("a")) == (2, 3, 0)
    d.abort(lease)
    assert d.gain("a") == 1


def test_gain_of_a_moving_request_is_nothing() -> None:
    d = driver(host_pages=4)
    d.stored(step(span(7)))
    d.claim_offload("a", handle=d.handle())
    assert d.gain("a") == 0


def test_a_probe_answers_what_admit_would_and_changes_nothing() -> None:
    d = driver("a", "b", pages=3)
    d.stored(step(span(4), span(1, "b")))
    before = d.found()
    assert d.probe(step(span(4))) is None
    assert d.probe(step(span(5))) == PagesExhausted(request="a", label="main", short=(1,))
    assert d.probe(step(span(1, "gone"))) == UnknownRequest(request="gone")
    assert (d.found(), d.ref.leases) == (before, {})


def test_a_probe_can_count_on_what_is_leaving() -> None:
    d = driver("a", "b", pages=4, host_pages=4)
    d.stored(step(span(8)))
    lease = d.admitted(step(span(1, "b")))
    d.claim_offload("a", handle=d.handle())
    d.reset("b")
    # Two pages are claimed, one waits for a void row to end.
    assert d.probe(step(span(16, "b"))) == PagesExhausted(request="b", label="main", short=(3,))
    assert d.probe(step(span(16, "b")), leaving=True) is None
    assert d.probe(step(span(1)), leaving=True) == StreamNotOnDevice(request="a", label="main", residency="Offloading")
    d.abort(lease)
