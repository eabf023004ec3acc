"""Forks: rows F1–F7 of the known bugs, and their siblings."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvstate.ops import ForkCopy
from kvstate.refusals import ForkPending, PagesExhausted, TooLarge, UnknownRequest
from kvstate.state import Lease
from kvstate.types import LabelFork, Publication, Record, Segment, Step, StreamFork, StreamId

FORK = (LabelFork("main", "cfg"),)


def chain(*labels: str) -> tuple[LabelFork, ...]:
    """Fork each label onto the next."""
    return tuple(LabelFork(one, two) for one, two in itertools.pairwise(labels))


def between(source: str, target: str) -> StreamFork:
    """Fork the main streams of two requests."""
    return StreamFork(StreamId(source), StreamId(target))


# -- F1


def test_F1_a_fork_at_a_page_border_and_a_segment_on_its_target_get_a_page(machines: Any) -> None:
    kv = machines(pages=3)
    kv.ingest("r")
    kv.run(Segment("r", span=4))
    main = kv.tokens("r")
    kv.run(Segment("r", "cfg", 1), pre_forks=FORK)

    assert kv.device_free == 0
    assert kv.pages("r", "cfg")[:2] == kv.pages("r") and len(kv.pages("r", "cfg")) == 3
    assert kv.tokens("r") == main, "token 4 of cfg is not token 0 of main's last page"
    assert kv.tokens("r", "cfg")[:4] == main and kv.tokens("r", "cfg")[4].startswith("r/cfg@4")


def test_F1_without_that_page_the_step_is_refused(machines: Any) -> None:
    kv = machines(pages=6)
    kv.ingest("r", "s")
    kv.run(Segment("r", span=4), Segment("s", span=8))

    assert kv.admit(Segment("r", "cfg", 1), pre_forks=FORK) == PagesExhausted(request="r", label="cfg", short=(1,))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("span", [0, 1, 2, 3])
def test_F1_sibling_every_length_and_span_reserves_what_it_writes(kv: Any, length: int, span: int) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=length))
    before, free = kv.tokens("r"), kv.device_free
    kv.run(Segment("r", "cfg", span), Segment("r", "cfg", 1), pre_forks=FORK)

    cfg = kv.tokens("r", "cfg")
    assert (kv.tokens("r"), cfg[:length], len(cfg)) == (before, before, length + span + 1)
    assert free - kv.device_free == kv.geometry.pages_for(len(cfg)) - length // 2, "only full pages are shared"


def test_F1_sibling_source_and_target_grow_in_the_same_step(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=4))
    before = kv.tokens("r")
    kv.run(Segment("r", span=1), Segment("r", "cfg", 1), pre_forks=FORK)

    main, cfg = kv.tokens("r"), kv.tokens("r", "cfg")
    assert main[:4] == cfg[:4] == before
    assert (main[4].split("@")[0], cfg[4].split("@")[0]) == ("r/main", "r/cfg")


def test_F1_sibling_a_post_fork_target_that_is_also_a_segment_gets_both(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3), Segment("r", "cfg", 4))
    kv.run(Segment("r", span=2), Segment("r", "cfg", 1), post_forks=FORK)

    assert kv.tokens("r", "cfg") == kv.tokens("r") and len(kv.tokens("r")) == 5
    assert kv.pages("r", "cfg")[:2] == kv.pages("r")[:2]


# -- F2


@pytest.mark.parametrize("length", [2, 3])
def test_F2_a_chain_of_pre_forks_onto_new_labels_copies_the_first_source(kv: Any, length: int) -> None:
    kv.ingest("r")
    kv.run(Segment("r", "a", length))
    before = kv.tokens("r", "a")
    kv.run(Segment("r", "c", 1), pre_forks=chain("a", "b", "c"))

    assert kv.tokens("r", "a") == kv.tokens("r", "b") == kv.tokens("r", "c")[:length] == before


@pytest.mark.parametrize("length", [2, 3])
def test_F2_a_pre_fork_then_a_post_fork_from_its_target(kv: Any, length: int) -> None:
    kv.ingest("r")
    kv.run(Segment("r", "a", length))
    before = kv.tokens("r", "a")
    kv.run(Segment("r", "b", 2), pre_forks=chain("a", "b"), post_forks=chain("b", "c"))

    assert kv.tokens("r", "b")[:length] == before
    assert kv.tokens("r", "c") == kv.tokens("r", "b") and len(kv.tokens("r", "c")) == length + 2


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_F2_sibling_a_chain_of_post_forks_takes_what_was_accepted(kv: Any, accepted: int) -> None:
    kv.ingest("r")
    kv.run(Segment("r", "a", 2))
    kv.run(Segment("r", "a", 3), post_forks=chain("a", "b", "c"), accepted=(accepted,))

    assert len(kv.tokens("r", "a")) == 2 + accepted
    assert kv.tokens("r", "a") == kv.tokens("r", "b") == kv.tokens("r", "c")


def test_F2_sibling_forks_of_the_same_phase_run_in_declaration_order(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", "a", 3), Segment("r", "b", 1))
    a, b = kv.tokens("r", "a"), kv.tokens("r", "b")
    kv.run(Segment("r", span=1), pre_forks=(LabelFork("b", "c"), LabelFork("a", "b")))

    assert (kv.tokens("r", "c"), kv.tokens("r", "b"), kv.tokens("r", "a")) == (b, a, a)


def test_F2_sibling_two_labels_change_places(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", "a", 3), Segment("r", "b", 1))
    a, b = kv.tokens("r", "a"), kv.tokens("r", "b")
    swap = (LabelFork("a", "saved"), LabelFork("b", "a"), LabelFork("saved", "b"))
    kv.run(Segment("r", span=1), post_forks=swap)

    assert (kv.tokens("r", "a"), kv.tokens("r", "b"), kv.tokens("r", "saved")) == (b, a, a)


def test_F2_sibling_a_source_that_this_step_opens_is_legal_and_one_that_nobody_opens_is_none(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", "a", 2), pre_forks=chain("a", "b"), post_forks=(LabelFork("a", "c"), LabelFork("x", "y")))

    assert (kv.tokens("r", "b"), kv.tokens("r", "c")) == ([], kv.tokens("r", "a"))
    assert kv.stream("r", "x") is None and kv.stream("r", "y") is None


# -- F3


def test_F3_a_post_fork_of_a_dropped_source_leaves_its_target_alone(kv: Any) -> None:
    kv.ingest("parent", "child")
    kv.run(Segment("parent", span=3), Segment("child", span=3))
    child = kv.tokens("child")
    lease = kv.launched(Segment("parent"), post_forks=(between("parent", "child"),))
    kv.reset("parent")

    assert kv.commit(lease).dropped == (0,)
    assert kv.tokens("child") == child
    assert isinstance(kv.admit(Segment("child")), Lease), "the fork is no longer pending"


@pytest.mark.parametrize("verb", ["reset", "remove"])
def test_F3_sibling_a_pre_fork_of_a_dropped_source_drops_its_target(kv: Any, verb: str) -> None:
    kv.ingest("parent", "child", "other")
    kv.run(Segment("parent", span=3), Segment("child", span=3))
    child = kv.tokens("child")
    lease, _ = kv.staged(Segment("child"), Segment("other"), pre_forks=(between("parent", "child"),))
    getattr(kv, verb)("parent")
    kv.plan(lease)
    kv.launch(kv.plan(lease))

    assert kv.commit(lease).dropped == (0,)
    assert (kv.tokens("child"), len(kv.tokens("other"))) == (child, 1)


def test_F3_sibling_a_dropped_source_drops_the_whole_chain(kv: Any) -> None:
    kv.ingest("a", "b", "c")
    kv.run(Segment("b", span=1), Segment("c", span=1))
    tokens = kv.tokens("b"), kv.tokens("c")
    lease = kv.launched(Segment("c", span=2), pre_forks=(between("a", "b"), between("b", "c")))
    kv.remove("a")

    assert kv.commit(lease).dropped == (0,)
    assert (kv.tokens("b"), kv.tokens("c")) == tokens


def test_F3_sibling_a_committed_child_outlives_its_parent(kv: Any) -> None:
    kv.ingest("parent", "child")
    kv.run(Segment("parent", span=5), post_forks=(between("parent", "child"),))
    child = kv.tokens("child")
    kv.remove("parent")

    assert kv.tokens("child") == child
    kv.run(Segment("child"))
    assert kv.tokens("child")[:5] == child


# -- F4


@pytest.mark.parametrize("phase", ["pre_forks", "post_forks"])
@pytest.mark.parametrize("how_far", ["admitted", "planned", "launched"])
def test_F4_a_cancelled_fork_leaves_the_contents_of_its_target(kv: Any, phase: str, how_far: str) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=5), Segment("r", "cfg", 3))
    main, cfg, free = kv.tokens("r"), kv.tokens("r", "cfg"), kv.device_free
    lease = kv.admit(Segment("r", "cfg", 1), **{phase: FORK})
    if how_far != "admitted":
        plan = kv.plan(lease)
    if how_far == "launched":
        kv.launch(plan)
    kv.abort(lease)

    assert (kv.tokens("r"), kv.tokens("r", "cfg"), kv.device_free) == (main, cfg, free)
    assert kv.stream("r", "cfg").length == 3


def test_F4_sibling_a_fork_with_open_leases_above_is_cancelled(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3), Segment("r", "cfg", 1))
    main, cfg = kv.tokens("r"), kv.tokens("r", "cfg")
    fork = kv.admit(Segment("r", "cfg", 1), pre_forks=FORK)
    above, plan = kv.staged(Segment("r", "cfg", 2), Segment("r"))
    assert [(seen.start, seen.length) for seen in plan.in_step_order] == [(4, 6), (3, 4)]
    kv.abort(fork)

    kv.plan(above)
    kv.launch(kv.plan(above))
    assert kv.commit(above).dropped == (0, 1), "both stood on a row of the fork's lease"
    assert (kv.tokens("r", "cfg"), kv.tokens("r"), kv.device_free) == (cfg, main, 5)


def test_F4_sibling_a_fork_onto_a_label_that_shares_the_same_pages_is_cancelled(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=5), post_forks=FORK)
    cfg = kv.tokens("r", "cfg")
    kv.abort(kv.launched(Segment("r", "cfg", 2), pre_forks=FORK))

    assert kv.tokens("r", "cfg") == cfg
    kv.remove("r")
    assert kv.device_free == 8


def test_F4_sibling_a_cancelled_fork_onto_a_new_label_leaves_no_label(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    before = kv.manager.view().unordered().streams
    for phase in ("pre_forks", "post_forks"):
        kv.abort(kv.admit(Segment("r", span=2), **{phase: FORK}))
        assert kv.manager.view().unordered().streams == before


def test_F4_sibling_while_a_post_fork_is_pending_nobody_else_names_its_target(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3), Segment("r", "cfg", 1))
    lease = kv.admit(Segment("r"), post_forks=FORK)

    assert kv.admit(Segment("r", "cfg")) == ForkPending(request="r", label="cfg")
    kv.abort(lease)
    assert isinstance(kv.admit(Segment("r", "cfg")), Lease)


# -- F5


def test_F5_a_reset_that_keeps_pages_keeps_none_that_a_sibling_has(kv: Any) -> None:
    kv.ingest("parent", "child")
    kv.run(Segment("parent", span=5), post_forks=(between("parent", "child"),))
    child = kv.tokens("child")

    done = kv.reset("parent", free=False)
    assert done.pages_kept == 1
    kv.run(Segment("parent", span=6))
    assert kv.tokens("child") == child
    assert not set(kv.pages("parent")) & set(kv.pages("child"))


def test_F5_sibling_the_labels_of_one_request_are_reset_together_and_apart(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=5), post_forks=FORK)
    kv.reset("r", free=False)
    kv.run(Segment("r", span=3), Segment("r", "cfg", 3))

    main, cfg = kv.tokens("r"), kv.tokens("r", "cfg")
    assert all(token.startswith("r/main") for token in main) and all(token.startswith("r/cfg") for token in cfg)
    assert not set(kv.pages("r")) & set(kv.pages("r", "cfg"))


def test_F5_sibling_a_reset_keeps_none_that_a_planned_fork_reads(kv: Any) -> None:
    kv.ingest("parent", "child")
    kv.run(Segment("parent", span=4))
    lease = kv.launched(Segment("child"), pre_forks=(between("parent", "child"),))

    assert kv.reset("parent", free=False).pages_kept == 0
    kv.run(Segment("parent", span=4))
    assert kv.commit(lease).dropped == (0,)
    assert kv.tokens("child") == []


def test_F5_sibling_a_reset_keeps_none_that_a_claim_moves(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=4))
    claim = kv.claim_offload("r")

    assert kv.reset("r", free=False).pages_kept == 0
    kv.run(Segment("r", span=3))
    new = kv.tokens("r")
    kv.abandon(claim)
    assert (kv.tokens("r"), kv.device_free) == (new, 6)


def test_F5_sibling_a_reset_keeps_none_that_a_fetch_writes(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    record = Record(6, 0, 2, ((0, 1, 2),), False, "elsewhere", 1, 0)
    [fetch] = kv.claim_retrieve("r", Publication("r", 1, {0: {"main": record}})).fetches

    assert kv.reset("r", free=False).pages_kept == 1, "the last page is the fetch's too"
    kv.run(Segment("r", span=4))
    new = kv.tokens("r")
    kv.transport.fail(fetch, "garbage arrived")
    kv.poll()
    assert kv.tokens("r") == new


# -- F6


def test_F6_two_beams_never_write_one_page(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", "a", 3))
    for _ in range(2):
        kv.run(Segment("r", "a"), Segment("r", "b"), pre_forks=chain("a", "b"))
        a, b = kv.tokens("r", "a"), kv.tokens("r", "b")
        assert a[:-1] == b[:-1] and a[-1] != b[-1]
        writes = [set(kv.pages("r", label)[-1:]) for label in ("a", "b")]
        assert not writes[0] & writes[1]
        kv.run(Segment("r", "b"), Segment("r", "a"), pre_forks=chain("b", "a"))
        assert kv.tokens("r", "a")[:-1] == kv.tokens("r", "b")[:-1]
        assert kv.tokens("r", "b")[: len(b)] == b


def test_F6_sibling_a_beam_that_was_reset_is_forked_onto_again(kv: Any) -> None:
    kv.ingest("best", "beam")
    kv.run(Segment("best", span=3), post_forks=(between("best", "beam"),))
    stale = kv.pages("beam")
    kv.run(Segment("beam", span=2))
    kv.reset("beam", free=False)
    kv.run(Segment("best"), Segment("beam"), pre_forks=(between("best", "beam"),))

    best, beam = kv.tokens("best"), kv.tokens("beam")
    assert best[:3] == beam[:3] and best[3] != beam[3]
    assert kv.pages("best")[1] != kv.pages("beam")[1]
    assert stale[0] == kv.pages("beam")[0] == kv.pages("best")[0]


def test_F6_sibling_a_fork_copies_its_source_as_it_is_now(kv: Any) -> None:
    kv.ingest("best", "beam")
    kv.run(Segment("best", span=3), post_forks=(between("best", "beam"),))
    kv.reset("best", free=False)
    kv.run(Segment("best", span=1))
    best = kv.tokens("best")
    kv.run(Segment("best", span=0), post_forks=(between("best", "beam"),))

    assert kv.tokens("beam") == best
    assert kv.last(ForkCopy).copies[0] == [(kv.pages("best")[0], kv.pages("beam")[0], 1)]


# -- F7


@pytest.mark.parametrize("committed", [True, False])
def test_F7_a_span_of_zero_on_a_label_nobody_opened_creates_nothing(kv: Any, committed: bool) -> None:
    kv.ingest("r")
    kv.run(Segment("r", span=3))
    before = [(s.label, s.device, s.length) for s in kv.manager.view().streams]
    lease, plan = kv.staged(Segment("r", "ghost", 0), Segment("r", span=0))

    ghost, main = plan.in_step_order
    assert (ghost.start, ghost.length, ghost.pages) == (0, 0, ())
    assert (main.start, main.length) == (3, 3)
    kv.launch(plan)
    kv.commit(lease) if committed else kv.abort(lease)
    assert [(s.label, s.device, s.length) for s in kv.manager.view().streams] == before


def test_F7_sibling_a_fork_that_does_nothing_creates_nothing(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", "ghost", 0), pre_forks=chain("x", "y"), post_forks=chain("y", "z"))

    assert [s.label for s in kv.manager.view().streams] == ["main"]
    assert kv.device_free == 8


def test_F7_sibling_a_step_that_does_not_commit_opens_nothing(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", "ghost", 3), commit=False)

    assert kv.stream("r", "ghost") is None and kv.device_free == 8


def test_F7_sibling_of_nothing_accepted_the_label_stays_open_and_empty(kv: Any) -> None:
    kv.ingest("r")
    kv.run(Segment("r", "new", 3), accepted=(0,))

    assert (kv.stream("r", "new").length, kv.tokens("r", "new")) == (0, [])


def test_F7_sibling_what_can_never_fit_is_said_to_be_too_large(machines: Any) -> None:
    kv = machines(pages=2)
    kv.ingest("r")
    step = Step([Segment("r", span=3)], post_forks=FORK)

    assert kv.manager.admit(step) == TooLarge(request="r", label="main", wanted=3, capacity=2)
    assert kv.admit(Segment("s"), post_forks=FORK) == UnknownRequest(request="s", label="main")
