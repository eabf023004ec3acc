"""How many pages the host pool gets: what was asked for, within a share of what this machine can spare.

Pinned memory cannot be swapped out, so a pool that is too large ends in the out-of-memory killer. `host_memory`
measures, `host_pages` decides, and the decision is a pure function of what was measured.
"""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import TypeGuard

import attrs

from kvstate.errors import KVStateError

GIB = 2**30
"""Bytes of one GiB."""

SHARE = 0.5
"""The share of available memory that the host pools of one machine may take together."""

# A v1 group without a limit reads the largest multiple of the machine's page size below 2**63.
_NO_LIMIT = 2**62


class HostPoolWarning(UserWarning):
    """The host pool is not what was asked for, or nobody asked for its size."""


class HostSizeInvalid(KVStateError, ValueError):
    """What was asked of the host pool is not a size.

    Attributes
    ----------
    requested
        As it was given.
    """

    def __init__(self, requested: object, why: str) -> None:
        super().__init__(f"host pool size {requested!r}: {why}; give GiB as a number, 0 for no pool, None for a share")
        self.requested = requested


class PsutilMissing(KVStateError, ImportError):
    """The host pool was to take its share of available memory, which nobody can measure without psutil."""

    def __init__(self) -> None:
        super().__init__(
            "the host pool takes a share of available memory, and measuring it needs psutil: "
            "`pip install 'kvstate[gpu]'`, or give the size in GiB (0 for no pool)",
            name="psutil",
        )


@attrs.frozen
class HostMemory:
    """What one machine can spare, as every rank on it sees it.

    Parameters
    ----------
    available_bytes
        Memory that can be had without swapping; None when psutil is not there to measure it.
    headroom_bytes
        What the control group still allows, its limit minus its usage; None when there is no limit.
    local_ranks
        Ranks on this machine, each with a pool of its own.
    """

    available_bytes: int | None = attrs.field()
    headroom_bytes: int | None = attrs.field(default=None)
    local_ranks: int = attrs.field(default=1)

    @available_bytes.validator
    @headroom_bytes.validator
    def _bytes(self, attribute: attrs.Attribute[int | None], value: object) -> None:
        if value is not None and not (_whole(value) and value >= 0):
            raise ValueError(f"{attribute.name} must be a whole number of at least 0, or None, got {value!r}")

    @local_ranks.validator
    def _ranks(self, attribute: attrs.Attribute[int], value: object) -> None:
        if not (_whole(value) and value >= 1):
            raise ValueError(f"{attribute.name} must be a whole number of at least 1, got {value!r}")

    @property
    def spare_bytes(self) -> int | None:
        """What all ranks together could have; None without psutil."""
        if self.available_bytes is None or self.headroom_bytes is None:
            return self.available_bytes
        return min(self.available_bytes, self.headroom_bytes)


def host_pages(requested_gib: float | None, page_bytes: int, memory: HostMemory, *, share: float = SHARE) -> int:
    """Return the pages of one rank's host pool.

    Parameters
    ----------
    requested_gib
        Size of the pool of one rank, in GiB. None takes the rank's share, 0 means no pool.
    page_bytes
        Bytes of one page.
    memory
        What the machine can spare; see `host_memory`.
    share
        Above 0, at most 1: what the pools of all ranks of the machine may take of it together.

    Returns
    -------
    Whole pages; 0 means that there is no host pool.

    Raises
    ------
    HostSizeInvalid
        `requested_gib` is negative, not finite, or not a number.
    PsutilMissing
        `requested_gib` is None and `memory` was measured without psutil.

    Warns
    -----
    HostPoolWarning
        With what was requested, available and given: the pool took its share, was clamped to it, could not be clamped
        for lack of psutil, or is off because not one page fits. A request for 0 is silent.

    Examples
    --------
    >>> host_pages(2, 2**20, HostMemory(available_bytes=64 * GIB, local_ranks=8))
    2048
    """
    if not (_whole(page_bytes) and page_bytes >= 1):
        raise ValueError(f"page_bytes must be a whole number of at least 1, got {page_bytes!r}")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share!r}")
    requested = None if requested_gib is None else _bytes(requested_gib)
    if requested_gib == 0:
        return 0
    ceiling = _ceiling(memory, share)
    if requested is None and ceiling is None:
        raise PsutilMissing
    wanted = [limit for limit in (requested, ceiling) if limit is not None]
    pages = min(wanted) // page_bytes

    if not pages:
        what = f"host pool off, one page takes {_gib(page_bytes)}"
    elif ceiling is None:
        what = "host pool not clamped, psutil is not installed (`pip install 'kvstate[gpu]'`)"
    elif requested is None:
        what = "host pool sized"
    elif requested > ceiling:
        what = "host pool clamped"
    else:
        return pages
    warnings.warn(
        f"{what}: requested {'a share' if requested_gib is None else f'{requested_gib} GiB'}, "
        f"available {_available(memory, share)}, resulting {_gib(pages * page_bytes)} ({pages} pages)",
        HostPoolWarning,
        stacklevel=2,
    )
    return pages


