"""The one event schema: what a program, a recorded trace, a replay file and an explorer's path are made of.

One event is one critical section: a verb, its arguments, and what came of it. Leases, claims and fetches appear by
serial. Recording appends a value under the lock; everything is formatted outside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

import attrs

from kvstate.ops import Op, Plan
from kvstate.state import Fetch, Lease, OffloadClaim, ReloadClaim, State
from kvstate.transitions import VERBS
from kvstate.transitions.retrieve import Retrieval, Snapshot
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

_VALUES: tuple[type[Any], ...] = (
    LabelFork, Publication, Record, RequestConfig, RetentionPolicy, Segment, Step, StreamFork, StreamId,
)  # fmt: skip
FORMAT = 1
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
        return {"plan": value.serial}
    if isinstance(value, Op):
        return {"op": value.number}
    if isinstance(value, Snapshot):
        return {"snapshot": value.serial}
    if isinstance(value, Mapping):
        return {"map": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, bytes):
        return {"hex": value.hex()}
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
        if "hex" in value:
            return bytes.fromhex(value["hex"])
        if "map" in value:
            return {decode(k): decode(v) for k, v in value["map"]}
        return {name: decode(item) for name, item in value.items()}
    return value


@attrs.frozen
class Header:
    """What a trace was recorded on."""

    geometry: Geometry
    address: str = "kv"
    rank: int = 0
    world_size: int = 1


class TraceMismatch(Exception):
    """A recorded event does not come out as recorded.

    Attributes
    ----------
    line
        Of the trace, from 1; the header is line 1.
    """

    def __init__(self, line: int, verb: str, recorded: Any, replayed: Any) -> None:
        super().__init__(f"line {line}: {verb} gave {json.dumps(replayed)}, recorded was {json.dumps(recorded)}")
        self.line = line


def dumps(header: Header, events: Iterable[Event]) -> str:
    """Return a trace as JSON lines: the header, then one line per critical section."""
    geometry = attrs.asdict(header.geometry)
    first = {"kvstate_trace": FORMAT, **attrs.asdict(header, recurse=False), "geometry": geometry}
    lines = [json.dumps(first)]
    for event in events:
        entry = {"verb": event.verb, "args": encode(event.args), "result": encode(event.result)}
        lines.append(json.dumps(entry))
    return "\n".join(lines) + "\n"


def replay(text: str) -> State:
    """Run a trace on a new State and return it.

    Raises
    ------
    TraceMismatch
        At the first event that does not come out as recorded.
    ValueError
        When the text is no trace of this format.
    """
    lines = text.splitlines()
    try:
        first = json.loads(lines[0])
        if first["kvstate_trace"] != FORMAT:
            raise ValueError(f"format {first['kvstate_trace']!r}, this version reads {FORMAT}")
        geometry = dict(first["geometry"])
        geometry["groups"] = tuple(Group(**group) for group in geometry["groups"])
        state = State(Geometry(**geometry), first["address"], first["rank"], first["world_size"])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"line 1: not the header of a trace, kvstate.trace.dumps writes one ({error!r})") from error
    handles: dict[tuple[str, int], Any] = {}
    for number, line in enumerate(lines[1:], start=2):
        try:
            entry = json.loads(line)
            verb, recorded, args = entry["verb"], entry["result"], _resolve(entry["args"], handles)
            call = signature(VERBS[verb]).bind(state, *args)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number}: not an event of this trace; was it cut off? ({error!r})") from error
        result = VERBS[verb](*call.args)
        for op in state.outbox:
            handles["op", op.number] = op
        state.outbox.clear()
        _remember(result, handles)
        replayed = encode(result)
        if replayed != recorded:
            raise TraceMismatch(number, verb, recorded, replayed)
    return state


_HANDLES = ("lease", "claim", "fetch", "plan", "op", "snapshot")


def _resolve(value: Any, handles: Mapping[tuple[str, int], Any]) -> Any:
    if isinstance(value, list):
        return tuple(_resolve(item, handles) for item in value)
    if isinstance(value, dict) and len(value) == 1:
        [(kind, serial)] = value.items()
        if kind in _HANDLES:
            return handles[kind, serial]
    return decode(value)


def _remember(result: Any, handles: dict[tuple[str, int], Any]) -> None:
    for value in result.fetches if isinstance(result, Retrieval) else (result,):
        encoded = encode(value)
        if isinstance(encoded, dict) and len(encoded) == 1:
            [(kind, serial)] = encoded.items()
            if kind in _HANDLES:
                handles[kind, serial] = value
