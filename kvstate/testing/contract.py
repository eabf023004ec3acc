"""The contract of a backend, as checks that any StampedBackend must pass.

Each check drives a KVManager over a fresh backend and raises AssertionError when the backend breaks its word::

    @pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
    def test_my_backend_keeps_the_contract(check):
        check(my_backend)  # a callable (geometry, *, judge=None), see kvstate.testing.backends

`GROUPS` are further checks, for a backend that drives several groups in the same bytes, with windows.

Order and edges need an adversary that delays ops; here every op may have run when its submit returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvstate.errors import Poisoned
from kvstate.manager import KVManager
from kvstate.ops import CopyIn, CopyOut, ForkCopy, Op, Plan, Tier
from kvstate.ordering import NOTHING, Clock, covers
from kvstate.refusals import CopyFailed, ManagerPoisoned, Refusal
from kvstate.state import Lease, OffloadClaim
from kvstate.testing.backends import StampedBackend
from kvstate.testing.judge import EdgeJudge
from kvstate.types import Geometry, Group, LabelFork, Segment, Step
from kvstate.view import StreamView

Make = Callable[..., StampedBackend]

GEOMETRY = Geometry(pages=8, page_size=4, host_pages=8)

WINDOW = 6
SHARED = Geometry(
    pages=16, page_size=4, host_pages=8, groups=(Group("full", 512), Group("window", 256, WINDOW))
)  # fmt: skip
"""Sectors of one page of the first group, or two of the second."""


class Rig:
    """A manager over the backend under test, with one edge judge and tokens that are never used twice."""

    def __init__(self, make: Make, *requests: str, geometry: Geometry = GEOMETRY) -> None:
        self.geometry = geometry
        self.judge = EdgeJudge.of(geometry)
        self.backend = make(geometry, judge=self.judge)
        self.kv = KVManager(geometry, self.backend, debug=True)
        self._next = 1
        for request in requests:
            self.kv.ingest(request)

    def stamps(self, count: int) -> list[int]:
        """Return `count` tokens."""
        self._next += count
        return list(range(self._next - count, self._next))

    def lease(self, step: Step) -> Lease:
        """Admit a step that must be admitted."""
        lease = self.kv.admit(step)
        assert isinstance(lease, Lease), lease
        return lease

    def plan(self, lease: Lease) -> Plan:
        """Plan a lease that must be planned."""
        plan = self.kv.plan(lease)
        assert isinstance(plan, Plan), plan
        return plan

    def run(self, step: Step) -> list[list[int]]:
        """Run a step to its commit; return what each segment wrote."""
        lease = self.lease(step)
        plan = self.plan(lease)
        written = [self.stamps(segment.span) for segment in step.segments]
        with self.kv.launch(plan):
            for place, stamps in enumerate(written):
                self.backend.write(plan, place, stamps)
        outcome = self.kv.commit(lease)
        assert not isinstance(outcome, Refusal), outcome
        return written

    def stream(self, request: str, label: str = "main") -> StreamView:
        """Return the view of a stream."""
        return next(s for s in self.kv.view().streams if (s.request, s.label) == (request, label))

    def content(self, request: str, label: str = "main") -> list[Any]:
        """Read a stream back, on the device or on the host; a group with a window has its last tokens."""
        stream = self.stream(request, label)
        on_host = stream.residency == "OnHost"
        tables, read = (stream.host, self.backend.read_host) if on_host else (stream.device, self.backend.read)
        size = self.geometry.page_size
        whole, *others = (
            read(table, stream.length - skipped * size, group)
            for group, (table, skipped) in enumerate(zip(tables, stream.skipped, strict=True))
        )
        for group, (tokens, skipped) in enumerate(zip(others, stream.skipped[1:], strict=True), start=1):
            assert tokens == whole[skipped * size :], f"{request}/{label} holds {tokens} in group {group}, not {whole}"
        return whole

    def pages(self, request: str, label: str = "main", group: int = 0) -> tuple[int, ...]:
        """Return a stream's device pages."""
        return self.stream(request, label).device[group]

    def end(self) -> None:
        """Close, and see that no edge was missing."""
        assert not self.judge.violations, self.judge.violations[0]
        self.kv.close()


def what_a_step_writes_is_read_back(make: Make) -> None:
    """Tokens come back from every page, also when they were written in several steps."""
    rig = Rig(make, "r")
    [first] = rig.run(Step([Segment("r", span=6)]))
    [second] = rig.run(Step([Segment("r", span=5)]))
    assert rig.content("r") == first + second
    rig.end()


