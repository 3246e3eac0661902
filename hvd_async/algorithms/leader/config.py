"""Leader-pull: the user's options, the algorithms, the configuration ranks share, and messages to and from rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hvd_async.algorithms.leader import selection
from hvd_async.algorithms.leader.easgd import EASGD
from hvd_async.algorithms.leader.lsgd import LSGD
from hvd_async.algorithms.leader.selection import SPREADS, Rule, Strength, Strengths
from hvd_async.algorithms.option import BUFFERS, Real, Whole, check_one_of, option, options_of
from hvd_async.runtime.protocol import Algorithm, Config, OptimizerCommand, OptimizerEvent

# -- configuration that ranks share, and messages ----------------------------------------------------------------------


class PullProgress(msgspec.Struct, frozen=True):
    """Counted steps and known losses of ranks that follow a leader, at a drain or cut.

    Attributes:
        leader: the rank with the lowest recent mean loss; the lowest-numbered rank if no loss is known.
        steps: number of steps since the last due pull, by group; the last entry is of all ranks.
        means: mean losses, by position of the rank; None if there is none or it is not finite.
    """

    leader: int
    steps: list[int]
    means: list[float | None]


class LeaderConfig(Config, frozen=True, tag=True):
    """Configuration of an optimizer, which must be equal on all its ranks before the first pull.

    Attributes:
        algorithm: "lsgd" or "easgd".
        groups: groups of ranks, as positions among the ranks that share the optimizer; each has its own leader (LSGD).
        local_period, global_period: average number of steps per rank between pulls: of a group towards its leader, and
            of all ranks towards the global leader or the center.
        settings: other settings that must be equal, as text: strengths of the pulls and the like.
        buffers: "average" if drains average batch-norm statistics, else "local".
        loss_window: average number of steps per rank after which a loss is too old for the choice of a leader.
        local, whole: whether pulls of groups, and of all ranks, change anything; if not, there are none.
        progress: progress at the cut of an earlier run, if this run continues it.
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
    """This rank has taken ``steps`` steps since its last report; ``loss`` is the mean of its last training losses, None
    if it has recorded none."""

    loss: float | None
    steps: int = 1


class PullDone(OptimizerEvent, frozen=True, tag=True):
    """A pull has completed on this rank."""

    round: int


class StartPull(OptimizerCommand, frozen=True, tag=True):
    """Submit a pull of the ranks of ``group`` (-1: of all) towards the weights of rank ``leader`` (-1: the center).

    ``leader`` -2: no rank has ever recorded a loss. Then there is no pull, and ranks raise an error.
    """

    round: int
    group: int
    leader: int


EVENTS = (StepTaken, PullDone)
COMMANDS = (StartPull,)


# -- a user's options, and the algorithms ------------------------------------------------------------------------------


STRENGTH = Real(0, below=1)
"""Range of a pull's strength; in Python a strength may also be a function of a rank's step."""


def _read_group(text: str) -> str | int:
    """Return "host", or the number of ranks per group."""
    return text if text == "host" else Whole(1)(text)


def _strength(doc: str, what: str) -> Any:
    """Return the field of a strength of LSGD."""
    return option(
        None,
        f"of lsgd: strength of {doc}, from 0 to below 1, or a function of the rank's own step; None: 0.1",
        help=f"{what}; from 0 (not at all) to below 1 (all the way)",
        absent="0.1",
        read=STRENGTH,
        metavar="X",
    )


