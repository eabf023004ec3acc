"""A row holds what was uploaded into it, never what somebody planned; a running step's row is not rewritten."""

from typing import Any

import pytest
import torch

from gpu_backend.page_tables import SINK_ROW
from gpu_backend.queues import Staging
from kvstate import LabelFork, RetentionPolicy, Segment, Step
from kvstate.errors import SubmitError
from kvstate.ops import Plan

from .rig import CountingQueues, LateQueues, Rig, layout


def rows(rig: Rig, plan: Plan) -> list[list[int]]:
    """The page-table rows that a running plan reads, each as far as its view goes."""
    tables = rig.backend.bind(plan).tensors
    [label] = plan.views
    kept = rig.backend.page_tables()[tables(label).rows.long()]
    return [row[: len(view.pages)].tolist() for row, view in zip(kept, plan.views[label], strict=True)]


def expected(plan: Plan) -> list[list[int]]:
    [label] = plan.views
    return [list(view.pages) for view in plan.views[label]]


def uploaded(rig: Rig) -> int:
    return rig.backend.memory.tables.uploaded


def test_a_step_uploads_what_its_tables_have_beyond_the_rows() -> None:
    rig = Rig()
    rig.ingest("a", "b")
    for spans, fresh in [((9, 2), 4), ((1, 1), 0), ((3, 1), 1), ((1, 1), 1), ((0, 1), 0)]:
        before = uploaded(rig)
        with rig.step(Segment("a", span=spans[0]), Segment("b", span=spans[1])) as plan:
            assert rows(rig, plan) == expected(plan)
            assert uploaded(rig) - before == fresh


def test_a_step_without_new_pages_uploads_no_delta_at_all() -> None:
    queues = CountingQueues()
    rig = Rig(queues=queues)
    rig.ingest("a")
    with rig.step(Segment("a", span=2)):
        assert queues.uploads == 1
    with rig.step(Segment("a", span=1)):
        assert queues.uploads == 1


def test_d15_a_cancelled_plan_leaves_no_stale_row() -> None:
    rig = Rig()
    rig.ingest("a", "b")
    with rig.step(Segment("a", span=4)):
        pass
    cancelled = rig.plan(Step((Segment("a", span=6),)))
    pages = cancelled.in_step_order[0].pages
    rig.manager.abort(cancelled.lease)
    with rig.step(Segment("b", span=3)):
        pass
    with rig.step(Segment("a", span=5)) as plan:
        assert expected(plan) != [list(pages)], "others than the cancelled plan had"
        assert rows(rig, plan) == expected(plan)


def test_d15_a_launch_that_failed_leaves_no_stale_row() -> None:
    rig = Rig()
    rig.ingest("a", "b")
    with rig.step(Segment("a", span=4)):
        pass
    with pytest.raises(ZeroDivisionError), rig.launched(Step((Segment("a", span=6),))) as plan:
        assert rows(rig, plan) == expected(plan)
        raise ZeroDivisionError
    with rig.step(Segment("b", span=12)) as plan:
        assert rows(rig, plan) == expected(plan)
    before = uploaded(rig)
    with rig.step(Segment("a", span=5)) as plan:
        assert rows(rig, plan) == expected(plan)
    assert uploaded(rig) - before == 3, "the table has another origin: the whole row"


def test_a_shorter_table_of_the_same_origin_uploads_nothing() -> None:
    rig = Rig()
    rig.ingest("a")
    with rig.step(Segment("a", span=3)):
        pass
    with pytest.raises(ZeroDivisionError), rig.launched(Step((Segment("a", span=3),))):
        raise ZeroDivisionError
    before = uploaded(rig)
    with rig.step(Segment("a", span=1)) as plan:
        assert rows(rig, plan) == expected(plan)
    assert uploaded(rig) == before


class FailingQueues(CountingQueues):
    failing = False

    def upload(self, *args: Any) -> None:
        if self.failing:
            raise SubmitError("made to fail")
        super().upload(*args)


@pytest.mark.parametrize("count", [1, 4])
def test_an_upload_that_failed_is_made_again(count: int) -> None:
    queues = FailingQueues()
    rig = Rig(queues=queues, rows=count)
    rig.ingest("a", "b")
    # With one row, "b" takes that of "a", whose table then stays the same throughout.
    for request, span in (("a", 3), ("b", 3)):
        with rig.step(Segment(request, span=span)):
            pass
    queues.failing = True
    with pytest.raises(SubmitError), rig.launched(Step((Segment("a", span=1 if count == 1 else 3),))):
        pass
    assert all(row.readers == 0 for row in rig.backend.memory.tables._rows)
    queues.failing = False
    with rig.step(Segment("a", span=1)) as plan:
        assert rows(rig, plan) == expected(plan)


def test_retention_and_forks_change_whole_rows() -> None:
    rig = Rig()
    rig.ingest("a")
    with rig.step(Segment("a", span=14), retention={"main": RetentionPolicy(context_budget=6)}):
        pass
    with rig.step(Segment("a", span=2)) as plan:
        assert rows(rig, plan) == expected(plan)
        assert len(expected(plan)[0]) < 4
    for _ in range(2):
        with rig.step(Segment("a", "cfg", 3), pre_forks=(LabelFork("main", "cfg"),)) as plan:
            assert rows(rig, plan) == expected(plan)


