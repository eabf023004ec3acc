"""A cache in memory that other processes can map."""

from __future__ import annotations

import fcntl
import mmap
import os

import torch

from gpu_backend.device_cache import DeviceCache


def mapped(fd: int, size_bytes: int) -> torch.Tensor:
    """Map shared memory; the mapping ends with the last tensor over it."""
    return torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)


class SharedMemory:
    """Bytes that other processes can map. Not released before the last tensor over them, here and there.

    Parameters
    ----------
    size_bytes
        Fixed: the memory is sealed against growing and shrinking, so no reader can run off its end.

    Attributes
    ----------
    bytes
        uint8, ``(size_bytes,)``, zeros.
    """

    def __init__(self, size_bytes: int) -> None:
        self.fd = os.memfd_create("kvstate", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self.bytes = mapped(self.fd, size_bytes)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Hand it to nobody any more. Twice is harmless."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def share(cache: DeviceCache) -> SharedMemory:
    """Put a cache into shared memory. Its content is lost, so do it before the first step.

    Raises
    ------
    ValueError
        When the cache is not in the memory of this machine's CPU.
    """
    if not cache.bytes.is_cpu:
        raise ValueError(f"{cache.layout.name}: shared memory takes a cache on device 'cpu', not {cache.bytes.device}")
    memory = SharedMemory(cache.bytes.numel())
    cache.move(memory.bytes)
    return memory
