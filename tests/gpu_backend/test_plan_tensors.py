"""The tensors of a plan say what the plan says: by label, by view, by token; static ones at the same address."""

import doctest
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_backend import plan_tensors as plan_tensors_module
from gpu_backend.page_tables import SINK_ROW
from gpu_backend.plan_tensors import CaptureLengthError, PlanTensors
from kvstate import RetentionPolicy, Segment, Step
from kvstate.ops import Plan

from .rig import STEPS, CountingQueues, Rig, layout

TENSORS = [name for name, kind in PlanTensors.__annotations__.items() if kind == "Tensor"]


def agree(rig: Rig, plan: Plan, tensors: PlanTensors) -> None:
    """Compare the tensors of one plan label with the plan's own words."""
    views = plan.views[tensors.label]
    size, tokens, count = rig.layout.page_size, tensors.tokens, tensors.views
    assert (tokens, count) == (sum(view.span for view in views), len(views))
    assert list(zip(tensors.token_page[:tokens].tolist(), tensors.token_slot[:tokens].tolist(), strict=True)) == (
        plan.addresses(tensors.label)
    )
    assert tensors.token_position[:tokens].tolist() == [
        view.position + place for view in views for place in range(view.span)
    ]
    assert tensors.query_indptr[: count + 1].tolist() == list(accumulate((view.span for view in views), initial=0))
    begins = tensors.page_indptr.tolist()
    for place, view in enumerate(views):
        assert tuple(tensors.page_indices[begins[place] : begins[place + 1]].tolist()) == view.pages
        assert tensors.lengths[place] == view.length
        last = tensors.last_page_lengths[place]
        assert (len(view.pages) - 1) * size + last == view.length if view.length else last == 0
        assert tuple(rig.backend.page_tables()[tensors.rows[place], : len(view.pages)].tolist()) == view.pages
    assert tensors.span_max == max(view.span for view in views)
    assert tensors.length_max == max(view.length for view in views)
    assert tensors.decode == all(view.span == 1 for view in views)


def tail_at_sink(rig: Rig, tensors: PlanTensors) -> None:
    """Rows of static buffers that do not count write to the sink and read nothing else."""
    tokens, count, bucket, sink = tensors.tokens, tensors.views, tensors.bucket, rig.layout.sink
    assert tensors.token_page.shape == (bucket,)
    assert tensors.token_page[tokens:].tolist() == [sink] * (bucket - tokens)
    assert tensors.token_slot[tokens:].tolist() == [0] * (bucket - tokens)
    assert tensors.rows[count:].tolist() == [SINK_ROW] * (bucket - count)
    assert tensors.query_indptr[-1] == bucket, "every row belongs to a view"
    begins, ends = tensors.page_indptr[count], tensors.page_indptr[-1]
    assert tensors.page_indices[begins:ends].tolist() == [sink] * (bucket - tokens)
    assert (tensors.lengths[count:] == tensors.query_indptr.diff()[count:]).all()
    assert (tensors.last_page_lengths[count:] == tensors.lengths[count:]).all()


def decode_rig(**options: object) -> Rig:
    rig = Rig(layout(pages=40), **options)
    rig.ingest("a", "b", "c")
    with rig.step(Segment("a", span=3), Segment("b", span=4), Segment("c", span=9)):
        pass
    return rig


DECODE = (Segment("b"), Segment("a"), Segment("c"))


def test_examples_run() -> None:
    assert doctest.testmod(plan_tensors_module, extraglobs={"torch": torch}).failed == 0


