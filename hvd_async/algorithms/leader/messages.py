"""Messages of leader-pull between ranks and coordinator, and the configuration that ranks must have in common."""

from __future__ import annotations

import msgspec

from hvd_async.runtime.messages import Config, OptimizerCommand, OptimizerEvent

ALL_RANKS = -1
"""In place of a group: all ranks."""
CENTER = -1
"""In place of a leader: EASGD's center."""
NO_LEADER = -2
"""In place of a leader: no rank of the group has recorded a loss."""


class PullProgress(msgspec.Struct, frozen=True):
    """Steps counted and losses known between ranks that follow a leader, at a drain or cut.

    Attributes:
        leader: the rank whose mean loss is the lowest of the recent ones; the lowest-numbered where none is known.
        steps: since the last pull that was due, of each group of the ranks and, at the end, of all.
        means: mean losses by place; None where there is none that is finite.
    """

    leader: int
    steps: list[int]
    means: list[float | None]


class LeaderConfig(Config, frozen=True, tag=True):
    """Configuration that all ranks of an optimizer must have in common before the first pull.

    Attributes:
        algorithm: "lsgd" or "easgd".
        groups: of ranks, by their places among those that share the optimizer; each has its own leader (LSGD).
        local_period, global_period: pulls are due when the ranks have taken so many steps each, on the average: of a
            group towards its leader, of all towards the global leader or the center.
        settings: other settings that must be the same, as text: strengths of the pulls and the like.
        buffers: "average" if batch-norm statistics are averaged at each pull, else "local".
        loss_window: steps of a rank, on the average, after which a loss is too old to lead by.
        local, whole: whether pulls of groups, and of all, change anything; else there are none.
        progress: progress at an earlier run's cut, if this one goes on from there.
    """

    algorithm: str
    groups: list[list[int]]
    local_period: int
    global_period: int
    settings: str
    buffers: str = "local"
    loss_window: int = 10
    local: bool = True
    whole: bool = True
    progress: PullProgress | None = None


class StepTaken(OptimizerEvent, frozen=True, tag=True):
    """This rank has taken ``steps`` steps since it last said so; ``loss`` is the mean of its last training losses, None
    before it has recorded one."""

    loss: float | None
    steps: int = 1


class PullDone(OptimizerEvent, frozen=True, tag=True):
    """A pull has completed on this rank."""

    round: int


class StartPull(OptimizerCommand, frozen=True, tag=True):
    """Submit a pull of the ranks of ``group`` (of all: -1) towards the weights of rank ``leader`` (the center: -1).

    ``leader`` -2: no rank has ever recorded a loss, so there is no pull, and ranks raise an error that says so.
    """

    round: int
    group: int
    leader: int


EVENTS = (StepTaken, PullDone)
COMMANDS = (StartPull,)
