"""Several groups in one memory: each has its own pages, tables and sink, and a sector belongs to one group at a time.

Here stands what needs no manager; what a manager does with groups is in test_decoder and test_group_steps.
"""

import math
from typing import Any

import attrs
import pytest
import torch

from gpu_backend import CacheLayout, GroupLayout
from gpu_backend.backend import TorchBackend, cpu_backend
from gpu_backend.device_cache import DeviceCache, dtype_of
from gpu_backend.host_pool import HostPool
from gpu_backend.queues import HostQueues
from gpu_backend.stamps import StampCode, Undefined
from kvstate import Geometry, Group
from kvstate.errors import Poisoned
from kvstate.ops import CopyIn, CopyOut, ForkCopy, Tier
from kvstate.ordering import NOTHING

from .rig import DTYPES

CPU = torch.device("cpu")
POISON = Undefined.POISON


def mixed(**changes: Any) -> CacheLayout:
    """Pages of 1536 and 1024 bytes in sectors of 3072: two of the one, or three of the other."""
    groups = [GroupLayout("full", [1, 3, 5], 2, 8), GroupLayout("window", [0, 2, 4, 6], 1, 8, window=6)]
    sizes = {"page_size": 4, "pages": 5, "host_pages": 3, "dtype": "float32"}
    return CacheLayout(**{"groups": groups, **sizes, **changes})


# -- sizes


def test_a_sector_holds_whole_pages_of_every_group() -> None:
    sizes = mixed()
    assert [part.page_bytes for part in sizes.parts] == [3 * 2 * 4 * 64, 4 * 2 * 4 * 32]
    assert sizes.sector_bytes == 3072
    geometry = sizes.geometry()
    assert geometry.groups == (Group("full", 1536), Group("window", 1024, window=6))
    assert (geometry.pages, geometry.host_pages, geometry.pages_per_sector) == (5, 3, (2, 3))
    assert sizes.sinks == geometry.group_pages == (10, 15)


def test_each_layer_of_the_model_has_its_place() -> None:
    sizes = mixed()
    assert sizes.layers == 7
    assert [sizes.place_of(layer) for layer in range(7)] == [(1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (0, 2), (1, 3)]
    for layer in (-1, 7):
        with pytest.raises(IndexError, match=r"kv has layers 0 … 6, not"):
            sizes.place_of(layer)


def test_one_group_is_described_as_before_or_as_a_group() -> None:
    plain = CacheLayout(layers=3, kv_heads=2, head_dim=8, pages=7)
    assert plain == CacheLayout(groups=[GroupLayout("full", 3, 2, 8)], pages=7)
    assert (plain.sector_bytes, plain.sinks, plain.sink) == (plain.page_bytes, (7,), 7), "a sector is a page"
    assert attrs.evolve(plain, pages=9).sink == 9


def test_what_only_one_group_has_is_not_said_of_several() -> None:
    for name in ("kv_heads", "heads", "head_dim", "page_shape", "page_bytes", "token_bytes", "sink"):
        with pytest.raises(ValueError, match="kv has 2 groups; ask its `parts`"):
            getattr(mixed(), name)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"groups": [GroupLayout("a", [0, 1], 2, 8), GroupLayout("b", [1, 2], 2, 8)]}, "layer 1 is in two groups"),
        ({"groups": [GroupLayout("a", [0], 2, 8), GroupLayout("b", [2], 2, 8)]}, "layer 1 is in no group"),
        ({"groups": [GroupLayout("a", [0], 2, 8), GroupLayout("a", [1], 2, 8)]}, "two groups have one name"),
        ({"groups": [GroupLayout("a", [0], 2, 8), "b"]}, "made of GroupLayouts, got 'b'"),
        ({"groups": [GroupLayout("a", 1, 6, 8)], "world_size": 4}, "6 heads of K and V cannot be shared evenly"),
        ({"groups": [GroupLayout("a", 1, 2, 8, window=4)]}, "with a window in every group .* give max_seq_len"),
    ],
)
def test_groups_that_make_no_cache_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        mixed(**wrong)


