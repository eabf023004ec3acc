"""The reference scheduler: continuous batching over a KVManager, with eviction, soft reset and restore.

::

    requests    what is asked for, answered, and known of a request in between       reasons   why something was decided
    roster      who is live and where each stands        waiting   the queue of those that hold no device pages
    demand      the most that a request can need         drafting  its part of the next step
    passes      one step put together                    steady    … the same again, while nothing changes
    scheduler   Scheduler: schedule, update, cancel      settling  what a step's tokens change
    batch       what it hands out                        loop      the loop of an engine around it

Who leaves when memory is short is decided in `kvstate.eviction`.
"""

from kvstate.scheduler.batch import Batch, Blocked, Idle, InFlight, Update
from kvstate.scheduler.loop import Model, Sampled, serve
from kvstate.scheduler.requests import GenerationRequest, Output
from kvstate.scheduler.scheduler import Scheduler

__all__ = [
    "Batch",
    "Blocked",
    "GenerationRequest",
    "Idle",
    "InFlight",
    "Model",
    "Output",
    "Sampled",
    "Scheduler",
    "Update",
    "serve",
]
