"""The reference with several groups: sentences 2, 7 – 9, 11, 19 – 24, 27 – 29, 32 and 33 of spec/README.md."""

from typing import Any

import attrs

from kvstate.refusals import HostExhausted, PagesExhausted, TooLarge
from kvstate.types import Geometry, Group, LabelFork, Publication, Record, RequestConfig, RetentionPolicy, StreamFork
from kvstate.types import StreamId as Id
from kvstate_spec.reference import agrees
from tests.spec.sectors import FULL, WINDOW, Driver, driver, span, step

BOTH = (FULL, WINDOW)


def mixed(*requests: str, **geometry: Any) -> Driver:
    return driver(*requests, groups=BOTH, **geometry)


def windowed(window: int, **geometry: Any) -> Driver:
    return driver(groups=(Group(window=window),), **geometry)


def record(d: Driver, length: int, first: int = 0, **changes: Any) -> Publication:
    """Return what a publisher of the same geometry says, whose window begins at place `first`."""
    geometry: Geometry = d.ref.geometry
    full = tuple(range(geometry.pages_for(length)))
    pages = (full, (geometry.group_pages[1],) * first + full[first:])
    made = Record(length, 0, 4, pages, False, "elsewhere", 1, 1, skipped=(0, first))
    return Publication("a", 1, {0: {"main": attrs.evolve(made, **changes)}})


def test_a_window_of_w_tokens_keeps_what_the_next_token_attends_to() -> None:
    d = windowed(6)
    for length, skipped, pages in ((5, 0, 2), (8, 0, 2), (9, 1, 2), (13, 2, 2), (16, 2, 2), (17, 3, 2)):
        d.stored(step(span(length - d.length())))
        assert (d.length(), d.stream().skipped, d.stream().content_pages) == (length, (skipped,), (pages,))
        assert d.device_free == 16 - pages


def test_a_window_of_one_token_keeps_nothing_behind_a_page_border() -> None:
    d = windowed(1)
    d.stored(step(span(8)))
    assert (d.stream().skipped, d.stream().content_pages, d.device_free) == ((2,), (0,), 16)
    d.stored(step(span(1)))
    assert (d.stream().skipped, d.stream().content_pages) == ((2,), (1,))


def test_a_step_holds_every_page_from_the_first_that_was_held_until_it_commits() -> None:
    d = windowed(6, pages=5)
    d.stored(step(span(8)))
    lease = d.launched(step(span(12)))
    assert d.device_free == 0
    d.commit(lease)
    assert (d.stream().skipped, d.device_free) == ((3,), 3)


def test_the_window_slides_by_accepted_tokens() -> None:
    d = windowed(6)
    d.stored(step(span(16)), accepted=[9])
    assert (d.stream().skipped, d.stream().content_pages, d.stream().surplus_pages) == ((1,), (2,), (1,))


def test_a_step_without_commit_slides_no_window() -> None:
    d = windowed(6)
    d.stored(step(span(8)))
    d.stored(step(span(12), commit=False))
    assert (d.length(), d.stream().skipped, d.stream().content_pages) == (8, (0,), (2,))


def test_what_leaves_a_window_stays_taken_under_the_rows_above() -> None:
    d = windowed(6)
    first, second = d.launched(step(span(16))), d.launched(step(span(1)))
    d.commit(first)
    assert (d.stream().content_pages, d.device_free) == ((2,), 16 - 4 - 1)
    d.commit(second)
    assert (d.stream().content_pages, d.device_free) == ((2,), 14)


def test_retention_comes_before_the_window_and_takes_places_that_had_left_out_of_the_table() -> None:
    d = Driver(groups=(Group(window=6),))
    d.ingest("a", RequestConfig(retention={"main": RetentionPolicy(8)}))
    d.stored(step(span(12)))
    # (12 - 8) // 4 = 1 page goes, then the window of 6 leaves the first of the two that are left: (8 - 5) // 4 = 0.
    assert (d.length(), d.stream().released, d.stream().skipped, d.stream().content_pages) == (8, 4, (0,), (2,))
    d.stored(step(span(3)))
    assert (d.length(), d.stream().skipped, d.stream().content_pages) == (11, (1,), (2,))
    d.stored(step(span(1)))
    assert (d.length(), d.stream().released, d.stream().skipped, d.stream().content_pages) == (8, 8, (0,), (2,))
    assert d.contents()["a", "main"] == tuple(range(8, 16))