@pytest.mark.parametrize(
    ("layers", "window", "why"),
    [
        ([], None, "group 'a' has no layers"),
        ([-1], None, "layers must be a whole number of at least 0"),
        (0, None, "layers must be a whole number of at least 1"),
        ([0], 0, "window must be a whole number of at least 1"),
    ],
)
def test_a_group_that_is_none_is_refused(layers: Any, window: int | None, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        GroupLayout("a", layers, 2, 8, window)


def test_layers_are_given_one_way() -> None:
    with pytest.raises(TypeError, match="the one or the other"):
        mixed(layers=2)
    with pytest.raises(TypeError, match="needs layers, kv_heads and head_dim; or groups"):
        CacheLayout(layers=2, pages=3)


def test_ranks_share_the_heads_of_every_group() -> None:
    sizes = mixed(world_size=2)
    assert [part.heads for part in sizes.parts] == [1, 1]


def test_only_groups_without_a_window_limit_a_sequence() -> None:
    assert mixed().pages_per_sequence == 10
    assert mixed(max_seq_len=300).pages_per_sequence == 75


# -- memory


def tiers(sizes: CacheLayout) -> list[DeviceCache | HostPool]:
    return [DeviceCache(sizes, CPU), HostPool(sizes, HostQueues())]


@pytest.mark.parametrize("dtype", DTYPES)
def test_page_p_lies_in_sector_p_over_pages_per_sector(dtype: str) -> None:
    sizes = mixed(dtype=dtype)
    geometry = sizes.geometry()
    for tier in tiers(sizes):
        for group, memory in enumerate(tier.groups):
            per_sector, page_bytes = geometry.pages_per_sector[group], sizes.parts[group].page_bytes
            assert memory.storage.shape[1:] == sizes.parts[group].page_shape
            for page in range(len(memory.bytes)):
                tier.bytes.zero_()
                memory.storage[page] = 1
                first, *_, last = tier.bytes.flatten().nonzero().flatten().tolist()
                begin = page // per_sector * geometry.sector_bytes + page % per_sector * page_bytes
                assert begin <= first and last < begin + page_bytes, f"page {page} of group {group}"


def test_every_sink_lies_at_the_beginning_of_the_extra_sector() -> None:
    cache, pool = tiers(mixed())
    assert cache.bytes.shape == (6, 3072) and pool.bytes.shape == (3, 3072)
    assert [len(group.bytes) for group in cache.groups] == [11, 16]
    assert [len(group.bytes) for group in pool.groups] == [6, 9], "the host has no sink"
    assert {group.bytes[-1].data_ptr() for group in cache.groups} == {cache.bytes[-1].data_ptr()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_view_is_of_the_group_of_its_layer(dtype: str) -> None:
    sizes = mixed(dtype=dtype)
    cache = DeviceCache(sizes, CPU)
    for layer in range(7):
        group, place = sizes.place_of(layer)
        view = cache.layer_view(layer)
        heads = (2, 1)[group]
        assert view.shape == (len(cache.groups[group].bytes), 2, 4, heads, 8) and view.dtype == dtype_of(sizes)
        assert view.data_ptr() == cache.groups[group].storage[0, place].data_ptr()
    with pytest.raises(IndexError, match=r"layers 0 … 6"):
        cache.layer_view(7)


def test_a_cache_that_moves_is_the_same_to_every_group() -> None:
    cache = DeviceCache(mixed(), CPU)
    memory = torch.zeros(cache.bytes.numel(), dtype=torch.uint8)
    cache.move(memory)
    cache.groups[1].bytes[3] = 7
    assert memory.nonzero().flatten().tolist() == list(range(3072, 4096))
    cache.poison([1], group=0)
    assert (memory[1536:3072] == 0xFF).all()


def test_a_pool_of_no_sectors_is_legal() -> None:
    assert [group.bytes.shape for group in HostPool(mixed(host_pages=0), HostQueues()).groups] == [(0, 1536), (0, 1024)]


# -- a backend


def backend() -> TorchBackend:
    made = TorchBackend(mixed())
    for tier in Tier:
        made.memory.cache.bytes.fill_(0xFF)
        made.memory.pool.bytes.fill_(0xFF)
        assert made.load(1, [0], 0, 1, tier) == [POISON]
    return made


def stamps(made: TorchBackend, tier: Tier, group: int) -> dict[int, int]:
    """The pages of a group that hold a stamp in their first slot."""
    found = {page: made.load(group, [page], 0, 1, tier)[0] for page in range(len(made.memory.pages(tier, group)))}
    return {page: stamp for page, stamp in found.items() if isinstance(stamp, int)}


def test_copies_go_between_the_pages_of_their_own_group() -> None:
    made = backend()
    made.store(0, [2, 3], 0, range(10, 18))
    made.store(1, [12, 0], 0, range(20, 28))
    made.submit(CopyOut(1, NOTHING, None, ([(2, 3, 4), (3, 0, 4)], [(12, 8, 4), (0, 6, 4)])))
    assert stamps(made, Tier.HOST, 0) == {3: 10, 0: 14} and stamps(made, Tier.HOST, 1) == {8: 20, 6: 24}
    made.memory.cache.bytes.fill_(0xFF)
    made.submit(CopyIn(2, NOTHING, None, ([(3, 9, 4)], [(8, 1, 4), (6, 2, 4)])))
    assert stamps(made, Tier.DEVICE, 0) == {9: 10} and stamps(made, Tier.DEVICE, 1) == {1: 20, 2: 24}
    made.submit(ForkCopy(3, NOTHING, None, ([(9, 4, 4)], [(2, 9, 1)])))
    assert stamps(made, Tier.DEVICE, 0) == {9: 10, 4: 10} and stamps(made, Tier.DEVICE, 1) == {1: 20, 2: 24, 9: 24}
    assert made.copier.pages == [2, 4, 3]
    assert made.copier.bytes == [1536 + 1024, 2 * 1536 + 2 * 1024, 1536 + 2 * 1024]


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("side", ["source", "target"])
def test_no_copy_names_a_sink_or_a_page_of_the_larger_tier(group: int, side: str) -> None:
    made = backend()
    device, host = (10, 15)[group], (6, 9)[group]
    copy = (device, 0, 1) if side == "source" else (0, host, 1)
    copies = [[], []]
    copies[group].append(copy)
    with pytest.raises(Poisoned, match=f"{side} pages .* within 0 … {(device if side == 'source' else host) - 1}"):
        made.submit(CopyOut(1, NOTHING, None, tuple(copies)))


def test_stamps_are_read_of_their_own_group_only() -> None:
    """Where two groups have pages of one shape, bytes of the one hold no stamps of the other."""
    twins = [GroupLayout("a", [0, 1], 2, 8), GroupLayout("b", [2, 3], 2, 8)]
    made = TorchBackend(mixed(groups=twins))
    made.store(0, [3], 0, range(4))
    assert made.load(0, [3], 0, 4) == [0, 1, 2, 3]
    assert made.load(1, [3], 0, 4) == [Undefined.TORN] * 4
    code = StampCode(made.layout.parts[0], CPU)
    assert code.get(code.words(made.memory.cache.groups[0].bytes), [[3]], [4]) == [[0, 1, 2, 3]]


def test_pages_are_poisoned_read_and_loaded_per_group() -> None:
    made = backend()
    made.store(1, [4, 5], 2, [1, 2, 3, 4])
    assert made.load(1, [99, 4, 5], 6, 10) == [1, 2, 3, 4], "pages in front of the first token are not read"
    assert made.read([4, 5], 6, group=1) == [POISON, POISON, 1, 2, 3, 4]
    assert made.read_many([[4], [5]], [3, 1], group=1) == [[POISON, POISON, 1], [3]]
    made.poison(Tier.DEVICE, 1, [5])
    assert made.load(1, [4, 5], 2, 5) == [1, 2, POISON]
    with pytest.raises(IndexError, match=r"groups 0 \(full\), 1 \(window\), not 2"):
        made.poison(Tier.DEVICE, 2, [0])


# -- the backend that `kvstate check` finds


@pytest.mark.parametrize("page_bytes", [(1, 1), (1, 2), (3, 2), (64, 128), (96, 64, 32), (4096, 1024), (5, 7)])
def test_a_geometry_keeps_its_page_numbers_and_what_shares_its_bytes(page_bytes: tuple[int, ...]) -> None:
    groups = tuple(Group(f"g{size}.{at}", size, (None, 7, 3)[at]) for at, size in enumerate(page_bytes))
    geometry = Geometry(pages=3, page_size=4, host_pages=2, groups=groups)
    made = cpu_backend(geometry)
    assert [group.window for group in made.geometry.groups] == [group.window for group in groups]
    assert [len(made.memory.pages(Tier.DEVICE, at)) for at in range(len(groups))] == list(geometry.group_pages)
    assert [len(made.memory.pages(Tier.HOST, at)) for at in range(len(groups))] == list(geometry.host_group_pages)
    assert made.layout.sinks == geometry.group_pages
    size = [group.page_bytes for group in made.geometry.groups]
    sectors = {per_sector * own for per_sector, own in zip(geometry.pages_per_sector, size, strict=True)}
    assert len(sectors) == 1, "page p of every group lies in sector p // pages_per_sector"
    assert math.lcm(*size, 128) == made.layout.sector_bytes
    made.store(len(groups) - 1, [geometry.group_pages[-1] - 1], 0, range(4))
    assert made.read([geometry.group_pages[-1] - 1], 4, len(groups) - 1) == [0, 1, 2, 3]


def test_a_geometry_of_windows_only_has_page_tables_all_the_same() -> None:
    made = cpu_backend(Geometry(pages=4, page_size=4, groups=(Group(window=5),)))
    assert made.layout.pages_per_sequence == 1024
