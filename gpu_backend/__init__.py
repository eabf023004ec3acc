"""The torch backend of kvstate: a device cache, a host pool, and the copies between them.

::

    layout        what a page is made of                 device_cache, host_pool   the two tiers
    queues        the seam: all that differs by device   copier                    page copies, in runs
    page_tables   rows on the device, per stream         plan_tensors              a plan in tensors
    kv_io         what attention layers call             stamps                    contents that can be checked
    backend       ops on tensors: kvstate.backend.Backend

It imports the core's types, ops, errors and public face, never its transitions. `import gpu_backend` imports no torch:
names below come when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_backend.backend import TorchBackend, cpu_backend
    from gpu_backend.kv_io import KVAccess
    from gpu_backend.layout import CacheLayout, GroupLayout

__all__ = ["CacheLayout", "GroupLayout", "KVAccess", "TorchBackend", "cpu_backend"]

_HOMES = {
    "CacheLayout": "gpu_backend.layout",
    "GroupLayout": "gpu_backend.layout",
    "KVAccess": "gpu_backend.kv_io",
    "TorchBackend": "gpu_backend.backend",
    "cpu_backend": "gpu_backend.backend",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
