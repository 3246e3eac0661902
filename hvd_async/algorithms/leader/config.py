"""Leader-pull: the user's options, the algorithms, the configuration ranks share, and messages to and from rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hvd_async.algorithms.leader import selection
from hvd_async.algorithms.leader.easgd import EASGD
from hvd_async.algorithms.leader.lsgd import LSGD
from hvd_async.algorithms.leader.selection import SPREADS, Strength, Strengths
from hvd_async.algorithms.option import BUFFERS, Real, Whole, check_one_of, option, options_of
from hvd_async.runtime.protocol import Algorithm, Config, OptimizerCommand, OptimizerEvent

# -- configuration that ranks share, and messages ----------------------------------------------------------------------


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
        local_period, global_period: steps per rank, on average, between pulls: of a group towards its leader, and of
            all ranks towards the global leader or the center.
        settings: other settings that must be the same, as text: strengths of the pulls and the like.
        buffers: "average" if batch-norm statistics are averaged at each pull, else "local".
        loss_window: steps of a rank, on the average, after which a loss is too old to lead by.
        local, whole: whether pulls of groups, and of all, change anything; else there are none.
        progress: progress at the cut of an earlier run, if this one continues it.
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


# -- a user's options, and the algorithms ------------------------------------------------------------------------------


STRENGTH = Real(0, below=1)
"""Numbers that are a pull's strength; in Python also functions of a rank's step that give such."""


def _read_group(text: str) -> str | int:
    """Return "host", or how many ranks are a group."""
    return text if text == "host" else Whole(1)(text)


def _strength(doc: str, what: str) -> Any:
    """Return the field of one of LSGD's strengths."""
    return option(
        None,
        f"of lsgd: strength of {doc}, from 0 up to 1, or a function of the rank's own step; None: 0.1",
        help=f"{what}; 0 is not at all, 1 all the way",
        absent="0.1",
        read=STRENGTH,
        metavar="X",
    )