@dataclass(frozen=True, kw_only=True)
class LeaderOptions:
    """Options of ``LeaderOptimizer`` that are neither Horovod's arguments nor those of a single framework.

    None: the default of the algorithm's entry in ``ALGORITHMS``.
    """

    algorithm: str = option(
        "lsgd",
        '"lsgd" (leader stochastic gradient descent, Teng et al., NeurIPS 2019): the rank with the lowest mean '
        'training loss of a group leads the group, that of all ranks leads all; or "easgd" (Zhang et al., NeurIPS '
        "2015): ranks and a center are pulled towards each other",
        flags=(),
    )
    local_period: int | None = option(
        None,
        "of lsgd: average number of steps per rank of a group between two pulls towards its leader. Steps of "
        "all ranks count together: fast ranks do more. None: a quarter of ``global_period``",
        help="average number of steps per rank of a group between two pulls towards its leader",
        absent="a quarter of --global-period",
        read=Whole(1),
        metavar="N",
    )
    global_period: int | None = option(
        None,
        "the same between two pulls of all ranks; None: 16",
        help="average number of steps per rank between two pulls of all ranks towards the leader or the center",
        absent="16",
        read=Whole(1),
        metavar="N",
    )
    local_pull: Strength | None = _strength(
        "a pull towards the group's leader", "how far a rank is pulled towards the leader of its group"
    )
    global_pull: Strength | None = _strength(
        "a pull towards the leader of all", "how far a rank is pulled towards the leader of all"
    )
    local_prox: Strength | None = _strength(
        "the steps between pulls of a group, summed over a period",
        "how far the steps of a --local-period together pull a rank towards the leader of its group, between pulls",
    )
    global_prox: Strength | None = _strength(
        "the steps between pulls of all, summed over a period",
        "how far the steps of a --global-period together pull a rank towards the leader of all, between pulls",
    )
    alpha: float | None = option(
        None,
        "of easgd: strength of a rank's pull towards the center; None: ``beta`` over the number of ranks",
        help="how far a rank is pulled towards the center",
        absent="--beta over the number of ranks",
        read=STRENGTH,
        metavar="X",
    )
    beta: float | None = option(
        None,
        "of easgd: strength of the center's pull towards the ranks' mean; None: 0.43",
        help="how far the center is pulled towards the ranks' mean",
        absent="0.43",
        read=STRENGTH,
        metavar="X",
    )
    group: str | int | Sequence[Any] | None = option(
        None,
        'of lsgd: "host" (Horovod\'s local ranks; also None), ranks per group, or the groups themselves: lists of '
        "ranks, or process sets. Groups other than all ranks need Horovod process sets: pass them to ``hvd.init()``, "
        'or call ``hvd.init(process_sets="dynamic")``',
        help="the ranks of a host, or N ranks, have their own leader",
        absent="host",
        read=_read_group,
        metavar="host|N",
    )
    loss_window: int | None = option(
        None,
        "of lsgd: number of last losses that count in the choice of a leader; None: 10",
        help="number of last losses that count in the choice of a leader",
        absent="10",
        read=Whole(1),
        metavar="N",
    )
    lr_spread: str = option(
        "none",
        '"linear": rank i\'s learning rate is i + 1 times the optimizer\'s; "power": 2^i times; "none"',
        help="learning rates that differ by rank: linear: rank i's is i + 1 times --lr, power: 2^i times",
        choices=SPREADS,
    )
    buffers: str = option(
        "average",
        'what drains do with batch-norm statistics: "average" them, or take the leader\'s ("local")',
        flags=(),
    )

    def check(self, ranks: int | None) -> None:
        """Check that a job can have these options.

        Raises:
            ValueError: an option has an invalid value.
        """
        check_one_of("buffers", self.buffers, BUFFERS)
        if self.buffers == "root":
            raise ValueError("buffers must be 'average' or 'local', got 'root'. No rank of leader-pull is a root")
        self.resolved()

    def resolved(self) -> dict[str, Any]:
        """Return the algorithm's own options, with defaults for options that are None.

        Raises:
            ValueError: an option that the algorithm does not have, or an invalid value.
        """
        check_one_of("algorithm", self.algorithm, ALGORITHMS)
        algorithm, described = ALGORITHMS[self.algorithm], options_of(LeaderOptions)
        defaults = algorithm.options
        stray = [name for name in OWN_OPTIONS if getattr(self, name) is not None and name not in defaults]
        if stray:
            raise ValueError(
                f"{', '.join(stray)}: {self.algorithm} does not support this; leave it out, or use another algorithm"
            )
        given = {name: default if (own := getattr(self, name)) is None else own for name, default in defaults.items()}
        for name, value in given.items():
            kind = described[name].read
            if value is None:
                continue
            if kind is STRENGTH:
                _check_strength(name, value, callables=not algorithm.has_center)
            elif isinstance(kind, Real):
                kind.check(name, value)
        if "local_period" in given:
            local, whole = given["local_period"], given["global_period"]
            given["local_period"] = max(1, whole // 4) if local is None else local
            if given["local_period"] > whole:
                raise ValueError(
                    f"local_period={local} is above global_period={whole}: groups follow their own leader more often "
                    f"than that of all; a quarter of global_period is usual"
                )
        return given


def _check_strength(name: str, value: Any, callables: bool) -> None:
    if callable(value) and not callables:
        raise ValueError(f"{name} must be a number, got {value!r}: all ranks must move the center alike")
    try:
        selection.value_at(value, 1)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


@dataclass(frozen=True)
class LeaderAlgorithm(Algorithm):
    """Algorithm of the family.

    Attributes:
        rule: returns its equations for the configuration, the strengths, this rank's group and the
            number of ranks.
        has_center: whether ranks are pulled towards a center variable instead of a leader: then no losses are needed,
            and groups are never pulled separately.
    """

    rule: Callable[[LeaderConfig, Strengths, int, int], Rule] = field(kw_only=True)
    has_center: bool = False


ALGORITHMS: Mapping[str, LeaderAlgorithm] = {
    "lsgd": LeaderAlgorithm(
        name="lsgd",
        family="leader",
        options={
            "local_period": None,
            "global_period": 16,
            "local_pull": 0.1,
            "global_pull": 0.1,
            "local_prox": 0.1,
            "global_prox": 0.1,
            "group": "host",
            "loss_window": 10,
        },
        sends="weights",
        waits_for="none",
        about="towards the rank with the lowest training loss",
        rule=lambda config, strengths, group, size: LSGD(config, strengths, group),
    ),
    "easgd": LeaderAlgorithm(
        name="easgd",
        family="leader",
        options={"global_period": 16, "alpha": None, "beta": 0.43},
        sends="weights",
        waits_for="none",
        about="towards a center",
        rule=lambda config, strengths, group, size: EASGD(strengths, size),
        has_center=True,
    ),
}
"""Algorithms by name. ``local_period`` None is a quarter of ``global_period``, ``alpha`` None is ``beta`` / P."""
OWN_OPTIONS = tuple(dict.fromkeys(name for algorithm in ALGORITHMS.values() for name in algorithm.options))
"""Options that only some algorithms of the family have, in order."""
