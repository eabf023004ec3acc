"""The host pool at every border: what was asked, what there is, how many share it, what nobody can measure."""

import inspect
import math
import re
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_backend import host_size
from gpu_backend.host_size import (
    GIB,
    HostMemory,
    HostPoolWarning,
    HostSizeInvalid,
    PsutilMissing,
    host_memory,
    host_pages,
)

PAGE = 16 * 2**10
ONE_PAGE = PAGE / GIB
ONE_BYTE = 1 / GIB
PLENTY = HostMemory(1024 * GIB)
UNMEASURED = HostMemory(None)
UNLIMITED_V1 = 9223372036854771712


def told(requested: float | None, page_bytes: int, memory: HostMemory, **options: float) -> tuple[int, str]:
    """The pages and the one warning, "" for none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pages = host_pages(requested, page_bytes, memory, **options)
    assert all(warning.category is HostPoolWarning and warning.filename == __file__ for warning in caught)
    assert len(caught) <= 1
    return pages, "".join(str(warning.message) for warning in caught)


# -- explicit sizes


@pytest.mark.parametrize(
    ("requested", "pages"),
    [
        (ONE_PAGE, 1),
        (ONE_PAGE + ONE_BYTE, 1),
        (2 * ONE_PAGE - ONE_BYTE, 1),
        (2 * ONE_PAGE, 2),
        (1, 2**16),
        (1.5, 3 * 2**15),
    ],
)
def test_what_fits_is_taken_in_whole_pages_and_silently(requested: float, pages: int) -> None:
    assert told(requested, PAGE, PLENTY) == (pages, "")


@given(st.integers(1, 2**22), st.integers(1, 1000))
def test_a_request_for_exactly_n_pages_gets_n_pages_whatever_their_size(page_bytes: int, pages: int) -> None:
    assert told(page_bytes * pages / GIB, page_bytes, PLENTY) == (pages, "")


@pytest.mark.parametrize("memory", [PLENTY, HostMemory(0), UNMEASURED])
@pytest.mark.parametrize("requested", [0, 0.0, -0.0])
def test_zero_is_off_silently_whatever_is_known(requested: float, memory: HostMemory) -> None:
    assert told(requested, PAGE, memory) == (0, "")


@pytest.mark.parametrize("memory", [PLENTY, UNMEASURED])
@pytest.mark.parametrize("requested", [ONE_PAGE - ONE_BYTE, ONE_BYTE, 5e-324])
def test_less_than_one_page_is_off_with_a_warning(requested: float, memory: HostMemory) -> None:
    pages, message = told(requested, PAGE, memory)
    assert pages == 0
    assert message.startswith("host pool off, one page takes 1.526e-05 GiB: ")
    assert f"requested {requested} GiB" in message
    assert message.endswith("resulting 0 GiB (0 pages)")


@pytest.mark.parametrize("requested", [-1, -0.5, -5e-324])
@pytest.mark.parametrize("memory", [PLENTY, UNMEASURED])
def test_a_negative_size_is_an_error(requested: float, memory: HostMemory) -> None:
    with pytest.raises(HostSizeInvalid, match=rf"host pool size {requested}: negative; give GiB .* 0 for no pool"):
        host_pages(requested, PAGE, memory)


@pytest.mark.parametrize("requested", [math.nan, math.inf, -math.inf, 10**400])
def test_a_size_that_is_not_finite_is_an_error(requested: float) -> None:
    with pytest.raises(HostSizeInvalid, match="not a finite number"):
        host_pages(requested, PAGE, PLENTY)


@pytest.mark.parametrize("requested", ["4", "4GiB", "", b"4", True, False, [4], 4j])
def test_a_size_that_is_not_a_number_is_an_error(requested: object) -> None:
    with pytest.raises(HostSizeInvalid, match="not a number; give GiB as a number") as caught:
        host_pages(requested, PAGE, PLENTY)  # type: ignore[arg-type]
    assert caught.value.requested is requested
    assert isinstance(caught.value, ValueError)


# -- the share


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_none_takes_the_share_over_the_local_ranks_and_says_so(ranks: int) -> None:
    pages, message = told(None, GIB, HostMemory(64 * GIB, local_ranks=ranks))
    assert pages == 32 // ranks
    over = "" if ranks == 1 else f" over {ranks} local ranks"
    assert message == (
        f"host pool sized: requested a share, available 64 GiB (share 0.5{over}), resulting {pages} GiB ({pages} pages)"
    )


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("headroom", [None, 2**20 * PAGE])
def test_an_explicit_size_is_clamped_to_the_share_from_the_first_byte_above_it(
    ranks: int, headroom: int | None
) -> None:
    available = 2**20 * PAGE if headroom is None else 2**21 * PAGE
    memory = HostMemory(available, headroom, ranks)
    limit = 2**19 // ranks
    assert told(limit * ONE_PAGE, PAGE, memory) == (limit, "")
    assert told(limit * ONE_PAGE - ONE_BYTE, PAGE, memory) == (limit - 1, "")
    pages, message = told(limit * ONE_PAGE + ONE_BYTE, PAGE, memory)
    assert pages == limit
    assert message.startswith(f"host pool clamped: requested {limit * ONE_PAGE + ONE_BYTE} GiB, available 16 GiB (")
    assert f"resulting {limit * ONE_PAGE:.4g} GiB" in message


@pytest.mark.parametrize(
    ("available", "headroom", "spare"),
    [(8, None, 8), (8, 9, 8), (8, 8, 8), (8, 7, 7), (8, 0, 0), (0, 8, 0), (None, None, None), (None, 7, None)],
)
def test_the_lower_of_memory_and_control_group_counts(
    available: int | None, headroom: int | None, spare: int | None
) -> None:
    assert HostMemory(available, headroom).spare_bytes == spare


@pytest.mark.parametrize("requested", [None, 1])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_share_of_exactly_one_page_is_a_pool_and_one_byte_less_is_off_with_a_warning(
    requested: float | None, ranks: int
) -> None:
    exact = 2 * PAGE * ranks
    assert told(requested, PAGE, HostMemory(exact, local_ranks=ranks))[0] == 1
    pages, message = told(requested, PAGE, HostMemory(exact - 1, local_ranks=ranks))
    assert pages == 0
    assert message.startswith("host pool off")


@pytest.mark.parametrize("tenths", range(1, 10))
def test_a_share_means_its_decimal_digits(tenths: int) -> None:
    assert told(None, PAGE, HostMemory(10 * PAGE), share=tenths / 10)[0] == tenths


def test_the_whole_may_be_the_share() -> None:
    assert told(None, PAGE, HostMemory(10 * PAGE), share=1)[0] == 10


@pytest.mark.parametrize("share", [0, -0.1, 1.1, math.nan, math.inf, "0.5", True])
def test_a_share_outside_of_zero_to_one_is_an_error(share: float) -> None:
    with pytest.raises(ValueError, match="share must be above 0 and at most 1"):
        host_pages(1, PAGE, PLENTY, share=share)


@given(
    st.none() | st.floats(0, 1e6),
    st.integers(1, 2**22),
    st.integers(0, 2**42),
    st.none() | st.integers(0, 2**42),
    st.integers(1, 8),
)
def test_all_ranks_together_never_take_more_than_the_share_nor_one_more_than_it_asked(
    requested: float | None, page_bytes: int, available: int, headroom: int | None, ranks: int
) -> None:
    memory = HostMemory(available, headroom, ranks)
    pages, message = told(requested, page_bytes, memory)
    assert memory.spare_bytes is not None
    assert 2 * ranks * pages * page_bytes <= memory.spare_bytes
    assert requested is None or pages * page_bytes <= requested * GIB
    wished = memory.spare_bytes // 2 // ranks if requested is None else int(requested * GIB)
    assert message or requested == 0 or pages == wished // page_bytes


# -- without psutil


def test_without_psutil_an_explicit_size_is_taken_unclamped_with_a_warning() -> None:
    pages, message = told(4096, GIB, HostMemory(None, headroom_bytes=GIB, local_ranks=8))
    assert pages == 4096
    assert message == (
        "host pool not clamped, psutil is not installed (`pip install 'kvstate[gpu]'`): "
        "requested 4096 GiB, available unknown, resulting 4096 GiB (4096 pages)"
    )


def test_without_psutil_the_share_is_an_error_that_names_the_extra() -> None:
    with pytest.raises(PsutilMissing, match=r"pip install 'kvstate\[gpu\]'") as caught:
        host_pages(None, PAGE, UNMEASURED)
    assert caught.value.name == "psutil"


def test_the_reader_says_when_psutil_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert host_memory(2, tmp_path) == HostMemory(None, None, 2)


# -- values


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"available_bytes": -1}, "available_bytes"),
        ({"available_bytes": 1.5}, "available_bytes"),
        ({"available_bytes": 1, "headroom_bytes": -1}, "headroom_bytes"),
        ({"available_bytes": 1, "local_ranks": 0}, "local_ranks"),
        ({"available_bytes": 1, "local_ranks": True}, "local_ranks"),
    ],
)
def test_a_measurement_that_exists_is_valid(options: dict[str, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number"):
        HostMemory(**options)


@pytest.mark.parametrize("page_bytes", [0, -1, 1.0, True])
def test_a_page_takes_at_least_one_byte(page_bytes: int) -> None:
    with pytest.raises(ValueError, match="page_bytes must be a whole number of at least 1"):
        host_pages(0, page_bytes, PLENTY)


def test_the_option_is_not_named_after_the_one_that_moves_weights() -> None:
    assert "cpu_offload" not in inspect.getsource(host_size)


# -- control groups, read from a root of our own


class Machine:
    """A root with the files of control groups, and psutil seeing 64 GiB."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str | int) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def v1(self, path: str, limit: str | int, usage: int = 0, **statistics: int) -> None:
        self._group(
            f"sys/fs/cgroup/memory{path}", "memory.limit_in_bytes", limit, "memory.usage_in_bytes", usage, statistics
        )

    def v2(self, path: str, limit: str | int, usage: int = 0, **statistics: int) -> None:
        self._group(f"sys/fs/cgroup{path}", "memory.max", limit, "memory.current", usage, statistics)

    def _group(
        self, folder: str, limit_file: str, limit: str | int, usage_file: str, usage: int, statistics: dict[str, int]
    ) -> None:
        self.write(f"{folder}/{limit_file}", limit)
        self.write(f"{folder}/{usage_file}", usage)
        self.write(f"{folder}/memory.stat", "\n".join(f"{name} {value}" for name, value in statistics.items()))

    def member(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "\n".join(lines))

    def headroom(self) -> int | None:
        measured = host_memory(1, self.root)
        assert measured.available_bytes == 64 * GIB
        return measured.headroom_bytes


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    psutil = pytest.importorskip("psutil")

    class Available:
        available = 64 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", Available)
    return Machine(tmp_path)


