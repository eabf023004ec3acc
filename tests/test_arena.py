"""Page ownership: what is granted, who owns it, and what the next owner waits for."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.arena import Arena, Pool
from kvstate.errors import DoubleFree
from kvstate.ops import Tier
from kvstate.ordering import NOTHING, Clock, covers, merge
from kvstate.types import Geometry, Group


@pytest.fixture
def pool() -> Pool:
    return Pool(Tier.DEVICE, 4)


def test_pages_are_granted_oldest_first(pool: Pool) -> None:
    assert pool.grant(3) == [0, 1, 2]
    pool.drop([2], NOTHING)
    pool.drop([0], NOTHING)
    assert pool.grant(3) == [3, 2, 0]


def test_granting_nothing_takes_nothing(pool: Pool) -> None:
    assert pool.grant(0) == []
    assert list(pool.free) == [0, 1, 2, 3]


def test_a_shared_page_is_free_when_its_last_owner_has_dropped_it(pool: Pool) -> None:
    pages = pool.grant(2)
    pool.share(pages[:1])
    assert pool.drop(pages, NOTHING) == 1
    assert pool.owners[:2] == [1, 0]
    assert pool.drop(pages[:1], NOTHING) == 1
    assert list(pool.free) == [2, 3, 1, 0]


def test_dropping_a_free_page_is_an_error_at_the_call(pool: Pool) -> None:
    pool.grant(1)
    pool.drop([0], NOTHING)
    with pytest.raises(DoubleFree, match="device page 0 has no owner left to drop it") as raised:
        pool.drop([0], NOTHING)
    assert (raised.value.tier, raised.value.page) == ("device", 0)
    assert list(pool.free).count(0) == 1


def test_one_list_that_drops_a_page_more_often_than_it_is_owned_is_an_error(pool: Pool) -> None:
    [page] = pool.grant(1)
    pool.share([page])
    with pytest.raises(DoubleFree):
        pool.drop([page, page, page], NOTHING)
    assert list(pool.free).count(page) == 1


def test_one_list_may_drop_a_page_once_for_each_owner(pool: Pool) -> None:
    [page] = pool.grant(1)
    pool.share([page, page])
    assert pool.drop([page, page, page], NOTHING) == 1


def test_a_page_that_nobody_owns_cannot_be_shared(pool: Pool) -> None:
    with pytest.raises(DoubleFree):
        pool.share([3])
    assert pool.owners == [0, 0, 0, 0]


def test_every_dropped_ownership_leaves_its_uses_behind_whether_or_not_owners_remain(pool: Pool) -> None:
    [page] = pool.grant(1)
    pool.share([page])
    pool.drop([page], (3, 0, 1))
    assert pool.fences[page] == (3, 0, 1), "an owner remains, and the use counts all the same"
    pool.drop([page], (1, 5, 0))
    assert pool.fences[page] == (3, 5, 1)


def test_each_page_of_a_list_keeps_its_own_fence(pool: Pool) -> None:
    pages = pool.grant(3)
    pool.drop(pages[:1], (9, 0, 0))
    pool.grant(2)
    pool.drop([0, 1, 2], (0, 4, 0))
    assert pool.fences == [(9, 4, 0), (0, 4, 0), (0, 4, 0), NOTHING]


def test_a_grant_clears_no_fence_and_one_never_used_gives_back_what_it_found(pool: Pool) -> None:
    pool.drop(pool.grant(4), (7, 2, 0))
    pages = pool.grant(2)
    assert pool.fence_of(pages) == (7, 2, 0)
    pool.drop(pages, NOTHING)
    assert pool.fences == [(7, 2, 0)] * 4


def test_an_op_that_enters_several_pages_follows_all_their_fences(pool: Pool) -> None:
    pages = pool.grant(3)
    for page, uses in zip(pages, ((5, 0, 0), (0, 6, 0), (1, 1, 7)), strict=True):
        pool.drop([page], uses)
    assert pool.fence_of(pages) == (5, 6, 7)
    assert pool.fence_of([]) == NOTHING


def test_a_seal_lasts_as_long_as_the_page_is_owned(pool: Pool) -> None:
    pages = pool.grant(2)
    pool.share(pages[:1])
    pool.seal(pages)
    pool.drop(pages, NOTHING)
    assert list(pool.sealed) == [1, 0, 0, 0]
    pool.drop(pages[:1], NOTHING)
    assert list(pool.sealed) == [0, 0, 0, 0]


def test_the_sink_is_never_granted() -> None:
    pool = Pool(Tier.DEVICE, 3)
    assert pool.sink == 3
    assert pool.sink not in pool.grant(3)
    assert not pool.free


def test_a_tier_without_pages_has_a_sink_all_the_same() -> None:
    pool = Pool(Tier.HOST, 0)
    assert (pool.sink, list(pool.free)) == (0, [])


def test_short_counts_missing_pages_per_group_and_only_those_that_are_missing() -> None:
    # Four sectors of 256 bytes, each with one page of the first group or two of the second.
    arena = Arena(Tier.DEVICE, Geometry(pages=4, groups=(Group("full", 256), Group("window", 128))))
    assert arena.short([2, 4]) is None
    assert arena.short([5, 0]) == (1, 0)
    assert arena.short([1, 7]) == (0, 1)
    assert arena.short([6, 3]) == (2, 3)
    arena.pools[1].grant(3)
    assert arena.short([2, 1]) is None
    assert arena.short([3, 0]) == (1, 0)
    assert arena.short([2, 2]) == (0, 1)


def test_an_arena_drops_per_group() -> None:
    arena = Arena(Tier.HOST, Geometry(pages=1, host_pages=3, groups=(Group("full", 128), Group("window", 64))))
    for pool in arena.pools:
        pool.grant(2)
    assert arena.lent == [0, 0, 1] and arena.empty == []
    assert arena.drop([[0], [4]], (0, 3, 0)) == 2
    assert arena.lent == [None, 0, 1] and [pool.free_pages() for pool in arena.pools] == [(), (4,)]
    assert arena.fences(0)[:2] == ((0, 3, 0), NOTHING) and arena.fences(1)[4:] == ((0, 3, 0), NOTHING)
    with pytest.raises(DoubleFree, match="host page 0"):
        arena.drop([[0], []], NOTHING)


def test_a_sector_returns_when_its_last_page_is_free_and_carries_the_fences_of_all_its_pages() -> None:
    arena = Arena(Tier.DEVICE, Geometry(pages=1, groups=(Group("full", 128), Group("window", 64))))
    full, window = arena.pools
    assert window.grant(2) == [0, 1]
    assert arena.short([1, 0]) == (1, 0)
    window.drop([0], (5, 0, 0))
    assert arena.short([1, 0]) == (1, 0) and arena.lent == [1]
    window.drop([1], (0, 0, 7))
    assert arena.short([1, 0]) is None and arena.lent == [None]
    [page] = full.grant(1)
    assert full.fence_of([page]) == (5, 0, 7)


def test_grants_fill_the_sectors_that_are_nearly_full_and_leave_the_others_to_empty_out() -> None:
    arena = Arena(Tier.DEVICE, Geometry(pages=4, groups=(Group("full", 512), Group("window", 128))))
    window = arena.pools[1]
    assert window.grant(8) == list(range(8))
    window.drop([0, 1, 2, 5], NOTHING)
    assert window.grant(1) == [5]
    assert window.grant(4) == [0, 1, 2, 8]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.booleans()), max_size=40))
def test_sectors_conserve_and_the_capacity_test_is_exact(program: list[tuple[int, int, bool]]) -> None:
    geometry = Geometry(pages=5, groups=(Group("full", 384), Group("window", 128)))
    arena = Arena(Tier.DEVICE, geometry)
    owned: list[list[int]] = [[], []]
    for group, number, give in program:
        pool = arena.pools[group]
        if give and owned[group]:
            page = owned[group].pop(number % len(owned[group]))
            pool.drop([page], NOTHING)
        elif not give:
            wanted = [0, 0]
            wanted[group] = number
            held = [{page // per for page in own} for own, per in zip(owned, (1, 3), strict=True)]
            left = geometry.pages - len(held[0]) - len(held[1])
            room = (left + len(held[group])) * (1, 3)[group] - len(owned[group])
            assert arena.available()[group] == room
            short = arena.short(wanted)
            assert (short is None) == (number <= room)
            if short is None:
                granted = pool.grant(number)
                assert granted == sorted(granted) and not set(granted) & set(owned[group])
                owned[group] += granted
            else:
                assert short[group] == number - room
        for own, per, which in zip(owned, (1, 3), (0, 1), strict=True):
            assert {sector for sector, lent in enumerate(arena.lent) if lent == which} == {page // per for page in own}


clocks = st.tuples(*[st.integers(0, 9)] * 3)
moves = st.lists(st.tuples(st.sampled_from(["grant", "share", "drop"]), st.integers(0, 5), clocks), max_size=40)


@given(st.integers(0, 6), moves)
def test_free_and_owned_pages_are_all_pages_and_fences_only_grow(
    pages: int, program: list[tuple[str, int, Clock]]
) -> None:
    pool = Pool(Tier.DEVICE, pages)
    owned: Counter[int] = Counter()
    fences: dict[int, Clock] = {}
    for verb, number, uses in program:
        if verb == "grant":
            expected = list(pool.free)[:number]
            if number <= len(pool.free):
                assert pool.grant(number) == expected
                owned.update(expected)
        elif owned:
            page = sorted(owned)[number % len(owned)]
            if verb == "share":
                pool.share([page])
                owned[page] += 1
            else:
                assert pool.drop([page], uses) == (1 if owned[page] == 1 else 0)
                owned -= Counter([page])
                fences[page] = merge(fences.get(page, NOTHING), uses)
        assert sorted([*pool.free, *owned]) == list(range(pages))
        assert pool.owners == [owned[page] for page in range(pages)]
        assert all(covers(pool.fences[page], fence) for page, fence in fences.items())
        assert [pool.fences[page] for page in range(pages) if page not in fences] == [NOTHING] * (pages - len(fences))
