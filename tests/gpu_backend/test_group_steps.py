"""Steps over several groups: each has its page tables, addresses and storage; transfers are as few as with one."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_backend import CacheLayout, GroupLayout
from gpu_backend.device_cache import POISON_BYTE
from gpu_backend.kv_io import KVAccess
from gpu_backend.page_tables import SINK_ROW, PageTables
from gpu_backend.plan_tensors import PlanTensors
from gpu_backend.queues import HostQueues, Staging
from gpu_backend.stamps import Undefined
from kvstate import Segment, Step
from kvstate.ops import Plan, PlanView, Tier
from kvstate.state import Table
from kvstate.transitions.offload import Offloaded

from .rig import STEPS, CountingQueues, Rig

GROUPS = [GroupLayout("window", [0, 2, 3], 2, 8, window=6), GroupLayout("full", [1, 4], 1, 8)]
WINDOW, FULL = 0, 1
LAYERS = range(5)


def mixed(**changes: Any) -> CacheLayout:
    sizes = {"page_size": 4, "pages": 30, "host_pages": 12, "dtype": "float32", **changes}
    return CacheLayout(groups=GROUPS, **sizes)


def agree(rig: Rig, plan: Plan, tensors: PlanTensors, group: int) -> None:
    """Compare the tensors of one label in one group with the plan's own words."""
    views = plan.views[tensors.label]
    size, count = rig.layout.page_size, len(views)
    assert tensors.window == rig.layout.groups[group].window
    addresses = list(zip(tensors.token_page.tolist(), tensors.token_slot.tolist(), strict=True))
    assert addresses[: tensors.tokens] == plan.addresses(tensors.label, group)
    assert tensors.query_indptr[: count + 1].tolist() == list(accumulate((view.span for view in views), initial=0))
    assert tensors.skipped[:count].tolist() == [view.skipped[group] for view in views]
    begins = tensors.page_indptr.tolist()
    table = rig.backend.page_tables(group)
    for place, view in enumerate(views):
        skip, pages = view.skipped[group], view.tables[group]
        assert tuple(tensors.page_indices[begins[place] : begins[place + 1]].tolist()) == pages[skip:]
        assert tuple(table[tensors.rows[place], skip : len(pages)].tolist()) == pages[skip:]
        assert tensors.lengths[place] == view.length
        assert view.length == 0 or (len(pages) - 1) * size + tensors.last_page_lengths[place] == view.length
    sink = rig.layout.sinks[group]
    tail = tensors.bucket - tensors.tokens
    assert tensors.token_page[tensors.tokens :].tolist() == [sink] * tail
    assert tensors.page_indices[begins[count] : begins[-1]].tolist() == [sink] * tail
    assert ((table >= 0) & (table <= sink)).all(), "no row names a page that does not exist"


def everywhere(rig: Rig, plan: Plan, access: KVAccess) -> None:
    for label in access.labels:
        for group, own in enumerate(rig.layout.groups):
            for layer in own.layers:
                agree(rig, plan, access.tensors(label, layer=layer), group)


@pytest.mark.slow
@given(st.integers(1, 5), st.lists(STEPS, min_size=1, max_size=6), st.booleans())
def test_tensors_agree_with_the_plan_in_every_group(
    page_size: int, program: list[list[tuple[str, str, int]]], combine: bool
) -> None:
    rig = Rig(mixed(page_size=page_size, pages=300, host_pages=0), rows=8)
    rig.ingest("a", "b", "c")
    for rows in program:
        segments = [Segment(*row) for row in rows]
        labels = tuple(dict.fromkeys(segment.label for segment in segments))
        combined = {labels: "both"} if combine and len(labels) == 2 else {}
        with rig.step(*segments, combined_labels=combined) as plan:
            everywhere(rig, plan, rig.backend.bind(plan))


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 20), min_size=3, max_size=3),
    st.lists(st.sampled_from(("a", "b", "c", None)), min_size=1, max_size=5, unique=True),
    st.booleans(),
)
def test_decode_and_packed_addressing_agree_in_every_group(
    lengths: list[int], requests: list[str | None], static: bool
) -> None:
    rig = Rig(mixed(pages=40), rows=8)
    rig.ingest("a", "b", "c")
    with rig.step(*(Segment(name, span=span) for name, span in zip("abc", lengths, strict=True))):
        pass
    rig.backend.register("graph", 8)
    with rig.step(*(Segment(request) for request in requests)) as plan:
        launch = rig.backend._launch(plan)
        for packed in (False, True):
            made = rig.backend.memory.addressing.make(plan, launch.rows, "graph" if static else None, packed=packed)
            for group, tensors in enumerate(made["main"]):
                assert tensors.decode
                agree(rig, plan, tensors, group)


