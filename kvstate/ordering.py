"""Which op must follow which.

Ops run on three queues. Inside one queue order is free, so what an op waits for is one number per queue, the newest:
a clock. A clock that names an op also covers everything before it on the same queue.

Who keeps what::

    page    fence     newest use of every dropped ownership, per queue; merged on every drop, never cleared,
                      so a grant never used gives back exactly what it found
    stream  written   the newest write of what it stores: reads follow it
            used      the newest other uses: a page that leaves takes both into its fence

A step that enters a page follows that page's fence; a copy that reads a stream follows `written`.
"""

from __future__ import annotations

import enum

Clock = tuple[int, int, int]
"""Newest op number per queue (compute, copy_out, copy_in); 0 is none."""

NOTHING: Clock = (0, 0, 0)


class Queue(enum.IntEnum):
    """Where an op runs; its place in a clock."""

    COMPUTE = 0
    COPY_OUT = 1
    COPY_IN = 2


def at(queue: Queue, number: int) -> Clock:
    """Return the clock that names one op.

    >>> at(Queue.COPY_OUT, 7)
    (0, 7, 0)
    """
    return (
        number if queue == Queue.COMPUTE else 0,
        number if queue == Queue.COPY_OUT else 0,
        number if queue == Queue.COPY_IN else 0,
    )


def merge(a: Clock, b: Clock) -> Clock:
    """Return the clock that covers both.

    >>> merge((3, 0, 1), (1, 2, 1))
    (3, 2, 1)
    """
    if a is b or b is NOTHING:
        return a
    if a is NOTHING:
        return b
    return (
        a[0] if a[0] >= b[0] else b[0],
        a[1] if a[1] >= b[1] else b[1],
        a[2] if a[2] >= b[2] else b[2],
    )


def covers(a: Clock, b: Clock) -> bool:
    """Tell whether everything `b` names is covered by `a`.

    >>> covers((3, 2, 0), (3, 0, 0)), covers((3, 2, 0), (0, 0, 1))
    (True, False)
    """
    return a[0] >= b[0] and a[1] >= b[1] and a[2] >= b[2]


def elsewhere(after: Clock, queue: Queue) -> Clock:
    """Return `after` without the part that the queue's own order gives for free.

    >>> elsewhere((3, 2, 1), Queue.COMPUTE)
    (0, 2, 1)
    """
    return (
        0 if queue == Queue.COMPUTE else after[0],
        0 if queue == Queue.COPY_OUT else after[1],
        0 if queue == Queue.COPY_IN else after[2],
    )
