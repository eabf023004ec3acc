"""The seam between the backend and a device: queues, events, page copies, memory that copies can reach.

Everything that differs between devices is behind `Queues`. On the CPU the work is done when it is submitted; the rest
of the package does not know.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from gpu_backend.copier import Run
from kvstate.errors import KVStateError, Poisoned
from kvstate.ordering import NOTHING, Clock, Queue, at, covers, merge


class HostMemoryError(KVStateError):
    """Host memory cannot be had as it was asked for; the message says what to do."""


class Mark(Protocol):
    """A point on a queue."""

    def reached(self) -> bool:
        """Tell whether everything submitted before the mark has run."""

    def wait(self) -> None:
        """Block until it has."""


class Queues(Protocol):
    """The three queues of a device. All are made at once, when the backend is: no first use that two threads race for.

    Attributes
    ----------
    device
        Of the tensors.
    copy_s
        Seconds that each queue spent in page copies so far, as far as the host knows.
    """

    device: torch.device
    copy_s: list[float]

    def on(self, queue: Queue) -> AbstractContextManager[object]:
        """Return the context in which torch submits to `queue`."""

    def follow(self, queue: Queue, after: Clock) -> None:
        """Let what comes next on `queue` wait for what `after` names; the host does not wait."""

    def copy(self, queue: Queue, target: Tensor, source: Tensor, runs: Sequence[Run]) -> None:
        """Copy runs of pages between two tensors `(pages, page_bytes)` of bytes, contiguous and in range."""

    def upload(self, queue: Queue, target: Tensor, source: Tensor) -> None:
        """Copy from host memory to the device; `source` is read when the queue gets there."""

    def mark(self, queue: Queue) -> Mark:
        """Return the point behind everything submitted to `queue` so far."""

    def record(self, queue: Queue, number: int) -> None:
        """Let op `number` complete when everything submitted to `queue` so far has run."""

    def completed(self) -> Clock:
        """Return the newest op per queue that the host has seen complete."""

    def wait(self, clock: Clock) -> None:
        """Block until everything that `clock` names has completed.

        Raises
        ------
        Poisoned
            After `lose`.
        """

    def lose(self, why: str) -> None:
        """The device failed: nothing completes any more."""

    def host_memory(self, size_bytes: int, what: str) -> Tensor:
        """Return bytes in host memory that `copy` and `upload` reach without the host's help.

        Raises
        ------
        HostMemoryError
            When they cannot be had so.
        """


class _Reached:
    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        return None


_REACHED = _Reached()

_HUGE_PAGE_BYTES = 2 << 20


class HostQueues:
    """Queues of a device that is the host: what is submitted has run."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.copy_s = [0.0 for _ in Queue]
        self._completed = NOTHING
        self._lost: str | None = None
        # Guards `_completed` and `_lost` for those who wait; never held while anything is copied.
        self._done = threading.Condition()

    def on(self, queue: Queue) -> AbstractContextManager[object]:
        return nullcontext()

    def follow(self, queue: Queue, after: Clock) -> None:
        """Everything submitted before has run."""

    def copy(self, queue: Queue, target: Tensor, source: Tensor, runs: Sequence[Run]) -> None:
        """One memmove per run: Tensor.copy_ costs several microseconds per call. It lets other threads run."""
        began_s = time.perf_counter()
        page_bytes = target.shape[1]
        to, origin = target.data_ptr(), source.data_ptr()
        move = ctypes.memmove
        for source_page, target_page, count in runs:
            move(to + target_page * page_bytes, origin + source_page * page_bytes, count * page_bytes)
        self.copy_s[queue] += time.perf_counter() - began_s

    def upload(self, queue: Queue, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self, queue: Queue) -> Mark:
        return _REACHED

    def record(self, queue: Queue, number: int) -> None:
        with self._done:
            self._completed = merge(self._completed, at(queue, number))
            self._done.notify_all()

    def completed(self) -> Clock:
        return self._completed

    def wait(self, clock: Clock) -> None:
        with self._done:
            while not covers(self._completed, clock):
                if self._lost is not None:
                    raise Poisoned(self._lost)
                self._done.wait()

    def lose(self, why: str) -> None:
        with self._done:
            self._lost = self._lost or why
            self._done.notify_all()

    def host_memory(self, size_bytes: int, what: str) -> Tensor:
        try:
            return _in_huge_pages(torch.empty(size_bytes, dtype=torch.uint8))
        except RuntimeError as error:
            raise HostMemoryError(
                f"{what} needs {size_bytes / 2**30:.2f} GiB of host memory, which cannot be had; "
                "ask for fewer host pages"
            ) from error


def _in_huge_pages(memory: Tensor) -> Tensor:
    """Ask the kernel for huge pages behind `memory`: page copies jump about, and so miss the TLB less.

    What cannot be had is done without: it costs time, not correctness.
    """
    advice: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
    low = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    high = (memory.data_ptr() + memory.numel()) // mmap.PAGESIZE * mmap.PAGESIZE
    if advice is not None and high - low >= _HUGE_PAGE_BYTES:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), advice)
    return memory


def queues_for(device: torch.device) -> Queues:
    """Return the queues of `device`.

    Raises
    ------
    ValueError
        When this version has none for it.
    """
    if device.type == "cpu":
        return HostQueues()
    raise ValueError(f"no queues for device {str(device)!r} in this version; use device 'cpu'")


class Staging:
    """Buffers in host memory from which lists of numbers are uploaded; each is used again once its upload has run.

    A buffer is taken, filled, uploaded and marked in one go. Nobody keeps one while waiting for anything else, so the
    wait for the next free one is a wait for the device only, and always ends.

    Parameters
    ----------
    queues
        Do the uploads, on the compute queue.
    buffers
        How many.
    """

    def __init__(self, queues: Queues, buffers: int = 4) -> None:
        self._queues = queues
        self._buffers: list[tuple[Tensor, Mark]] = [(self._buffer(1024), _REACHED) for _ in range(buffers)]
        self._next = 0
        self._lock = threading.Lock()

    def _buffer(self, count: int) -> Tensor:
        return self._queues.host_memory(4 * count, "a staging buffer").view(torch.int32)

    def upload(self, values: Tensor, target: Tensor | None = None) -> Tensor:
        """Upload `values` (int32, on the host) into the beginning of `target`, or of fresh memory; return that.

        Blocks only while every buffer waits for its upload.
        """
        count = len(values)
        with self._lock:
            place = self._take()
            buffer = self._buffers[place][0]
            if len(buffer) < count:
                buffer = self._buffer(1 << (count - 1).bit_length())
            buffer[:count] = values
            with self._queues.on(Queue.COMPUTE):
                if target is None:
                    target = torch.empty(count, dtype=torch.int32, device=self._queues.device)
                self._queues.upload(Queue.COMPUTE, target[:count], buffer[:count])
            self._buffers[place] = (buffer, self._queues.mark(Queue.COMPUTE))
            self._next = (place + 1) % len(self._buffers)
        return target[:count]

    def _take(self) -> int:
        """Return the place of the next free buffer; the oldest is free first."""
        for ahead in range(len(self._buffers)):
            place = (self._next + ahead) % len(self._buffers)
            if self._buffers[place][1].reached():
                return place
        self._buffers[self._next][1].wait()
        return self._next
