"""Ranks agree on pages and find out where they differ; real processes over gloo.

One set of processes runs every scenario of its world size in sequence, on the same communicators: a scenario that left
one rank a collective behind would make the next ones fail or hang.
"""

import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    # A torch without numpy says so when it is first imported.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    torch = pytest.importorskip("torch")

import attrs
import torch.distributed as dist

from gpu_backend.host_size import HostPoolWarning
from gpu_backend.ranks import NotDistributed, RanksDiverge, _divergence, _view_facts, agree_pages, validate_ranks
from kvstate import Geometry, Group, KVManager, Segment, Step
from kvstate.testing.memory import MemoryBackend
from tests.steps import store

from .processes import run_ranks

# -- managers


class BrokenTransport:
    """A transport that cannot even be asked."""

    def poll(self) -> list[Any]:
        raise RuntimeError("the link is down")


def manager(*requests: str, geometry: Geometry | None = None) -> KVManager:
    """A manager after warm-up: each of `requests` has stored 5 tokens."""
    geometry = geometry or Geometry(pages=16, page_size=4, host_pages=8)
    warm = KVManager(geometry, MemoryBackend(geometry))
    for request in requests:
        warm.ingest(request)
        store(warm, Segment(request, span=5))
    return warm


def manager_that_cannot_be_read() -> KVManager:
    broken = manager("a")
    broken.transport = BrokenTransport()  # type: ignore[assignment]
    return broken


def diverged(inject: Callable[[KVManager], Any]) -> KVManager:
    """A manager with a request on the device, one on the host and an open lease, to which something happened."""
    warm = manager("a", "b")
    warm.offload("b")
    warm.admit(Step((Segment("a", span=2),)))
    inject(warm)
    return warm


def _state(kv: KVManager) -> Any:
    return kv._state


def _stream(kv: KVManager, request: str) -> Any:
    return _state(kv).requests[request].streams["main"]


def set_length(kv: KVManager) -> None:
    _stream(kv, "a").length += 1


def raise_generation(kv: KVManager) -> None:
    _stream(kv, "b").generation += 1


def turn_the_free_list(kv: KVManager) -> None:
    _state(kv).device.pools[0].free.rotate(1)


def forget_an_owner(kv: KVManager) -> None:
    _state(kv).host.pools[0].owners[1] += 1


def move_a_row(kv: KVManager) -> None:
    [lease] = _state(kv).leases.values()
    lease.rows[0].start += 1


INJECTED: dict[str, Callable[[KVManager], Any]] = {
    "length": set_length,
    "generation": raise_generation,
    "free list": turn_the_free_list,
    "owners": forget_an_owner,
    "row": move_a_row,
    "epoch": lambda kv: setattr(_stream(kv, "b"), "epoch", 7),
}
"""What goes wrong inside one rank's machine."""


# -- scenarios: what one rank does; `odd` is the rank that differs, `pair` its half of the ranks, `other` the other half