@dataclass(frozen=True)
class LeaderOptions:
    """A user's options of ``LeaderOptimizer``, beside Horovod's arguments and those of one framework.

    None is the default that the algorithm's entry in ``ALGORITHMS`` has.
    """

    algorithm: str = option(
        "lsgd",
        '"lsgd" (leader stochastic gradient descent, Teng et al., NeurIPS 2019): the rank with the lowest mean '
        'training loss leads its group, and another all; or "easgd" (Zhang et al., NeurIPS 2015): ranks and a '
        "centre are pulled towards each other",
        flags=(),
    )
    local_period: int | None = option(
        None,
        "of lsgd: steps of each rank of a group, on the average, between two pulls towards its leader. Steps of "
        "all ranks count together: fast ranks do more. None: a quarter of ``global_period``",
        help="steps of each rank of a group, on the average, between two pulls towards its leader",
        absent="a quarter of --global-period",
        read=Whole(1),
        metavar="N",
    )
    global_period: int | None = option(
        None,
        "the same between two pulls of all ranks; None: 16",
        help="steps of each rank, on the average, between two pulls of all ranks towards the leader or the centre",
        absent="16",
        read=Whole(1),
        metavar="N",
    )
    local_pull: Strength | None = _strength(
        "a pull towards the group's leader", "how far a rank is pulled towards the leader of its group"
    )
    global_pull: Strength | None = _strength("a pull towards the leader of all", "and towards that of all")
    local_prox: Strength | None = _strength(
        "the steps between pulls of a group, a period's together",
        "how far the steps of a --local-period together pull it, between these pulls",
    )
    global_prox: Strength | None = _strength(
        "those between pulls of all, a period's together",
        "and those of a --global-period towards the leader of all",
    )
    alpha: float | None = option(
        None,
        "of easgd: of a rank towards the centre; None: ``beta`` over the number of ranks",
        help="how far a rank is pulled towards the centre",
        absent="--beta over the number of ranks",
        read=STRENGTH,
        metavar="X",
    )
    beta: float | None = option(
        None,
        "of easgd: of the centre towards the ranks' mean; None: 0.43",
        help="how far the centre moves",
        absent="0.43",
        read=STRENGTH,
        metavar="X",
    )
    group: str | int | Sequence[Any] | None = option(
        None,
        'of lsgd: "host" (Horovod\'s local ranks; also None), ranks per group, or the groups themselves: lists of '
        "ranks, or process sets. Groups other than all ranks need Horovod process sets: those that ``hvd.init()`` "
        'was given, or ``hvd.init(process_sets="dynamic")``',
        help="the ranks of a host, or N ranks, have a leader of their own",
        absent="host",
        read=_read_group,
        metavar="host|N",
    )
    loss_window: int | None = option(
        None,
        "of lsgd: how many of the last losses count; None: 10",
        help="losses that count in the choice",
        absent="10",
        read=Whole(1),
        metavar="N",
    )
    lr_spread: str = option(
        "none",
        '"linear": rank i\'s learning rate is i + 1 times the optimizer\'s; "power": 2^i times; "none"',
        help="ranks have learning rates of their own: linear: rank i's is i + 1 times --lr, power: 2^i times",
        choices=SPREADS,
    )
    buffers: str = option(
        "average",
        'how batch-norm statistics agree: "average" them at each pull, or each rank\'s own ("local")',
        flags=(),
    )

    def check(self, ranks: int | None) -> None:
        """Refuse what no job can have.

        Raises:
            ValueError: with a hint.
        """
        check_one_of("buffers", self.buffers, BUFFERS)
        if self.buffers == "root":
            raise ValueError("buffers='root': no rank is the root of others here; take 'average' or 'local'")
        self.resolved()

    def resolved(self) -> dict[str, Any]:
        """Return the algorithm's own options, with its defaults where none was given.

        Raises:
            ValueError: an option that it does not have, or a value that cannot be.
        """
        check_one_of("algorithm", self.algorithm, ALGORITHMS)
        algorithm, described = ALGORITHMS[self.algorithm], options_of(LeaderOptions)
        defaults = algorithm.options
        stray = [name for name in OWN_OPTIONS if getattr(self, name) is not None and name not in defaults]
        if stray:
            raise ValueError(
                f"{', '.join(stray)}: {self.algorithm} has no use for it; leave it out, or take another algorithm"
            )
        given = {name: default if (own := getattr(self, name)) is None else own for name, default in defaults.items()}
        for name, value in given.items():
            kind = described[name].read
            if value is None:
                continue
            if kind is STRENGTH:
                _check_strength(name, value, callables=not algorithm.has_center)
            elif isinstance(kind, Whole | Real):
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
        raise ValueError(f"{name}={value!r}: take a number from 0 up to 1; all ranks must move the centre alike")
    try:
        selection.value_at(value, 1)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


@dataclass(frozen=True)
class LeaderAlgorithm(Algorithm):
    """One algorithm of the family.

    Attributes:
        rule: makes its equations, a ``rule.Rule``, from the configuration, the strengths, this rank's group and the
            number of ranks.
        has_center: whether ranks are pulled towards a center variable and no rank leads: no losses are needed then,
            and groups are never pulled by themselves.
    """

    rule: Callable[[LeaderConfig, Strengths, int, int], Any] = field(kw_only=True)
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
        waits_for="nobody",
        about="towards whoever has the lowest training loss",
        rule=lambda config, strengths, group, size: LSGD(config, strengths, group),
    ),
    "easgd": LeaderAlgorithm(
        name="easgd",
        family="leader",
        options={"global_period": 16, "alpha": None, "beta": 0.43},
        sends="weights",
        waits_for="nobody",
        about="towards a centre",
        rule=lambda config, strengths, group, size: EASGD(strengths, size),
        has_center=True,
    ),
}
"""By name. ``local_period`` None is a quarter of ``global_period``, ``alpha`` None is ``beta`` / P."""
OWN_OPTIONS = tuple(dict.fromkeys(name for algorithm in ALGORITHMS.values() for name in algorithm.options))
"""Options that algorithms of the family have of their own, in order."""