@pytest.mark.slow
@given(st.integers(1, 5), st.lists(STEPS, min_size=1, max_size=4), st.booleans())
def test_tensors_agree_with_the_plan(page_size: int, program: list[list[tuple[str, str, int]]], combine: bool) -> None:
    rig = Rig(layout(page_size=page_size, pages=200, host_pages=0), rows=8)
    rig.ingest("a", "b", "c")
    for rows in program:
        segments = [Segment(*row) for row in rows]
        labels = tuple(dict.fromkeys(segment.label for segment in segments))
        combined = {labels: "both"} if combine and len(labels) == 2 else {}
        with rig.step(*segments, combined_labels=combined) as plan:
            access = rig.backend.bind(plan)
            assert access.labels == tuple(plan.views)
            for label in access.labels:
                agree(rig, plan, access.tensors(label))


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 9), min_size=3, max_size=3),
    st.lists(st.sampled_from(("a", "b", "c", None)), min_size=1, max_size=5, unique=True),
    st.booleans(),
)
def test_decode_and_packed_addressing_agree(lengths: list[int], requests: list[str | None], static: bool) -> None:
    rig = Rig(layout(pages=40), rows=8)
    rig.ingest("a", "b", "c")
    with rig.step(*(Segment(name, span=span) for name, span in zip("abc", lengths, strict=True))):
        pass
    rig.backend.register("graph", 8)
    with rig.step(*(Segment(request) for request in requests)) as plan:
        launch = rig.backend._launch(plan)
        found = []
        for packed in (False, True):
            made = rig.backend.memory.addressing.make(plan, launch.rows, "graph" if static else None, packed=packed)
            [tensors] = made["main"]
            agree(rig, plan, tensors)
            assert tensors.decode
            found.append([getattr(tensors, name).tolist() for name in TENSORS])
        assert found[0] == found[1]


@pytest.mark.parametrize("slot", [None, "graph"])
def test_decode_is_one_transfer_per_label(slot: str | None) -> None:
    queues = CountingQueues()
    rig = decode_rig(queues=queues)
    rig.backend.register("graph", 4)
    with rig.step(*DECODE) as plan:
        before = queues.uploads
        rig.backend.bind(plan, slot)
        assert queues.uploads == before + 1
        agree(rig, plan, rig.backend.bind(plan, slot).tensors())


def test_a_token_at_a_page_border_goes_to_slot_0_of_the_next_page() -> None:
    rig = decode_rig()
    with rig.step(*DECODE) as plan:
        tensors = rig.backend.bind(plan).tensors()
        assert tensors.token_slot.tolist() == [0, 3, 1]
        assert tensors.token_page.tolist() == [view.pages[-1] for view in plan.in_step_order]
    with rig.step(Segment("a", span=5)) as plan:
        tensors = rig.backend.bind(plan).tensors()
        assert tensors.token_slot.tolist() == [0, 1, 2, 3, 0]
        assert tensors.token_page.tolist() == [plan.in_step_order[0].pages[1]] * 4 + [plan.in_step_order[0].pages[2]]


def test_void_segments_and_padding_go_to_the_sink() -> None:
    rig = decode_rig()
    lease = rig.admit(Step((*DECODE, Segment.padding(1))))
    rig.manager.remove("a")
    rig.manager.plan(lease)
    plan = rig.manager.plan(lease)
    assert isinstance(plan, Plan)
    with rig.manager.launch(plan):
        tensors = rig.backend.bind(plan).tensors()
        agree(rig, plan, tensors)
        assert [page == rig.layout.sink for page in tensors.token_page.tolist()] == [False, True, False, True]


def test_positions_go_on_when_retention_shrinks_the_table() -> None:
    rig = Rig()
    rig.ingest("a")
    with rig.step(Segment("a", span=14), retention={"main": RetentionPolicy(context_budget=6)}):
        pass
    with rig.step(Segment("a", span=2)) as plan:
        tensors = rig.backend.bind(plan).tensors()
        assert tensors.token_position.tolist() == [14, 15]
        assert tensors.length_max < 14


# -- static buffers