class Seat:
    """One rank's place."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.odd = rank == world - 1
        half = world // 2
        halves = [dist.new_group(list(range(half))), dist.new_group(list(range(half, world)))]
        self.mine, self.other = halves if rank < half else reversed(halves)
        self.halves = halves


INVALID = [(64, -1), (-1, 64), (True, 1), (64, 2.0), (64, 2**63), (64,), (64, 32, 16), (64, None), ("64", "32")]

SCENARIOS: dict[str, Callable[[Seat], Any]] = {
    "agree equal": lambda seat: agree_pages((64, 32)),
    "agree crossed": lambda seat: agree_pages((64 + seat.rank, 32 - seat.rank)),
    "agree no host pool": lambda seat: agree_pages((64, 0 if seat.odd else 32)),
    "agree no pages": lambda seat: agree_pages((0, 0)),
    "agree most": lambda seat: agree_pages((2**63 - 1, 2**63 - 1)),
    "agree half": lambda seat: agree_pages((64 + seat.rank, 32 + seat.rank), seat.mine),
    "agree as stranger": lambda seat: agree_pages((64, 32), seat.other),
    **{
        f"agree invalid {own}": lambda seat, own=own: agree_pages(own if seat.odd else (64, 32))  # type: ignore[misc]
        for own in INVALID
    },
    "validate equal": lambda seat: validate_ranks(manager("a", "b")),
    "validate empty": lambda seat: validate_ranks(manager()),
    "validate agreed": lambda seat: validate_ranks(
        manager("a", geometry=Geometry(*agree_pages((16 + seat.rank, 8)), name="kv"))
    ),
    "validate pages": lambda seat: validate_ranks(manager("a", geometry=Geometry(16 + seat.odd, 4))),
    "validate page size": lambda seat: validate_ranks(manager("a", geometry=Geometry(16, 8 if seat.odd else 4))),
    "validate host pages": lambda seat: validate_ranks(manager("a", geometry=Geometry(16, 4, 8 * (not seat.odd)))),
    "validate page bytes": lambda seat: validate_ranks(
        manager("a", geometry=Geometry(16, groups=(Group(page_bytes=2 if seat.odd else 1),)))
    ),
    "validate order of managers": lambda seat: validate_ranks(
        manager("a", geometry=Geometry(16, name="cross" if seat.odd else "self"))
    ),
    "validate pages_free": lambda seat: validate_ranks(manager(*("abc" if seat.odd else "ab"))),
    "validate everyone differs": lambda seat: validate_ranks(manager(*"abcd"[: seat.rank + 1])),
    "validate requests": lambda seat: validate_ranks(manager("a", "other" if seat.odd else "b")),
    **{
        f"validate diverged {name}": lambda seat, injected=injected: validate_ranks(  # type: ignore[misc]
            diverged(injected if seat.odd else lambda kv: None)
        )
        for name, injected in INJECTED.items()
    },
    "validate unreadable": lambda seat: validate_ranks(manager_that_cannot_be_read() if seat.odd else manager("a")),
    "validate all unreadable": lambda seat: validate_ranks(manager_that_cannot_be_read()),
    # The odd rank's half sees the difference first, and still goes on to the communicator of all.
    "validate halves, then all": lambda seat: validate_ranks(
        manager("a", "other" if seat.odd else "b"), (*seat.halves, None)
    ),
    # One half differs from the other, nobody within.
    "validate halves only": lambda seat: validate_ranks(
        manager("a" if seat.rank < seat.world // 2 else "b"), seat.halves
    ),
    "validate as stranger": lambda seat: validate_ranks(manager("a"), [seat.other]),
    "validate nobody": lambda seat: validate_ranks(manager("a"), []),
    "validate equal at the end": lambda seat: validate_ranks(manager("a"), (*seat.halves, None)),
}


def told(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call returned or raised, and the warnings of ours."""
    outcome: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome["value"] = call()
        except Exception as error:
            outcome["error"] = type(error).__name__
            outcome["message"] = str(error)
            if isinstance(error, RanksDiverge):
                outcome["field"] = error.field
                outcome["ranks"] = list(error.values.items())
    outcome["warnings"] = [str(w.message) for w in caught if issubclass(w.category, HostPoolWarning)]
    return outcome


def run_scenarios(rank: int, world: int) -> dict[str, Any]:
    """Run every scenario as one rank and say how each ended."""
    seat = Seat(rank, world)
    return {name: told(lambda scenario=scenario: scenario(seat)) for name, scenario in SCENARIOS.items()}


class Ranks:
    """How each scenario ended, per rank."""

    def __init__(self, outcomes: list[dict[str, Any]]) -> None:
        self.outcomes = outcomes
        self.world = len(outcomes)
        self.odd = self.world - 1

    def __getitem__(self, scenario: str) -> list[dict[str, Any]]:
        return [outcome[scenario] for outcome in self.outcomes]

    def values(self, scenario: str) -> list[Any]:
        assert [one.get("message") for one in self[scenario]] == [None] * self.world
        return [one["value"] for one in self[scenario]]

    def divergence(self, scenario: str) -> dict[str, Any]:
        """The one that every rank raised."""
        first = self[scenario][0]
        assert first.get("error") == "RanksDiverge", first
        assert all(one == first for one in self[scenario])
        return first

    def diverge(self, scenario: str, field: str, most: str, odd: str) -> str:
        """Check that every rank raised the same, the last rank being the odd one; return the message."""
        raised = self.divergence(scenario)
        assert raised["field"] == field
        assert raised["ranks"] == [[rank, odd if rank == self.odd else most] for rank in range(self.world)]
        others = "rank 0" if self.world == 2 else "ranks 0, 1, 2"
        assert raised["message"].startswith(f"ranks diverge in {field}: {most} on {others}; {odd} on rank {self.odd}; ")
        return str(raised["message"])


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    world: int = request.param
    return Ranks(run_ranks(run_scenarios, world, tmp_path_factory.mktemp(f"ranks{world}")))