def test_a_machine_without_control_groups_has_no_limit(machine: Machine) -> None:
    assert machine.headroom() is None


def test_v2_max_is_no_limit(machine: Machine) -> None:
    machine.member("0::/serving")
    machine.v2("/serving", "max", usage=5 * GIB)
    assert machine.headroom() is None


def test_v2_limit_minus_usage(machine: Machine) -> None:
    machine.member("0::/serving")
    machine.v2("/serving", 8 * GIB, usage=5 * GIB)
    assert machine.headroom() == 3 * GIB


def test_v1_huge_number_is_no_limit(machine: Machine) -> None:
    machine.member("4:memory:/serving", "0::/")
    machine.v1("/serving", UNLIMITED_V1, usage=5 * GIB)
    assert machine.headroom() is None


def test_v1_limit_minus_usage_with_the_controller_mounted_together_with_others(machine: Machine) -> None:
    machine.member("5:cpu,cpuacct:/elsewhere", "4:hugetlb,memory:/serving:one", "1:name=systemd:/")
    machine.v1("/serving:one", 8 * GIB, usage=5 * GIB)
    machine.v1("/elsewhere", 1, usage=0)
    assert machine.headroom() == 3 * GIB


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_tightest_group_on_the_way_to_the_root_counts(machine: Machine, version: int, depth: int) -> None:
    machine.member(("4:memory:" if version == 1 else "0::") + "/a/b")
    group = machine.v1 if version == 1 else machine.v2
    for place, path in enumerate(["", "/a", "/a/b"]):
        group(path, (3 if place == depth else 7) * GIB, usage=GIB)
    group("/a/b/c", GIB, usage=GIB)
    assert machine.headroom() == 2 * GIB


