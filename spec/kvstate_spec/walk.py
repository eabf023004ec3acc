"""What a step does to the streams that it names: sentences 7, 8, 9, 16, 17 and 19 of spec/README.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from kvstate.types import RetentionPolicy, Step, StreamFork, StreamId
from kvstate_spec.model import Image, Key, Page, Token, stream_id


def pages(length: int, size: int) -> int:
    """Return the pages that hold `length` tokens.

    >>> pages(9, size=4)
    3
    """
    return -(-length // size)


@attrs.frozen
class Walked:
    """What a step did: in-step tables, pages that left, forks that did something, pages that pre-forks share."""

    tables: dict[StreamId, list[Page]]
    left: dict[StreamId, list[Page]]
    forked: list[StreamFork]
    posted: list[StreamFork]
    shared: dict[StreamId, list[Page]]


def walk(
    step: Step,
    size: int,
    policies: Mapping[StreamId, RetentionPolicy | None],
    new: Callable[[int], list[Page]],
    images: Mapping[StreamId, Image],
    granted: dict[Key, list[Page]],
    tokens: Sequence[Sequence[Token]],
    accepted: Sequence[int],
    void: frozenset[StreamId] = frozenset(),
    doing: Sequence[StreamFork] | None = None,
) -> Walked:
    """Take `images` through a step: in its admission everything is accepted and nothing void, in its commit not so.

    A page that is needed and not in `granted` is granted, by `new`, and noted there. `doing` are the post-forks that
    did something in the admission; None while that is found out.
    """
    spans = {name: 0 for name in images}
    for segment in step.segments:
        if (name := stream_id(segment)) is not None:
            spans[name] += segment.span
    left: dict[StreamId, list[Page]] = {name: [] for name in images}
    shared: dict[StreamId, list[Page]] = {}
    forked: list[StreamFork] = []
    posted: list[StreamFork] = []

    def copy(fork: StreamFork, page: list[Page]) -> None:
        source, target = images[fork.source], images[fork.target]
        left[fork.target] += target.content
        target.content = source.content[: len(source.tokens) // size] + page
        target.surplus = [p for p in target.surplus if p not in page]
        target.opened, target.released, target.tokens = True, source.released, list(source.tokens)

    # Pre-forks (8): the source exists, or comes to exist with this step.
    for place, fork in enumerate(step.stream_forks(step.pre_forks)):
        source, target = images[fork.source], images[fork.target]
        exists = source.opened or (step.commit and spans[fork.source] > 0)
        if fork.target in void or not exists:
            continue
        page: list[Page] = []
        if len(source.tokens) % size:
            page = target.surplus[:1] or granted.setdefault(("pre", place), new(1))
        copy(fork, page)
        shared[fork.target] = source.content[: len(source.tokens) // size]
        forked.append(fork)

    # Segments (7): content first, then surplus, then grants.
    start = {name: len(image.tokens) for name, image in images.items()}
    own: dict[StreamId, list[Page]] = {name: [] for name in images}
    for place, segment in enumerate(step.segments):
        name = stream_id(segment)
        if name is None or name in void:
            continue
        image = images[name]
        image.tokens = image.tokens + list(tokens[place])
        missing = pages(len(image.tokens), size) - len(image.content)
        used, image.surplus = image.surplus[:missing], image.surplus[missing:]
        own[name] += used
        missing -= len(used)
        image.content += used
        if missing:
            image.content += granted.setdefault(("segment", place), new(missing))
    tables = {name: list(image.content) for name, image in images.items()}

    # What is stored (16, 17), and retention (19).
    uncertain = {name: False for name in images}
    for name, image in images.items():
        if name in void or not spans[name]:
            continue
        stored = sum(n for n, segment in zip(accepted, step.segments, strict=True) if stream_id(segment) == name)
        if not step.commit:
            stored = 0
        image.tokens = image.tokens[: start[name] + stored]
        keep = pages(len(image.tokens), size)
        rest, image.content = image.content[keep:], image.content[:keep]
        if step.commit:
            image.surplus = rest + image.surplus
            image.opened = uncertain[name] = True
            policy = step.retention.get(name.label, policies[name])
            left[name] += retain(image, policy, size)

    # Post-forks (9, 16): the page was found at admission, for whatever count is accepted. One that is dropped drops
    # those that copy its target.
    dropped = set(void)
    for place, fork in enumerate(step.stream_forks(step.post_forks)):
        source, target = images[fork.source], images[fork.target]
        if doing is not None and fork not in doing:
            continue
        if fork.source in dropped or fork.target in dropped:
            dropped.add(fork.target)
            continue
        if not source.opened:
            continue
        page = []
        if size > 1 and (uncertain[fork.source] or len(source.tokens) % size):
            page = granted.get(("post", place)) or target.surplus[:1] or new(1)
            if page != target.surplus[:1]:
                granted["post", place] = page
        copy(fork, page if len(source.tokens) % size else [])
        uncertain[fork.target] = uncertain[fork.source]
        posted.append(fork)

    # Without a commit, surplus that the segments used is surplus again; granted pages return with the lease (17).
    if not step.commit:
        for name, image in images.items():
            image.surplus = own[name] + image.surplus
    return Walked(tables, left, forked, posted, shared)


def retain(image: Image, policy: RetentionPolicy | None, size: int) -> list[Page]:
    """Let whole pages leave from the front, behind the protected ones (19); return them."""
    if policy is None:
        return []
    first = pages(policy.protected_prefix, size)
    count = max(0, (len(image.tokens) - policy.context_budget) // size - first)
    gone = image.content[first : first + count]
    image.content = image.content[:first] + image.content[first + count :]
    image.tokens = image.tokens[: first * size] + image.tokens[(first + count) * size :]
    image.released += count * size
    return gone