VIEW_FIELDS = [
    ("length", "streams[a/main].length", "5", "6"),
    ("generation", "streams[b/main].generation", "2", "3"),
    ("epoch", "streams[b/main].epoch", "1", "7"),
    ("row", "leases[{lease}].rows[a/main].start", "5", "6"),
    ("free list", "device[0].free[0]", "4", "3"),
    ("owners", "host[0].owners[1]", "1", "2"),
]
"""(what was injected, the field that is named, its value on most ranks, and on the odd one)."""


# -- agreeing


@pytest.mark.slow
def test_equal_ranks_keep_what_they_have_and_hear_nothing(ranks: Ranks) -> None:
    assert ranks.values("agree equal") == [[64, 32]] * ranks.world
    assert ranks.values("agree no pages") == [[0, 0]] * ranks.world
    assert ranks.values("agree most") == [[2**63 - 1, 2**63 - 1]] * ranks.world
    for scenario in ("agree equal", "agree no pages", "agree most"):
        assert not any(one["warnings"] for one in ranks[scenario])


@pytest.mark.slow
def test_the_minimum_is_taken_per_tier(ranks: Ranks) -> None:
    assert ranks.values("agree crossed") == [[64, 32 - ranks.odd]] * ranks.world


@pytest.mark.slow
def test_a_rank_without_host_pool_turns_it_off_everywhere_and_the_others_are_warned(ranks: Ranks) -> None:
    assert ranks.values("agree no host pool") == [[64, 0]] * ranks.world
    heard = [
        "host pool shrunk: requested 32 pages on this rank, available 0 on another, resulting 0 pages on every rank"
    ]
    assert [one["warnings"] for one in ranks["agree no host pool"]] == [heard] * ranks.odd + [[]]


@pytest.mark.slow
def test_ranks_agree_within_their_communicator(ranks: Ranks) -> None:
    half = ranks.world // 2
    assert ranks.values("agree half") == [[64, 32]] * half + [[64 + half, 32 + half]] * half


@pytest.mark.slow
def test_a_rank_cannot_agree_in_a_communicator_it_is_not_in(ranks: Ranks) -> None:
    for one in ranks["agree as stranger"]:
        assert one["error"] == "NotDistributed"
        assert "this rank is not in the communicator" in one["message"]


@pytest.mark.slow
@pytest.mark.parametrize("own", INVALID, ids=str)
def test_a_rank_that_brings_no_pages_fails_all_ranks_and_none_waits(ranks: Ranks, own: tuple[Any, ...]) -> None:
    brought = ranks[f"agree invalid {own}"]
    assert [one.get("error") for one in brought] == ["PagesInvalid"] * ranks.world
    assert brought[ranks.odd]["message"].endswith(f"this one brought {own!r}")
    assert brought[0]["message"].endswith("this one brought (64, 32)")


# -- validating


@pytest.mark.slow
@pytest.mark.parametrize("state", ["equal", "empty", "agreed", "halves only", "equal at the end"])
def test_equal_ranks_pass(ranks: Ranks, state: str) -> None:
    assert ranks.values(f"validate {state}") == [None] * ranks.world


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "field", "most", "odd"),
    [
        ("pages", "pages", "16", "17"),
        ("page size", "page_size", "4", "8"),
        ("host pages", "host_pages", "8", "0"),
        ("page bytes", "groups[0].page_bytes", "1", "2"),
        ("order of managers", "name", "'self'", "'cross'"),
    ],
)
def test_another_geometry_is_named_before_its_consequences(
    ranks: Ranks, what: str, field: str, most: str, odd: str
) -> None:
    message = ranks.diverge(f"validate {what}", f"geometry.{field}", most, odd)
    assert message.endswith("with the pages that agree_pages returns")


@pytest.mark.slow
def test_other_pages_free_are_named_with_tier_and_group(ranks: Ranks) -> None:
    message = ranks.diverge("validate pages_free", "pages_free.device[0]", "12", "10")
    assert "give each the same verbs in the same order" in message


@pytest.mark.slow
def test_every_value_is_named_with_its_ranks(ranks: Ranks) -> None:
    raised = ranks.divergence("validate everyone differs")
    assert raised["ranks"] == [[rank, str(14 - 2 * rank)] for rank in range(ranks.world)]
    assert "; 12 on rank 1; " in raised["message"]


@pytest.mark.slow
def test_equal_counts_of_other_content_are_told_apart_by_the_view(ranks: Ranks) -> None:
    ranks.diverge("validate requests", "requests[1][0]", "'b'", "'other'")


