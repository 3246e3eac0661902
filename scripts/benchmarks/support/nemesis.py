"""Schedules of trouble for elastic training, drawn from a seed: who is killed, stopped or cut off, where, and when."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

START = 3
"""Ranks with which drawn schedules begin and end."""
SLOTS, COLUMNS = 12, 256
"""Hosts of one schedule, and batches of one host, at the most."""
FAST = 30
"""Batches that follow each other quickly; later ones only wait for hosts."""
EAGER = ("all", "majority", "solo")
LEADERS = ("lsgd", "easgd")
MEAN_KEPT = ("sgp", "osgp", "dpsgd", "adpsgd", "local")
"""Gossip whose messages keep the mean of the ranks' weights."""
KINDS = (*EAGER, *MEAN_KEPT, *LEADERS)
HOROVOD = "horovod"
"""Not drawn: Horovod's own optimizer and elastic state, to compare with."""
EVERY_BATCH = ("between", "backward", "before step", "step", "apply")
SOMETIMES = {"drain": 7, "checkpoint": 11, "commit": 2}
"""Points that only every so many batches have."""
IN_A_RESET = ("meeting", "sync")
"""Points that only come after another loss."""
POINTS = (*EVERY_BATCH, *SOMETIMES, *IN_A_RESET)
LOSSES = 2
"""Ranks that a schedule takes away, at the most."""
STOPS = (0.3, 2.0, 11.0)
"""Seconds for which a process stands still: two that all bear, one that is taken for a death."""


CUTS = (0.3, 2.0, 20.0)
"""Seconds for which a virtual host's link is cut: two that all bear, one after which Horovod has given the host up."""


@dataclass(frozen=True)
class Trouble:
    """One event.

    Attributes:
        number: in its schedule.
        action: "kill", "stop" (SIGSTOP), "cut" (all of a rank's connections), "join", "leave" (of hosts), "slow disk".
        point: where in its training the rank is, one of ``POINTS``.
        batch: from which on it may come.
        victim: this number, modulo the number of ranks there are then, is the rank that it comes to.
        seconds: of a stop, or of a disk; else how long after the point's beginning it comes, where that takes a while.
    """

    number: int
    action: str
    point: str
    batch: int
    victim: int
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """All that happens in one training.

    Attributes:
        seed: it was drawn from.
        kind: of the optimizer, one of ``KINDS``, or ``HOROVOD``.
        troubles: in order of their batches.
        start: ranks with which it begins and ends.
    """

    seed: int
    kind: str
    troubles: tuple[Trouble, ...]
    start: int = START

    def content(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    @classmethod
    def of(cls, content: dict[str, Any]) -> Schedule:
        """Return what ``content`` gave."""
        return cls(**{**content, "troubles": tuple(Trouble(**one) for one in content["troubles"])})

    def __str__(self) -> str:
        told = [f"{one.action} rank {one.victim} at {one.point} from batch {one.batch}" for one in self.troubles]
        return f"seed {self.seed}, {self.kind}: {'; '.join(told)}"


def points_of(batch: int) -> tuple[str, ...]:
    """Return the points that a batch has."""
    return (*EVERY_BATCH, *(point for point, each in SOMETIMES.items() if batch % each == each - 1))


def drawn(seed: int) -> Schedule:
    """Return a schedule: the same for the same seed."""
    draws = random.Random(seed)
    troubles: list[Trouble] = []
    losses = 0
    for number in range(draws.randint(1, 4)):
        action = draws.choices(("kill", "stop", "cut", "join", "leave", "slow disk"), (8, 3, 3, 3, 3, 1))[0]
        if losses == LOSSES and action in ("kill", "leave"):
            action = draws.choice(("stop", "cut", "join"))
        losses += action in ("kill", "leave")
        points = POINTS if action == "kill" else (*EVERY_BATCH, *SOMETIMES)
        point = "checkpoint" if action == "slow disk" else draws.choice(points)
        seconds = draws.uniform(0.0, 0.02 if point != "meeting" else 0.5)
        if action == "stop":
            seconds = draws.choices(STOPS, (6, 4, 1))[0]
        elif action == "slow disk":
            seconds = draws.uniform(0.5, 2.0)
        batch = draws.randint(1, FAST - 12)
        troubles.append(Trouble(number, action, point, batch, draws.randrange(60), seconds))
    return Schedule(seed, KINDS[seed % len(KINDS)], tuple(sorted(troubles, key=lambda one: one.batch)))
