"""Measure every mutant and write docs/mutants.md: ``python -m tests.mutants.table [PATTERN]``.

A mutant is hunted by the random walk as the tests do; then the program that shows it is made as short as
`kvstate.testing.program.shrink` can. With a pattern, only the mutants whose id matches are measured, and nothing is
written.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from kvstate.testing import program
from tests.mutants import pools, registry
from tests.mutants.registry import NOT_HERE, Mutant, hunt

MUTANTS = (*registry.MUTANTS, *pools.POOLS)

TARGET = Path(__file__).parents[2] / "docs" / "mutants.md"

HEAD = """\
# Mutants

Known bugs of real engines and broken promises, put into the core one at a time by `registry.py` and `pools.py` in
`tests/mutants/`. The core has no switch for any of them. A name such as O7 or D10 is a row of `tests/bugs/`, where
tests of that name state the schedule and what must hold. Rows that are not one wrong line of the core (D9, D15, F6, O4,
O11, O14 and P6) have tests and no mutant. Those of the scheduler (O13, Q2, Q3, Q5, Q12, Q17, Q20 and promises of its
own) stand in `scheduler.py` beside them and are not in this table: random schedules and programs by hand catch each,
as `python -m pytest tests/mutants/test_scheduler.py` asserts.

`layer` is who objected first while the random walk ran on the mutated core (`python -m pytest tests/mutants` asserts
it, and that the machine as it is passes the same programs):

- **reference**: an answer or the state differs from the executable spec;
- **refusal**: a refused call changed something;
- **promise**: an invariant of the view does not hold;
- **oracle**: a stream, or what a step read, holds other tokens than were committed;
- **judge**: two ops are in conflict, and no edge orders them;
- **crash**: the core raised;
- **by hand**: a program beside the mutant: for verbs that block, which no walk calls, and for what pools must do.

`seconds` and `programs` are what the walk took on one core, in worlds of one group, from the mutant's `seed` on: where
the first seed was slow a few others were looked at, and a quick one kept. `calls` is the length of the program that
shows it, after shrinking, with the calls that end what it leaves open.

Written by `python -m tests.mutants.table`.

| mutant | what the core does wrong | layer | caught | seconds | seed | programs | calls |
|---|---|---|---|--:|--:|--:|--:|
"""


def row(mutant: Mutant) -> tuple[str, bool]:
    """Measure a mutant; return its line of the table, and whether it was caught."""
    start = f"| {mutant.id} | {mutant.what} |"
    if mutant.to_come:
        return f"{start} {mutant.to_come} | not run | | | | |", True
    if mutant.by_hand is not None:
        began = time.monotonic()
        with mutant.patch():
            try:
                mutant.by_hand()
            except AssertionError:
                return f"{start} by hand | yes | {time.monotonic() - began:.2f} | | | |", True
        return f"{start} by hand | **no** | | | | |", False
    caught = hunt(mutant)
    if caught is None:
        return f"{start} | **no** | | {mutant.seed} | {mutant.programs} | |", False
    violation = caught.violation
    with mutant.patch():
        calls = len(program.shrink(caught.sizes, violation.program, violation.witness, tries_max=1500))
    line = f"{start} {violation.witness} | yes | {caught.seconds:.2f} | {mutant.seed} | {caught.programs} | {calls} |"
    return line, True


def main(pattern: str = "") -> int:
    """Print the table; without a pattern, write it too. Return 1 when a mutant was not caught."""
    lines = []
    missed = 0
    for mutant in MUTANTS:
        if re.search(pattern, mutant.id):
            line, caught = row(mutant)
            print(line, flush=True)
            lines.append(line)
            missed += not caught
    if not pattern:
        rest = "".join(f"- {name}: {why}.\n" for name, why in NOT_HERE.items())
        TARGET.write_text(f"{HEAD}{chr(10).join(lines)}\n\nNot expressible so far:\n\n{rest}")
        print(f"written to {TARGET}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
