"""The in-memory backend does what ops say, spoils what they leave undefined, and fails when it is told to."""

import threading
from typing import Any

import pytest

from kvstate.errors import SubmitError
from kvstate.manager import KVManager
from kvstate.ops import CopyIn, CopyOut, ForkCopy, Op, Plan, StepBegin, StepEnd, Tier
from kvstate.ordering import NOTHING
from kvstate.prefix import page_keys
from kvstate.state import Lease, OffloadClaim, OnDevice, ReloadClaim, State
from kvstate.testing.judge import EdgeJudge
from kvstate.testing.memory import POISON, MemoryBackend, given_back, nobodys
from kvstate.transitions import lifecycle, offload, reload, step
from kvstate.types import Geometry, Group, LabelFork, Segment, Step
from tests.steps import store

GEOMETRY = Geometry(pages=8, page_size=4, host_pages=8)


class Rig:
    """A state whose outbox is handed to a backend after every transition."""

    def __init__(self, geometry: Geometry = GEOMETRY, **options: Any) -> None:
        self.state = State(geometry)
        self.judge = EdgeJudge(geometry.page_size, MemoryBackend.sinks_of(geometry))
        self.backend = MemoryBackend(geometry, judge=self.judge, **options)

    def drain(self) -> None:
        while self.state.outbox:
            self.backend.submit(self.state.outbox.pop(0))

    def plan(self, wanted: Step) -> Plan:
        lease = step.admit(self.state, wanted)
        assert isinstance(lease, Lease)
        planned = step.plan(self.state, lease)
        assert isinstance(planned, Plan)
        assert isinstance(step.launch_enter(self.state, planned), StepBegin)
        self.drain()
        return planned

    def run(self, wanted: Step, *stamps: str) -> None:
        planned = self.plan(wanted)
        for place, row in enumerate(stamps):
            self.backend.write(planned, place, list(row))
        step.launch_exit(self.state, planned.lease)
        self.drain()
        assert isinstance(step.commit(self.state, planned.lease), step.Committed)
        self.drain()

    def content(self, request: str, label: str = "main") -> str:
        stream = self.state.requests[request].streams[label]
        assert isinstance(stream.residency, OnDevice)
        return "".join(
            map(str, self.backend.read(stream.residency.tables[0].first(-(-stream.length // 4)), stream.length))
        )


def one(request: str, span: int, **options: Any) -> Step:
    return Step((Segment(request, span=span),), **options)


def test_what_steps_write_is_read_back_over_page_borders() -> None:
    rig = Rig()
    lifecycle.ingest(rig.state, "a")
    rig.run(one("a", 3), "abc")
    rig.run(one("a", 7), "defghij")
    assert rig.content("a") == "abcdefghij"
    assert rig.judge.violations == []


def test_padding_and_void_segments_write_to_the_sink_only() -> None:
    rig = Rig()
    lifecycle.ingest(rig.state, "a")
    rig.run(Step((Segment("a", span=2), Segment.padding(6))), "ab", "xxxxxx")
    assert rig.content("a") == "ab"
    size = GEOMETRY.page_size
    assert rig.backend.device[0][: GEOMETRY.pages * size].count("x") == 0
    assert "x" in rig.backend.device[0][GEOMETRY.pages * size :]
    assert len(rig.backend.device[0]) == (GEOMETRY.pages + 1) * size


def test_one_stamp_per_computed_token_is_required() -> None:
    rig = Rig()
    lifecycle.ingest(rig.state, "a")
    planned = rig.plan(one("a", 2))
    with pytest.raises(ValueError, match="computes 2 tokens, got 3 stamps"):
        rig.backend.write(planned, 0, ["a", "b", "c"])


def test_a_table_that_ends_early_is_never_read_short() -> None:
    with pytest.raises(IndexError, match="1 pages of 4 tokens do not hold token 4"):
        Rig().backend.read([0], 5)


def test_fork_copies_move_the_filled_part_of_a_page_and_spoil_the_rest() -> None:
    rig = Rig()
    lifecycle.ingest(rig.state, "a")
    rig.run(one("a", 6), "abcdef")
    rig.run(Step((Segment("a", "main", 1),), post_forks=(LabelFork("main", "cfg"),)), "g")
    assert rig.content("a") == rig.content("a", "cfg") == "abcdefg"
    stream = rig.state.requests["a"].streams["cfg"]
    assert rig.backend.read(stream.residency.tables[0].first(2), 8)[7] is POISON
    rig.run(Step((Segment("a", "cfg", 1),)), "h")
    assert (rig.content("a"), rig.content("a", "cfg")) == ("abcdefg", "abcdefgh")


def test_an_offload_and_a_reload_keep_the_content_and_nothing_beyond_it() -> None:
    rig = Rig(record=True)
    lifecycle.ingest(rig.state, "a")
    rig.run(one("a", 6), "abcdef")
    claim = offload.claim_offload(rig.state, "a")
    assert isinstance(claim, OffloadClaim)
    rig.drain()
    device = list(claim.parts[0].device[0])
    assert offload.commit_offload(rig.state, claim) == offload.Offloaded("a", 2)
    rig.backend.poison(Tier.DEVICE, 0, device)
    host = list(claim.parts[0].host[0])
    assert rig.backend.read_host(host, 8) == [*"abcdef", POISON, POISON]
    back = reload.claim_reload(rig.state, "a")
    assert isinstance(back, ReloadClaim)
    rig.drain()
    assert isinstance(reload.commit_reload(rig.state, back), reload.Reloaded)
    rig.backend.poison(Tier.HOST, 0, host)
    assert rig.content("a") == "abcdef"
    assert rig.judge.violations == []
    assert [type(op) for op in rig.backend.ops] == [StepBegin, StepEnd, CopyOut, CopyIn]


def test_an_op_reads_all_its_pages_before_it_writes_one() -> None:
    backend = MemoryBackend(GEOMETRY)
    backend.store(0, [0, 1, 2], 0, "aaaabbbbcccc")
    backend.submit(ForkCopy(1, NOTHING, None, ([(0, 1, 4), (1, 2, 4)],)))
    assert backend.read([0, 1, 2], 12) == [*"aaaaaaaabbbb"]


def test_fresh_and_freed_pages_hold_poison() -> None:
    backend = MemoryBackend(GEOMETRY)
    assert backend.read([3], 4) == [POISON] * 4
    backend.store(0, [3, 4], 0, "abcdefgh")
    backend.poison(Tier.DEVICE, 0, [3])
    assert backend.read([3, 4], 8) == [POISON] * 4 + [*"efgh"]
    assert repr(POISON) == "POISON"


def test_a_failed_submit_runs_nothing_and_its_place_completes_by_a_skip() -> None:
    rig = Rig(record=True)
    lifecycle.ingest(rig.state, "a")
    rig.run(one("a", 4), "abcd")
    claim = offload.claim_offload(rig.state, "a")
    assert isinstance(claim, OffloadClaim)
    [op] = rig.state.outbox
    rig.backend.fail_next(CopyIn)
    rig.backend.fail_next(CopyOut)
    with pytest.raises(SubmitError, match="CopyOut was made to fail"):
        rig.backend.submit(op)
    assert rig.backend.read_host(list(claim.parts[0].host[0]), 4) == [POISON] * 4
    assert rig.backend.completed() == (2, 0, 0)
    rig.backend.skip(op)
    assert rig.backend.completed() == (2, op.number, 0)
    assert (rig.backend.ops[-1], rig.backend.skipped) == (op, {op.number})


def test_a_hook_decides_which_ops_fail() -> None:
    backend = MemoryBackend(GEOMETRY, fail=lambda op: op.number == 2)
    backend.submit(StepBegin(1, NOTHING, None))
    with pytest.raises(SubmitError):
        backend.submit(CopyOut(2, NOTHING, None, ([],)))
    backend.fail_next()
    with pytest.raises(SubmitError):
        backend.submit(CopyOut(3, NOTHING, None, ([],)))
    backend.submit(CopyOut(4, NOTHING, None, ([],)))
    assert backend.completed() == (1, 4, 0)


def test_waiting_ends_when_another_thread_submits_the_op() -> None:
    backend = MemoryBackend(GEOMETRY)
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: (backend.wait((2, 3, 0)), seen.append(backend.completed())))
    thread.start()
    ops: list[Op] = [StepBegin(1, NOTHING, None), StepBegin(2, NOTHING, None), CopyOut(3, NOTHING, None, ([],))]
    for op in ops:
        backend.submit(op)
    thread.join(60)
    assert seen == [(2, 3, 0)]


def test_a_launch_that_runs_while_the_backend_closes_may_still_end() -> None:
    rig = Rig(record=True)
    lifecycle.ingest(rig.state, "a")
    planned = rig.plan(one("a", 2))
    rig.backend.close()
    rig.backend.close()
    rig.backend.write(planned, 0, "ab")
    end = step.launch_exit(rig.state, planned.lease)
    rig.drain()
    assert isinstance(end, StepEnd)
    rig.backend.wait((end.number, 0, 0))
    assert [type(op) for op in rig.backend.ops] == [StepBegin]


def test_threads_write_disjoint_pages_at_once() -> None:
    geometry = Geometry(pages=64, page_size=4)
    rig = Rig(geometry)
    names = [f"r{k}" for k in range(4)]
    for name in names:
        lifecycle.ingest(rig.state, name)
    planned = rig.plan(Step([Segment(name, span=50) for name in names]))
    start = threading.Barrier(4)

    def write(place: int) -> None:
        start.wait(60)
        for turn in range(200):
            rig.backend.write(planned, place, [(place, turn)] * 50)

    threads = [threading.Thread(target=write, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for place, view in enumerate(planned.in_step_order):
        assert rig.backend.read(view.pages, 50) == [(place, 199)] * 50


# -- groups that share sectors

SHARED = Geometry(pages=2, page_size=4, host_pages=2, groups=(Group("full", 384), Group("window", 256)))
"""Sectors of two pages of the first group, or three of the second."""


def shared() -> MemoryBackend:
    """Return a backend whose second group has written its first sector, and the first group its second one."""
    backend = MemoryBackend(SHARED)
    backend.store(1, [0, 1, 2], 0, "aaaabbbbcccc")
    backend.store(0, [2, 3], 0, "ddddeeee")
    return backend


def held(backend: MemoryBackend, group: int, pages: list[int], tier: Tier = Tier.DEVICE) -> str:
    """Return what pages hold, poison as dots."""
    stamps = backend.load(group, pages, 0, len(pages) * 4, tier)
    return "".join("." if stamp is POISON else str(stamp) for stamp in stamps)


def test_each_group_has_all_the_pages_that_the_sectors_could_give_it_and_a_sink() -> None:
    backend = MemoryBackend(SHARED)
    assert [len(pages) for pages in backend.device] == [(4 + 1) * 4, (6 + 1) * 4]
    assert [len(pages) for pages in backend.host] == [(4 + 1) * 4, (6 + 1) * 4]
    assert MemoryBackend.sinks_of(SHARED) == {
        (Tier.DEVICE, 0): 4, (Tier.DEVICE, 1): 6, (Tier.HOST, 0): 4, (Tier.HOST, 1): 6,
    }  # fmt: skip


def test_a_write_spoils_what_other_groups_had_in_its_sector() -> None:
    backend = shared()
    assert (held(backend, 1, [0, 1, 2]), held(backend, 0, [2, 3])) == ("aaaabbbbcccc", "ddddeeee")
    backend.store(0, [0], 1, "x")
    assert held(backend, 1, [0, 1, 2]) == "............"
    assert (held(backend, 0, [0, 1]), held(backend, 0, [2, 3])) == (".x......", "ddddeeee")


def test_a_group_that_writes_on_in_its_own_sector_spoils_nothing() -> None:
    backend = shared()
    backend.store(1, [1], 0, "x")
    assert held(backend, 1, [0, 1, 2]) == "aaaaxbbbcccc"


@pytest.mark.parametrize("op", [ForkCopy, CopyIn])
def test_copies_onto_a_sector_of_another_group_spoil_it_too(op: Any) -> None:
    backend = shared()
    backend.submit(op(1, NOTHING, None, ([(3, 1, 2)], [])))
    assert held(backend, 1, [0, 1, 2]) == "............"
    assert held(backend, 0, [0, 1]) == ("....ee.." if op is ForkCopy else "........")


def test_host_sectors_are_shared_like_those_of_the_device() -> None:
    backend = shared()
    backend.submit(CopyOut(1, NOTHING, None, ([(2, 0, 4)], [])))
    assert held(backend, 0, [0], Tier.HOST) == "dddd"
    backend.submit(CopyOut(2, NOTHING, None, ([], [(2, 2, 4)])))
    assert (held(backend, 0, [0], Tier.HOST), held(backend, 1, [2], Tier.HOST)) == ("....", "cccc")
    assert held(backend, 0, [2, 3]) == "ddddeeee"


def test_an_op_over_groups_reads_everything_before_it_writes_anything() -> None:
    backend = shared()
    backend.submit(ForkCopy(1, NOTHING, None, ([(2, 0, 4)], [(0, 4, 4)])))
    assert (held(backend, 0, [0]), held(backend, 1, [4])) == ("dddd", "aaaa")
    assert (held(backend, 0, [2, 3]), held(backend, 1, [0, 1, 2])) == ("........", "............")


def test_pages_are_spoiled_for_every_group_that_could_have_them() -> None:
    backend = shared()
    backend.poison(Tier.DEVICE, 0, [0])
    assert held(backend, 1, [0, 1, 2]) == "............"
    backend.poison(Tier.DEVICE, 0, [2])
    assert held(backend, 0, [2, 3]) == "....eeee"


def test_sinks_do_not_reach_into_the_sectors_in_front_of_them() -> None:
    backend = shared()
    for group, sink in enumerate(SHARED.group_pages):
        backend.store(group, [sink], 0, "xxxx")
    assert (held(backend, 1, [0, 1, 2]), held(backend, 0, [2, 3])) == ("aaaabbbbcccc", "ddddeeee")


def test_many_tables_of_any_group_are_read_at_once() -> None:
    assert shared().read_many([[0], [2, 1]], [2, 5], group=1) == [[*"aa"], [*"ccccb"]]


# -- which pages the harness may spoil


def filled(geometry: Geometry) -> KVManager:
    """Return a manager whose request has stored twelve tokens, four of them findable."""
    kv = KVManager(geometry, MemoryBackend(geometry), debug=True)
    kv.ingest("r")
    store(kv, Segment("r", span=12))
    kv.key("r", range(4))
    return kv


def test_pages_of_nobody_are_those_that_are_neither_owned_nor_findable() -> None:
    kv = filled(GEOMETRY)
    before = kv.view()
    assert nobodys(before) == [(Tier.DEVICE, 0, [3, 4, 5, 6, 7]), (Tier.HOST, 0, list(range(8)))]
    kv.remove("r")
    assert kv.match(page_keys(range(4), 4)) == 1
    assert given_back(before, kv.view()) == [(Tier.DEVICE, 0, [1, 2])]
    assert given_back(kv.view(), kv.view()) == []


def test_bytes_that_another_group_was_lent_are_not_spoiled() -> None:
    geometry = Geometry(pages=6, page_size=4, groups=(Group("full", 256), Group("window", 128)))
    kv = filled(geometry)
    before = kv.view()
    # Three sectors of the first group, two of the second with a page left, and one of nobody.
    assert [has for has in before.device_lent] == [0, 0, 0, 1, 1, None]
    assert nobodys(before)[:2] == [(Tier.DEVICE, 0, [5]), (Tier.DEVICE, 1, [9, 10, 11])]
    kv.remove("r")
    assert given_back(before, kv.view()) == [(Tier.DEVICE, 0, [1, 2, 4]), (Tier.DEVICE, 1, [2, 3, 4, 5, 7, 8])]
