"""Mutants of the pools and of the prefix cache: rows Q of the known bugs, and row O15, which needs a prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kvstate.arena import Arena
from kvstate.errors import DoubleFree
from kvstate.manager import KVManager
from kvstate.ops import Plan, Tier
from kvstate.ordering import NOTHING
from kvstate.prefix import page_keys
from kvstate.refusals import PagesExhausted, Refusal
from kvstate.state import Lease
from kvstate.testing.judge import EdgeJudge
from kvstate.testing.memory import MemoryBackend
from kvstate.transitions.prefix import Keyed
from kvstate.types import Geometry, Group, RequestConfig, RetentionPolicy, Segment, Step, StreamFork, StreamId
from tests.mutants.registry import Mutant, both, edit, off, wrap

TWO = (Group("full", 256), Group("small", 128))
LAST = (Group("full", 256), Group("last", 128, window=1))
WINDOW = (Group("full", 256), Group("window", 128, window=3))

# -- programs by hand


def _by_hand(program: Callable[[], None]) -> Callable[[], None]:
    """Let whatever a program raises count as an objection: a promise that is broken, a crash."""

    @wraps(program)
    def run() -> None:
        try:
            program()
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}") from error

    return run


class _Rig:
    """A manager with every promise checked; tokens of a request are one range of numbers."""

    def __init__(self, *requests: str, **sizes: Any) -> None:
        self.geometry = Geometry(**{"pages": 8, "page_size": 2, "host_pages": 8, **sizes})
        self.judge = EdgeJudge.of(self.geometry)
        self.backend = MemoryBackend(self.geometry, judge=self.judge)
        self.kv = KVManager(self.geometry, self.backend, debug=True)
        self._stamp = 0
        for request in requests:
            self.kv.ingest(request)

    def admit(self, *segments: Segment, **kwargs: Any) -> Lease:
        lease = self.kv.admit(Step(segments, **kwargs))
        assert isinstance(lease, Lease), lease
        return lease

    def launched(self, *segments: Segment, **kwargs: Any) -> Lease:
        lease = self.admit(*segments, **kwargs)
        plan = self.kv.plan(lease)
        assert isinstance(plan, Plan), plan
        with self.kv.launch(plan):
            for place, segment in enumerate(segments):
                self._stamp += segment.span
                self.backend.write(plan, place, range(self._stamp - segment.span, self._stamp))
        return lease

    def run(self, *segments: Segment, **kwargs: Any) -> None:
        committed = self.kv.commit(self.launched(*segments, **kwargs))
        assert not isinstance(committed, Refusal), committed

    def content(self, request: str) -> list[Any]:
        """Return what a stream holds on the device; every group must hold it from its window on."""
        stream = next(s for s in self.kv.view().streams if s.request == request)
        size = self.geometry.page_size
        whole, *others = (
            self.backend.read(table, stream.length - skip * size, group)
            for group, (table, skip) in enumerate(zip(stream.device, stream.skipped, strict=True))
        )
        for tokens, skip in zip(others, stream.skipped[1:], strict=True):
            assert tokens == whole[skip * size :]
        return whole

    def key(self, request: str, tokens: int, pages: int) -> None:
        """Let others find the pages of a request, of which so many must become findable."""
        assert self.kv.key(request, self.prompt(request, tokens)) == Keyed(request, pages, 0)

    def cached(self, request: str, tokens: int) -> list[Any]:
        """Leave findable pages behind; return what they hold."""
        self.kv.ingest(request)
        self.run(Segment(request, span=tokens))
        self.key(request, tokens, tokens // 2)
        held = self.content(request)
        self.kv.remove(request)
        return held

    @staticmethod
    def prompt(request: str, tokens: int) -> range:
        return range(1000 * ord(request), 1000 * ord(request) + tokens)

    def keys(self, request: str, pages: int) -> tuple[bytes, ...]:
        return page_keys(self.prompt(request, 2 * pages), 2)

    def found(self, request: str, pages: int) -> int:
        return self.kv.match(self.keys(request, pages))


@_by_hand
def a_host_pool_filled_emptied_and_filled_by_another_group() -> None:
    """Sectors that one group gave back are granted to another, until all are used, again and again."""
    rig = _Rig("r", "s", host_pages=4, groups=LAST)
    for _ in range(4):
        rig.run(Segment("r", span=2))
    assert not isinstance(rig.kv.offload("r"), Refusal)
    assert not isinstance(rig.kv.reload("r"), Refusal)
    rig.run(Segment("s", span=1))
    assert not isinstance(rig.kv.offload("s"), Refusal), "what was given back cannot be granted"


@_by_hand
def one_victim_makes_room_for_another_group() -> None:
    """What a victim had in one group is room for a newcomer in the other."""
    rig = _Rig("a", "b", "n", pages=6, host_pages=6, groups=LAST)
    for _ in range(4):
        rig.run(Segment("a", span=2))
    rig.run(Segment("b", span=1))
    rig.kv.offload("a")
    lease = rig.kv.admit(Step([Segment("n", span=3)]))
    assert isinstance(lease, Lease), f"another victim is needed: {lease}"


@_by_hand
def cached_pages_of_one_group_are_room_for_another() -> None:
    """Pages that nobody owns are available, whichever group they are of."""
    rig = _Rig("n", pages=6, host_pages=0, groups=LAST)
    rig.kv.ingest("a")
    for _ in range(5):
        rig.run(Segment("a", span=2))
    rig.key("a", 10, 5)
    rig.kv.remove("a")
    rig.run(Segment("n", span=6))


@_by_hand
def a_shortage_of_one_page() -> None:
    """One cached page leaves, and the others are still found."""
    rig = _Rig("s")
    rig.cached("a", 8)
    rig.run(Segment("s", span=10))
    assert rig.found("a", 4) == 3


@_by_hand
def a_page_given_back_twice() -> None:
    """The second call is an error, and the page is granted to one owner."""
    pool = Arena(Tier.DEVICE, Geometry(pages=4)).pools[0]
    [page] = pool.grant(1)
    pool.drop([page], NOTHING)
    try:
        pool.drop([page], NOTHING)
    except DoubleFree:
        pass
    else:
        raise AssertionError(f"free: {list(pool.free)}")


@_by_hand
def a_page_twice_in_one_list() -> None:
    """It is an error, and the page counts once."""
    for geometry in (Geometry(pages=4), Geometry(pages=4, groups=TWO)):
        arena = Arena(Tier.DEVICE, geometry)
        before = arena.free()
        [page] = arena.pools[0].grant(1)
        try:
            arena.pools[0].drop([page, page], NOTHING)
        except DoubleFree:
            assert arena.free() == before
        else:
            raise AssertionError(f"free: {arena.free()} of {before}")


@_by_hand
def retention_and_a_window_at_one_commit() -> None:
    """Both let go of the same pages, which leave once."""
    rig = _Rig("r", pages=16, groups=WINDOW)
    rig.run(Segment("r", span=9), retention={"main": RetentionPolicy(context_budget=3)})
    rig.run(Segment("r", span=4))
    rig.content("r")
    rig.kv.remove("r")
    assert rig.kv.pages_free()["device"] == rig.geometry.group_pages


@_by_hand
def retention_behind_a_window() -> None:
    """Retention shortens a stream to less than its window, which does not slide back over what has left it."""
    rig = _Rig("r", pages=24, groups=(Group("full", 256), Group("window", 128, window=7)))
    rig.run(Segment("r", span=12))
    rig.run(Segment("r", span=1), retention={"main": RetentionPolicy(context_budget=1, protected_prefix=4)})
    rig.run(Segment("r", span=6))
    rig.content("r")


@_by_hand
def weights_change_under_cached_pages() -> None:
    """Nothing of the old weights is found."""
    rig = _Rig("s")
    rig.cached("a", 4)
    rig.kv.reset_prefix_cache()
    assert rig.found("a", 2) == 0
    assert isinstance(rig.kv.admit(Step([Segment("s", prefix=rig.keys("a", 2))])), Refusal)


@_by_hand
def weights_change_under_stored_tokens() -> None:
    """Tokens of the old weights get no keys, wherever they were when the weights changed."""
    rig = _Rig("r", "s", "t", "u")
    rig.run(Segment("r", span=2))
    rig.run(Segment("s", span=2))
    rig.kv.key("s", rig.prompt("s", 2))
    rig.kv.offload("s")
    lease = rig.launched(Segment("t", span=2))
    rig.kv.reset_prefix_cache()
    rig.kv.commit(lease)
    rig.kv.reload("s")
    assert rig.found("s", 1) == 0, "a host copy brought a key back"
    rig.run(Segment("r", span=1), post_forks=[StreamFork(StreamId("r"), StreamId("u"))])
    for request in "rstu":
        assert rig.kv.key(request, rig.prompt(request, 2)) == Keyed(request, 0, 0), f"{request} is of the old weights"


@_by_hand
def a_hit_is_aborted_beside_a_reader() -> None:
    """One of two that started on the same pages gives up; the other still owns them."""
    rig = _Rig("r", "s")
    held = rig.cached("a", 4)
    rig.run(Segment("r", span=1, prefix=rig.keys("a", 2)))
    rig.kv.abort(rig.admit(Segment("s", span=1, prefix=rig.keys("a", 2))))
    rig.run(Segment("s", span=10))
    assert rig.content("r")[:4] == held


@_by_hand
def lookups_without_end() -> None:
    """A lookup changes nothing."""
    rig = _Rig("s")
    rig.cached("a", 4)
    before = rig.kv.view()
    assert [rig.found("a", 2) for _ in range(3)] == [2, 2, 2]
    assert rig.kv.view() == before
    rig.run(Segment("s", span=16))


@_by_hand
def a_page_gets_new_bytes() -> None:
    """It is not found by what it held, under no salt that its former owners had."""
    rig = _Rig("s")
    for salt in "AB":
        rig.kv.ingest(salt, RequestConfig(cache_salt=salt))
    rig.run(Segment("A", span=4), post_forks=[StreamFork(StreamId("A"), StreamId("B"))])
    for salt in "AB":
        rig.kv.key(salt, range(4))
    for salt in "AB":
        rig.kv.remove(salt)
    rig.cached("c", 4)
    rig.run(Segment("s", span=16))
    assert [rig.kv.match(page_keys(range(4), 2, salt)) for salt in "AB"] == [0, 0]
    assert rig.found("c", 2) == 0


@_by_hand
def a_step_starts_on_the_oldest_pages_and_needs_more() -> None:
    """What it starts on is not what makes room for it; a refusal is exact."""
    rig = _Rig("s", "t")
    held = rig.cached("a", 8)
    rig.cached("b", 4)
    refused = rig.kv.admit(Step([Segment("t", span=16, prefix=rig.keys("a", 4))]))
    assert isinstance(refused, Refusal)
    lease = rig.kv.admit(Step([Segment("t", span=9, prefix=rig.keys("a", 4))]))
    assert isinstance(lease, Refusal), "it counted what it starts on as room"
    rig.run(Segment("s", span=8, prefix=rig.keys("a", 4)))
    assert rig.content("s")[:8] == held


@_by_hand
def a_reload_finds_the_oldest_pages_and_needs_more() -> None:
    """What the device still has of a request is not what makes room for the rest of it."""
    rig = _Rig("r")
    rig.run(Segment("r", span=8))
    rig.key("r", 8, 4)
    held = rig.content("r")
    rig.kv.offload("r")
    rig.cached("b", 8)
    done = rig.kv.reload("r", Step([Segment("r", span=4)]))
    assert not isinstance(done, Refusal), done
    assert rig.content("r") == held


@_by_hand
def a_step_that_cannot_fit_beside_what_it_starts_on() -> None:
    """Refused with what is missing, and nothing evicted."""
    rig = _Rig("s", "t")
    rig.cached("a", 8)
    rig.run(Segment("t", span=6))
    refused = rig.kv.admit(Step([Segment("s", span=4, prefix=rig.keys("a", 4))]))
    assert refused == PagesExhausted(request="s", label="main", short=(1,))
    assert rig.found("a", 4) == 4


# -- patches that need a function of their own


def _pinned(match: Any) -> Any:
    def pins(state: Any, keys: Any) -> int:
        found: int = match(state, keys)
        for pool in state.device.pools:
            pool.own([pool.places[key] for key in keys[:found] if key in pool.places])
        return found

    return pins


_NEVER_EMPTY = edit("arena.SectorPool._return_cached", ("if mask == self._full:", "if False:"))

_DROPS = (
    "left < 0:\n                self._ownerless(gone, kept)\n                raise DoubleFree(self.tier.value, page)"
)

POOLS: tuple[Mutant, ...] = (
    Mutant(
        "Q1-reclaim",
        "sectors whose pages are all free are counted as available and never given back",
        _NEVER_EMPTY,
        by_hand=a_host_pool_filled_emptied_and_filled_by_another_group,
    ),
    Mutant(
        "Q8-lent",
        "a sector is available to its own group only until it is given back, and it never is",
        both(
            _NEVER_EMPTY,
            edit(
                "arena.Arena.short",
                ("left -= busy", "busy = max(busy, self.lent.count(group))\n            left -= busy"),
            ),
        ),
        by_hand=one_victim_makes_room_for_another_group,
    ),
    Mutant(
        "Q8-cached",
        "cached pages of one group are no room for another",
        edit(
            "arena.Arena.short",
            ("left -= busy", "busy = max(busy, self.lent.count(group))\n            left -= busy"),
        ),
        by_hand=cached_pages_of_one_group_are_room_for_another,
    ),
    Mutant(
        "Q9-flush",
        "any shortage evicts every cached page",
        edit(
            "arena.Arena.make_room",
            (
                "for page in pages:\n                pool.evict(page)",
                "for pool in self.pools:\n                [pool.evict(page) for page in list(pool.cached)]",
            ),
        ),
        by_hand=a_shortage_of_one_page,
    ),
    Mutant(
        "Q10-unchecked",
        "a page without an owner can be given back again",
        edit("arena.Pool.drop", (_DROPS, "left < 0:\n                left = 0")),
        by_hand=a_page_given_back_twice,
    ),
    Mutant(
        "Q13-survives",
        "keys outlive a change of the weights",
        edit(
            "transitions.prefix.reset_prefix_cache",
            ("return state.device.forget_keys()", "return sum(len(pool.keys) for pool in state.device.pools)"),
        ),
        by_hand=weights_change_under_cached_pages,
    ),
    Mutant(
        "Q13-stored",
        "tokens stored before the weights changed can get keys",
        off("transitions.prefix.reset_prefix_cache", "stream.stale = True"),
        by_hand=weights_change_under_stored_tokens,
    ),
    Mutant(
        "Q13-flight",
        "tokens of a step in flight when the weights changed can get keys",
        edit("transitions.prefix.reset_prefix_cache", ("stream.length or stream.rows or", "stream.length or")),
        by_hand=weights_change_under_stored_tokens,
    ),
    Mutant(
        "Q13-host",
        "a reload brings keys of the old weights back",
        both(
            off("transitions.prefix.reset_prefix_cache", "stream.keys = []"),
            edit("transitions.reload._rekey", ("if stream.stale:", "if False:")),
        ),
        by_hand=weights_change_under_stored_tokens,
    ),
    Mutant(
        "Q13-fork",
        "a fork of tokens of the old weights can get keys",
        edit(
            "transitions.fork.apply_post_forks",
            (
                "target.keys, target.stale = keys_shared(source, target, full), source.stale",
                "target.keys = keys_shared(source, target, full)",
            ),
        ),
        by_hand=weights_change_under_stored_tokens,
    ),
    Mutant(
        "Q14-counted",
        "a page that is twice in one list counts twice",
        edit("arena.Pool.drop", (_DROPS, "left < 0:\n                left = 0")),
        by_hand=a_page_twice_in_one_list,
    ),
    Mutant(
        "Q14-both",
        "retention and a window that let go of the same page at one commit give it back twice",
        edit(
            "transitions.retention.retain",
            ("gone: Pages = ()", "gone: Pages = ()\n    whole, stored = tables, length"),
            (
                "tables, left = slide(state, tables, length)",
                "_, left = slide(state, whole, stored)\n        tables, _ = slide(state, tables, length)",
            ),
        ),
        by_hand=retention_and_a_window_at_one_commit,
    ),
    Mutant(
        "Q14-back",
        "a window slides back over pages that it has left",
        edit(
            "state.Table.slid",
            (
                "return self if skip <= self.skip else Table(self._buffer, self.count, skip)",
                "return Table(self._buffer, self.count, skip)",
            ),
        ),
        by_hand=retention_behind_a_window,
    ),
    Mutant(
        "Q15-twice",
        "an aborted hit gives back twice what it had found",
        edit(
            "transitions.leaving.give_back",
            (
                "for pages in row.owned:",
                "for pages in (row.takes, row.temps, row.tails, row.takes if row.prefix else ()):",
            ),
        ),
        by_hand=a_hit_is_aborted_beside_a_reader,
    ),
    Mutant(
        "Q15-lookup",
        "a lookup owns what it finds",
        wrap("transitions.prefix.match", _pinned),
        by_hand=lookups_without_end,
    ),
    Mutant(
        "Q16-evicted",
        "an evicted page is still found by its key",
        off("arena.Pool._unkey", "del self.places[key]"),
        by_hand=a_page_gets_new_bytes,
    ),
    Mutant(
        "Q16-two-keys",
        "a page that several requests share gets a key of each",
        edit("arena.Pool.key", ("if key in self.places or page in self.keys:", "if key in self.places:")),
        by_hand=a_page_gets_new_bytes,
    ),
    Mutant(
        "O15-match",
        "an admission evicts before it owns what it starts on",
        edit(
            "transitions.reserve.Reservation.build",
            (
                "# What the step starts on is owned before anything is evicted to make room for the rest.",
                "state.device.make_room(self.wanted)",
            ),
            ("state.device.make_room(self.wanted)\n        rows:", "rows:"),
        ),
        by_hand=a_step_starts_on_the_oldest_pages_and_needs_more,
    ),
    Mutant(
        "O15-reload",
        "a reload evicts before it owns what the device still has of it",
        edit(
            "transitions.reload.claim_reload",
            (
                "# What the device has is owned before anything is evicted to make room for the rest.",
                "state.device.make_room(wanted)",
            ),
            ("pool.ready_of(own.values()))\n    state.device.make_room(wanted)", "pool.ready_of(own.values()))"),
        ),
        by_hand=a_reload_finds_the_oldest_pages_and_needs_more,
    ),
    Mutant(
        "O15-counted",
        "what a step starts on counts as room for the rest of it",
        edit(
            "transitions.step._short",
            ("asking.wanted, asking.owning, leaving)\n    if", "asking.wanted, (), leaving)\n    if"),
        ),
        by_hand=a_step_that_cannot_fit_beside_what_it_starts_on,
    ),
)
"""Programs by hand show them; `layers` of the walk come with an alphabet that has groups, prompts and prefixes."""
