"""kvstate: the state of a paged KV cache as a machine that can be checked.

See ``docs/`` and ``spec/README.md``. This package is pure Python and imports no tensor library.
"""

from kvstate.manager import KVManager, Launch, admit_all
from kvstate.refusals import Kind, Refusal
from kvstate.scheduler import GenerationRequest, Output, Scheduler, serve
from kvstate.types import (
    Geometry,
    Group,
    LabelFork,
    Publication,
    Record,
    RequestConfig,
    RetentionPolicy,
    Segment,
    Step,
    StreamFork,
    StreamId,
)

__version__ = "0.1.0"

__all__ = [
    "GenerationRequest",
    "Geometry",
    "Group",
    "KVManager",
    "Kind",
    "LabelFork",
    "Launch",
    "Output",
    "Publication",
    "Record",
    "Refusal",
    "RequestConfig",
    "RetentionPolicy",
    "Scheduler",
    "Segment",
    "Step",
    "StreamFork",
    "StreamId",
    "admit_all",
    "serve",
]