def test_what_left_a_window_does_not_come_back_when_retention_makes_the_table_shorter() -> None:
    d = Driver(groups=(Group(window=10),))
    d.ingest("a")
    d.stored(step(span(20)))
    assert (d.stream().skipped, d.stream().content_pages) == ((2,), (3,))
    # Places 1 and 2 go, of which 1 had left: place 0, which had left too, is all that is missing.
    d.stored(step(span(1), retention={"main": RetentionPolicy(9, protected_prefix=4)}))
    assert (d.length(), d.stream().released, d.stream().skipped, d.stream().content_pages) == (13, 8, (1,), (3,))


def test_every_group_has_its_own_pages_surplus_and_window() -> None:
    d = mixed()
    d.stored(step(span(18)), accepted=[13])
    stream = d.stream()
    assert (stream.content_pages, stream.surplus_pages, stream.skipped) == ((4, 2), (1, 1), (0, 2))
    assert d.found().device_owned == (5, 3)
    # The window has surplus for the next page, and so has the other group.
    d.stored(step(span(4)))
    assert (d.stream().content_pages, d.stream().surplus_pages) == ((5, 2), (0, 0))


def test_reset_without_freeing_keeps_what_each_group_holds() -> None:
    d = mixed()
    d.stored(step(span(13)))
    d.reset("a", free=False)
    assert (d.stream().surplus_pages, d.stream().skipped) == ((4, 2), (0, 0))
    lease = d.admitted(step(span(13)))
    assert d.found().device_owned == (4, 4)
    d.abort(lease)
    assert d.found().device_owned == (4, 2)


def test_forks_share_from_the_sources_window_on_and_copy_the_last_page_of_every_group() -> None:
    d = mixed("a", "b")
    d.stored(step(span(14)))
    d.stored(step(span(1, "b"), pre_forks=(StreamFork(Id("a"), Id("b")),)))
    a, b = d.stream("a"), d.stream("b")
    assert (a.device, b.device) == (((0, 1, 2, 3), (4, 5)), ((0, 1, 2, 6), (4, 7)))
    assert (b.skipped, d.found().device_owned) == ((0, 2), (5, 3))
    # A post-fork reserves the page in both groups, and returns it when the last page is full.
    lease = d.launched(step(span(2), post_forks=(LabelFork("main", "x"),)))
    assert d.found().device_owned == (6, 4)
    d.commit(lease)
    assert (d.found().device_owned, d.stream("a", "x").skipped) == ((5, 3), (0, 2))


def test_admission_is_atomic_over_groups_and_says_what_each_misses() -> None:
    d = mixed("a", "b", pages=6)
    d.stored(step(span(4)))
    assert d.found().device_owned == (1, 1)
    before = d.found()
    # 2 sectors lent, 4 empty; three pages need 3 more sectors and 2 places of which one is loose: 1 more.
    assert d.admit(step(span(12, "b")), handle=d.handle()) is None
    d.abort(d.serial)
    refusal = d.admit(step(span(16, "b")))
    assert refusal == PagesExhausted(request="b", label="main", short=(0, 3))
    assert d.found() == before
    assert d.pages_available() == {"device": (4, 9), "host": (0, 0)}


def test_bytes_in_sectors_of_another_group_are_called_fragmented() -> None:
    d = driver("a", "b", groups=(Group("full", 512), Group("quarter", 128)), pages=4)
    d.stored(step(span(1), span(1, "b")))
    # Whoever deals out sectors may have given each page its own.
    full, quarter = ([page for page in d.device.numbers if page.group == group] for group in range(2))
    d.device.numbers = dict(zip(full, (0, 1), strict=True)) | dict(zip(quarter, (8, 12), strict=True))
    refusal = d.admit(step(span(4, label="x")))
    assert refusal == PagesExhausted(request="a", label="x", short=(1, 0), fragmented=True)


