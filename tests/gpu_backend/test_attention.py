"""A small decoder gives the same logits over our pages, whatever happened to them, as over plain contiguous caches.

Both run the same arithmetic on the same rows, so logits are compared bit by bit. At the end of a program every stream
that retention left alone is computed once more without any cache, by a softmax written out: those are compared within
1e-5.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest

with warnings.catch_warnings():
    # A torch without numpy says so when it is first imported.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    torch = pytest.importorskip("torch")

import attrs
from torch import Tensor
from torch.nn import functional

from gpu_backend.attention import gather_kv, paged_attention
from gpu_backend.device_cache import dtype_of
from gpu_backend.kv_io import KVAccess
from kvstate import KVManager, LabelFork, RequestConfig, RetentionPolicy, Segment, Step, StreamFork, StreamId
from kvstate.ops import Plan, PlanView, Tier
from kvstate.refusals import Refusal, StalePlan
from kvstate.state import Lease
from kvstate.transitions.offload import Offloaded
from kvstate.transitions.reload import Reloaded
from kvstate.transitions.step import Committed
from kvstate.types import LabelFork as _LabelFork

from .rig import DTYPES, Rig, layout

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 2, 4, 2, 8, 4
WIDTH, WORDS, POSITIONS = HEADS * HEAD_DIM, 50, 128
Stream = tuple[str, str]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