def host_memory(local_ranks: int, root: Path = Path("/")) -> HostMemory:
    """Measure what this machine can spare now.

    Every rank measures before any rank pins memory (a barrier in between), or the last ones see what the first left.

    Parameters
    ----------
    local_ranks
        Ranks on this machine. There is no default: eight ranks that each believe to be alone take the machine down.
    root
        Where ``proc`` and ``sys`` are.

    Warns
    -----
    HostPoolWarning
        A limit of the control group cannot be read and is ignored.
    """
    available: int | None
    try:
        import psutil
    except ImportError:
        available = None
    else:
        available = int(psutil.virtual_memory().available)
    return HostMemory(available, _headroom(root), local_ranks)


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _bytes(requested_gib: object) -> int:
    """Return a request in bytes, rounded down. Exact, so that a request for exactly one page gets it."""
    if isinstance(requested_gib, bool) or not isinstance(requested_gib, int | float):
        raise HostSizeInvalid(requested_gib, "not a number")
    try:
        finite = math.isfinite(requested_gib)
    except OverflowError:
        finite = False
    if not finite:
        raise HostSizeInvalid(requested_gib, "not a finite number")
    if requested_gib < 0:
        raise HostSizeInvalid(requested_gib, "negative")
    return math.floor(Fraction(requested_gib) * GIB)


def _ceiling(memory: HostMemory, share: float) -> int | None:
    """Return the most bytes that one rank may take; None without psutil."""
    spare = memory.spare_bytes
    # By way of its digits: 0.7 of ten pages is seven pages, whereas the binary number 0.7 is a little less.
    return None if spare is None else math.floor(spare * Fraction(str(share)) / memory.local_ranks)


def _available(memory: HostMemory, share: float) -> str:
    spare = memory.spare_bytes
    if spare is None:
        return "unknown"
    ranks = "" if memory.local_ranks == 1 else f" over {memory.local_ranks} local ranks"
    return f"{_gib(spare)} (share {share}{ranks})"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.4g} GiB"


# -- control groups


def _headroom(root: Path) -> int | None:
    """Return the least that any control group around this process still allows, in bytes; None without a limit.

    References
    ----------
    cgroups(7); Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of Linux.
    """
    paths = _memberships(root)
    allowed = [
        *_walk(root / "sys/fs/cgroup", paths.get(2), "memory.max", "memory.current", "inactive_file"),
        *_walk(
            root / "sys/fs/cgroup/memory",
            paths.get(1),
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ]
    return min(allowed, default=None)


def _memberships(root: Path) -> dict[int, PurePosixPath]:
    """Return the path of this process in the memory hierarchy of v1 and of v2, as far as it has one."""
    text = _read(root / "proc/self/cgroup") or ""
    paths: dict[int, PurePosixPath] = {}
    for line in text.splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if "memory" in controllers.split(","):
            paths[1] = PurePosixPath(path)
        elif number == "0" and not controllers:
            paths[2] = PurePosixPath(path)
    return paths


def _walk(mount: Path, member: PurePosixPath | None, limit: str, usage: str, reclaimable: str) -> list[int]:
    """Return what each limited group from `member` up to `mount` still allows, in bytes.

    A container often sees its own group as the mount, and a path that does not exist below it: what is missing is
    passed over. A path that leads out of the mount ("..") belongs to another namespace; then only the mount counts.
    """
    parts = () if member is None or ".." in member.parts else member.parts[1:]
    allowed: list[int] = []
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        limit_bytes = _number(folder / limit)
        if limit_bytes is None or limit_bytes >= _NO_LIMIT:
            continue
        used_bytes = max(0, (_number(folder / usage) or 0) - _statistic(folder / "memory.stat", reclaimable))
        allowed.append(max(0, limit_bytes - used_bytes))
    return allowed


def _statistic(path: Path, name: str) -> int:
    """Return the bytes of one line of `path`, 0 when it is not there.

    Usage counts the page cache: a process that has just read its weights would seem to have filled its group. What the
    kernel drops first is taken off, as the kubelet does for its working set.
    """
    for line in (_read(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    """Return the whole number in `path`; None when there is none or it says ``max``."""
    text = _read(path)
    if text is None or text.strip() == "max":
        return None
    if not text.strip().isdecimal():
        _ignored(path, f"{text.strip()!r} is not a number")
        return None
    return int(text)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        _ignored(path, str(error))
        return None


def _ignored(path: Path, why: str) -> None:
    warnings.warn(f"{path} cannot be read ({why}); the host pool ignores it", HostPoolWarning, stacklevel=2)
