"""A page is one contiguous range in both tiers, and its size is what every dtype and world size makes of it."""

import doctest
import subprocess
import sys
from typing import Any

import pytest
import torch

import gpu_backend
from gpu_backend import layout as layout_module
from gpu_backend.device_cache import DeviceCache, dtype_of
from gpu_backend.host_pool import HostPool
from gpu_backend.layout import CacheLayout
from gpu_backend.queues import HostMemoryError, HostQueues, queues_for

from .rig import DTYPES, layout

CPU = torch.device("cpu")


def test_examples_run() -> None:
    assert doctest.testmod(layout_module).failed == 0


@pytest.mark.parametrize(("kv_heads", "world_size", "heads"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (2, 4, 1), (1, 8, 1)])
def test_heads_are_shared_by_the_ranks_and_each_stores_at_least_one(kv_heads: int, world_size: int, heads: int) -> None:
    sizes = layout(kv_heads=kv_heads, world_size=world_size)
    assert sizes.heads == heads
    assert sizes.page_bytes == 2 * 2 * 4 * heads * 8 * 2


def test_heads_that_cannot_be_shared_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="6 heads of K and V cannot be shared evenly by 4 ranks"):
        layout(kv_heads=6, world_size=4)


@pytest.mark.parametrize(
    "wrong", [{"layers": 0}, {"pages": 0}, {"head_dim": True}, {"host_pages": -1}, {"max_seq_len": 0}]
)
def test_a_size_out_of_range_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        layout(**wrong)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype"):
        layout(dtype="int8")


@pytest.mark.parametrize(("dtype", "size"), list(zip(DTYPES, (2, 2, 4, 1, 1), strict=True)))
def test_page_bytes_follow_the_dtype_and_reach_the_manager(dtype: str, size: int) -> None:
    sizes = layout(dtype=dtype)
    assert sizes.page_bytes == 2 * 2 * 4 * 2 * 8 * size
    geometry = sizes.geometry()
    assert (geometry.groups[0].page_bytes, geometry.pages, geometry.host_pages) == (sizes.page_bytes, 12, 12)


def test_page_tables_are_as_wide_as_the_longest_sequence() -> None:
    assert layout(max_seq_len=17).pages_per_sequence == 5
    assert layout().pages_per_sequence == 12


def test_the_package_imports_no_torch_until_it_is_asked_to() -> None:
    code = "import sys, gpu_backend; gpu_backend.CacheLayout; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = gpu_backend.Nothing


# -- the two tiers


def caches(sizes: CacheLayout) -> list[DeviceCache | HostPool]:
    return [DeviceCache(sizes, CPU), HostPool(sizes, HostQueues())]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_is_one_contiguous_range_of_its_storage(dtype: str) -> None:
    sizes = layout(dtype=dtype)
    for cache in caches(sizes):
        assert cache.storage.shape[1:] == sizes.page_shape
        cache.bytes.zero_()
        cache.storage[3] = 1
        changed = cache.bytes.any(dim=1).nonzero().flatten().tolist()
        assert changed == [3]
        assert cache.storage[3].is_contiguous()
        assert cache.bytes[3].data_ptr() == cache.storage[3].data_ptr()


def test_the_sink_lies_behind_the_last_device_page_and_the_host_has_none() -> None:
    device, host = caches(layout())
    assert len(device.bytes) == len(device.storage) == 13
    assert layout().sink == 12
    assert len(host.bytes) == 12


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_view_is_the_cache_itself_in_its_dtype(dtype: str) -> None:
    sizes = layout(dtype=dtype)
    cache = DeviceCache(sizes, CPU)
    cache.bytes.zero_()
    view = cache.layer_view(1)
    assert view.shape == (13, 2, 4, 2, 8)
    assert view.dtype == dtype_of(sizes)
    cache.storage[5, 1, 1, 2, 1, 7] = 64
    assert view.view(cache.storage.dtype)[5, 1, 2, 1, 7] == 64
    assert view.data_ptr() == cache.storage[0, 1].data_ptr()


def test_there_is_no_layer_before_the_first_or_behind_the_last() -> None:
    cache = DeviceCache(layout(), CPU)
    for layer in (-1, 2):
        with pytest.raises(IndexError, match=r"layers 0 … 1"):
            cache.layer_view(layer)


@pytest.mark.parametrize("dtype", DTYPES)
def test_poisoned_pages_read_as_nan_and_the_others_stay(dtype: str) -> None:
    sizes = layout(dtype=dtype)
    for cache in caches(sizes):
        cache.bytes.zero_()
        cache.poison([7, 2, 3])
        nan = cache.storage.view(dtype_of(sizes)).float().isnan().flatten(1)
        assert nan.all(dim=1).nonzero().flatten().tolist() == [2, 3, 7]
        assert nan.any(dim=1).sum() == 3


def test_a_host_pool_of_no_pages_is_legal() -> None:
    assert HostPool(layout(host_pages=0), HostQueues()).bytes.shape == (0, layout().page_bytes)


def test_host_memory_that_cannot_be_had_is_an_error_with_a_hint() -> None:
    with pytest.raises(HostMemoryError, match=r"host pool of 'kv' needs .* GiB .* ask for fewer host pages"):
        HostPool(layout(host_pages=1 << 50), HostQueues())


def test_a_device_without_queues_is_refused() -> None:
    with pytest.raises(ValueError, match="no queues for device 'meta'"):
        queues_for(torch.device("meta"))