def a_step_writes_its_own_pages_only(make: Make) -> None:
    """Padding and void rows write to the sink; nobody else's tokens change."""
    rig = Rig(make, "r", "s")
    [kept, _] = rig.run(Step([Segment("r", span=6), Segment.padding(9)]))
    lease = rig.lease(Step([Segment("s", span=3), Segment("r", span=1)]))
    rig.kv.reset("s")
    assert isinstance(rig.kv.plan(lease), Refusal)
    plan = rig.plan(lease)
    token = rig.stamps(1)
    with rig.kv.launch(plan):
        rig.backend.write(plan, 0, rig.stamps(3))
        rig.backend.write(plan, 1, token)
    rig.kv.commit(lease)
    assert rig.content("r") == kept + token
    assert rig.content("s") == []
    rig.end()


def offload_and_reload_keep_every_token(make: Make) -> None:
    """A request comes back as it was, onto other pages, a partly filled last page included."""
    rig = Rig(make, "r", "s")
    [tokens] = rig.run(Step([Segment("r", span=10)]))
    before = rig.pages("r")
    rig.kv.offload("r")
    assert rig.content("r") == tokens
    rig.backend.poison(Tier.DEVICE, 0, before)
    rig.run(Step([Segment("s", span=6)]))
    rig.kv.reload("r")
    assert rig.content("r") == tokens
    [more] = rig.run(Step([Segment("r", span=3)]))
    assert rig.content("r") == tokens + more
    rig.end()


def forks_copy_the_partly_filled_page(make: Make) -> None:
    """Before and after a step: source and target go their own ways from the fork on."""
    _forks(Rig(make, "r"), 6)


def _forks(rig: Rig, prompt: int) -> None:
    [tokens] = rig.run(Step([Segment("r", span=prompt)]))
    [main, cfg] = rig.run(Step([Segment("r"), Segment("r", "cfg", 2)], pre_forks=[LabelFork("main", "cfg")]))
    assert (rig.content("r"), rig.content("r", "cfg")) == (tokens + main, tokens + cfg)
    [more] = rig.run(Step([Segment("r")], post_forks=[LabelFork("main", "beam")]))
    [last, beam] = rig.run(Step([Segment("r"), Segment("r", "beam")]))
    assert rig.content("r") == tokens + main + more + last
    assert rig.content("r", "beam") == tokens + main + more + beam
    rig.end()


def plans_launched_together_keep_their_own_tables(make: Make) -> None:
    """Two launches overlap: what the first writes after the second has entered lands on the first's pages."""
    rig = Rig(make, "r", "s")
    one, two = rig.lease(Step([Segment("r", span=5)])), rig.lease(Step([Segment("s", span=5)]))
    plan_one, plan_two = rig.plan(one), rig.plan(two)
    tokens_one, tokens_two = rig.stamps(5), rig.stamps(5)
    with rig.kv.launch(plan_one), rig.kv.launch(plan_two):
        rig.backend.write(plan_two, 0, tokens_two)
        rig.backend.write(plan_one, 0, tokens_one)
    rig.kv.commit(two)
    rig.kv.commit(one)
    assert (rig.content("r"), rig.content("s")) == (tokens_one, tokens_two)
    rig.end()


def a_cancelled_plan_leaves_no_stale_table(make: Make) -> None:
    """A plan that never ran must not show in the tables of the next one on the same stream."""
    rig = Rig(make, "r", "s")
    [tokens] = rig.run(Step([Segment("r", span=3)]))
    staged = rig.lease(Step([Segment("r", span=6)]))
    rig.plan(staged)
    rig.kv.abort(staged)
    rig.run(Step([Segment("s", span=9)]))
    [more] = rig.run(Step([Segment("r", span=6)]))
    assert rig.content("r") == tokens + more
    rig.end()


def _fails(make: Make, kind: type[Op], run: Callable[[Rig], Any]) -> None:
    rig = Rig(make, "r")
    [tokens] = rig.run(Step([Segment("r", span=6)]))
    rig.kv.offload("r") if kind is CopyIn else None
    before = rig.kv.view()
    rig.backend.fail_next(kind)
    answer = run(rig)
    assert rig.backend.fail_none() == 0, "the failure that was asked for did not happen"
    assert isinstance(answer, CopyFailed), answer
    assert rig.kv.view().unordered() == before.unordered(), "a failed copy leaves everything as it was"
    assert rig.content("r") == tokens
    rig.kv.reload("r") if kind is CopyIn else rig.kv.offload("r")
    assert rig.content("r") == tokens, "and the next try works"
    rig.end()


def an_offload_that_fails_at_submit_changes_nothing(make: Make) -> None:
    """Nothing of the op ran; skip keeps its place in the order."""
    _fails(make, CopyOut, lambda rig: rig.kv.offload("r"))


def a_reload_that_fails_at_submit_changes_nothing(make: Make) -> None:
    """The host copy is still the only one."""
    _fails(make, CopyIn, lambda rig: rig.kv.reload("r"))