def test_static_buffers_keep_their_address_whatever_is_planned() -> None:
    rig = decode_rig()
    for length in (4, 16):
        rig.backend.register("graph", length)
    seen = set()
    for segments in (DECODE, (Segment("a", span=5), Segment("b", span=2)), DECODE[:1], (Segment("c", span=16),)):
        with rig.step(*segments) as plan:
            tensors = rig.backend.bind(plan, "graph").tensors()
            agree(rig, plan, tensors)
            tail_at_sink(rig, tensors)
            seen.add(tuple(getattr(tensors, name).data_ptr() for name in TENSORS))
    assert len(seen) == 1


@pytest.mark.slow
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.sampled_from((None, 20, 32)))
def test_the_tail_of_static_buffers_is_at_the_sink(spans: list[int], bucket: int | None) -> None:
    rig = decode_rig()
    for length in (2, 20, 32):
        rig.backend.register("graph", length)
    # Something long first: what it left must not show through.
    with rig.step(Segment("a", span=15), Segment("b", span=15)) as plan:
        rig.backend.bind(plan, "graph")
    with rig.step(*(Segment(name, span=span) for name, span in zip("abc", spans, strict=False))) as plan:
        tensors = rig.backend.bind(plan, "graph", bucket).tensors()
        assert tensors.bucket == (bucket or (2 if sum(spans) <= 2 else 20))
        agree(rig, plan, tensors)
        tail_at_sink(rig, tensors)
        whole = tensors.token_page.as_strided((32,), (1,))
        assert (whole[tensors.tokens :] == rig.layout.sink).all(), "a longer graph's rows point there too"


def test_every_label_of_every_slot_has_its_own_buffers() -> None:
    rig = decode_rig()
    pointers = []
    for slot in ("one", "two"):
        rig.backend.register(slot, 4)
    with rig.step(Segment("a"), Segment("a", "cfg"), Segment("b", "cfg")) as plan:
        for slot in ("one", "two"):
            access = rig.backend.bind(plan, slot)
            for label in ("main", "cfg"):
                agree(rig, plan, access.tensors(label))
                pointers.append(access.tensors(label).token_page.data_ptr())
    assert len(set(pointers)) == 4


def test_a_larger_registration_after_the_first_plan_is_refused_and_a_smaller_one_taken() -> None:
    rig = decode_rig()
    rig.backend.register("graph", 4)
    rig.backend.register("graph", 8)
    with rig.step(*DECODE) as plan:
        rig.backend.bind(plan, "graph")
    with pytest.raises(CaptureLengthError, match=r"buffers for 8 rows.*register 9 before the slot's first plan"):
        rig.backend.register("graph", 9)
    rig.backend.register("graph", 3)
    with rig.step(*DECODE) as plan:
        assert rig.backend.bind(plan, "graph").tensors().bucket == 3


@pytest.mark.parametrize(
    ("segments", "bucket", "why"),
    [
        (
            (Segment("a", span=9),),
            None,
            "has 9 tokens, and 8 rows were asked for in slot 'graph'; it has graphs for 4, 8",
        ),
        (DECODE, 5, "3 tokens, and 5 rows were asked for"),
        ((Segment("a", span=5),), 4, "5 tokens, and 4 rows"),
        ((Segment("a", span=1), Segment("b", span=0)), None, "a view without tokens"),
    ],
)
def test_a_plan_that_fits_no_captured_length_is_refused(
    segments: tuple[Segment, ...], bucket: int | None, why: str
) -> None:
    rig = decode_rig()
    rig.backend.register("graph", 4)
    rig.backend.register("graph", 8)
    with rig.step(*segments) as plan, pytest.raises(CaptureLengthError, match=why):
        rig.backend.bind(plan, "graph", bucket)


def test_a_slot_needs_a_registered_length() -> None:
    rig = decode_rig()
    with rig.step(*DECODE) as plan, pytest.raises(CaptureLengthError, match="'graph' has no capture length"):
        rig.backend.bind(plan, "graph")
    with pytest.raises(CaptureLengthError, match="at least 1"):
        rig.backend.register("graph", 0)