@pytest.mark.parametrize("line", ["4:memory:/docker/0123", "4:memory:/../../outside", "4:memory:/"])
def test_a_container_that_sees_its_own_group_as_the_mount_is_limited_by_it(machine: Machine, line: str) -> None:
    machine.member(line)
    machine.v1("", 8 * GIB, usage=5 * GIB)
    assert machine.headroom() == 3 * GIB


def test_a_group_outside_of_the_mount_is_not_looked_for(machine: Machine) -> None:
    machine.member("4:memory:/../../outside")
    machine.v1("", 8 * GIB, usage=5 * GIB)
    machine.write("sys/fs/outside/memory.limit_in_bytes", GIB)
    assert machine.headroom() == 3 * GIB


def test_a_process_without_proc_is_limited_by_the_mount(machine: Machine) -> None:
    machine.v2("", 8 * GIB, usage=5 * GIB)
    assert machine.headroom() == 3 * GIB


@pytest.mark.parametrize("usage", [8 * GIB, 9 * GIB])
@pytest.mark.parametrize("version", [1, 2])
def test_a_full_group_has_no_headroom_and_never_less(machine: Machine, version: int, usage: int) -> None:
    (machine.v1 if version == 1 else machine.v2)("", 8 * GIB, usage)
    assert machine.headroom() == 0