def test_too_large_counts_sectors() -> None:
    d = mixed(pages=4)
    assert d.admit(step(span(12))) == TooLarge(request="a", label="main", wanted=5, capacity=4)
    assert d.admit(step(span(8)), handle=d.handle()) is None


def test_offload_copies_what_is_held_and_reload_brings_it_back() -> None:
    d = mixed(host_pages=5)
    d.stored(step(span(13)))
    before = d.found()
    d.offloaded("a")
    stream = d.stream()
    assert (d.found().device_owned, d.found().host_owned) == ((0, 0), (4, 2))
    assert (stream.host, stream.skipped, stream.content_pages) == (((0, 1, 2, 3), (4, 5)), (0, 2), (0, 0))
    d.reloaded("a")
    assert d.found() == before


def test_the_host_is_short_per_group() -> None:
    d = mixed(host_pages=4)
    d.stored(step(span(13)))
    assert agrees(HostExhausted(request="a", short=(0, 2)), d.claim_offload("a")) is None


def test_a_reload_is_short_per_group_and_too_large_in_sectors() -> None:
    d = mixed("a", "b", pages=6, host_pages=5)
    d.stored(step(span(13)))
    d.offloaded("a")
    d.stored(step(span(8, "b")))
    # b has two sectors and one; three are left, and the loose place of the second group's is none.
    assert agrees(PagesExhausted(request="a", short=(1, 2)), d.claim_reload("a")) is None
    assert agrees(TooLarge(request="a", wanted=7, capacity=6), d.claim_reload("a", step(span(4)))) is None


def test_a_reloads_extra_pages_are_asked_for_in_every_group() -> None:
    d = mixed(host_pages=5)
    d.stored(step(span(13)))
    d.offloaded("a")
    claim = d.handle()
    assert d.claim_reload("a", step(span(4)), handle=claim) is None
    d.commit_reload(claim)
    assert (d.stream().content_pages, d.stream().surplus_pages) == ((4, 2), (1, 1))


def test_a_fetch_fills_the_places_that_the_published_length_needs() -> None:
    d = mixed()
    d.stored(step(span(6)))
    fetch = d.handle()
    assert d.claim_retrieve("a", record(d, 21), ["main"], handles={"main": fetch}) == ("main",)
    # 6 pages of which 2 are here; the window of 21 tokens begins at place 4, behind all that is here.
    assert d.found().device_owned == (6, 2 + 2)
    d.landed(fetch, list(range(50, 65)))
    assert (d.stream().content_pages, d.stream().skipped, d.found().device_owned) == ((6, 2), (0, 4), (6, 2))


def test_a_fetch_co_owns_a_half_filled_page_only_where_it_writes_it() -> None:
    d = mixed("a", "b")
    d.stored(step(span(6)))
    fetch = d.handle()
    d.claim_retrieve("a", record(d, 21), ["main"], handles={"main": fetch})
    d.reset("a")
    assert d.found().device_owned == (4 + 1, 2)
    d.failed(fetch, "torn")
    assert d.found().device_owned == (0, 0)
    d.stored(step(span(6, "b")))
    publication = Publication("b", 1, record(d, 9).ranks)
    d.claim_retrieve("b", publication, ["main"], handles={"main": fetch})
    d.landed(fetch, [6, 7, 8])
    assert (d.stream("b").content_pages, d.stream("b").skipped) == ((3, 2), (0, 1))


def test_a_fetch_holds_no_more_than_the_publisher_does() -> None:
    d = mixed()
    fetch = d.handle()
    d.claim_retrieve("a", record(d, 8, first=1), ["main"], handles={"main": fetch})
    assert d.found().device_owned == (2, 1)
    d.landed(fetch, list(range(8)))
    assert d.stream().skipped == (0, 1)


def test_a_fetch_is_short_per_group() -> None:
    d = mixed(pages=4)
    refused = d.claim_retrieve("a", record(d, 13), ["main"], handles={})
    assert agrees(TooLarge(request="a", wanted=5, capacity=4), refused) is None
    d.stored(step(span(4, label="x")))
    refused = d.claim_retrieve("a", record(d, 12), ["main"], handles={})
    assert agrees(PagesExhausted(request="a", short=(1, 1)), refused) is None
