"""The fuzz: the alphabet as a hypothesis state machine, a rule per verb. `program.shrink` makes them short."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from kvstate.testing.alphabet import ALPHABET, Letter, advance
from kvstate.testing.walk import SIZES, Tally
from kvstate.testing.world import Node, Sizes, Violation, World

STEPS = 40
"""Calls of one program, at most."""

ADVANCES = 8
"""Rules that go on with what is open: rules are drawn evenly, and a step takes five calls."""

BATCH = 25
"""Programs between two looks at the clock."""


@attrs.frozen
class DataChooser:
    """Choices that hypothesis makes."""

    data: st.DataObject

    def below(self, count: int) -> int:
        return self.data.draw(st.integers(0, count - 1))


def _rule(letter: Letter, address: str) -> Callable[..., None]:
    def node(machine: Any) -> Node:
        found: Node = machine.world.nodes[address]
        return found

    def call(machine: Any, data: st.DataObject) -> None:
        letter.call(node(machine), DataChooser(data))

    call.__name__ = f"{address}_{letter.verb}"
    ready = precondition(lambda machine: letter.ready(node(machine)))
    ruled: Callable[..., None] = ready(rule(data=st.data())(call))
    return ruled


def machine(sizes: Sizes, tally: Tally | None = None) -> type[RuleBasedStateMachine]:
    """Return the state machine of a world of `sizes`: each verb of each node is a rule; promises, oracle, reference and
    judge look after each. What the programs reached is added to `tally`.
    """

    class KVStateMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world = World(sizes)

        def teardown(self) -> None:
            try:
                self.world.finish()
            finally:
                if tally is not None:
                    tally.add(self.world)

    for address in ("a", "b"):
        for letter in ALPHABET:
            setattr(KVStateMachine, f"{address}_{letter.verb}", _rule(letter, address))
        for copy in range(ADVANCES):
            letter = Letter(f"advance{copy}", 0, lambda n: bool(n.leases or n.claims or n.fetches), advance)
            setattr(KVStateMachine, f"{address}_{letter.verb}", _rule(letter, address))
    return KVStateMachine


def profile(examples: int, steps: int = STEPS) -> settings:
    """Return the settings of a run of `examples` programs.

    Hypothesis only writes them: `program.shrink`, which knows what a call is, makes them shorter in a second, where
    hypothesis takes minutes.
    """
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        print_blob=False,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


def run_once(sizes: Sizes, seed_: int, examples: int, tally: Tally | None = None) -> Violation | None:
    """Run `examples` programs; return the first violation."""
    factory = seed(seed_)(machine(sizes, tally))
    try:
        run_state_machine_as_test(factory, settings=profile(examples))
    except Violation as violation:
        return violation
    return None


def fuzz(
    seed_: int,
    seconds: float,
    tally: Tally,
    progress: Callable[[Tally], None] = lambda tally: None,
    device: str = "memory",
) -> tuple[Sizes, Violation] | None:
    """Fuzz on backend `device` until `seconds` are over; return the first violation."""
    start = time.monotonic()
    batch = 0
    while time.monotonic() - start < seconds:
        sizes = attrs.evolve(SIZES[batch % len(SIZES)], device=device)
        violation = run_once(sizes, seed_ * 1_000_003 + batch, BATCH, tally)
        batch += 1
        tally.seconds = time.monotonic() - start
        progress(tally)
        if violation is not None:
            return sizes, violation
    return None
