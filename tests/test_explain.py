"""Explanations name who owns every page, add up to what the pools count, and say what an eviction really brings."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from kvstate import view as views
from kvstate.explain import Explanation, explain, explain_victim, owners
from kvstate.manager import KVManager
from kvstate.ops import CopyOut, Tier
from kvstate.owners import holds
from kvstate.prefix import page_keys
from kvstate.refusals import NotEmpty, Refusal
from kvstate.state import Lease, OffloadClaim, ReloadClaim
from kvstate.testing.memory import MemoryBackend
from kvstate.testing.transport import Network, StepTransport
from kvstate.transitions.retrieve import Retrieval
from kvstate.types import Geometry, Group, LabelFork, Segment, Step, StreamFork, StreamId

DEVICE = (Tier.DEVICE, 0)
SHARED = Geometry(pages=6, page_size=2, host_pages=4, groups=(Group("full", 256), Group("window", 128, window=3)))
"""Sectors of one page of the first group, or two of the second."""


class Rig:
    """A manager, and programs in its verbs; every explanation is checked against what the pools count."""

    def __init__(self, geometry: Geometry | None = None, network: Network | None = None, address: str = "a") -> None:
        self.geometry = geometry if geometry is not None else Geometry(pages=12, page_size=2, host_pages=6)
        self.network = network if network is not None else Network()
        backend = MemoryBackend(self.geometry)
        self.backend = backend
        self.transport = StepTransport(self.network, address)
        self.kv = KVManager(self.geometry, backend, transport=self.transport, address=address, debug=True)
        self.network.join(address, backend, self.kv.epoch_holds)

    def ingest(self, *requests: str) -> None:
        for request in requests:
            self.kv.ingest(request)

    def admit(self, *segments: Segment, **kwargs: Any) -> Lease:
        lease = self.kv.admit(Step(segments, **kwargs))
        assert isinstance(lease, Lease), lease
        return lease

    def launched(self, *segments: Segment, **kwargs: Any) -> Lease:
        lease = self.admit(*segments, **kwargs)
        plan = self.kv.plan(lease)
        assert not isinstance(plan, Refusal)
        with self.kv.launch(plan):
            pass
        return lease

    def run(self, *segments: Segment, **kwargs: Any) -> None:
        self.kv.commit(self.launched(*segments, **kwargs))

    def fetching(self, request: str, length: int) -> int:
        """Start a fetch of `length` tokens; return its serial."""
        other = Rig(self.geometry, self.network, "b")
        other.ingest(request)
        other.run(Segment(request, span=length))
        claimed = self.kv.claim_retrieve(request, other.kv.publish(request))  # type: ignore[arg-type]
        assert isinstance(claimed, Retrieval)
        return claimed.fetches[0].serial

    def refused(self, *segments: Segment, **kwargs: Any) -> Refusal:
        refusal = self.kv.admit(Step(segments, **kwargs))
        assert isinstance(refusal, Refusal)
        return refusal

    def pages(self, request: str, label: str = "main", group: int = 0) -> tuple[int, ...]:
        return next(s.device[group] for s in self.kv.view().streams if (s.request, s.label) == (request, label))

    def owners(self, tier: Tier = Tier.DEVICE, group: int = 0) -> dict[int, tuple[str, ...]]:
        return owners(self.kv.view())[tier, group]

    def explain(self, what: Refusal | str) -> list[str]:
        """Return the lines of an explanation, which must add up."""
        found = self.kv.explain(what)
        self.adds_up()
        assert json.loads(json.dumps(found.data)) == found.data
        return list(found.lines)

    def adds_up(self) -> None:
        now = self.kv.view()
        for tier, pools in ((Tier.DEVICE, now.device), (Tier.HOST, now.host)):
            for group, pool in enumerate(pools):
                listed = Counter(page for hold in holds(now) if hold.tier is tier for page in hold.pages[group])
                assert {page: count for page, count in enumerate(pool.owners) if count} == listed
        for request, _ in now.requests:
            data = explain_victim(now, request).data.get("device")
            if data is not None and not any(why.startswith("until") for why in data["waits"]):
                later = [counts for why, counts in data["waits"].items() if why.startswith("behind")]
                assert sum(data["now"]) + sum(map(sum, later)) == self.kv.gain(request), data


@pytest.fixture
def rig() -> Rig:
    """Return a manager of 12 device and 6 host pages of 2 tokens with requests r, s, t and u."""
    made = Rig()
    made.ingest("r", "s", "t", "u")
    return made


# -- owners


def test_free_pages_are_free_and_a_stream_names_its_pages_in_order(rig: Rig) -> None:
    rig.run(Segment("r", span=5))
    found = rig.owners()
    assert [found[page] for page in rig.pages("r")] == [(f"stream r/main page {place}",) for place in range(3)]
    assert sorted(found) == list(range(12))
    assert list(found.values()).count(("free",)) == 9
    assert set(rig.owners(Tier.HOST).values()) == {("free",)}


def test_a_shared_page_names_all_its_owners(rig: Rig) -> None:
    rig.run(Segment("r", span=2), post_forks=[LabelFork("main", "cfg"), StreamFork(StreamId("r"), StreamId("s"))])
    [page] = rig.pages("r")
    assert rig.owners()[page] == ("stream r/main page 0", "stream r/cfg page 0", "stream s/main page 0")


def test_pages_without_tokens_are_surplus(rig: Rig) -> None:
    rig.run(Segment("r", span=4))
    rig.kv.reset("r", free=False)
    assert Counter(rig.owners().values()) == {("stream r/main surplus",): 2, ("free",): 10}


def test_a_lease_owns_what_it_took_for_its_rows(rig: Rig) -> None:
    lease = rig.admit(Segment("r", span=3), Segment("s", span=1))
    assert Counter(rig.owners().values()) == {
        (f"lease {lease.serial} (admitted) for r/main",): 2,
        (f"lease {lease.serial} (admitted) for s/main",): 1,
        ("free",): 9,
    }


def test_what_left_a_stream_is_held_behind_its_open_leases(rig: Rig) -> None:
    rig.run(Segment("r", span=4))
    first, second = rig.launched(Segment("r")), rig.admit(Segment("r"))
    rig.kv.reset("r")
    behind = f"held for r/main behind leases {first.serial}, {second.serial}"
    assert Counter(rig.owners().values())[behind,] == 2
    rig.kv.remove("r")
    removed = f"held for r/main (removed) behind leases {first.serial}, {second.serial}"
    assert Counter(rig.owners().values())[removed,] == 2


def test_claims_own_what_they_move_in_both_tiers(rig: Rig) -> None:
    rig.run(Segment("r", span=3), Segment("r", "cfg", 1))
    out = rig.kv.claim_offload("r")
    assert isinstance(out, OffloadClaim)
    name = (f"offload claim {out.serial} of r",)
    assert Counter(rig.owners().values())[name] == Counter(rig.owners(Tier.HOST).values())[name] == 3
    rig.kv.commit_claim(out)
    assert Counter(rig.owners(Tier.HOST).values()) == {
        ("stream r/main page 0",): 1, ("stream r/main page 1",): 1, ("stream r/cfg page 0",): 1, ("free",): 3,
    }  # fmt: skip
    back = rig.kv.claim_reload("r")
    assert isinstance(back, ReloadClaim)
    name = (f"reload claim {back.serial} of r",)
    assert Counter(rig.owners().values())[name] == Counter(rig.owners(Tier.HOST).values())[name] == 3


def test_a_fetch_owns_what_it_writes(rig: Rig) -> None:
    rig.run(Segment("r", span=3))
    serial = rig.fetching("r", 5)
    found = rig.owners()
    assert Counter(found.values())[f"fetch {serial} of r/main",] == 1
    assert found[rig.pages("r")[1]] == ("stream r/main page 1", f"fetch {serial} of r/main")


def test_a_keyed_page_without_an_owner_is_cached(rig: Rig) -> None:
    rig.run(Segment("r", span=5))
    rig.kv.key("r", [1, 2, 3, 4])
    rig.kv.remove("r")
    assert Counter(rig.owners().values()) == {("cached",): 2, ("free",): 10}


def test_pages_of_a_sector_that_another_group_has_say_so() -> None:
    rig = Rig(SHARED)
    rig.ingest("r")
    rig.run(Segment("r", span=5))
    full, window = (rig.owners(group=group) for group in (0, 1))
    assert [full[page] for page in rig.pages("r")] == [(f"stream r/main page {place}",) for place in range(3)]
    held = rig.pages("r", group=1)
    assert [window[page] for page in held] == [("stream r/main page 1",), ("stream r/main page 2",)]
    assert {full[page // 2] for page in held} == {("in a sector of group 1",)}
    assert {window[2 * page] for page in rig.pages("r")} == {("in a sector of group 0",)}
    assert ("free",) in full.values() and ("free",) in window.values()


# -- refusals


def test_too_few_pages_are_explained_by_who_has_them_and_what_comes_back(rig: Rig) -> None:
    rig.run(Segment("r", span=5))
    rig.run(Segment("s", span=4), post_forks=[StreamFork(StreamId("s"), StreamId("t"))])
    lease = rig.launched(Segment("u", span=3))
    refusal = rig.refused(Segment("t", span=11))
    assert rig.explain(refusal) == [
        "kv: PagesExhausted (t/main): 1 device pages short; retry after pages were freed",
        "asked for 6 pages",
        "device: 5 of 12 pages available (5 free, 0 cached)",
        "r: 3 pages (main 3); by an eviction: 3 back at once",
        "s: 2 pages (main 2); by an eviction: 2 shared with t/main",
        "t: 2 pages (main 2); by an eviction: 2 shared with s/main",
        f"u: 2 pages (lease {lease.serial} (launched) 2); by an eviction: 2 behind lease {lease.serial}",
    ]
    data = rig.kv.explain(refusal).data
    assert (data["short"], data["asked"], data["available"]) == ([1], [6], [5])
    assert [(h["request"], h["pages"], h["now"]) for h in data["holders"]] == [
        ("r", [3], [3]), ("s", [2], [0]), ("t", [2], [0]), ("u", [2], [0]),
    ]  # fmt: skip
    assert data["holders"][3]["waits"] == {f"behind lease {lease.serial}": [2]}


def test_what_moves_or_is_fetched_comes_back_when_that_has_ended(rig: Rig) -> None:
    rig.run(Segment("r", span=4))
    rig.run(Segment("s", span=6))
    out = rig.kv.claim_offload("r")
    assert isinstance(out, OffloadClaim)
    rig.kv.offload("s")
    back = rig.kv.claim_reload("s")
    assert isinstance(back, ReloadClaim)
    serial = rig.fetching("t", 3)
    assert rig.explain(rig.refused(Segment("u", span=20)))[3:] == [
        f"s: 3 pages (reload claim {back.serial} 3); by an eviction: 3 until reload claim {back.serial} has ended",
        f"r: 2 pages (offload claim {out.serial} 2); by an eviction: 2 until offload claim {out.serial} has ended",
        f"t: 2 pages (fetch {serial} 2); by an eviction: 2 until fetch {serial} has ended",
    ]


def test_cached_pages_are_available_and_nobody_holds_them(rig: Rig) -> None:
    rig.run(Segment("r", span=6))
    rig.kv.key("r", range(6))
    rig.kv.remove("r")
    rig.run(Segment("s", span=8))
    lines = rig.explain(rig.refused(Segment("t", span=20)))
    assert lines[1:3] == ["asked for 10 pages", "device: 8 of 12 pages available (5 free, 3 cached)"]
    assert lines[3:] == ["s: 4 pages (main 4); by an eviction: 4 back at once"]


def test_a_removed_request_still_holds_what_runs(rig: Rig) -> None:
    rig.run(Segment("r", span=4))
    lease = rig.launched(Segment("r", span=2))
    rig.kv.remove("r")
    rig.ingest("r")
    rig.run(Segment("r", span=2))
    lines = rig.explain(rig.refused(Segment("s", span=20)))[3:]
    serial = lease.serial
    assert lines == [
        f"r (removed): 3 pages (held behind lease {serial} 2, lease {serial} (launched) 1); "
        f"by an eviction: 3 behind lease {serial}",
        "r: 1 page (main 1); by an eviction: 1 back at once",
    ]


def test_too_few_pages_of_groups_are_explained_per_group_and_sorted_by_bytes() -> None:
    rig = Rig(SHARED)
    rig.ingest("r", "s", "t")
    rig.run(Segment("r", span=3))
    rig.run(Segment("s", span=2))
    refusal = rig.refused(Segment("t", span=5))
    lines = rig.explain(refusal)
    assert lines[1:] == [
        "device, full: 1 of 6 pages available to it alone (0 in sectors that it uses, 1 sectors that nobody uses)",
        "device, window: 3 of 12 pages available to it alone (1 in sectors that it uses, 1 sectors that nobody uses)",
        "r: 2 full + 2 window pages (main 2 full + 2 window); by an eviction: 2 full + 2 window back at once",
        "s: 1 full + 1 window pages (main 1 full + 1 window); by an eviction: 1 full + 1 window back at once",
    ]
    data = rig.kv.explain(refusal).data
    assert data["available"] == list(rig.kv.pages_available()["device"])
    assert "asked" not in data


def test_too_few_host_pages_are_explained_by_who_has_copies(rig: Rig) -> None:
    for request, span in (("r", 4), ("s", 6), ("t", 6)):
        rig.run(Segment(request, span=span))
    rig.kv.offload("r")
    rig.kv.offload("s")
    refusal = rig.kv.offload("t")
    assert isinstance(refusal, Refusal)
    assert rig.explain(refusal) == [
        "kv: HostExhausted (t): 2 host pages short; retry after pages were freed",
        "asked for 3 pages",
        "host: 1 of 6 pages available (1 free, 0 cached)",
        "s: 3 pages (main 3); by an eviction: 3 back at once",
        "r: 2 pages (main 2); by an eviction: 2 back at once",
    ]


def test_what_can_never_fit_is_not_blamed_on_others(rig: Rig) -> None:
    rig.run(Segment("r", span=5))
    lines = rig.explain(rig.refused(Segment("t", span=99)))
    assert lines[1:] == ["no eviction helps: it must ask for less, or the cache be larger"]


def test_a_busy_request_names_its_leases_and_how_they_end(rig: Rig) -> None:
    first, second = rig.launched(Segment("r")), rig.admit(Segment("r", span=2))
    refusal = rig.kv.claim_offload("r")
    assert isinstance(refusal, Refusal)
    assert rig.explain(refusal)[1:] == [
        f"r/main: OnDevice, 0 tokens, named by leases {first.serial}, {second.serial}",
        f"lease {first.serial} is launched: commit it, or abort it",
        f"lease {second.serial} is admitted: launch and commit it, or abort it",
    ]


def test_a_pending_fork_names_the_lease_that_it_waits_for(rig: Rig) -> None:
    rig.run(Segment("r", span=2), Segment("r", "cfg", 1))
    rig.launched(Segment("r", "cfg"))
    forking = rig.launched(Segment("r"), post_forks=[LabelFork("main", "cfg")])
    lines = rig.explain(rig.refused(Segment("r", "cfg")))
    assert lines[0].startswith("kv: ForkPending (r/cfg)")
    assert lines[-1] == f"lease {forking.serial} is launched: commit it, or abort it"
    assert len(lines) == 4


def test_a_request_that_is_away_names_its_claim_or_what_a_reload_asks_for(rig: Rig) -> None:
    rig.run(Segment("r", span=4), Segment("r", "cfg", 1))
    claim = rig.kv.claim_offload("r")
    assert isinstance(claim, OffloadClaim)
    assert rig.explain(rig.refused(Segment("r")))[1:] == [
        f"r/main: Offloading by claim {claim.serial}, 4 tokens",
        f"r/cfg: Offloading by claim {claim.serial}, 1 tokens",
        f"offload claim {claim.serial} is open",
    ]
    rig.kv.commit_claim(claim)
    assert rig.explain(rig.refused(Segment("r")))[3:] == [
        "a reload asks for 3 pages of the device, less what it still has by content keys",
        "device: 12 of 12 pages available (12 free, 0 cached)",
    ]


def test_a_claim_whose_copy_failed_says_so(rig: Rig) -> None:
    rig.run(Segment("r", span=4))
    rig.backend.fail_next(CopyOut)
    claim = rig.kv.claim_offload("r")
    assert isinstance(claim, OffloadClaim)
    [*_, last] = rig.explain(rig.refused(Segment("r")))
    assert last.startswith(f"offload claim {claim.serial} is open; its copy failed (") and last.endswith("abandon it")


def test_a_fetch_in_the_way_says_what_it_has_and_a_failed_one_what_clears_it(rig: Rig) -> None:
    serial = rig.fetching("r", 3)
    assert rig.explain(rig.refused(Segment("r")))[1:] == [
        f"r/main: Fetching by fetch {serial}, 0 tokens",
        f"fetch {serial} has 2 pages until its transport says that it ended",
    ]
    rig.transport.fail(rig.transport.waiting[0], "cable")
    rig.kv.poll()
    assert rig.explain(rig.refused(Segment("r")))[-1].startswith("a reset clears the error")


def test_other_refusals_show_the_request_as_it_is(rig: Rig) -> None:
    rig.run(Segment("r", span=4))
    refusal = rig.refused(Segment("r", prefix=page_keys(range(4), 2)))
    assert isinstance(refusal, NotEmpty)
    assert rig.explain(refusal)[1:] == ["r/main: OnDevice, 4 tokens"]
    assert rig.explain(rig.refused(Segment("nobody")))[1:] == []


# -- victims


def test_a_victim_is_explained_page_by_page(rig: Rig) -> None:
    rig.run(Segment("r", span=6), Segment("r", "cfg", 3))
    rig.kv.key("r", range(4))
    rig.run(Segment("s"), post_forks=[StreamFork(StreamId("r", "cfg"), StreamId("s", "cfg"))])
    lease = rig.launched(Segment("r", "cfg", 2))
    assert rig.explain("r") == [
        "r/main: OnDevice, 6 tokens",
        f"r/cfg: OnDevice, 3 tokens, named by lease {lease.serial}",
        f"device: r: 6 pages (main 3, cfg 2, lease {lease.serial} (launched) 1); by an eviction: 3 back at once, "
        f"2 behind lease {lease.serial}, 1 shared with s/cfg",
        "2 pages of those that come back at once can still be found",
        "an offload asks for 5 pages of the host; available: 6 pages",
    ]
    assert rig.kv.explain("r").data["offload"] == {"wanted": [5], "available": [6]}


def test_a_victim_in_both_tiers_and_one_that_is_not_here(rig: Rig) -> None:
    rig.run(Segment("r", span=4))
    claim = rig.kv.claim_offload("r")
    assert isinstance(claim, OffloadClaim)
    until = f"2 pages (offload claim {claim.serial} 2); by an eviction: 2 until offload claim {claim.serial} has ended"
    assert rig.explain("r")[1:] == [f"device: r: {until}", f"host: r: {until}"]
    assert rig.explain("nobody") == ["nobody is not here"]


def test_without_a_host_pool_a_victim_must_compute_again() -> None:
    rig = Rig(Geometry(pages=4, page_size=2))
    rig.ingest("r")
    rig.run(Segment("r", span=2))
    assert rig.explain("r")[-1] == "there is no host pool: its tokens would be computed again"


def test_surplus_comes_back_and_needs_no_host_page(rig: Rig) -> None:
    rig.run(Segment("r", span=6))
    rig.kv.reset("r", free=False)
    rig.run(Segment("r", span=1))
    lines = rig.explain("r")
    assert lines[1] == "device: r: 3 pages (main 3); by an eviction: 3 back at once"
    assert lines[2] == "an offload asks for 1 page of the host; available: 6 pages"


def test_a_victim_of_groups_is_counted_in_each() -> None:
    rig = Rig(SHARED)
    rig.ingest("r")
    rig.run(Segment("r", span=7))
    lines = rig.explain("r")
    assert lines[1] == (
        "device: r: 4 full + 2 window pages (main 4 full + 2 window); by an eviction: 4 full + 2 window back at once"
    )
    assert lines[2] == "an offload asks for 4 full + 2 window pages of the host; available: 4 full + 8 window pages"


def test_equal_views_are_explained_in_equal_words(rig: Rig) -> None:
    rig.run(Segment("r", span=5))
    refusal = rig.refused(Segment("s", span=20))
    now = rig.kv.view()
    again = views.view(rig.kv._state)
    assert explain(now, refusal) == explain(again, refusal)
    assert isinstance(explain(now, refusal), Explanation)
    assert str(explain(now, refusal)) == "\n".join(explain(now, refusal).lines)