def test_static_buffers_of_every_group_keep_their_address_and_end_at_its_own_sink() -> None:
    rig = Rig(mixed())
    rig.ingest("a", "b")
    rig.backend.register("graph", 16)
    names = [name for name, kind in PlanTensors.__annotations__.items() if kind == "Tensor"]
    seen = set()
    for segments in ((Segment("a", span=13),), (Segment("a"), Segment("b")), (Segment("b", span=5), Segment("a"))):
        with rig.step(*segments) as plan:
            access = rig.backend.bind(plan, "graph")
            everywhere(rig, plan, access)
            tensors = [access.tensors(layer=own.layers[0]) for own in GROUPS]
            seen.add(tuple(getattr(own, name).data_ptr() for own in tensors for name in names))
    assert len(seen) == 1
    assert tensors[0].token_page.data_ptr() != tensors[1].token_page.data_ptr()


def test_a_step_over_groups_takes_one_transfer_for_its_rows_and_one_per_label() -> None:
    queues = CountingQueues()
    rig = Rig(mixed(), queues=queues)
    rig.ingest("a", "b")
    with rig.step(Segment("a", span=9), Segment("b", span=2)) as plan:
        assert queues.uploads == 1, "the rows of two streams in two groups"
        rig.backend.bind(plan)
        assert queues.uploads == 2
    with rig.step(Segment("a"), Segment("b")):
        assert queues.uploads == 2, "no page is new"
    with rig.step(Segment("b", span=3), Segment("a", "cfg")) as plan:
        rig.backend.bind(plan)
        assert queues.uploads == 5


def test_a_window_that_slides_uploads_new_pages_only() -> None:
    rig = Rig(mixed())
    rig.ingest("a")
    for length in range(1, 40):
        before = rig.backend.memory.tables.uploaded
        with rig.step(Segment("a")) as plan:
            everywhere(rig, plan, rig.backend.bind(plan))
        assert rig.backend.memory.tables.uploaded - before == (2 if length % 4 == 1 else 0)


def view(*tables: Table) -> PlanView:
    pages = tuple(table.first(table.count, sink) for table, sink in zip(tables, (90, 91), strict=True))
    skipped = tuple(table.skip for table in tables)
    return PlanView("a", "main", pages, 0, 0, 0, 0, 0, False, skipped, tables)


def rows(tables: PageTables, row: int) -> list[list[int]]:
    return [tensor[row].tolist() for tensor in tables.tensors]


def made() -> PageTables:
    queues = HostQueues()
    return PageTables(3, 6, (90, 91), queues, Staging(queues))


def test_rows_hold_what_each_table_holds_wherever_its_window_is() -> None:
    tables = made()
    long, short = Table.of([3, 4, 5, 6]), Table.of([7, 8], skip=2, sink=91)
    [row] = tables.enter([view(long, short)])
    assert rows(tables, row) == [[3, 4, 5, 6, 90, 90], [91, 91, 7, 8, 91, 91]]
    grown = long.extended([9]), short.extended([2]).slid(4)
    [again] = tables.enter([view(*grown)])
    assert again == row, "a row that a launch reads is extended"
    assert rows(tables, row) == [[3, 4, 5, 6, 9, 90], [91, 91, 7, 8, 2, 91]]
    assert tables.uploaded == 8


