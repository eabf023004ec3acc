"""What a step does to the streams that it names: sentences 7, 8, 9, 16, 17, 19, 33 and 38 of spec/README.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from kvstate.types import Geometry, RequestConfig, RetentionPolicy, Step, StreamFork, StreamId
from kvstate_spec.model import Ask, Hit, Image, Page, Pages, Token, pages_in, stream_id


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
    geometry: Geometry,
    configs: Mapping[StreamId, RequestConfig],
    new: Callable[[int, int], list[Page]],
    images: Mapping[StreamId, Image],
    granted: dict[Ask, Pages],
    tokens: Sequence[Sequence[Token]],
    accepted: Sequence[int],
    void: frozenset[StreamId] = frozenset(),
    doing: Sequence[StreamFork] | None = None,
    hits: Mapping[StreamId, Hit] | None = None,
) -> Walked:
    """Take `images` through a step: in its admission everything is accepted and nothing void, in its commit not so.

    A page that is needed and not in `granted` is granted, by `new`, and noted there. `doing` are the post-forks that
    did something in the admission; None while that is found out. `hits` are what prefixes stand for.
    """
    size, groups = geometry.page_size, range(len(geometry.groups))
    spans = {name: 0 for name in images}
    for segment in step.segments:
        if (name := stream_id(segment)) is not None:
            spans[name] += segment.span
    left: dict[StreamId, list[Page]] = {name: [] for name in images}
    shared: dict[StreamId, list[Page]] = {}
    forked: list[StreamFork] = []
    posted: list[StreamFork] = []

    def grant(ask: Ask, group: int, count: int) -> list[Page]:
        lists = granted.setdefault(ask, [[] for _ in groups])
        if not lists[group]:
            lists[group] = new(group, count)
        return lists[group]

    def copy(fork: StreamFork, copies: Pages) -> None:
        source, target = images[fork.source], images[fork.target]
        left[fork.target] += pages_in(target.content)
        whole = len(source.tokens) // size
        target.content = [[*source.content[g][:whole], *copies[g]] for g in groups]
        target.surplus = [[p for p in target.surplus[g] if p not in copies[g]] for g in groups]
        target.opened, target.released, target.tokens = True, source.released, list(source.tokens)
        same = configs[fork.source].cache_salt == configs[fork.target].cache_salt
        target.keys, target.stale = list(source.keys) if same else [], source.stale

    # Pre-forks (8): the source exists, or comes to exist with this step.
    for place, fork in enumerate(step.stream_forks(step.pre_forks)):
        source, target = images[fork.source], images[fork.target]
        exists = source.opened or (step.commit and spans[fork.source] > 0)
        if fork.target in void or not exists:
            continue
        copies: Pages = [[] for _ in groups]
        if len(source.tokens) % size:
            copies = [target.surplus[g][:1] or list(grant(("pre", place), g, 1)) for g in groups]
        copy(fork, copies)
        whole = len(source.tokens) // size
        shared[fork.target] = pages_in([source.content[g][:whole] for g in groups])
        forked.append(fork)

    # Segments (7, 38): a prefix first, then content, then surplus, then grants.
    start = {name: len(image.tokens) for name, image in images.items()}
    own: dict[StreamId, Pages] = {name: [[] for _ in groups] for name in images}
    for place, segment in enumerate(step.segments):
        name = stream_id(segment)
        if name is None or name in void:
            continue
        image = images[name]
        if segment.prefix and hits is not None and name in hits:
            hit = hits[name]
            image.content = [list(hit.content[g]) for g in groups]
            image.tokens, start[name] = list(hit.tokens), len(hit.tokens)
            image.keys = [] if image.stale else list(hit.keys)
        image.tokens = image.tokens + list(tokens[place])
        for g in groups:
            missing = pages(len(image.tokens), size) - len(image.content[g])
            used, image.surplus[g] = image.surplus[g][:missing], image.surplus[g][missing:]
            own[name][g] += used
            image.content[g] += used
            if missing > len(used):
                image.content[g] += grant(("segment", place), g, missing - len(used))
    tables = {name: pages_in(image.content) for name, image in images.items()}

    # What is stored (16, 17), retention (19), and windows (33).
    uncertain = {name: False for name in images}
    for name, image in images.items():
        if name in void or not spans[name]:
            continue
        stored = sum(n for n, segment in zip(accepted, step.segments, strict=True) if stream_id(segment) == name)
        if not step.commit:
            stored = 0
        image.tokens = image.tokens[: start[name] + stored]
        keep = pages(len(image.tokens), size)
        for g in groups:
            rest, image.content[g] = image.content[g][keep:], image.content[g][:keep]
            if step.commit:
                image.surplus[g] = pages_in([rest]) + image.surplus[g]
        if step.commit:
            image.opened = uncertain[name] = True
            policy = step.retention.get(name.label, configs[name].retention.get(name.label))
            left[name] += retain(image, policy, size)
            left[name] += slide(image, geometry)

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
        copies = [[] for _ in groups]
        if size > 1 and (uncertain[fork.source] or len(source.tokens) % size):
            for g in groups:
                reserved = granted[("post", place)][g] if ("post", place) in granted else []
                copies[g] = list(reserved or target.surplus[g][:1] or grant(("post", place), g, 1))
        copy(fork, copies if len(source.tokens) % size else [[] for _ in groups])
        uncertain[fork.target] = uncertain[fork.source]
        posted.append(fork)

    # Without a commit, surplus that the segments used is surplus again; granted pages return with the lease (17).
    if not step.commit:
        for name, image in images.items():
            image.surplus = [own[name][g] + image.surplus[g] for g in groups]
    return Walked(tables, left, forked, posted, shared)


def retain(image: Image, policy: RetentionPolicy | None, size: int) -> list[Page]:
    """Let whole pages leave from the front, behind the protected ones (19); return them."""
    if policy is None:
        return []
    first = pages(policy.protected_prefix, size)
    count = max(0, (len(image.tokens) - policy.context_budget) // size - first)
    gone = pages_in([own[first : first + count] for own in image.content])
    image.content = [own[:first] + own[first + count :] for own in image.content]
    image.tokens = image.tokens[: first * size] + image.tokens[(first + count) * size :]
    if count:
        image.keys = image.keys[:first]
    image.released += count * size
    return gone


def slide(image: Image, geometry: Geometry) -> list[Page]:
    """Let the pages leave that no window needs any more (33); return them. Before a place that left all have left."""
    gone: list[Page] = []
    for group, own in enumerate(image.content):
        gaps = [place + 1 for place, page in enumerate(own) if page is None]
        first = max([geometry.skipped(group, len(image.tokens)), *gaps])
        gone += pages_in([own[:first]])
        own[:first] = [None] * first
    return gone
