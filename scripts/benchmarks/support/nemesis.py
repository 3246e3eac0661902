"""Trouble in elastic training: schedules of it, drawn from a seed, and histories of trainings that went through them.

The model has a weight for each batch of each host, and a batch's gradient is 1 at its own. So weights count how often a
gradient was applied: the learning rate is the number of ranks where gradients are averaged over the ranks, else 1.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

START = 3
"""Ranks with which drawn schedules begin and end."""
SLOTS, COLUMNS = 12, 256
"""Maximum number of hosts of a schedule, and of batches of a host."""
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
"""Points that only every n-th batch has."""
IN_A_RESET = ("meeting", "sync")
"""Points that only come after another loss."""
POINTS = (*EVERY_BATCH, *SOMETIMES, *IN_A_RESET)
LOSSES = 2
"""Maximum number of ranks that a schedule removes."""
STOPS = (0.3, 2.0, 11.0)
"""Seconds for which a process stands still: two that all bear, one that is taken for a death."""
CUTS = (0.3, 2.0, 20.0)
"""Seconds for which a virtual host's link is cut: two that all bear, one after which Horovod has given the host up."""


class Trouble(msgspec.Struct, frozen=True):
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


class Schedule(msgspec.Struct, frozen=True):
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
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def __str__(self) -> str:
        texts = [f"{one.action} rank {one.victim} at {one.point} from batch {one.batch}" for one in self.troubles]
        return f"seed {self.seed}, {self.kind}: {'; '.join(texts)}"


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


# -- histories ---------------------------------------------------------------------------------------------------------

Record = Mapping[str, Any]
"""A line that a process has written: ``what`` is "begin", "generation", "step", "stepped", "trouble" or "end"."""
TOLERANCE = 1e-3
LEAST_WEIGHT = {"osgp": 0.25}
"""Push-sum weights of ranks whose messages are on their way, by kind: an update made then moves the weights by this
factor, permanently if the membership changes before the messages arrive."""


class Recovery(NamedTuple):
    """Seconds after a process's death, of the survivor that took longest.

    Attributes:
        seconds: until it trained on.
        found_out: until its training loop noticed.
        restart: of Horovod's shutdown and its new start.
        state: the rest, in which the ranks agree on the state to continue from.
        again: steps that a survivor had ended and took again, mean.
    """

    seconds: float
    found_out: float
    restart: float
    state: float
    again: float


