"""Partial allreduce: the user's options, the configuration ranks share, and messages between ranks and coordinator."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hvd_async.algorithms.eager.extrapolation import rounds_ahead
from hvd_async.algorithms.eager.quorum import AUTO, Quorum, check_quorum, parse_quorum, waits_for_all
from hvd_async.algorithms.option import BUFFERS, Real, Whole, check_hosts, check_one_of, option
from hvd_async.runtime.protocol import Algorithm, Config, Hyper, OptimizerCommand, OptimizerEvent

# -- configuration that ranks share, and messages ----------------------------------------------------------------------


class EagerConfig(Config, frozen=True, tag=True):
    """Configuration that all ranks of an optimizer must have in common before the first round.

    Attributes:
        quorum: "solo", "majority", "all", "auto", an int (ranks) or a float (fraction of the ranks).
        max_staleness: rounds.
        grace: seconds to wait for more ranks once the quorum is there, or "auto".
        seed: seed of majority's draw of an initiator.
        buckets: number of buckets in a round.
        pace: "steps", where every rank does the same number of steps, or "rounds", where a late rank does fewer.
        local_size: ranks of a host, numbered host by host, that take each step together: then quorum and staleness
            count hosts; 1: they count ranks.
        weight_prediction: rounds by which updates are extrapolated.
        weighting: "ranks", whose gradients a round averages alike, or "samples", by which it weights them.
    """

    quorum: str | int | float
    max_staleness: int
    grace: float | str
    seed: int
    buckets: int
    pace: str = "steps"
    local_size: int = 1
    weight_prediction: float = 0.0
    weighting: str = "ranks"

    @property
    def counts(self) -> int:
        """The length of ``Finished.produced``."""
        return self.buckets


class StepEntered(OptimizerEvent, frozen=True, tag=True, omit_defaults=True):
    """This rank is in ``step()`` number ``step``, with these hyperparameters; None: those it sent last. The gradients
    of ``buckets`` come with it, as in ``GradientReady``."""

    step: int
    hyper: Hyper | None = None
    buckets: list[int] = msgspec.field(default_factory=list)
    landed: int = 0
    empty: list[int] = msgspec.field(default_factory=list)


class GradientReady(OptimizerEvent, frozen=True, tag=True, omit_defaults=True):
    """The gradients of ``buckets`` of this rank's step are with its engine, on which ``landed`` rounds are complete;
    those of ``empty`` hold nothing."""

    buckets: list[int]
    step: int
    landed: int = 0
    empty: list[int] = msgspec.field(default_factory=list)


class VersionTaken(OptimizerEvent, frozen=True, tag=True):
    """This rank's weights are at ``version``: its next gradient is computed there (pace "rounds" only)."""

    version: int


class RoundsReceived(OptimizerEvent, frozen=True, tag=True):
    """Answers ``ReportReceived`` number ``call``: ``landed[b]`` rounds of bucket b have completed on this engine."""

    call: int
    landed: list[int]


class RoundTrigger(msgspec.Struct, frozen=True):
    """Why and when the round of a bucket started.

    Attributes:
        reason: a human-readable text.
        by: the rank whose event started it.
        arrived: number of ranks that had arrived for it.
        first: time of the first arrival, on the coordinator's clock (s).
        fired: time of the start, on the same clock.
        held: seconds that those ranks waited until then, summed over ranks.
    """

    reason: str
    by: int
    arrived: int
    first: float
    fired: float
    held: float


