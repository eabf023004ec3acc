"""Transports: fetches between the device caches of managers, in one process or between processes of one machine."""

from gpu_backend.transports.fetches import Faults, FetchTransport, PeerLost, unique_address
from gpu_backend.transports.in_process import InProcessTransport, Network
from gpu_backend.transports.memory import SharedMemory, share
from gpu_backend.transports.pages import Pages
from gpu_backend.transports.shared_memory import Publisher, SharedMemoryTransport

__all__ = [
    "Faults",
    "FetchTransport",
    "InProcessTransport",
    "Network",
    "Pages",
    "PeerLost",
    "Publisher",
    "SharedMemory",
    "SharedMemoryTransport",
    "share",
    "unique_address",
]
