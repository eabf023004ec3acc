"""Programs as files and as text: what a violation leaves behind.

A replay file is JSON: sizes, calls, and what was seen. The pytest file is the same program as a person would write it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import attrs

from kvstate.testing import prompts
from kvstate.testing.world import SALTS, Call, Handle, Node, Sizes, Violation, World
from kvstate.trace import decode, encode
from kvstate.types import LabelFork, RequestConfig, RetentionPolicy, Segment, Step, StreamFork, StreamId

FORMAT = 1

VERBS = frozenset(
    {"ingest", "admit", "plan", "launch_enter", "run", "launch_exit", "commit", "abort", "claim_offload"}
    | {"claim_reload", "commit_claim", "abandon", "snapshot", "publish", "claim_retrieve", "copy", "land"}
    | {"fail_fetch", "confirm_cancel", "cancel_retrieve", "key", "reset_prefix_cache", "reset", "remove"}
)
"""What a program may call on a node."""


def run(sizes: Sizes, program: Iterable[Call], finish: bool = True) -> tuple[World, Violation | None]:
    """Run a program on a new world; return the world and the violation it met, if any."""
    world = World(sizes)
    try:
        for call in program:
            world.play(call)
        if finish:
            world.finish()
    except Violation as violation:
        return world, violation
    return world, None


def shrink(sizes: Sizes, program: Sequence[Call], witness: str, tries_max: int = 4000) -> list[Call]:
    """Return a shorter program that the same witness objects to: calls are left out, or made simpler."""
    best = list(program)
    tries = 0

    def fails(candidate: Sequence[Call], length_max: int) -> bool:
        """Try a candidate; ending what it leaves open may add calls, so its length is that of what it ran."""
        nonlocal tries, best
        tries += 1
        _, violation = run(sizes, candidate)
        if violation is None or violation.witness != witness or len(violation.program) > length_max:
            return False
        best = list(violation.program)
        return True

    chunk = max(1, len(best) // 2)
    while chunk:
        start = 0
        while start < len(best) and tries < tries_max:
            if not fails(best[:start] + best[start + chunk :], len(best) - 1):
                start += chunk
        chunk = chunk // 2 if chunk > 1 else 0
    progress = True
    while progress and tries < tries_max:
        progress = False
        for place in reversed(range(len(best))):
            if place < len(best) and fails([*best[:place], *best[place + 1 :]], len(best) - 1):
                progress = True
        for place in range(len(best)):
            simpler = _simpler(best[place]) if place < len(best) else ()
            progress = any(fails([*best[:place], call, *best[place + 1 :]], len(best)) for call in simpler) or progress
    return best


def _simpler(call: Call) -> Iterable[Call]:
    """Yield the call with smaller arguments."""
    for place, arg in enumerate(call.args):
        smaller: list[Any] = []
        if isinstance(arg, Step):
            smaller = list(_simpler_steps(arg))
        elif arg is True:
            smaller = [False]
        elif isinstance(arg, RequestConfig) or (
            isinstance(arg, tuple) and arg and all(isinstance(item, int) for item in arg)
        ):
            smaller = [None]
        for value in smaller:
            yield attrs.evolve(call, args=(*call.args[:place], value, *call.args[place + 1 :]))


def _simpler_steps(step: Step) -> Iterable[Step]:
    for name in ("pre_forks", "post_forks", "segments"):
        items = getattr(step, name)
        for place in range(len(items)):
            yield attrs.evolve(step, **{name: items[:place] + items[place + 1 :]})
    if step.retention:
        yield attrs.evolve(step, retention={})
    if not step.commit:
        yield attrs.evolve(step, commit=True)
    for place, segment in enumerate(step.segments):
        if segment.prefix:
            bare = attrs.evolve(segment, prefix=())
            yield attrs.evolve(step, segments=(*step.segments[:place], bare, *step.segments[place + 1 :]))
        if segment.span > 1:
            smaller = attrs.evolve(segment, span=segment.span - 1)
            yield attrs.evolve(step, segments=(*step.segments[:place], smaller, *step.segments[place + 1 :]))


# -- files


def save(path: Path, sizes: Sizes, violation: Violation) -> None:
    """Write a replay file."""
    document = {
        "kvstate": FORMAT,
        "sizes": attrs.asdict(sizes),
        "witness": violation.witness,
        "detail": violation.detail,
        "program": [
            {"node": call.node, "verb": call.verb, "args": [_encode(arg) for arg in call.args], "gives": call.gives}
            for call in violation.program
        ],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def load(path: Path) -> tuple[Sizes, list[Call], str]:
    """Return (sizes, program, witness) of a replay file.

    Raises
    ------
    ValueError
        When the file is no replay file of this format, saying what is wrong with it.
    """
    try:
        document = json.loads(path.read_text())
        if document["kvstate"] != FORMAT:
            raise ValueError(f"format {document['kvstate']!r}; this version reads format {FORMAT}")
        calls = [
            Call(call["node"], call["verb"], tuple(_decode(arg) for arg in call["args"]), call["gives"])
            for call in document["program"]
        ]
        sizes, witness = Sizes(**document["sizes"]), str(document["witness"])
        World(sizes)
        for call in calls:
            if call.node not in ("a", "b") or call.verb not in VERBS:
                raise ValueError(f"there is no call {call.node}.{call.verb}")
            signature(getattr(Node, call.verb)).bind(None, *call.args)
            if not any(letter.isdigit() for letter in call.gives):
                raise ValueError(f"{call.gives!r} names no result; it has no number")
    except (KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: not a replay file ({why}); `kvstate check` writes them") from error
    return sizes, calls, witness


def _encode(value: Any) -> Any:
    return {"handle": value.name} if isinstance(value, Handle) else encode(value)


def _decode(value: Any) -> Any:
    return Handle(value["handle"]) if isinstance(value, dict) and "handle" in value else decode(value)


# -- text


def text(program: Sequence[Call]) -> str:
    """Return the program as a person would write it, one call per line."""
    used = {arg.name.split("_", 1)[0] for call in program for arg in call.args if isinstance(arg, Handle)}
    fetches = {arg.name for call in program for arg in call.args if isinstance(arg, Handle) and "_" in arg.name}
    lines = []
    for call in program:
        line = f"{call.node}.{call.verb}({', '.join(_text(arg) for arg in call.args)})"
        if call.gives in used:
            line = f"{call.gives} = {line}"
        lines.append(line)
        for name in sorted(fetches):
            owner, label = name.split("_", 1)
            if owner == call.gives:
                lines.append(f"{name} = next(f for f in {owner}.fetches if f.stream.label == {label!r})")
    return "\n".join(lines)


def preamble(sizes: Sizes, program: Sequence[Call]) -> str:
    """Return the lines that make the world in which `text` runs."""
    nodes = [name for name in ("a", "b") if any(call.node == name for call in program)] or ["a"]
    values = attrs.asdict(sizes, recurse=False)
    if sizes.groups == Sizes().groups:
        del values["groups"]
    arguments = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return f"world = World({arguments})\n{', '.join(nodes)} = {', '.join(f'world.{name}' for name in nodes)}"


def _text(value: Any) -> str:
    if isinstance(value, Handle):
        return value.name
    if isinstance(value, Step):
        parts = ["[" + ", ".join(_text(segment) for segment in value.segments) + "]"]
        for name in ("pre_forks", "post_forks"):
            forks = getattr(value, name)
            if forks:
                parts.append(f"{name}=[{', '.join(_text(fork) for fork in forks)}]")
        if not value.commit:
            parts.append("commit=False")
        if value.retention:
            parts.append(f"retention={_text(value.retention)}")
        return f"Step({', '.join(parts)})"
    if isinstance(value, Segment):
        if value.request is None:
            return f"Segment.padding({value.span})"
        label = f", {value.label!r}" if value.label != "main" else ""
        span = f", span={value.span}" if value.span != 1 else ""
        prefix = f", prefix={_prefix(value.prefix)}" if value.prefix else ""
        return f"Segment({value.request!r}{label}{span}{prefix})"
    if isinstance(value, LabelFork):
        return f"LabelFork({value.source!r}, {value.target!r})"
    if isinstance(value, StreamFork):
        return f"StreamFork({_text(value.source)}, {_text(value.target)})"
    if isinstance(value, StreamId):
        return f"StreamId({value.request!r}, {value.label!r})"
    if isinstance(value, RetentionPolicy):
        prefix = f", {value.protected_prefix}" if value.protected_prefix else ""
        return f"RetentionPolicy({value.context_budget}{prefix})"
    if isinstance(value, RequestConfig):
        parts = [f"labels={value.labels!r}"] if value.labels != ("main",) else []
        if value.retention:
            parts.append(f"retention={_text(value.retention)}")
        if value.cache_salt:
            parts.append(f"cache_salt={value.cache_salt!r}")
        return f"RequestConfig({', '.join(parts)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _prefix(keys: tuple[bytes, ...]) -> str:
    """Return keys as a call that makes them, where they are those of a prompt."""
    for page_size in range(1, 9):
        for prompt in prompts.PROMPTS:
            for salt in SALTS:
                if keys == prompts.keys(prompt, len(keys), page_size, salt):
                    return f"keys({prompt}, {len(keys)}, {page_size}{f', {salt!r}' if salt else ''})"
    return f"[bytes.fromhex(key) for key in {[key.hex() for key in keys]}]"


def as_pytest(sizes: Sizes, violation: Violation) -> str:
    """Return a test file that runs the program; it fails while the violation is there."""
    body, head = text(violation.program), preamble(sizes, violation.program)
    names = sorted(
        name
        for name in ("Group", "LabelFork", "Publication", "Record", "RequestConfig", "RetentionPolicy", "Segment",
                     "Step", "StreamFork", "StreamId")
        if f"{name}(" in head + body or f"{name}." in body
    )  # fmt: skip
    lines = [
        f'"""Found by kvstate check. {violation.witness}: {_one_line(violation.detail)}"""',
        "",
        "from kvstate.testing.world import World",
    ]
    if "prefix=keys(" in body:
        lines.insert(2, "from kvstate.testing.prompts import keys")
    if names:
        lines.append(f"from kvstate.types import {', '.join(names)}")
    lines += ["", "", f"def test_{violation.witness}_holds():"]
    lines += [f"    {line}" for line in (head + "\n" + body).splitlines()]
    lines += ["    world.finish()", "    assert not any(node.subject.conflicts() for node in world.nodes.values())", ""]
    return "\n".join(lines)


def _one_line(detail: str) -> str:
    return " ".join(detail.replace('"""', "'''").replace("\\", "/").split())