class HostSteps(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Number of gradients of a bucket, per rank, that all ranks of a host have handed over since the last drain or cut:
    ``most`` on most hosts, and on the ``others`` by the number of the host."""

    most: int
    others: dict[int, int] = msgspec.field(default_factory=dict)

    def of(self, host: int) -> int:
        """Return the number of gradients of a host."""
        return self.others.get(host, self.most)


class StartRound(OptimizerCommand, frozen=True, tag=True, omit_defaults=True):
    """Submit the pending gradients of these buckets for this round.

    Attributes:
        by: the rank whose event started it.
        arrived: for each of these buckets, the number of ranks that had arrived for it.
        held: seconds that the ranks in this step have waited until then, summed over ranks; 0 unless all buckets have
            started.
        settled: whether the round's hyperparameters are known now; if not, ``SetHyperparameters`` or the start of
            another bucket follows.
        hyper: the hyperparameters, if known; None if they are those that were sent last.
        whole: gradients of each host that belong to it; None where each rank steps separately.
    """

    buckets: list[int]
    round: int
    by: int
    arrived: list[int]
    held: float = 0.0
    settled: bool = False
    hyper: Hyper | None = None
    whole: HostSteps | None = None


class ExplainRound(OptimizerCommand, frozen=True, tag=True):
    """For ranks that record a timeline: why and when a bucket's round starts, before it does."""

    bucket: int
    round: int
    trigger: RoundTrigger


class EndStep(OptimizerCommand, frozen=True, tag=True):
    """All ranks of a host have handed over step number ``steps`` since the last drain or cut, too late for its round:
    the step ends when their weights are at ``version``."""

    host: int
    steps: int
    version: int


class SetHyperparameters(OptimizerCommand, frozen=True, tag=True, omit_defaults=True):
    """The hyperparameters of a round that started before they were known; None: as in ``StartRound``."""

    round: int
    hyper: Hyper | None = None


class ReportReceived(OptimizerCommand, frozen=True, tag=True):
    """A round has been in flight for long: report at once that earlier commands have been submitted."""

    call: int


EVENTS = (StepEntered, GradientReady, VersionTaken, RoundsReceived)
COMMANDS = (StartRound, ExplainRound, EndStep, SetHyperparameters, ReportReceived)


# -- a user's options --------------------------------------------------------------------------------------------------


PACES = ("steps", "rounds")
NONFINITE = ("skip", "raise")
WEIGHTINGS = ("ranks", "samples")
MOST_AHEAD = 100
"""Largest number of rounds to extrapolate by."""


def _auto_or_real(text: str) -> float | str:
    """Return "auto", or a number."""
    return text if text == AUTO else Real(0)(text)


def _is_number(value: object, below: float) -> bool:
    """Whether a value is a number in [0, ``below``)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < below


@dataclass(frozen=True)
class EagerOptions:
    """A user's options of ``EagerOptimizer``, beside Horovod's arguments and those of one framework."""

    quorum: Quorum = option(
        "solo",
        'who must be there for a round to start: "solo" (the first rank), "majority" (a rank drawn anew each '
        'round), "all" (synchronous SGD), a number of ranks, a fraction of them, or "auto" (the number that '
        "brings the most fresh gradients per second, learned from the ranks' arrival times and said on rank 0's "
        "stderr); hosts in place of ranks with ``hierarchical``",
        help="who fires a round: solo (the first rank), majority (a rank drawn anew each round), all, a count of "
        "ranks, a fraction such as 0.75, or auto, which learns from the arrival times",
        read=parse_quorum,
        metavar="Q",
    )
    max_staleness: int = option(
        16,
        "rounds a gradient may be late; 0 is synchronous",
        help="how many rounds late a gradient may be, 0 is synchronous",
        read=Whole(0),
        metavar="N",
    )
    grace: float | str = option(
        AUTO,
        'seconds to wait for more ranks once the quorum is there; "auto": until as many are in as usually come right '
        "after it, and no longer than 5% of the time between two rounds",
        help="seconds a round still waits for more ranks once the quorum is there; auto waits for those that usually "
        "come right after it, no longer than 5% of the time between two rounds",
        read=_auto_or_real,
        metavar="S",
    )
    weight_prediction: float | str = option(
        AUTO,
        "rounds by which updates are extrapolated, as far as the optimizer's momentum alone carries the weights, since "
        "late gradients are applied there (after linear weight prediction, Kosson et al., MLSys 2021); 0: none; "
        '"auto": 2 where gradients may be late, else none',
        help="rounds by which updates are extrapolated, as far as momentum alone carries the weights, since late "
        "gradients are applied there; 0 is none, auto is 2 where gradients may be late",
        read=_auto_or_real,
        metavar="N",
    )
    seed: int = option(0, "of majority's draw, the same on all ranks", flags=())
    bucket_cap_mb: float = option(
        25.0, "MiB of gradients that travel together; smaller ones leave earlier during backward", flags=()
    )
    late_cap_mb: float = option(
        4096.0,
        "MiB of rounds that may wait for a late rank, of which there are up to ``max_staleness`` + 1: where a "
        "round (the model's gradients in float32) is too large for that, ``max_staleness`` is lowered, and rank "
        '0 says so. ``float("inf")`` leaves it alone',
        flags=(),
    )
    pace: str = option(
        "steps",
        '"steps" (all ranks do the same number of steps, and one that is always slower holds the others up after '
        '``max_staleness`` rounds) or "rounds" (it gives fewer gradients; end the job by ``optimizer.rounds``)',
        help="steps: every rank goes through its batches once an epoch; rounds: an epoch is as many rounds as the "
        "longest rank has batches, and a rank that is slow for good gives fewer gradients",
        choices=PACES,
    )
    hierarchical: bool | int = option(
        False,
        "the ranks of a host take each step together, so that their gradients go in the same round, and ``quorum``, "
        "``max_staleness`` and ``grace`` count hosts. True for Horovod's local ranks, or so many ranks, numbered host "
        "by host",
        help="the ranks of a host take each step together, and the quorum counts hosts",
        absent="off",
        flags=("--hierarchical-gossip", "--hierarchical"),
    )
    weighting: str = option(
        "ranks",
        'by what a round weights gradients: "ranks" (all alike) or "samples" (by the samples of each, as one large '
        "batch would; tell these by ``record_samples()``, which Keras' ``fit()`` does by itself)",
        help="ranks: a round weights all gradients alike; samples: by the images of each, as one large batch would",
        choices=WEIGHTINGS,
    )
    nonfinite: str = option(
        "skip",
        'what to do where a gradient holds NaN or an infinity: "skip" (hand its bucket over empty; counted in '
        '``stats().gradients_skipped``) or "raise" FloatingPointError',
        flags=(),
    )
    buffers: str = option(
        "average",
        'how batch-norm statistics agree: "average" them, keep each rank\'s own ("local"), or take rank 0\'s ("root")',
        flags=(),
    )

    def check(self, ranks: int | None, local_size: int | None = None) -> None:
        """Refuse what no job of so many ranks can have; None: nobody knows how many yet.

        Args:
            ranks: that share the optimizer.
            local_size: ranks that step together; None if only ``hierarchical`` says so.

        Raises:
            ValueError: with a hint.
        """
        together = self.hierarchical if local_size is None and not isinstance(self.hierarchical, bool) else local_size
        if ranks is not None and together is not None:
            check_hosts(ranks, together)
            ranks //= together
        check_quorum(self.quorum, ranks, "ranks" if together in (None, 1) else "hosts")
        late, grace = self.max_staleness, self.grace
        if isinstance(late, bool) or not isinstance(late, int) or late < 0:
            raise ValueError(
                f"max_staleness={late!r} is not a number of rounds: take 0 (synchronous) or more, 16 is usual"
            )
        if grace != AUTO and not _is_number(grace, below=math.inf):
            raise ValueError(f'grace={grace!r} is not a number of seconds: take "auto", or 0.0 or more')
        ahead = self.weight_prediction
        if ahead != AUTO and not _is_number(ahead, below=MOST_AHEAD + 1):
            raise ValueError(
                f'weight_prediction={ahead!r} is not a number of rounds: take "auto", or from 0 to {MOST_AHEAD}'
            )
        for name, size, usual in (("bucket_cap_mb", self.bucket_cap_mb, 25), ("late_cap_mb", self.late_cap_mb, 4096)):
            if isinstance(size, bool) or not isinstance(size, int | float) or not size > 0:
                raise ValueError(f"{name}={size!r} is not a size in MiB: take a number above 0, {usual} is usual")
        check_one_of("buffers", self.buffers, BUFFERS)
        check_one_of("pace", self.pace, PACES)
        check_one_of("nonfinite", self.nonfinite, NONFINITE)
        check_one_of("weighting", self.weighting, WEIGHTINGS)
        if self.pace == "rounds" and (self.quorum == "all" or late == 0):
            raise ValueError(
                f'pace="rounds" lets late ranks give fewer gradients, which quorum={self.quorum!r}, max_staleness='
                f'{late} never does: take pace="steps", or a quorum that does not wait for all'
            )

    def resolved(self, parties: int) -> EagerOptions:
        """Return the options of a job of so many ranks, or hosts, with a number in place of "auto"."""
        may_be_late = self.max_staleness > 0 and not waits_for_all(self.quorum, parties)
        ahead = rounds_ahead(self.weight_prediction, may_be_late) if parties > 1 else 0.0
        return dataclasses.replace(self, weight_prediction=ahead)

    def config(self, local_size: int = 1) -> dict[str, Any]:
        """Return what ranks must have in common, of ``EagerConfig``, where so many of a host step together."""
        return {
            "quorum": self.quorum,
            "max_staleness": self.max_staleness,
            "grace": self.grace if isinstance(self.grace, str) else float(self.grace),
            "seed": self.seed,
            "weight_prediction": self.weight_prediction,
            "pace": self.pace,
            "local_size": local_size,
            "weighting": self.weighting,
        }


ALGORITHMS: Mapping[str, Algorithm] = {
    "eager": Algorithm(
        "eager",
        "eager",
        {
            name: getattr(EagerOptions, name)
            for name in ("quorum", "max_staleness", "grace", "weight_prediction", "pace", "hierarchical", "weighting")
        },
        sends="gradients",
        waits_for="quorum",
        about="rounds that do not wait for late ranks",
        compressions=("none", "fp16", "bf16"),
    ),
}
"""By name."""