def a_fork_that_fails_at_submit_aborts_its_launch(make: Make) -> None:
    """The source keeps its tokens, the target does not come to exist."""
    rig = Rig(make, "r")
    [tokens] = rig.run(Step([Segment("r", span=6)]))
    before = rig.kv.view()
    lease = rig.lease(Step([Segment("r", "cfg")], pre_forks=[LabelFork("main", "cfg")]))
    plan = rig.plan(lease)
    rig.backend.fail_next(ForkCopy)
    try:
        with rig.kv.launch(plan):
            raise AssertionError("the model must not run")
    except Exception as error:
        if isinstance(error, AssertionError):
            raise
    assert {s.label: s.length for s in rig.kv.view().streams} == {"main": 6}
    assert len(rig.kv.view().device[0].free) == len(before.device[0].free)
    assert rig.content("r") == tokens
    rig.end()


def poisoned_pages_hold_nothing_to_rely_on(make: Make) -> None:
    """What the harness spoils, in either tier, reads back as something that was never written."""
    rig = Rig(make, "r")
    [tokens] = rig.run(Step([Segment("r", span=6)]))
    pages = rig.pages("r")
    claim = rig.kv.claim_offload("r")
    assert isinstance(claim, OffloadClaim)
    host = list(claim.parts[0].host[0])
    rig.kv.commit_claim(claim)
    rig.backend.poison(Tier.DEVICE, 0, pages)
    assert not set(rig.backend.read(pages, 6)) & set(tokens)
    rig.backend.poison(Tier.HOST, 0, host)
    assert not set(rig.backend.read_host(host, 6)) & set(tokens)
    rig.kv.close()


def completion_is_polled_and_only_rises(make: Make) -> None:
    """`wait` returns when what it names is complete; `completed` says so, and never falls."""
    rig = Rig(make, "r")
    newest: Clock = NOTHING
    for _ in range(3):
        rig.run(Step([Segment("r", span=3)]))
        rig.kv.offload("r")
        rig.kv.reload("r")
        state = rig.kv.view()
        stream = next(s for s in state.streams if s.request == "r")
        rig.backend.wait(stream.written)
        now = rig.backend.completed()
        assert covers(now, stream.written), f"waited for {stream.written}, completed is {now}"
        assert covers(now, newest), f"completed fell from {newest} to {now}"
        newest = now
    rig.backend.wait(NOTHING)
    rig.end()


def a_lost_device_refuses_everything(make: Make) -> None:
    """A failure after a submit is fatal: whoever comes later hears it too."""
    rig = Rig(make, "r")
    rig.run(Step([Segment("r", span=3)]))
    rig.backend.fail_next(CopyOut, fatal=True)
    try:
        rig.kv.offload("r")
    except Poisoned:
        pass
    else:
        raise AssertionError("the loss of the device went unnoticed")
    assert isinstance(rig.kv.ingest("s"), ManagerPoisoned)


def closing_twice_is_harmless(make: Make) -> None:
    """So is closing before anything ran."""
    rig = Rig(make)
    rig.kv.close()
    rig.kv.close()
    rig.backend.close()


CONTRACT: Sequence[Callable[[Make], None]] = (
    what_a_step_writes_is_read_back,
    a_step_writes_its_own_pages_only,
    offload_and_reload_keep_every_token,
    forks_copy_the_partly_filled_page,
    plans_launched_together_keep_their_own_tables,
    a_cancelled_plan_leaves_no_stale_table,
    an_offload_that_fails_at_submit_changes_nothing,
    a_reload_that_fails_at_submit_changes_nothing,
    a_fork_that_fails_at_submit_aborts_its_launch,
    poisoned_pages_hold_nothing_to_rely_on,
    completion_is_polled_and_only_rises,
    a_lost_device_refuses_everything,
    closing_twice_is_harmless,
)


# -- several groups


def every_group_reads_back_what_steps_write(make: Make) -> None:
    """Whole and in part, over page borders, and from the first page on that a window still needs."""
    rig = Rig(make, "r", geometry=SHARED)
    tokens: list[int] = []
    for span in (3, 6, 1, 7):
        [more] = rig.run(Step([Segment("r", span=span)]))
        tokens += more
        assert rig.content("r") == tokens
    stream = rig.stream("r")
    assert stream.skipped == (0, SHARED.skipped(1, 17)) == (0, 3)
    held = stream.device[1]
    assert rig.backend.load(1, held, 1, 4) == tokens[13:16]
    assert rig.backend.read_many([held, held[1:]], [5, 1], 1) == [tokens[12:17], tokens[16:17]]
    rig.end()


