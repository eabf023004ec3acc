"""What the ranks of one worker must have in common, agreed before the managers are built and checked after warm-up.

Ranks that schedule from different numbers take different decisions, and a rank that refuses what the others start
leaves them waiting in a collective. The same holds here: whatever is wrong on one rank, every rank makes the same
collective calls, and fails after them, not between. Only a rank that is gone ends them early, by the timeout that
torch.distributed was given.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
import torch.distributed as dist

from gpu_backend.host_size import HostPoolWarning
from kvstate import KVManager
from kvstate.errors import KVStateError

if TYPE_CHECKING:
    from kvstate.view import StateView

Communicator: TypeAlias = "dist.ProcessGroup | None"
"""A process group of torch.distributed; None is the default one, of all ranks."""

Facts: TypeAlias = "list[tuple[str, str]]"
"""Names and values of what ranks compare, in an order that puts causes before effects."""

DIGEST = "digest"

_MOST_PAGES = 2**63 - 1


class NotDistributed(KVStateError):
    """There is nobody to agree with."""


class PagesInvalid(KVStateError, ValueError):
    """A rank brought something else than two numbers of pages. Raised on every rank."""


class RanksDiverge(KVStateError):
    """Ranks that must be equal are not. Raised on every rank of the communicator.

    Attributes
    ----------
    field
        The first that differs: ``geometry.…``, ``pages_free.TIER[GROUP]``, a field of the view such as
        ``streams[r/main].length`` or ``device[0].free[3]``, or ``error`` when some rank could not be read.
    values
        ``{rank: value}``, by global rank.
    """

    def __init__(self, field: str, values: dict[int, str]) -> None:
        holders: dict[str, list[int]] = {}
        for rank, value in values.items():
            holders.setdefault(value, []).append(rank)
        differing = "; ".join(
            f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for value, ranks in holders.items()
        )
        if field == "error":
            hint = "repair that rank"
        elif field.startswith("geometry."):
            hint = "build every rank's manager from the same sizes, with the pages that agree_pages returns"
        else:
            hint = (
                "the ranks took different decisions; give each the same verbs in the same order, and let all of it end"
            )
        super().__init__(f"ranks diverge in {field}: {differing}; {hint}")
        self.field = field
        self.values = values


def agree_pages(own: tuple[int, int], communicator: Communicator = None) -> tuple[int, int]:
    """Return the pages that every rank can have: the minimum over the ranks, per tier.

    Every rank of `communicator` calls this, before it builds its manager.

    Parameters
    ----------
    own
        What this rank could have: device pages, host pages.

    Returns
    -------
    Device pages and host pages, the same on every rank.

    Raises
    ------
    NotDistributed
        torch.distributed is not initialised, or this rank is not in `communicator`.
    PagesInvalid
        On every rank, when one of them did not bring two whole numbers of at least 0.

    Warns
    -----
    HostPoolWarning
        Another rank has fewer host pages than this one.
    """
    if not _member(communicator):
        raise NotDistributed("this rank is not in the communicator; agree with the ranks that share its requests")
    valid = len(own) == 2 and all(
        isinstance(pages, int) and not isinstance(pages, bool) and 0 <= pages <= _MOST_PAGES for pages in own
    )
    # What is not valid takes part all the same, as less than nothing: the others are waiting for this rank.
    least = torch.tensor(own if valid else (-1, -1), dtype=torch.int64, device=_device(communicator))
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=communicator)
    device_pages, host_pages = (int(pages) for pages in least.tolist())
    if device_pages < 0:
        raise PagesInvalid(
            "a rank did not bring (device pages, host pages), two whole numbers of at least 0; "
            f"this one brought {own!r}"
        )
    if host_pages < own[1]:
        warnings.warn(
            f"host pool shrunk: requested {own[1]} pages on this rank, available {host_pages} on another, "
            f"resulting {host_pages} pages on every rank",
            HostPoolWarning,
            stacklevel=2,
        )
    return device_pages, host_pages


def validate_ranks(manager: KVManager, communicators: Sequence[Communicator] = (None,)) -> None:
    """Check that `manager` is in the same state on every rank of each communicator.

    Compared are the geometry, the free pages per tier and group, and the digest of the view; where only that differs,
    the view field by field. To be called after warm-up, while no verb runs and nothing is in flight.

    Parameters
    ----------
    communicators
        Every communicator whose ranks serve the same requests, in the same order on every rank. Those that this rank is
        not in are passed over.

    Raises
    ------
    NotDistributed
        torch.distributed is not initialised, or this rank is in none of the communicators.
    RanksDiverge
        On every rank of a communicator whose ranks differ, once all communicators have been checked.
    """
    joined = [communicator for communicator in communicators if _member(communicator)]
    if not joined:
        raise NotDistributed("this rank is in none of the communicators given; nothing was compared")
    failure: Exception | None = None
    view: StateView | None = None
    try:
        facts, view = _facts(manager)
    except Exception as error:
        failure, facts = error, [("error", f"{type(error).__name__}: {error}")]
    # A rank that stopped at the first difference would be missed by those it shares the next communicator with.
    divergences = [_compare(facts, view, communicator) for communicator in joined]
    if failure is not None:
        raise failure
    for divergence in divergences:
        if divergence is not None:
            raise divergence


def _member(communicator: Communicator) -> bool:
    """Tell whether this rank is in `communicator`."""
    if not (dist.is_available() and dist.is_initialized()):
        raise NotDistributed(
            "torch.distributed is not initialised; call torch.distributed.init_process_group on every rank first "
            "(a single rank has nobody to agree with, and needs no call)"
        )
    return dist.get_rank(communicator) >= 0


def _device(communicator: Communicator) -> torch.device:
    """Return where the communicator's backend takes tensors from: NCCL takes none of the CPU's."""
    if "cpu" in dist.get_backend_config(communicator):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _facts(manager: KVManager) -> tuple[Facts, StateView]:
    """Return what must be equal on every rank, and the view whose digest is in it."""
    facts = [("error", "none"), *_fields("geometry", manager.geometry)]
    # pages_free first: it takes note of fetches that have ended, which the view then holds.
    for tier, counts in manager.pages_free().items():
        facts.extend((f"pages_free.{tier}[{group}]", str(count)) for group, count in enumerate(counts))
    view = manager.view()
    facts.append((DIGEST, view.digest()))
    return facts, view


def _compare(facts: Facts, view: StateView | None, communicator: Communicator) -> RanksDiverge | None:
    """Return the first difference on a communicator.

    The view is large, so it travels only where its digests differ, and nothing before them: all ranks of the
    communicator have the same facts before them, so all of them go on or none does.
    """
    found = _divergence(_gather(facts, communicator))
    if found is None or found.field != DIGEST:
        return found
    return _divergence(_gather(_view_facts(view), communicator)) or found


def _view_facts(view: StateView | None) -> Facts:
    """Return a view in fields, with what was decided before what follows from it: requests first, pages last."""
    if view is None:
        return []
    names = [field.name for field in attrs.fields(type(view))]
    last = {"device", "host"}
    ordered = [name for name in names if name not in last] + [name for name in names if name in last]
    return [fact for name in ordered for fact in _fields(name, getattr(view, name))]


def _fields(name: str, value: Any) -> Facts:
    """Return a value of attrs classes, tuples and dicts leaf by leaf, so that fields added later are compared too."""
    if attrs.has(type(value)):
        return [fact for a in attrs.fields(type(value)) for fact in _fields(f"{name}.{a.name}", getattr(value, a.name))]
    if isinstance(value, tuple):
        keys = _keys(value)
        return [fact for key, item in zip(keys, value, strict=True) for fact in _fields(f"{name}[{key}]", item)]
    if isinstance(value, dict):
        return [fact for key, item in value.items() for fact in _fields(f"{name}[{key}]", item)]
    return [(name, repr(value))]


def _numbers(values: tuple[Any, ...]) -> list[str]:
    return [str(place) for place in range(len(values))]


def _keys(values: tuple[Any, ...]) -> list[str]:
    """Return what the items of a tuple are called: streams by request and label, leases by serial, others by place."""
    keys = [_key(value) for value in values]
    named = [key for key in keys if key is not None]
    return named if len(set(named)) == len(values) else _numbers(values)


def _key(value: Any) -> str | None:
    """Return the name of an item, if it has one."""
    if not attrs.has(type(value)):
        return None
    parts = [getattr(value, name) for name in ("request", "label") if hasattr(value, name)]
    serial = getattr(value, "serial", None)
    return str(serial) if serial is not None else "/".join(map(str, parts)) or None


def _gather(facts: Facts, communicator: Communicator) -> dict[int, dict[str, str]]:
    """Return the facts of every rank of `communicator`, by global rank.

    Bytes in two plain collectives: ``all_gather_object`` needs numpy, and unpickles what it receives.
    """
    device = _device(communicator)
    ranks = dist.get_process_group_ranks(communicator)
    text = json.dumps(facts).encode()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in ranks]
    dist.all_gather(sizes, torch.tensor([len(text)], dtype=torch.int64, device=device), group=communicator)
    lengths = [int(size.item()) for size in sizes]
    own = torch.tensor(list(text.ljust(max(lengths))), dtype=torch.uint8, device=device)
    texts = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(texts, own, group=communicator)
    return {
        rank: dict(json.loads(bytes(gathered[:length].tolist())))
        for rank, gathered, length in zip(ranks, texts, lengths, strict=True)
    }


def _divergence(facts: dict[int, dict[str, str]]) -> RanksDiverge | None:
    """Return the first difference, in the order of the rank that has most to say; None when all are equal."""
    for field in max(facts.values(), key=len):
        values = {rank: own.get(field, "absent") for rank, own in facts.items()}
        if len(set(values.values())) > 1:
            return RanksDiverge(field, values)
    return None
