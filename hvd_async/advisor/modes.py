"""The modes that are tried: how each is simulated, the line of the script that chooses it, and what is risked. Data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple


class Risk(IntEnum):
    """The changes that a mode makes in training, least first."""

    NONE = 0
    LATE = 1
    OWN = 2

    @property
    def text(self) -> str:
        """In words."""
        return RISKS[self]


RISKS: Mapping[Risk, str] = {
    Risk.NONE: "none: the same average in every step",
    Risk.LATE: "late gradients: ranks share one model, some gradients are applied steps later",
    Risk.OWN: "own weights: ranks train models of their own, which are averaged or pulled together",
}


class Mode(NamedTuple):
    """A mode to try.

    Attributes:
        name: for people.
        arm: as ``hvd_async.simulation.arms`` has it.
        line: the call in the script that replaces Horovod's ``hvd.DistributedOptimizer(opt, ...)``.
        risk: what it changes in training.
        remark: what else is to be known of it.
        options: of ``job_of``.
    """

    name: str
    arm: str
    line: str
    risk: Risk
    remark: str = ""
    options: Mapping[str, Any] = MappingProxyType({})

    def is_as(self, other: Mode) -> bool:
        """Return whether both are simulated alike."""
        return (self.arm, dict(self.options)) == (other.arm, dict(other.options))


YARDSTICK = Mode("horovod", "horovod", "hvd.DistributedOptimizer(opt)", Risk.NONE)
"""The mode that all are compared with."""
EVERY = "every"
"""Stands for the names of all modes."""
OWN_CLASSES = "loses accuracy where ranks see different classes"
MODES: Sequence[Mode] = (
    Mode("all", "all", 'hvd_async.EagerOptimizer(opt, quorum="all")', Risk.NONE),
    Mode("majority", "majority", 'hvd_async.EagerOptimizer(opt, quorum="majority")', Risk.LATE),
    Mode("solo", "solo", 'hvd_async.EagerOptimizer(opt, quorum="solo")', Risk.LATE, "the latest gradients of these"),
    Mode(
        "pace rounds",
        "solo",
        'hvd_async.EagerOptimizer(opt, pace="rounds")',
        Risk.LATE,
        "each rank at its own pace, slow ones take fewer steps: end the loop by opt.rounds, in Keras by StopAtRounds",
        MappingProxyType({"pace": "rounds"}),
    ),
    Mode(
        "auto",
        "auto",
        'hvd_async.EagerOptimizer(opt, quorum="auto")',
        Risk.LATE,
        "its quorum depends on what it measures",
    ),
    Mode("sgp", "sgp", 'hvd_async.GossipOptimizer(opt, algorithm="sgp")', Risk.OWN),
    Mode("osgp", "osgp", 'hvd_async.GossipOptimizer(opt, algorithm="osgp")', Risk.OWN),
    Mode("dpsgd", "dpsgd", 'hvd_async.GossipOptimizer(opt, algorithm="dpsgd")', Risk.OWN),
    Mode(
        "adpsgd",
        "adpsgd",
        'hvd_async.GossipOptimizer(opt, algorithm="adpsgd")',
        Risk.OWN,
        f"each rank at its own pace: slow ones take fewer steps; {OWN_CLASSES}",
    ),
    Mode(
        "local",
        "local-avg4",
        'hvd_async.GossipOptimizer(opt, algorithm="local", average_every=4)',
        Risk.OWN,
        f"averages every 4 steps; {OWN_CLASSES}",
    ),
    Mode(
        "lsgd",
        "lsgd",
        'hvd_async.LeaderOptimizer(opt, algorithm="lsgd")',
        Risk.OWN,
        "waits for nobody, and is the least accurate in short trainings; slow ranks take fewer steps; call "
        "opt.record_loss(loss) before each step",
    ),
    Mode(
        "easgd",
        "easgd",
        'hvd_async.LeaderOptimizer(opt, algorithm="easgd")',
        Risk.OWN,
        "waits for nobody, and is the least accurate in short trainings; slow ranks take fewer steps",
    ),
)


def quorum(ranks: int) -> Mode:
    """Return partial allreduce with a quorum of so many ranks."""
    return Mode(f"quorum {ranks}", f"k{ranks}", f"hvd_async.EagerOptimizer(opt, quorum={ranks})", Risk.LATE)


def named_modes(ranks: int, names: str = EVERY) -> list[Mode]:
    """Return the modes to try with so many ranks.

    Args:
        ranks: of the job.
        names: with commas between them; ``k3`` is a quorum of three.

    Raises:
        ValueError: there is no such mode.
    """
    offered = [MODES[0], *([quorum(ranks - 1)] if ranks > 2 else []), *MODES[1:]]
    known = {mode.name: mode for mode in offered}
    found: list[Mode] = []
    for name in dict.fromkeys(name.strip() for name in names.split(",")):
        if name == EVERY:
            found += offered
        elif name[:1] == "k" and name[1:].isdigit() and 0 < int(name[1:]) <= ranks:
            found.append(quorum(int(name[1:])))
        elif name in known:
            found.append(known[name])
        else:
            raise ValueError(f"there is no mode {name!r} for {ranks} ranks: say some of {', '.join(known)}, or k3")
    return found
