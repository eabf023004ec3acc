"""The one event schema: what a program, a recorded trace, a replay file and an explorer's path are made of.

One event is one critical section: a verb, its arguments, and what came of it. Leases, claims and fetches appear by
serial. Recording appends a value under the lock; everything is formatted outside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from kvstate.ops import Op, Plan
from kvstate.refusals import Refusal
from kvstate.state import Fetch, Lease, OffloadClaim, ReloadClaim
from kvstate.transitions.retrieve import Snapshot
from kvstate.types import (
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

_VALUES: tuple[type[Any], ...] = (
    LabelFork, Publication, Record, RequestConfig, RetentionPolicy, Segment, Step, StreamFork, StreamId,
)  # fmt: skip
_BY_NAME = {cls.__name__: cls for cls in _VALUES}


@attrs.frozen(eq=False)
class Event:
    """One critical section, as it was called: arguments and result are the objects themselves."""

    verb: str
    args: tuple[Any, ...]
    result: Any


def encode(value: Any) -> Any:
    """Return `value` in JSON types. Values of kvstate.types come back from `decode`; handles become their serials."""
    if isinstance(value, _VALUES):
        fields = {
            a.name: encode(getattr(value, a.name)) for a in attrs.fields(type(value)) if a.init and a.name[0] != "_"
        }
        return {"is": type(value).__name__, **fields}
    if isinstance(value, Lease):
        return {"lease": value.serial}
    if isinstance(value, (OffloadClaim, ReloadClaim)):
        return {"claim": value.serial}
    if isinstance(value, Fetch):
        return {"fetch": value.serial}
    if isinstance(value, Plan):
        return {"plan": value.lease.serial}
    if isinstance(value, Op):
        return {"op": value.number}
    if isinstance(value, Snapshot):
        return {"snapshot": value.request.id}
    if isinstance(value, Mapping):
        return {"map": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if attrs.has(type(value)):
        return {type(value).__name__: {a.name: encode(getattr(value, a.name)) for a in attrs.fields(type(value))}}
    raise TypeError(f"cannot write {value!r} into a trace")


def decode(value: Any) -> Any:
    """Return what `encode` wrote; lists become tuples."""
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if isinstance(value, dict):
        if "is" in value:
            cls = _BY_NAME.get(value["is"])
            if cls is None:
                raise ValueError(f"unknown value {value['is']!r} in a trace; was it written by a newer version?")
            return cls(**{name: decode(item) for name, item in value.items() if name != "is"})
        if "map" in value:
            return {decode(k): decode(v) for k, v in value["map"]}
        return {name: decode(item) for name, item in value.items()}
    return value


def line(event: Event) -> str:
    """Return one event as a line of JSON."""
    outcome = f"refused {type(event.result).__name__}" if isinstance(event.result, Refusal) else "done"
    return json.dumps(
        {"verb": event.verb, "args": encode(event.args), "outcome": outcome, "result": encode(event.result)}
    )


def lines(events: Iterable[Event]) -> str:
    """Return events as JSON lines."""
    return "".join(line(event) + "\n" for event in events)