@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_that_the_kernel_drops_first_is_not_usage(machine: Machine, version: int) -> None:
    if version == 1:
        machine.v1("", 8 * GIB, 7 * GIB, inactive_file=9, total_inactive_file=4 * GIB, total_active_file=GIB)
    else:
        machine.v2("", 8 * GIB, 7 * GIB, anon=2 * GIB, inactive_file=4 * GIB, active_file=GIB)
    assert machine.headroom() == 5 * GIB


def test_a_group_without_usage_allows_its_limit(machine: Machine) -> None:
    machine.write("sys/fs/cgroup/memory.max", 8 * GIB)
    assert machine.headroom() == 8 * GIB


@pytest.mark.parametrize("text", ["", "lots", "-1", "8G"])
def test_a_limit_that_nobody_understands_is_ignored_with_a_warning(machine: Machine, text: str) -> None:
    machine.v2("", text)
    path = machine.root / "sys/fs/cgroup/memory.max"
    with pytest.warns(HostPoolWarning, match=re.escape(f"{path} cannot be read ({text!r} is not a number)")):
        assert machine.headroom() is None


def test_a_limit_that_cannot_be_opened_is_ignored_with_a_warning(machine: Machine) -> None:
    (machine.root / "sys/fs/cgroup/memory.max").mkdir(parents=True)
    with pytest.warns(HostPoolWarning, match=r"memory\.max cannot be read"):
        assert machine.headroom() is None


def test_what_is_measured_here_makes_a_pool_that_fits() -> None:
    pytest.importorskip("psutil")
    memory = host_memory(2)
    assert memory.available_bytes
    assert memory.local_ranks == 2
    pages, message = told(None, PAGE, memory)
    assert 0 < pages * PAGE <= memory.available_bytes / 4
    assert message.startswith("host pool sized: requested a share")


def test_measured_and_sized_from_files_to_pages(machine: Machine) -> None:
    machine.member("0::/serving")
    machine.v2("/serving", 8 * GIB, usage=4 * GIB)
    pages, message = told(16, GIB, host_memory(2, machine.root))
    assert pages == 1
    assert message == (
        "host pool clamped: requested 16 GiB, available 4 GiB (share 0.5 over 2 local ranks), resulting 1 GiB (1 pages)"
    )