class History:
    """All that the processes of one schedule have written.

    Args:
        schedule: that they went through.
        by_host: each host's records, in order.

    Attributes:
        schedule: as above.
    """

    @classmethod
    def of(cls, block: Mapping[str, Any]) -> History:
        """Return the history that a job has written of a schedule."""
        return cls(msgspec.convert(block["schedule"], Schedule), block["history"])

    def __init__(self, schedule: Schedule, by_host: Mapping[str, Sequence[Record]]) -> None:
        self.schedule, self._by_host = schedule, {host: list(records) for host, records in by_host.items()}
        self._slots = {host: self._all(host, "begin")[0]["slot"] for host in self._by_host if self._by_host[host]}
        self._ends = {host: ends[0] for host in self._slots if (ends := self._all(host, "end"))}

    def violations(self) -> list[str]:
        """Return what should not have been."""
        return [
            *self._not_ended(),
            *self._steps_again(),
            *(self._weights() if len(self._ends) == self.schedule.start else ()),
        ]

    @property
    def resets(self) -> int:
        """Number of membership changes."""
        return max((len(self._all(host, "generation")) for host in self._slots), default=1) - 1

    def sizes(self) -> list[int]:
        """Return how many ranks there were, one after the other."""
        every = {record["at"]: record["size"] for host in self._slots for record in self._all(host, "generation")}
        return [size for _, size in sorted(every.items())]

    def held(self) -> list[list[tuple[frozenset[int], int]]]:
        """Return, for each host that was there from begin to end, the identifiers of its threads and the number of its
        open files after each reset."""
        stayed = [host for host in self._ends if len(self._all(host, "generation")) == self.resets + 1]
        generations = [self._all(host, "generation") for host in stayed]
        return [[(frozenset(one["threads"]), one["files"]) for one in own] for own in generations]

    def serving(self, what: str) -> list[str]:
        """Return the control processes, "relay" or "coordinator", that had a "trouble", or reached the "end",
        one after the other."""
        every = sorted((record["at"], record["serves"]) for host in self._slots for record in self._all(host, what))
        return [role for _, roles in every for role in roles]

    @property
    def lost(self) -> int:
        """Steps of ranks that are gone whose gradients were applied nowhere (of partial allreduce)."""
        if self.schedule.kind not in EAGER or len(self._ends) < self.schedule.start:
            return 0
        counts = self._counts()
        gone = [host for host in self._slots if host not in self._ends]
        return sum(int(counts[self._slots[host], batch] < 0.5) for host in gone for batch in self._batches(host))

    def recoveries(self) -> list[Recovery]:
        """Return what followed each process's death."""
        deaths = [one["at"] for host in self._slots for one in self._all(host, "trouble") if one["action"] == "kill"]
        found = []
        for at in sorted(deaths):
            stayed = [host for host in self._ends if self._all(host, "begin")[0]["at"] < at]
            times = {what: [self._first(host, what, at) for host in stayed] for what in ("meeting", "generation")}
            if stayed and all(None not in each for each in times.values()):
                heard, train = max(times["meeting"]), max(times["generation"])
                restart = max(self._restart(host, at, train) for host in stayed)
                again = sum(self._again(host, train) for host in stayed) / len(stayed)
                found.append(Recovery(train - at, heard - at, restart, max(0.0, train - heard - restart), again))
        return found

    def _first(self, host: str, what: str, after: float) -> Any:
        """Time at which a host first wrote this down after a given one; None if it never did."""
        return min((one["at"] for one in self._all(host, what) if one["at"] > after), default=None)

    def _restart(self, host: str, begin: float, end: float) -> float:
        """Seconds that Horovod took to end and to begin again on a host, between these times."""
        own = [*self._all(host, "shutdown"), *self._all(host, "init")]
        return sum(float(one["seconds"]) for one in own if begin < one["at"] <= end)

    def _again(self, host: str, begin: float) -> int:
        """Number of steps that a host had ended before a time and has ended again after it."""
        before = [one["batch"] for one in self._all(host, "stepped") if one["at"] < begin]
        after = [one["batch"] for one in self._all(host, "stepped") if one["at"] > begin]
        return len({*before} & {*after})

    @property
    def _most(self) -> float:
        """The most times that an update of gossip and leaders may count."""
        return 1 / LEAST_WEIGHT.get(self.schedule.kind, 1)

    def _all(self, host: str, what: str) -> list[Record]:
        return [record for record in self._by_host[host] if record["what"] == what]

    def _batches(self, host: str, what: str = "step") -> list[int]:
        return sorted({record["batch"] for record in self._all(host, what)})

    def _not_ended(self) -> Iterator[str]:
        if len(self._ends) != self.schedule.start:
            yield f"{len(self._ends)} ranks have come to the end, and not {self.schedule.start}: {sorted(self._ends)}"
        for host, end in self._ends.items():
            if self._all(host, "generation")[-1]["size"] != self.schedule.start or not end["drained"]:
                yield f"{host} has not ended among {self.schedule.start} ranks"

    def _steps_again(self) -> Iterator[str]:
        """Check that a completed step is not taken again, and that batches follow each other."""
        for host in self._slots:
            ended = [record["batch"] for record in self._all(host, "stepped")]
            if any(later <= earlier for earlier, later in itertools.pairwise(ended)):
                yield f"{host} has ended steps in this order: {ended}"

    def _counts(self) -> np.ndarray:
        weights = np.array(next(iter(self._ends.values()))["weights"], np.float64)
        return -weights.reshape(-1, COLUMNS)

    def _weights(self) -> Iterator[str]:
        every = [end["weights"] for end in self._ends.values()]
        if any(weights != every[0] for weights in every):
            yield "replicas differ at the end"
        counts = self._counts()
        if not np.isfinite(counts).all():
            yield "weights are not finite"
            return
        if self.schedule.kind in EAGER:
            yield from self._each_once(counts)
        else:
            if counts.min() < -TOLERANCE or counts.max() > self._most + TOLERANCE:
                yield f"an update counts {counts.min():.4f} to {counts.max():.4f} times"
            if self.schedule.kind not in LEADERS:
                yield from self._no_update_lost()
            if self.schedule.kind in MEAN_KEPT:
                yield from self._mean_kept(counts)

    def _each_once(self, counts: np.ndarray) -> Iterator[str]:
        """Partial allreduce: each gradient is applied once; a dead rank's at most once, and so that of a step which
        was broken off: if others have completed it, all continue after it."""
        for host, slot in self._slots.items():
            begun, wrong = self._batches(host), []
            must = self._batches(host, "stepped") if host in self._ends or self._carried(host) else []
            for batch in range(COLUMNS):
                count = counts[slot, batch]
                fine = abs(count - 1) < TOLERANCE or (abs(count) < TOLERANCE and batch not in must)
                if (batch in begun and not fine) or (batch not in begun and abs(count) > TOLERANCE):
                    wrong.append(f"batch {batch} counts {count:.3f} times")
            if wrong:
                yield f"{host}{'' if host in self._ends else ' (gone)'}: {', '.join(wrong)}"
        for host, end in self._ends.items():
            own, produced = counts[self._slots[host]].sum(), end["stats"]["gradients_produced"]
            if abs(own - produced) > TOLERANCE:
                yield f"{host} counts {produced} gradients, and {own:.3f} were applied"
            late = max((int(rounds) for rounds in end["stats"]["staleness"]), default=0)
            if late > end["max_staleness"]:
                yield f"{host}: a gradient was {late} rounds stale, and the bound is {end['max_staleness']}"

    def _carried(self, host: str) -> bool:
        """Whether all steps that a rank which is gone has ended are sure to be in the weights. (One that leaves in the
        very reset that another's death has begun hands nothing over any more.)"""
        left = any(one["action"] == "leave" for one in self._all(host, "trouble"))
        killed = any(one["action"] == "kill" for one in self._all(host, "trouble"))
        last = max((one["at"] for one in self._all(host, "generation")), default=0.0)
        broken = any(one["at"] > last for one in self._all(host, "meeting"))
        return self.schedule.kind == "all" or (left and not killed and not broken)

    def _no_update_lost(self) -> Iterator[str]:
        """Gossip: the update of each step of a rank that is there is in its own weights right after the step."""
        for host in self._ends:
            least = -self._most - TOLERANCE
            wrong = [one["batch"] for one in self._all(host, "stepped") if not least <= one["own"] < 0]
            if wrong:
                yield f"{host}: the updates of batches {wrong} are not in its weights"

    def _mean_kept(self, counts: np.ndarray) -> Iterator[str]:
        """Gossip: among ranks that stay the same, the mean of the weights changes by their updates alone."""
        mean = np.zeros_like(counts)
        for host in self._ends:
            records = self._by_host[host]
            begin = max(place for place, record in enumerate(records) if record["what"] == "generation")
            start = -np.array(records[begin]["weights"], np.float64).reshape(-1, COLUMNS)
            updates = np.zeros_like(mean)
            for record in records[begin:]:
                if record["what"] == "stepped" and abs(start[self._slots[host], record["batch"]]) < 1e-9:
                    updates[self._slots[host], record["batch"]] = 1
            mean += (start + updates) / self.schedule.start
        off = np.abs(mean - counts)
        if off.max() > TOLERANCE:
            slot, batch = np.unravel_index(off.argmax(), off.shape)
            yield f"the mean is off by {off.max():.4f} (slot {slot}, batch {batch}): {counts[slot, batch]:.4f}"
