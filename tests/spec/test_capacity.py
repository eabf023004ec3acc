"""What fits into sectors is what some way of dealing out the empty sectors makes fit."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvstate.types import Geometry, Group
from kvstate_spec.capacity import Tier, sectors_for, tier

BYTES = ((128, 128), (256, 128), (384, 128), (128, 256, 384))


def geometry(sectors: int, sizes: Sequence[int]) -> Geometry:
    return Geometry(sectors, groups=tuple(Group(f"g{i}", size) for i, size in enumerate(sizes)))


@st.composite
def tiers(draw: st.DrawFn) -> tuple[Geometry, Tier]:
    """A few sectors, each with some pages of one group owned, or none."""
    made = geometry(draw(st.integers(1, 5)), draw(st.sampled_from(BYTES)))
    owned: list[list[int]] = [[] for _ in made.groups]
    for sector in range(made.pages):
        group = draw(st.integers(0, len(owned) - 1))
        per = made.pages_per_sector[group]
        owned[group] += draw(st.lists(st.integers(sector * per, sector * per + per - 1), unique=True))
    return made, tier(made, made.pages, owned)


def can_be_granted(books: Tier, wanted: Sequence[int]) -> bool:
    """Deal out the sectors without owned pages in every way there is."""
    groups = range(len(wanted))
    empty = [
        s
        for s in range(books.sectors)
        if not any(page // books.per_sector[g] == s for g in groups for page in books.owned[g])
    ]
    for dealt in itertools.product(groups, repeat=len(empty)):
        theirs = {sector: group for sector, group in zip(empty, dealt, strict=True)}
        for group in groups:
            theirs.update({page // books.per_sector[group]: group for page in books.owned[group]})
        places = [
            [s * books.per_sector[g] + i for s, lent in theirs.items() if lent == g for i in range(books.per_sector[g])]
            for g in groups
        ]
        free = [len(set(places[g]) - books.owned[g]) for g in groups]
        if all(count <= room for count, room in zip(wanted, free, strict=True)):
            return True
    return False


@given(tiers(), st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_it_is_short_exactly_when_no_way_of_dealing_out_empty_sectors_would_do(
    made: tuple[Geometry, Tier], counts: list[int]
) -> None:
    _, books = made
    wanted = counts[: len(books.owned)]
    assert (books.short(wanted) is None) == can_be_granted(books, wanted)


@given(tiers(), st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_without_what_is_short_it_fits_and_with_one_page_more_it_does_not(
    made: tuple[Geometry, Tier], counts: list[int]
) -> None:
    _, books = made
    wanted = counts[: len(books.owned)]
    short = books.short(wanted)
    if short is not None:
        less = [count - missing for count, missing in zip(wanted, short, strict=True)]
        assert can_be_granted(books, less)
        for group, missing in enumerate(short):
            if missing:
                assert not can_be_granted(books, [n + (g == group) for g, n in enumerate(less)])


@given(tiers())
def test_each_group_alone_can_be_granted_what_is_available_to_it_and_no_more(made: tuple[Geometry, Tier]) -> None:
    _, books = made
    for group, count in enumerate(books.available()):
        alone = [count if g == group else 0 for g in range(len(books.owned))]
        assert can_be_granted(books, alone)
        assert not can_be_granted(books, [n + (g == group) for g, n in enumerate(alone)])


@given(tiers(), st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_what_fits_fits_by_bytes(made: tuple[Geometry, Tier], counts: list[int]) -> None:
    _, books = made
    wanted = counts[: len(books.owned)]
    assert books.fragmented(wanted) or not can_be_granted(books, wanted)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 12))
def test_of_one_group_short_is_wanted_minus_free(pages: int, owned: int, wanted: int) -> None:
    books = tier(Geometry(pages), pages, [range(min(owned, pages))])
    missing = wanted - (pages - min(owned, pages))
    assert books.short([wanted]) == ((missing,) if missing > 0 else None)
    assert missing <= 0 or not books.fragmented([wanted])


def test_free_places_in_sectors_of_another_group_do_not_help_and_it_says_so() -> None:
    made = geometry(2, (256, 128))
    books = tier(made, 2, [[0], [2]])
    assert books.short([1, 1]) == (1, 0)
    assert not books.fragmented([1, 1])
    books = tier(made, 2, [[], [0, 2]])
    assert (books.short([1, 0]), books.short([0, 2]), books.available()) == ((1, 0), None, (0, 2))
    assert books.fragmented([1, 0])


def test_earlier_groups_are_served_first() -> None:
    books = tier(geometry(2, (256, 128)), 2, [[0], []])
    assert books.short([1, 3]) == (0, 3)
    assert books.short([2, 3]) == (1, 3)
    assert books.short([0, 3]) == (0, 1)


def test_what_a_request_asks_for_by_itself_is_counted_in_whole_sectors_per_group() -> None:
    assert sectors_for(geometry(4, (256, 128)), (1, 1)) == 2
    assert sectors_for(Geometry(4), (3,)) == 3
