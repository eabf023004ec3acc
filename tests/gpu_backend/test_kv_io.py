"""K and V go where the plan says, in every dtype; defaults return with every plan; torch.compile keeps the mutation."""

import re
from typing import Any

import pytest
import torch

from gpu_backend.device_cache import POISON_BYTE, dtype_of
from gpu_backend.kv_io import KVAccess, LabelNotPlanned
from gpu_backend.stamps import StampCode
from kvstate import Segment

from .rig import DTYPES, Rig, layout

STEP = (Segment("a", span=6), Segment("b", "cfg", 1), Segment("c", "cfg", 1))


def rig(dtype: str = "bfloat16") -> Rig:
    made = Rig(layout(dtype=dtype))
    made.ingest("a", "b", "c")
    made.backend.memory.cache.poison(range(13))
    return made


def rows(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, which every dtype holds exactly."""
    return torch.randint(-8, 8, (count, 2, 8), generator=torch.Generator().manual_seed(seed)).to(dtype)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.float(), other.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_read_back_and_lies_where_the_plan_says(dtype: str) -> None:
    made = rig(dtype)
    kind = dtype_of(made.layout)
    with made.step(*STEP) as plan:
        kv = made.backend.bind(plan)
        k, v = rows(6, kind, 1), rows(6, kind, 2)
        assert kv.write_kv(k, v, layer=1) is None
        back = kv.read_kv(layer=1)
        assert (back.shape, back.dtype) == ((6, 2, 2, 8), kind)
        assert equal(back[:, 0], k) and equal(back[:, 1], v)
        view = kv.layer_view(1)
        for token, (page, slot) in enumerate(plan.addresses("main")):
            assert equal(view[page, 0, slot], k[token]) and equal(view[page, 1, slot], v[token])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_else_is_written(dtype: str) -> None:
    made = rig(dtype)
    with made.step(*STEP) as plan:
        kv = made.backend.bind(plan)
        kv.write_kv(rows(9, torch.float32), rows(9, torch.float32), layer=1)
        storage = made.backend.memory.cache.storage
        expected = torch.zeros(storage.shape, dtype=torch.bool)
        for page, slot in plan.addresses("main"):
            expected[page, 1, :, slot] = True
        changed = (storage.view(torch.uint8) != POISON_BYTE).view(*storage.shape, -1).any(dim=-1)
        assert not (changed & ~expected).any()
        assert changed[expected].float().mean() > 0.9


def test_rows_of_another_dtype_are_converted() -> None:
    made = rig("float16")
    with made.step(*STEP) as plan:
        kv = made.backend.bind(plan)
        k = rows(6, torch.float64)
        back = kv.write_kv(k, k, read_back=True)
        assert back is not None and back.dtype == torch.float16 and equal(back[:, 0], k)


def test_spare_rows_of_static_buffers_go_to_the_sink_and_the_rest_nowhere() -> None:
    made = rig()
    made.backend.register("graph", 8)
    with made.step(*STEP) as plan:
        kv = made.backend.bind(plan, "graph")
        before = made.backend.memory.cache.bytes.clone()
        kv.write_kv(rows(12, torch.bfloat16), rows(12, torch.bfloat16))
        assert equal(kv.read_kv()[:6, 0], rows(12, torch.bfloat16)[:6])
        touched = {page for page, _ in plan.addresses("main")} | {made.layout.sink}
        changed = (made.backend.memory.cache.bytes != before).any(dim=1).nonzero().flatten().tolist()
        assert set(changed) == touched
        kv.write_kv(rows(6, torch.bfloat16, 3), rows(6, torch.bfloat16, 4))
        assert equal(kv.read_kv()[:6, 0], rows(6, torch.bfloat16, 3))
        assert kv.read_kv().shape == (8, 2, 2, 8)


@pytest.mark.parametrize("shape", [(5, 2, 8), (6, 1, 8), (6, 2, 4), (6, 16)])
def test_rows_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    made = rig()
    with made.step(*STEP) as plan:
        kv = made.backend.bind(plan)
        with pytest.raises(ValueError, match=r"label 'main' takes at least 6 rows of \(2, 8\)"):
            kv.write_kv(torch.zeros(shape), torch.zeros(6, 2, 8))
        with pytest.raises(ValueError, match=r"v has shape"):
            kv.write_kv(torch.zeros(6, 2, 8), torch.zeros(shape))


def test_layer_0_and_main_are_the_defaults_until_they_are_set_and_again_with_the_next_plan() -> None:
    made = rig()
    made.backend.register("graph", 8)
    seen: list[KVAccess] = []
    for turn in range(2):
        with made.step(*STEP) as plan:
            kv = made.backend.bind(plan, "graph")
            seen.append(kv)
            assert kv.tensors().label == "main"
            assert kv.layer_view().data_ptr() == kv.layer_view(0).data_ptr()
            k = rows(6, torch.bfloat16, turn)
            kv.write_kv(k, k)
            assert equal(kv.read_kv(layer=0, label="main")[:6, 0], k)
            kv.set_layer(1)
            kv.set_label("cfg")
            assert kv.tensors().label == "cfg"
            assert kv.layer_view().data_ptr() == kv.layer_view(1).data_ptr()
            kv.write_kv(k[:2], k[:2])
            assert equal(kv.read_kv(layer=1, label="cfg")[:2, 1], k[:2])
            assert equal(kv.read_kv(layer=0, label="main")[:6, 0], k)
    assert seen[0] is seen[1], "a captured model keeps the object"


def test_a_label_that_is_not_planned_raises_and_names_those_that_are() -> None:
    made = rig()
    with made.step(*STEP) as plan:
        kv = made.backend.bind(plan)
        for call in (
            lambda: kv.set_label("beam"),
            lambda: kv.read_kv(label="beam"),
            lambda: kv.write_kv(torch.zeros(1), torch.zeros(1), label="beam"),
        ):
            with pytest.raises(
                LabelNotPlanned, match=re.escape("no plan label 'beam'; it has 'main', 'cfg'")
            ) as caught:
                call()
            assert (caught.value.label, caught.value.present) == ("beam", ("main", "cfg"))
    with made.step(Segment("b", "cfg", 1)) as plan, pytest.raises(LabelNotPlanned, match="it has 'cfg'"):
        made.backend.bind(plan).read_kv()


def test_a_combined_label_is_packed_label_by_label() -> None:
    made = rig()
    steps = (Segment("a", span=2), Segment("b", "cfg", 1), Segment("b", span=1))
    with made.step(*steps, combined_labels={("main", "cfg"): "both"}) as plan:
        kv = made.backend.bind(plan)
        assert kv.labels == ("both",)
        k = rows(4, torch.bfloat16)
        kv.write_kv(k, k, label="both")
        a, cfg, b = plan.in_step_order
        view = kv.layer_view()
        assert equal(view[a.pages[0], 0, :2], k[:2])
        assert equal(view[b.pages[0], 0, 0], k[2])
        assert equal(view[cfg.pages[0], 0, 0], k[3])


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_is_not_there_is_refused(layer: int) -> None:
    made = rig()
    with made.step(*STEP) as plan:
        kv = made.backend.bind(plan)
        for call in (
            lambda: kv.set_layer(layer),
            lambda: kv.layer_view(layer),
            lambda: kv.read_kv(layer=layer),
            lambda: kv.write_kv(torch.zeros(6, 2, 8), torch.zeros(6, 2, 8), layer=layer),
        ):
            with pytest.raises(IndexError, match="layers 0 … 1"):
                call()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_torch_compile_keeps_the_write_in_place_and_in_order(dtype: str) -> None:
    made = rig(dtype)
    kind = dtype_of(made.layout)

    def model(kv: KVAccess, x: torch.Tensor) -> torch.Tensor:
        before = kv.read_kv(layer=1).float().nan_to_num(0).sum()
        for layer in range(2):
            kv.write_kv(x * (layer + 1), x * (layer + 2), layer=layer)
        return kv.read_kv(layer=1).float() + before

    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    torch._dynamo.reset()
    with made.step(*STEP) as plan:
        kv = made.backend.bind(plan)
        address = made.backend.memory.cache.storage.data_ptr()
        x = rows(6, torch.float32).clamp(-4, 4)
        found = compiled(kv, x)
        assert made.backend.memory.cache.storage.data_ptr() == address
        for layer in range(2):
            assert equal(kv.read_kv(layer=layer)[:, 0], x * (layer + 1))
            assert equal(kv.read_kv(layer=layer)[:, 1], x * (layer + 2))
        assert equal(found, kv.read_kv(layer=1)), "the read before the write saw what was there before"
        assert kv.read_kv().dtype == kind


# -- stamps


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stamp_covers_every_byte_of_every_layer(dtype: str) -> None:
    sizes = layout(dtype=dtype)
    code = StampCode(sizes, torch.device("cpu"))
    memory = torch.zeros(3, sizes.page_bytes, dtype=torch.uint8)
    words = code.words(memory)
    slots = torch.tensor([0, 1, 2, 3])
    code.put(words, torch.ones(4, dtype=torch.int64), slots, [10, -5, 2**62, 0])
    assert code.get(words, [[1]], [4]) == [[10, -5, 2**62, 0]]
    for byte in range(sizes.page_bytes):
        memory[1, byte] ^= 0x10
        [stamps] = code.get(words, [[1]], [4])
        assert len([stamp for stamp in stamps if not isinstance(stamp, int)]) == 1
        memory[1, byte] ^= 0x10


@pytest.mark.parametrize("axis", ["layers", "K and V", "tokens", "heads", "pages"])
def test_whatever_is_swapped_is_noticed(axis: str) -> None:
    sizes = layout()
    code = StampCode(sizes, torch.device("cpu"))
    memory = torch.zeros(3, sizes.page_bytes, dtype=torch.uint8)
    words = code.words(memory)
    pages = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    code.put(words, pages, torch.arange(8) % 4, range(100, 108))
    storage = memory.view(torch.bfloat16).view(3, *sizes.page_shape)
    dim = ["pages", "layers", "K and V", "tokens", "heads"].index(axis)
    storage[:2] = storage[:2].flip(dim)
    [found] = code.get(words, [[0, 1]], [8])
    assert all(got != wanted for got, wanted in zip(found, range(100, 108), strict=True))
    assert any(isinstance(got, int) for got in found) == (axis in ("tokens", "pages"))


def test_stamps_need_whole_words() -> None:
    with pytest.raises(ValueError, match=r"one token's K has 4 \(1 heads of 2 bfloat16\); use a larger head_dim"):
        StampCode(layout(kv_heads=1, head_dim=2), torch.device("cpu"))
