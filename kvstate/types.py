"""Values that cross the border between kvstate and its callers.

Every value here is a frozen, slotted attrs class that is validated where it is built: a value that exists is valid.
Lengths, spans and budgets are in tokens, capacities in pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from kvstate.prefix import KEY_BYTES, Key
from kvstate.validators import non_empty, not_negative, positive, whole

MAIN = "main"


def _names(values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise ValueError(f"expected several labels, got the one string {values!r}; write ({values!r},)")
    names = tuple(values)
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"a label must be a non-empty string, got {name!r}")
    return names


def _labels_by_key(values: Mapping[Any, Iterable[str]]) -> dict[Any, tuple[str, ...]]:
    return {key: _names(labels) for key, labels in dict(values).items()}


def _labels_by_walk(values: Mapping[Any, Iterable[str]]) -> dict[Any, tuple[str, ...]]:
    for key in values:
        if not isinstance(key, tuple) or len(key) != 2:
            raise ValueError(f"walk_labels are keyed by (node, walk), got {key!r}")
    return _labels_by_key(values)


def _plan_labels(values: Mapping[Iterable[str], str]) -> dict[tuple[str, ...], str]:
    combined = {_names(labels): plan_label for labels, plan_label in dict(values).items()}
    if () in combined:
        raise ValueError(f"plan label {combined[()]!r} combines no label; leave it out")
    return combined


@attrs.frozen
class StreamId:
    """Names one token history: a request and one of its labels."""

    request: str = attrs.field(validator=non_empty)
    label: str = attrs.field(default=MAIN, validator=non_empty)

    def __str__(self) -> str:
        return f"{self.request}/{self.label}"


@attrs.frozen
class Group:
    """Layers that share one page table.

    Parameters
    ----------
    name
        Used in messages and metrics.
    page_bytes
        Bytes of one page in either tier.
    window
        Tokens that a token attends to, itself included (sliding-window attention); None: all before it.
    """

    name: str = attrs.field(default="full", validator=non_empty)
    page_bytes: int = attrs.field(default=1, validator=positive)
    window: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))


def _groups(values: Iterable[Group]) -> tuple[Group, ...]:
    groups = tuple(values)
    for group in groups:
        if not isinstance(group, Group):
            raise ValueError(f"a geometry is made of Groups, got {group!r}")
    return groups


@attrs.frozen(slots=False)
class Geometry:
    """Sizes of one paged cache.

    With one group a page is the unit of memory. Several groups share sectors of ``lcm(page bytes of every group, 128)``
    bytes: a sector is lent to one group until all its pages are free, and `pages` and `host_pages` count sectors.

    Parameters
    ----------
    pages
        Device pages, the sink not counted; of several groups, device sectors.
    page_size
        Tokens per page, of every group.
    host_pages
        Host pages, or sectors; 0 means that there is no host pool and offload is refused.
    groups
        One entry per attention type.
    name
        Used in messages and metrics.

    Examples
    --------
    >>> mixed = Geometry(pages=10, groups=(Group("full", 4096), Group("window", 1024, window=64)))
    >>> mixed.sector_bytes, mixed.pages_per_sector, mixed.group_pages
    (4096, (1, 4), (10, 40))
    """

    pages: int = attrs.field(validator=positive)
    page_size: int = attrs.field(default=16, validator=positive)
    host_pages: int = attrs.field(default=0, validator=not_negative)
    groups: tuple[Group, ...] = attrs.field(default=(Group(),), converter=_groups)
    name: str = attrs.field(default="kv", validator=non_empty)

    @groups.validator
    def _some_groups(self, _: attrs.Attribute[Any], value: tuple[Group, ...]) -> None:
        if not value:
            raise ValueError(f"geometry {self.name!r} has no groups; give one per attention type")
        names = [group.name for group in value]
        if len(set(names)) != len(names):
            raise ValueError(f"geometry {self.name!r} has two groups of one name: {', '.join(names)}; rename one")

    @cached_property
    def sector_bytes(self) -> int:
        """Bytes of a sector: what changes hands between groups. One group lends its pages to nobody."""
        sizes = [group.page_bytes for group in self.groups]
        return math.lcm(*sizes, 128) if len(sizes) > 1 else sizes[0]

    @cached_property
    def pages_per_sector(self) -> tuple[int, ...]:
        """Pages of a sector, per group. Page p of group g lies in sector ``p // pages_per_sector[g]``."""
        return tuple(self.sector_bytes // group.page_bytes for group in self.groups)

    @cached_property
    def group_pages(self) -> tuple[int, ...]:
        """Device pages that each group could have; that is also the number of its sink page."""
        return tuple(self.pages * per_sector for per_sector in self.pages_per_sector)

    @cached_property
    def host_group_pages(self) -> tuple[int, ...]:
        """Host pages that each group could have."""
        return tuple(self.host_pages * per_sector for per_sector in self.pages_per_sector)

    @cached_property
    def windowed(self) -> bool:
        """True when some group has a window."""
        return any(group.window is not None for group in self.groups)

    def pages_for(self, tokens: int) -> int:
        """Return the pages that hold `tokens` tokens.

        >>> Geometry(pages=8, page_size=4).pages_for(9)
        3
        """
        return -(-tokens // self.page_size)

    def sectors_for(self, pages: Sequence[int]) -> int:
        """Return the sectors that so many pages per group need at least; with one group, its pages.

        >>> Geometry(pages=4, groups=(Group("full", 256), Group("window", 128))).sectors_for((1, 3))
        3
        """
        return sum(-(-count // per) for count, per in zip(pages, self.pages_per_sector, strict=True))

    def skipped(self, group: int, length: int) -> int:
        """Return the leading pages that `group` need not hold when `length` tokens are stored.

        The next token, at position `length`, attends to ``window - 1`` stored ones.

        >>> mixed = Geometry(pages=8, page_size=4, groups=(Group("full"), Group("window", window=6)))
        >>> [mixed.skipped(1, length) for length in (5, 8, 9, 13)], mixed.skipped(0, 99)
        ([0, 0, 1, 2], 0)
        """
        window = self.groups[group].window
        return 0 if window is None else max(0, (length - window + 1) // self.page_size)


@attrs.frozen
class RetentionPolicy:
    """Which tokens a stream keeps when a step commits.

    Whole pages leave whose tokens all lie in front of the last `context_budget` stored tokens and behind the first
    `protected_prefix` ones (the attention sinks of StreamingLLM, Xiao et al. 2023).
    """

    context_budget: int = attrs.field(validator=positive)
    protected_prefix: int = attrs.field(default=0, validator=not_negative)


def _policies(values: Mapping[str, RetentionPolicy]) -> dict[str, RetentionPolicy]:
    policies = dict(values)
    for label, policy in policies.items():
        if not isinstance(policy, RetentionPolicy):
            raise ValueError(f"retention of label {label!r} must be a RetentionPolicy, got {policy!r}")
    return policies


@attrs.frozen
class RequestConfig:
    """What one request needs; the most specific entry wins.

    Parameters
    ----------
    labels
        Labels needed where nothing more specific is given.
    node_labels, walk_labels
        Labels needed at a node, or at a node on one walk through the graph of nodes: ``{(node, walk): labels}``.
    retention
        ``{label: RetentionPolicy}``.
    offload_priority
        Requests with a higher number are offered for offload first.
    cache_salt
        Pages are shared by content with requests of the same salt only: a tenant, an adapter.
    """

    labels: tuple[str, ...] = attrs.field(default=(MAIN,), converter=_names)
    node_labels: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, converter=_labels_by_key)
    walk_labels: Mapping[tuple[str, str], tuple[str, ...]] = attrs.field(factory=dict, converter=_labels_by_walk)
    retention: Mapping[str, RetentionPolicy] = attrs.field(factory=dict, converter=_policies)
    offload_priority: int = attrs.field(default=0, validator=whole)
    cache_salt: str = attrs.field(default="", validator=attrs.validators.instance_of(str))

    def labels_needed(self, node: str | None = None, walk: str | None = None) -> tuple[str, ...]:
        """Return the labels needed at `node` on `walk`.

        >>> config = RequestConfig(node_labels={"decoder": ("main", "cfg")})
        >>> config.labels_needed("decoder"), config.labels_needed("encoder")
        (('main', 'cfg'), ('main',))
        """
        if node is not None and walk is not None and (node, walk) in self.walk_labels:
            return self.walk_labels[node, walk]
        if node is not None and node in self.node_labels:
            return self.node_labels[node]
        return self.labels or (MAIN,)


def _keys(values: Iterable[Key]) -> tuple[Key, ...]:
    keys = tuple(values)
    for key in keys:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise ValueError(f"a key is {KEY_BYTES} bytes, as kvstate.prefix.page_keys makes them, got {key!r}")
    return keys


@attrs.frozen
class Segment:
    """`span` tokens that one step computes on one stream.

    A segment without a request is padding: it owns nothing and its tokens go to the sink. With a `prefix`, an empty
    stream starts on the cached pages of those keys, and the span continues behind them.
    """

    request: str | None = attrs.field(validator=attrs.validators.optional(non_empty))
    label: str = attrs.field(default=MAIN, validator=non_empty)
    span: int = attrs.field(default=1, validator=not_negative)
    prefix: tuple[Key, ...] = attrs.field(default=(), converter=_keys)

    @prefix.validator
    def _computes(self, _: attrs.Attribute[Any], value: tuple[Key, ...]) -> None:
        if value and (self.request is None or not self.span):
            raise ValueError("a segment with a prefix computes at least one token of a request; give it a span")

    @classmethod
    def padding(cls, span: int = 1, label: str = MAIN) -> Segment:
        """Return a row of `span` tokens that nobody reads."""
        return cls(None, label, span)


@attrs.frozen
class LabelFork:
    """Fork label `source` onto label `target` for every request of the step."""

    source: str = attrs.field(validator=non_empty)
    target: str = attrs.field(validator=non_empty)

    def __attrs_post_init__(self) -> None:
        if self.source == self.target:
            raise ValueError(f"a fork needs two labels, got {self.source!r} twice")


@attrs.frozen
class StreamFork:
    """Fork one stream onto another, within a request or across requests (both ingested)."""

    source: StreamId = attrs.field(validator=attrs.validators.instance_of(StreamId))
    target: StreamId = attrs.field(validator=attrs.validators.instance_of(StreamId))

    def __attrs_post_init__(self) -> None:
        if self.source == self.target:
            raise ValueError(f"a fork needs two streams, got {self.source} twice")


def _forks(values: Iterable[LabelFork | StreamFork]) -> tuple[LabelFork | StreamFork, ...]:
    forks = tuple(values)
    for fork in forks:
        if not isinstance(fork, LabelFork | StreamFork):
            raise ValueError(f"a fork is a LabelFork or a StreamFork, got {fork!r}")
    return forks


def _segments(values: Iterable[Segment]) -> tuple[Segment, ...]:
    segments = tuple(values)
    for segment in segments:
        if not isinstance(segment, Segment):
            raise ValueError(f"a step is made of Segments, got {segment!r}")
    return segments


@attrs.frozen
class Step:
    """One forward pass over segments, in declaration order.

    Parameters
    ----------
    segments
        Several segments on one stream add up.
    pre_forks
        Applied before the segments: visible to them.
    post_forks
        Applied after the segments: they include the tokens this step stores.
    commit
        False: pages are leased and written, but no length moves; forks still apply.
    retention
        ``{label: RetentionPolicy}``, in place of the request's own policy at this step's commit only.
    combined_labels
        ``{(label, …): plan label}``: packs these labels into one plan label, label by label, batch order inside.
        A label without an entry is its own plan label.
    """

    segments: tuple[Segment, ...] = attrs.field(converter=_segments)
    pre_forks: tuple[LabelFork | StreamFork, ...] = attrs.field(default=(), converter=_forks)
    post_forks: tuple[LabelFork | StreamFork, ...] = attrs.field(default=(), converter=_forks)
    commit: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    retention: Mapping[str, RetentionPolicy] = attrs.field(factory=dict, converter=_policies)
    combined_labels: Mapping[tuple[str, ...], str] = attrs.field(factory=dict, converter=_plan_labels)
    # Set by the transitions: the streams this step names, valid for one state until its set of streams changes.
    _resolved: Any = attrs.field(default=None, init=False, eq=False, repr=False)
    plain: bool = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        present = {segment.label for segment in self.segments}
        combined: set[str] = set()
        names: set[str] = set()
        for labels, plan_label in self.combined_labels.items():
            if not isinstance(plan_label, str) or not plan_label:
                raise ValueError(f"a plan label must be a non-empty string, got {plan_label!r}")
            for label in labels:
                if label not in present:
                    raise ValueError(
                        f"combined label {label!r} of {plan_label!r} has no segment in this step; leave it out"
                    )
                if label in combined:
                    raise ValueError(f"label {label!r} is combined twice; a label goes into one plan label")
                combined.add(label)
            if plan_label in names or (plan_label in present and plan_label not in labels):
                raise ValueError(f"plan label {plan_label!r} is already taken in this step; choose another name")
            names.add(plan_label)
        if any(segment.prefix for segment in self.segments):
            self._check_prefixes()
        for forks in (self.pre_forks, self.post_forks):
            targets = [fork.target for fork in self.stream_forks(forks)]
            for target in targets:
                if targets.count(target) > 1:
                    raise ValueError(f"{target} is the target of two forks at once; a stream takes one source")
        keys = [(segment.request, segment.label) for segment in self.segments]
        plain = (
            self.commit
            and not (self.pre_forks or self.post_forks or self.retention)
            and all(segment.request is not None and segment.span and not segment.prefix for segment in self.segments)
            and len(set(keys)) == len(keys)
        )
        object.__setattr__(self, "plain", plain)

    def _check_prefixes(self) -> None:
        started: set[tuple[str | None, str]] = set()
        for segment in self.segments:
            if segment.prefix and (not self.commit or (segment.request, segment.label) in started):
                raise ValueError(
                    f"the prefix of {segment.request}/{segment.label} must be in the first segment of its stream, in a "
                    "step that commits"
                )
            started.add((segment.request, segment.label))

    def requests(self) -> tuple[str, ...]:
        """Return the requests of the segments, in order of first appearance, padding left out."""
        return tuple(dict.fromkeys(s.request for s in self.segments if s.request is not None))

    def stream_forks(self, forks: Sequence[LabelFork | StreamFork]) -> list[StreamFork]:
        """Return `forks` with every label fork written out for each request of the step."""
        pairs: list[StreamFork] = []
        for fork in forks:
            if isinstance(fork, StreamFork):
                pairs.append(fork)
            else:
                pairs.extend(
                    StreamFork(StreamId(request, fork.source), StreamId(request, fork.target))
                    for request in self.requests()
                )
        return pairs


@attrs.frozen
class Record:
    """What one rank publishes of one stream.

    `pages` has one tuple per group and is empty while the bytes are on the host; a page that a window group does not
    hold is named as its sink. `address` is the transfer descriptor: what a transport needs to reach the pages. A reader
    copies, then asks whether (`incarnation`, `epoch`) still holds.
    `skipped` are the leading pages per group that are not held; none where it is empty.
    """

    length: int = attrs.field(validator=not_negative)
    released: int = attrs.field(validator=not_negative)
    page_size: int = attrs.field(validator=positive)
    pages: tuple[tuple[int, ...], ...]
    on_host: bool
    address: str
    incarnation: int = attrs.field(validator=not_negative)
    epoch: int = attrs.field(validator=not_negative)
    skipped: tuple[int, ...] = ()

    def newer(self, other: Record) -> bool:
        """Tell whether this record replaces `other`: a later content does, and a longer record of the same content."""
        return (self.incarnation, self.epoch, self.length) >= (other.incarnation, other.epoch, other.length)


@attrs.frozen
class Publication:
    """What the ranks of one worker publish of one request: ``{rank: {label: Record}}``."""

    request: str = attrs.field(validator=non_empty)
    world_size: int = attrs.field(validator=positive)
    ranks: Mapping[int, Mapping[str, Record]] = attrs.field()

    @ranks.validator
    def _in_the_world(self, _: attrs.Attribute[Any], value: Mapping[int, Mapping[str, Record]]) -> None:
        for rank in value:
            if not 0 <= rank < self.world_size:
                raise ValueError(f"rank {rank} is not in a world of {self.world_size}")

    def merge(self, other: Publication) -> Publication:
        """Return both in one, per rank and label; an older record, or a shorter one of its content, never overwrites.

        Raises
        ------
        ValueError
            When the two speak of different requests or world sizes.
        """
        if (self.request, self.world_size) != (other.request, other.world_size):
            raise ValueError(
                f"cannot merge {self.request!r} (world size {self.world_size}) "
                f"with {other.request!r} (world size {other.world_size})"
            )
        ranks: dict[int, dict[str, Record]] = {rank: dict(labels) for rank, labels in self.ranks.items()}
        for rank, labels in other.ranks.items():
            mine = ranks.setdefault(rank, {})
            for label, record in labels.items():
                if label not in mine or record.newer(mine[label]):
                    mine[label] = record
        return Publication(self.request, self.world_size, ranks)