@pytest.mark.slow
@pytest.mark.parametrize(("what", "field", "most", "odd"), VIEW_FIELDS)
def test_a_divergence_is_named_by_the_first_field_of_the_view_that_differs(
    ranks: Ranks, what: str, field: str, most: str, odd: str
) -> None:
    [lease] = diverged(lambda kv: None).view().leases
    ranks.diverge(f"validate diverged {what}", field.format(lease=lease.serial), most, odd)


@pytest.mark.slow
def test_a_rank_that_cannot_be_read_raises_its_own_error_and_the_others_learn_of_it(ranks: Ranks) -> None:
    *others, broken = ranks["validate unreadable"]
    assert (broken["error"], broken["message"]) == ("RuntimeError", "the link is down")
    for one in others:
        assert one["field"] == "error"
        assert f"RuntimeError: the link is down on rank {ranks.odd}; repair that rank" in one["message"]
    assert [one["error"] for one in ranks["validate all unreadable"]] == ["RuntimeError"] * ranks.world


@pytest.mark.slow
def test_ranks_that_differ_in_one_communicator_still_take_part_in_the_next(ranks: Ranks) -> None:
    raised = ranks["validate halves, then all"]
    assert [one.get("field") for one in raised] == ["requests[1][0]"] * ranks.world
    half = ranks.world // 2
    # A half of one rank cannot differ within itself: with two ranks, both learn it from the communicator of all.
    seen = [[rank for rank, _ in one["ranks"]] for one in raised]
    everyone = list(range(ranks.world))
    assert seen == [everyone] * half + [everyone if half == 1 else everyone[half:]] * half


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["validate as stranger", "validate nobody"])
def test_comparing_with_nobody_is_refused(ranks: Ranks, scenario: str) -> None:
    for one in ranks[scenario]:
        assert one["error"] == "NotDistributed"
        assert "none of the communicators given; nothing was compared" in one["message"]


# -- one process


def test_without_torch_distributed_both_refuse_and_say_what_to_call() -> None:
    assert not dist.is_initialized()
    with pytest.raises(NotDistributed, match=r"not initialised; call torch\.distributed\.init_process_group"):
        agree_pages((64, 32))
    with pytest.raises(NotDistributed, match=r"not initialised; call torch\.distributed\.init_process_group"):
        validate_ranks(manager("a"))


def test_a_torch_without_distributed_refuses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.delattr(dist, "is_initialized")
    with pytest.raises(NotDistributed, match="not initialised"):
        agree_pages((64, 32))


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timedelta(seconds=10)
    )
    yield
    dist.destroy_process_group()


def test_a_world_of_one_agrees_with_itself(alone: None) -> None:
    assert agree_pages((64, 32)) == (64, 32)
    validate_ranks(manager("a"))


def test_a_divergence_carries_its_field_and_values() -> None:
    error = RanksDiverge("pages_free.host[0]", {0: "8", 1: "7", 2: "8", 5: "8"})
    assert error.field == "pages_free.host[0]"
    assert error.values == {0: "8", 1: "7", 2: "8", 5: "8"}
    assert str(error) == (
        "ranks diverge in pages_free.host[0]: 8 on ranks 0, 2, 5; 7 on rank 1; "
        "the ranks took different decisions; give each the same verbs in the same order, and let all of it end"
    )


@pytest.mark.parametrize(("what", "field", "most", "odd"), VIEW_FIELDS)
def test_the_fields_of_two_views_first_differ_where_they_were_made_to(
    what: str, field: str, most: str, odd: str
) -> None:
    views = [diverged(inject).view() for inject in (lambda kv: None, INJECTED[what])]
    facts = [_view_facts(view) for view in views]
    assert all(len(dict(own)) == len(own) for own in facts), "no two fields of a view have one name"
    error = _divergence({rank: dict(own) for rank, own in enumerate(facts)})
    assert error is not None
    assert (error.field, error.values) == (field.format(lease=views[0].leases[0].serial), {0: most, 1: odd})


def test_every_difference_of_a_digest_has_a_field() -> None:
    """What a view's digest covers, its fields cover: each attribute is in them, by whatever name."""
    view = diverged(lambda kv: None).view()
    names = {name.split(".")[0].split("[")[0] for name, _ in _view_facts(view)}
    empty = {field.name for field in attrs.fields(type(view)) if getattr(view, field.name) == ()}
    assert names | empty == {field.name for field in attrs.fields(type(view))}


def test_a_field_that_only_some_ranks_have_is_a_divergence() -> None:
    error = _divergence({0: {"error": "none"}, 1: {"error": "none", "pages_free.device[1]": "8"}})
    assert error is not None
    assert (error.field, error.values) == ("pages_free.device[1]", {0: "absent", 1: "8"})
