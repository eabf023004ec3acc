"""Transitions: every change of a State, one function each; atomic under the manager's lock.

`VERBS` names them as traces, replay and docs/semantics.md do. A docstring's first line is the verb, its second the
arrow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstate.transitions import lifecycle, offload, prefix, reload, retrieve, step

VERBS: dict[str, Callable[..., Any]] = {
    "ingest": lifecycle.ingest,
    "admit": step.admit,
    "plan": step.plan,
    "launch_enter": step.launch_enter,
    "launch_exit": step.launch_exit,
    "commit": step.commit,
    "abort": step.abort,
    "claim_offload": offload.claim_offload,
    "commit_offload": offload.commit_offload,
    "abandon_offload": offload.abandon_offload,
    "claim_reload": reload.claim_reload,
    "commit_reload": reload.commit_reload,
    "abandon_reload": reload.abandon_reload,
    "snapshot": retrieve.snapshot,
    "publish": retrieve.publish,
    "claim_retrieve": retrieve.claim_retrieve,
    "landed": retrieve.landed,
    "failed": retrieve.failed,
    "abandon_fetch": retrieve.abandon_fetch,
    "cancel_retrieve": retrieve.cancel_retrieve,
    "cancelled": retrieve.cancelled,
    "key": prefix.key,
    "reset_prefix_cache": prefix.reset_prefix_cache,
    "reset": lifecycle.reset,
    "remove": lifecycle.remove,
    "clear": lifecycle.clear,
    "op_failed": lifecycle.op_failed,
}