def test_the_row_of_a_running_step_is_not_rewritten_when_its_request_begins_again() -> None:
    rig = Rig()
    rig.ingest("a")
    tables = rig.backend.memory.tables
    with rig.launched(Step((Segment("a", span=7),))) as running:
        first = rig.backend.bind(running).tensors().rows.tolist()
        held = rows(rig, running)
        rig.manager.remove("a")
        rig.ingest("a", "b")
        with rig.step(Segment("b", span=3), Segment("a", span=9)) as plan:
            second = rig.backend.bind(plan).tensors().rows.tolist()
            assert rows(rig, plan) == expected(plan)
            assert rows(rig, running) == held == expected(running)
        assert not set(first) & set(second)
        assert not set(first) & set(tables._free)
    assert set(first) <= set(tables._free), "nobody reads it any more"


def test_rows_are_recycled_by_their_last_use() -> None:
    rig = Rig(layout(pages=40), rows=2)
    names = ["a", "b", "c", "d"]
    rig.ingest(*names)
    for turn in range(3):
        for name in names:
            with rig.step(Segment(name, span=3)) as plan:
                assert rows(rig, plan) == expected(plan)
            kept = [stream for _, stream in rig.backend.memory.tables.streams()]
            assert f"{name}/main" in kept and len(kept) <= 2, turn


def test_a_step_with_more_streams_than_rows_is_refused_and_holds_none() -> None:
    rig = Rig(rows=2)
    rig.ingest("a", "b", "c")
    segments = tuple(Segment(name) for name in "abc")
    with pytest.raises(SubmitError, match="all 2 page-table rows; raise `rows`"), rig.launched(Step(segments)):
        pass
    for pair in (segments[:2], segments[1:]):
        with rig.step(*pair) as plan:
            assert rows(rig, plan) == expected(plan)
    assert rig.judge.violations == []


def test_a_sequence_longer_than_a_row_is_refused_with_a_hint() -> None:
    rig = Rig(layout(max_seq_len=8))
    rig.ingest("a")
    with rig.step(Segment("a", span=8)):
        pass
    hint = r"a/main has 9 tokens in 3 pages, .* raise max_seq_len"
    with pytest.raises(SubmitError, match=hint), rig.launched(Step((Segment("a"),))):
        pass
    assert rig.manager.view().leases == ()


def test_padding_reads_the_row_that_is_all_sink() -> None:
    rig = Rig()
    rig.ingest("a")
    with rig.step(Segment("a", span=2), Segment.padding(9)) as plan:
        assert rig.backend.bind(plan).tensors().rows.tolist()[1] == SINK_ROW
        assert rows(rig, plan)[1] == [12, 12, 12]
    assert (rig.backend.page_tables()[SINK_ROW] == rig.layout.sink).all()


def test_no_row_ever_holds_a_page_that_does_not_exist() -> None:
    rig = Rig()
    rig.ingest("a")
    with rig.step(Segment("a", span=40)):
        pass
    tensor = rig.backend.page_tables()
    assert ((tensor >= 0) & (tensor <= rig.layout.sink)).all()


def test_rows_that_cannot_be_addressed_are_refused() -> None:
    for count in (0, 1 << 30):
        with pytest.raises(ValueError, match="cannot be addressed"):
            Rig(rows=count)


# -- staging buffers


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_d7_a_staging_buffer_is_not_rewritten_before_its_upload_ran() -> None:
    queues = LateQueues()
    staging = Staging(queues, buffers=2)
    first, second = staging.upload(numbers(1, 2)), staging.upload(numbers(3, 4))
    assert queues.waits == 0
    third = staging.upload(numbers(5, 6))
    assert queues.waits == 1, "no buffer was free, so the host waited for the oldest"
    assert first.tolist() == [1, 2]
    queues.run()
    assert [second.tolist(), third.tolist()] == [[3, 4], [5, 6]]


def test_d7_a_step_that_runs_late_uses_its_own_slots() -> None:
    queues = LateQueues()
    queues.late = False
    rig = Rig(layout(page_size=64), queues=queues)
    names = [f"r{k}" for k in range(9)]
    rig.ingest(*names)
    rig.backend.register("graph", 1)
    for place, name in enumerate(names):
        with rig.step(Segment(name, span=place + 1)) as plan:
            pass
    with rig.step(Segment("r8")) as plan:
        tensors = rig.backend.bind(plan, "graph").tensors()
    queues.late = True
    addresses = []
    for name in names[:8]:
        with rig.step(Segment(name)) as plan:
            assert rig.backend.bind(plan, "graph").tensors().token_page.data_ptr() == tensors.token_page.data_ptr()
            addresses.extend(plan.addresses("main"))
    assert queues.waits == 4, "four buffers, eight steps"
    for place in range(4, 8):
        queues.run(1)
        assert (tensors.token_page.item(), tensors.token_slot.item()) == addresses[place]


def test_the_next_free_buffer_is_taken_without_a_wait() -> None:
    queues = LateQueues()
    staging = Staging(queues, buffers=2)
    for turn in range(5):
        target = staging.upload(numbers(turn))
        queues.run()
        assert target.tolist() == [turn]
    assert queues.waits == 0


def test_a_long_upload_gets_a_longer_buffer() -> None:
    staging = Staging(LateQueues(), buffers=1)
    long = torch.arange(5000, dtype=torch.int32)
    target = staging.upload(long)
    staging.upload(numbers(7))
    assert torch.equal(target, long)