def a_step_over_groups_writes_its_own_pages_only(make: Make) -> None:
    """The sinks of all groups are nobody's; neighbours in a sector keep their tokens."""
    rig = Rig(make, "r", "s", geometry=SHARED)
    [kept, _] = rig.run(Step([Segment("r", span=5), Segment.padding(9)]))
    [also] = rig.run(Step([Segment("s", span=3)]))
    [more, _, few] = rig.run(Step([Segment("r", span=6), Segment.padding(2), Segment("s", span=9)]))
    assert rig.content("r") == kept + more
    assert rig.content("s") == also + few
    rig.end()


def a_sector_is_reused_by_another_group(make: Make) -> None:
    """What a group gave back is written by another one, which reads back its own tokens, and nobody else's."""
    rig = Rig(make, "r", "s", geometry=SHARED)
    rig.run(Step([Segment("r", span=20)]))
    before = rig.pages("r"), rig.pages("r", group=1)
    rig.kv.reset("r")
    tokens: list[int] = []
    used: set[int] = set()
    for _ in range(10):
        [more] = rig.run(Step([Segment("s", span=2)]))
        tokens += more
        assert rig.content("s") == tokens
        used |= {page // 2 for page in rig.pages("s", group=1)}
    sectors_of_the_window = {page // 2 for page in before[1]}
    assert used & set(before[0]) or set(rig.pages("s")) & sectors_of_the_window, "no sector changed its group"
    rig.end()


def what_a_group_writes_is_written_over_what_others_had_in_the_same_bytes(make: Make) -> None:
    """A page of one group is gone when another group's page was written over it."""
    rig = Rig(make, geometry=SHARED)
    tokens = rig.stamps(4)
    rig.backend.store(0, [3], 0, tokens)
    rig.backend.store(1, [6], 0, rig.stamps(4))
    assert not set(rig.backend.read([3], 4)) & set(tokens)
    rig.backend.store(1, [6, 7], 0, tokens + rig.stamps(4))
    rig.backend.store(0, [3], 0, rig.stamps(4))
    assert not set(rig.backend.read([6], 4, 1)) & set(tokens)
    rig.kv.close()


def a_window_lets_pages_go_and_reads_on(make: Make) -> None:
    """Pages that a window has left are granted to others while their old owner goes on."""
    rig = Rig(make, "r", "s", geometry=SHARED)
    [tokens] = rig.run(Step([Segment("r", span=4)]))
    others: list[int] = []
    first = rig.pages("r", group=1)
    for _ in range(5):
        more, few = rig.run(Step([Segment("r", span=2), Segment("s", span=2)]))
        tokens, others = tokens + more, others + few
        assert (rig.content("r"), rig.content("s")) == (tokens, others)
    assert not set(first) & set(rig.pages("r", group=1))
    rig.end()


def offload_and_reload_move_what_each_group_holds(make: Make) -> None:
    """A request comes back as it was in every group, onto other pages and sectors."""
    rig = Rig(make, "r", "s", geometry=SHARED)
    [tokens] = rig.run(Step([Segment("r", span=13)]))
    pages = [rig.pages("r", group=group) for group in (0, 1)]
    rig.kv.offload("r")
    assert rig.content("r") == tokens
    for group in (0, 1):
        rig.backend.poison(Tier.DEVICE, group, pages[group])
    rig.run(Step([Segment("s", span=6)]))
    rig.kv.reload("r")
    assert rig.content("r") == tokens
    [more] = rig.run(Step([Segment("r", span=4)]))
    assert rig.content("r") == tokens + more
    rig.end()


def forks_copy_the_partly_filled_page_of_every_group(make: Make) -> None:
    """Source and target go their own ways in every group."""
    _forks(Rig(make, "r", geometry=SHARED), 10)


def poisoned_pages_of_any_group_hold_nothing_to_rely_on(make: Make) -> None:
    """What the harness spoils in one group reads back as something that was never written there."""
    rig = Rig(make, "r", geometry=SHARED)
    [tokens] = rig.run(Step([Segment("r", span=6)]))
    full, window = rig.pages("r"), rig.pages("r", group=1)
    rig.backend.poison(Tier.DEVICE, 1, window)
    assert not set(rig.backend.read(window, 6, 1)) & set(tokens)
    assert rig.backend.read(full, 6) == tokens
    rig.kv.close()


GROUPS: Sequence[Callable[[Make], None]] = (
    every_group_reads_back_what_steps_write,
    a_step_over_groups_writes_its_own_pages_only,
    a_sector_is_reused_by_another_group,
    what_a_group_writes_is_written_over_what_others_had_in_the_same_bytes,
    a_window_lets_pages_go_and_reads_on,
    offload_and_reload_move_what_each_group_holds,
    forks_copy_the_partly_filled_page_of_every_group,
    poisoned_pages_of_any_group_hold_nothing_to_rely_on,
)