def test_a_table_that_reaches_further_back_than_its_row_is_uploaded_again() -> None:
    tables = made()
    whole, far = Table.of([1, 2, 3]), Table.of([4, 5, 6])
    [row] = tables.enter([view(whole, far.slid(2))])
    [other] = tables.enter([view(whole, far)])
    assert other != row, "the first one is being read"
    assert rows(tables, other)[1][:3] == [4, 5, 6]
    tables.leave([row, other])
    [last] = tables.enter([view(Table.of([1, 2, 3]), far)])
    assert last == other and rows(tables, last)[0][:3] == [1, 2, 3]


def test_one_changed_group_takes_a_running_row_away_from_its_stream_in_all() -> None:
    tables = made()
    whole, far = Table.of([1, 2, 3]), Table.of([4, 5, 6])
    [row] = tables.enter([view(whole, far)])
    [other] = tables.enter([view(whole, Table.of([7]))])
    assert rows(tables, row) == [[1, 2, 3, 90, 90, 90], [4, 5, 6, 91, 91, 91]]
    assert rows(tables, other) == [[1, 2, 3, 90, 90, 90], [7, 91, 91, 91, 91, 91]]
    assert tables.tensors[1][SINK_ROW].tolist() == [91] * 6


# -- K and V


def numbers(count: int, heads: int, seed: int) -> torch.Tensor:
    return torch.randint(1, 99, (count, heads, 8), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.slow
def test_k_and_v_of_a_layer_go_to_its_group_and_nowhere_else() -> None:
    rig = Rig(mixed())
    rig.ingest("a", "b")
    rig.store("a", range(7))
    rig.backend.memory.cache.bytes.fill_(POISON_BYTE)
    with rig.step(Segment("a", span=3), Segment("b", span=5)) as plan:
        access = rig.backend.bind(plan)
        for layer in LAYERS:
            before = rig.backend.memory.cache.bytes.clone()
            group, place = rig.layout.place_of(layer)
            heads = GROUPS[group].kv_heads
            k, v = numbers(8, heads, layer), numbers(8, heads, layer + 50)
            back = access.write_kv(k, v, layer=layer, read_back=True)
            assert back is not None and torch.equal(back[:, 0], k) and torch.equal(back[:, 1], v)
            memory = rig.backend.memory.cache.groups[group]
            expected = torch.zeros(memory.storage.shape, dtype=torch.bool)
            for token, (page, slot) in enumerate(plan.addresses("main", group)):
                expected[page, place, :, slot] = True
                assert torch.equal(access.layer_view(layer)[page, 0, slot], k[token])
            changed = (before != rig.backend.memory.cache.bytes).flatten().nonzero().flatten()
            within = torch.zeros_like(rig.backend.memory.cache.bytes, dtype=torch.bool).flatten()
            within[: memory.bytes.numel()] = expected.repeat_interleave(4, dim=-1).flatten()
            assert len(changed) and within[changed].all()


def test_the_default_layer_chooses_the_group_of_every_call() -> None:
    rig = Rig(mixed())
    rig.ingest("a")
    with rig.step(Segment("a", span=2)) as plan:
        access = rig.backend.bind(plan)
        assert access.tensors().window == 6, "layer 0 has a window"
        assert access.layer_view().data_ptr() == access.layer_view(0).data_ptr()
        access.set_layer(4)
        assert access.tensors().window is None
        assert access.layer_view().data_ptr() == access.layer_view(4).data_ptr()
        k = numbers(2, 1, 3)
        access.write_kv(k, k)
        assert torch.equal(access.read_kv(layer=4)[:, 0], k)
        with pytest.raises(ValueError, match=r"label 'main' takes at least 2 rows of \(1, 8\)"):
            access.write_kv(numbers(2, 2, 3), numbers(2, 2, 3))
        for call in (access.layer_view, lambda layer: access.tensors(layer=layer), access.set_layer):
            with pytest.raises(IndexError, match="layers 0 … 4"):
                call(5)
    with rig.step(Segment("a")) as plan:
        assert rig.backend.bind(plan).tensors().window == 6, "every plan begins with layer 0"


@pytest.mark.slow
def test_torch_compile_keeps_the_writes_of_two_groups_in_place_and_in_order() -> None:
    rig = Rig(mixed())
    rig.ingest("a")

    def model(kv: KVAccess, x: torch.Tensor) -> torch.Tensor:
        for layer in LAYERS:
            rows = x if layer in GROUPS[WINDOW].layers else x[:, :1]
            kv.write_kv(rows * (layer + 1), rows * (layer + 2), layer=layer)
        return kv.read_kv(layer=4) + kv.read_kv(layer=3)[:, :, :1]

    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    torch._dynamo.reset()
    with rig.step(Segment("a", span=6)) as plan:
        kv = rig.backend.bind(plan)
        x = numbers(6, 2, 1)
        found = compiled(kv, x)
        for layer in LAYERS:
            heads = 2 if layer in GROUPS[WINDOW].layers else 1
            assert torch.equal(kv.read_kv(layer=layer)[:, 0], x[:, :heads] * (layer + 1))
            assert torch.equal(kv.read_kv(layer=layer)[:, 1], x[:, :heads] * (layer + 2))
        assert torch.equal(found, kv.read_kv(layer=4) + kv.read_kv(layer=3)[:, :, :1])


# -- pages that move


def contents(rig: Rig, request: str) -> list[list[Any]]:
    """The stamps of the tokens that each group holds of a stream."""
    [stream] = (stream for stream in rig.manager.view().streams if stream.request == request)
    size = rig.layout.page_size
    return [
        rig.backend.load(group, table, 0, stream.length - skip * size)
        for group, (table, skip) in enumerate(zip(stream.device, stream.skipped, strict=True))
    ]


def test_offload_and_reload_keep_what_each_group_holds_and_copy_no_more() -> None:
    rig = Rig(mixed())
    rig.ingest("a", "b")
    rig.store("a", range(100, 117))
    assert contents(rig, "a") == [list(range(112, 117)), list(range(100, 117))]
    assert isinstance(rig.manager.offload("a"), Offloaded)
    rig.backend.memory.cache.bytes.fill_(POISON_BYTE)
    rig.store("b", range(200, 219))
    rig.manager.reload("a")
    assert contents(rig, "a") == [list(range(112, 117)), list(range(100, 117))]
    assert contents(rig, "b") == [list(range(212, 219)), list(range(200, 219))]
    window, full = (part.page_bytes for part in rig.layout.parts)
    assert rig.backend.copier.pages == [0, 2 + 5, 2 + 5]
    assert rig.backend.copier.bytes[1:] == [2 * window + 5 * full] * 2
    assert rig.judge.violations == []


def test_padding_writes_to_the_sink_of_every_group() -> None:
    rig = Rig(mixed())
    rig.ingest("a")
    rig.backend.memory.cache.bytes.fill_(POISON_BYTE)
    with rig.step(Segment("a", span=2), Segment.padding(6)) as plan:
        rig.backend.write(plan, 0, [1, 2])
        rig.backend.write(plan, 1, [7] * 6)
    assert contents(rig, "a") == [[1, 2], [1, 2]]
    for group, sink in enumerate(rig.layout.sinks):
        held = [stamp for page in range(sink) for stamp in rig.backend.read([page], 4, group)]
        assert 7 not in held
        # One sector holds all sinks, and the last group wrote over the others.
        expected = [7] * 4 if group == FULL else [Undefined.TORN] * 4
        assert rig.backend.read([sink], 4, group) == expected


def test_what_a_window_left_is_granted_to_others_while_the_stream_goes_on() -> None:
    rig = Rig(mixed(pages=6, host_pages=0))
    rig.ingest("a", "b")
    rig.store("a", range(8))
    for turn in range(8, 24, 2):
        rig.store("a", [turn, turn + 1])
        free = rig.manager.view().device[WINDOW].free
        rig.backend.poison(Tier.DEVICE, WINDOW, free)
        window, full = contents(rig, "a")
        assert full == list(range(turn + 2)) and window == full[-len(window) :] and len(window) >= 5
    assert isinstance(rig.admit(Step((Segment("b", span=4),))).serial, int)
