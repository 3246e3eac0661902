"""Partial allreduce: the user's options, the configuration ranks share, and messages between ranks and coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hvd_async.algorithms.eager.extrapolation import rounds_ahead
from hvd_async.algorithms.eager.quorum import AUTO, Quorum, check_quorum, parse_quorum, waits_for_all
from hvd_async.algorithms.option import (
    BUFFERS,
    Real,
    Whole,
    agrees,
    check_bounds,
    check_hosts,
    check_one_of,
    confirms,
    option,
)
from hvd_async.runtime.protocol import Algorithm, Config, Hyper, OptimizerCommand, OptimizerEvent

# -- configuration that ranks share, and messages ----------------------------------------------------------------------


class EagerConfig(Config, frozen=True, tag=True):
    """Configuration of an optimizer, which must be equal on all its ranks before the first round.

    Attributes:
        quorum, max_staleness, grace, seed, pace, weighting: as in ``EagerOptions``.
        buckets: number of buckets in a round.
        local_size: number of ranks per host, numbered host by host, that take each step together; quorum and staleness
            then count hosts. 1: they count ranks.
        weight_prediction: rounds by which updates are extrapolated.
        confirm: whether a round is applied only once it is complete, on any data plane (HVD_ASYNC_CONFIRM=1).
        agree: whether a rank may announce a step at the hand-over of its first bucket (not HVD_ASYNC_AGREE=0).
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
    confirm: bool = False
    agree: bool = False

    @property
    def counts(self) -> int:
        """Length of ``Finished.produced``."""
        return self.buckets


class StepEntered(OptimizerEvent, frozen=True, tag=True, omit_defaults=True):
    """This rank is in ``step()`` number ``step``, with these hyperparameters; None: unchanged since it last sent them.
    The other fields are as in ``GradientReady``. A rank may also announce a step at the hand-over of its first bucket,
    with all buckets: it then submits each in its round when it has come, and zeros for the buckets that never do."""

    step: int
    hyper: Hyper | None = None
    buckets: list[int] = msgspec.field(default_factory=list)
    landed: int = 0
    empty: list[int] = msgspec.field(default_factory=list)


class GradientReady(OptimizerEvent, frozen=True, tag=True, omit_defaults=True):
    """The engine of this rank has the gradients of ``buckets`` of step ``step``; those of ``empty`` hold nothing, as do
    some others that a GPU has emptied. On this engine ``landed`` rounds are complete."""

    buckets: list[int]
    step: int
    landed: int = 0
    empty: list[int] = msgspec.field(default_factory=list)


class VersionTaken(OptimizerEvent, frozen=True, tag=True):
    """This rank computes its next gradient at ``version`` of the weights (pace "rounds" only)."""

    version: int


class RoundsReceived(OptimizerEvent, frozen=True, tag=True):
    """Answer to ``ReportReceived`` number ``call``: ``landed[b]`` rounds of bucket b have completed on this engine."""

    call: int
    landed: list[int]


class RoundTrigger(msgspec.Struct, frozen=True):
    """Reason and time of the start of a bucket's round.

    Attributes:
        reason: human-readable text.
        by: the rank whose event started the round.
        arrived: number of ranks that had arrived for the round.
        first: time of the first arrival, on the coordinator's clock (s).
        fired: time of the start, on the same clock.
        held: seconds that these ranks had waited until then, summed over ranks.
    """

    reason: str
    by: int
    arrived: int
    first: float
    fired: float
    held: float


class HostSteps(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Number of gradients of a bucket that every rank of a host has handed over since the last drain or cut: ``most``
    for most hosts, and ``others`` for the other hosts, by host number."""

    most: int
    others: dict[int, int] = msgspec.field(default_factory=dict)

    def of(self, host: int) -> int:
        """Return the number of gradients of a host."""
        return self.others.get(host, self.most)


class StartRound(OptimizerCommand, frozen=True, tag=True, omit_defaults=True):
    """Submit the pending gradients of these buckets for this round.

    Attributes:
        by: the rank whose event started the round.
        arrived: for each of these buckets, the number of ranks that had arrived for it.
        held: seconds that the ranks in this step had waited until then, summed over ranks; 0 unless all buckets have
            started.
        settled: whether the round's hyperparameters are known; if not, ``SetHyperparameters`` or the start of another
            bucket follows.
        hyper: the hyperparameters, if known; None if they equal the ones sent last.
        whole: number of gradients per host that belong to the round; None where each rank steps separately.
        confirm: whether the round may hold no gradient in these buckets: it is then applied only once it is complete.
    """

    buckets: list[int]
    round: int
    by: int
    arrived: list[int]
    held: float = 0.0
    settled: bool = False
    hyper: Hyper | None = None
    whole: HostSteps | None = None
    confirm: bool = False


class ExplainRound(OptimizerCommand, frozen=True, tag=True):
    """Reason and time of a bucket's round that is about to start, for ranks that record a timeline."""

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
    """A round has been in flight for long: confirm at once that all earlier commands have been submitted."""

    call: int


EVENTS = (StepEntered, GradientReady, VersionTaken, RoundsReceived)
COMMANDS = (StartRound, ExplainRound, EndStep, SetHyperparameters, ReportReceived)


# -- a user's options --------------------------------------------------------------------------------------------------


PACES = ("steps", "rounds")
NONFINITE = ("skip", "raise")
WEIGHTINGS = ("ranks", "samples")
MOST_AHEAD = 100
"""Largest number of rounds to extrapolate by."""


@dataclass(frozen=True)
class _AutoOr:
    """Values of an option that are "auto" or numbers."""

    number: Real

    def __call__(self, text: str) -> float | str:
        return text if text == AUTO else self.number(text)

    def check(self, name: str, value: Any) -> None:
        if value != AUTO:
            self.number.check(name, value)


@dataclass(frozen=True, kw_only=True)
class EagerOptions:
    """Options of ``EagerOptimizer`` that are neither Horovod's arguments nor those of a single framework."""

    quorum: Quorum = option(
        "majority",
        'ranks that must have arrived before a round starts: "majority" (a rank drawn at random each round), "solo" '
        '(the first rank), "all" (synchronous SGD), a number of ranks, a fraction of them, or "auto" (the number '
        "with the most fresh gradients per second, learned from the ranks' arrival times and reported on rank 0's "
        "stderr); hosts instead of ranks with ``hierarchical``",
        help="ranks that must have arrived before a round starts: majority (a rank drawn at random each round), solo "
        "(the first rank), all, a number of ranks, a fraction such as 0.75, or auto, learned from the arrival times",
        read=parse_quorum,
        metavar="Q",
    )
    max_staleness: int = option(
        16,
        "rounds a gradient may be late; 0 is synchronous",
        help="how many rounds late a gradient may be, 0 is synchronous",
        read=Whole(0, "a number of rounds, 0 (synchronous) or more"),
        metavar="N",
    )
    grace: float | str = option(
        AUTO,
        'seconds to wait for more ranks once the quorum is reached; "auto": until as many have arrived as usually '
        "arrive right after it, at most 5% of the time between two rounds",
        help="seconds that a round waits for more ranks once the quorum is reached; auto waits for the ranks that "
        "usually arrive right after it, at most 5% of the time between two rounds",
        read=_AutoOr(Real(0, what='"auto" or a number of seconds, at least 0')),
        metavar="S",
    )
    arrival_lead: float | str = option(
        AUTO,
        "on a GPU, seconds by which a rank arrives before its device has computed the step's last gradients, so that "
        "the host need not wait for it: a grace for ranks that are nearly there. 0: it arrives when they are "
        'computed; "auto": 0.008, at most a quarter of a step. Of no effect with ``quorum="all"``, on a CPU, and where '
        "rounds are applied only once they are complete",
        read=_AutoOr(Real(0, what='"auto" or a number of seconds, at least 0')),
        flags=(),
    )
    weight_prediction: float | str = option(
        AUTO,
        "rounds by which updates are extrapolated, as far as the optimizer's momentum alone carries the weights, since "
        "late gradients are applied there (after linear weight prediction, Kosson et al., MLSys 2021); 0: none; "
        '"auto": 2 where gradients may be late, else none',
        help="rounds by which updates are extrapolated, as far as momentum alone carries the weights, since late "
        "gradients are applied there; 0 is none, auto is 2 where gradients may be late",
        read=_AutoOr(Real(0, MOST_AHEAD + 1, what=f'"auto" or a number of rounds from 0 to {MOST_AHEAD}')),
        metavar="N",
    )
    seed: int = option(0, "seed of majority's draw, the same on all ranks", flags=())
    bucket_cap_mb: float = option(
        25.0,
        "MiB of gradients that travel together; smaller ones leave earlier during backward",
        read=Real(0, above=True, or_inf=True, what="a number of MiB above 0 (usually 25)"),
        flags=(),
    )
    late_cap_mb: float = option(
        4096.0,
        "MiB of rounds that may wait for a late rank, of which there are up to ``max_staleness`` + 1: if a "
        "round (the model's gradients in float32) is too large for that, ``max_staleness`` is lowered, and rank "
        '0 reports it. ``float("inf")``: no limit',
        read=Real(0, above=True, or_inf=True, what="a number of MiB above 0 (usually 4096)"),
        flags=(),
    )
    pace: str = option(
        "steps",
        '"steps" (all ranks do the same number of steps, and a permanently slow rank delays the others after '
        '``max_staleness`` rounds) or "rounds" (it gives fewer gradients; end the job by ``optimizer.rounds``)',
        help="steps: every rank goes through its batches once per epoch; rounds: an epoch has the largest number of "
        "batches of any rank as its number of rounds, and a permanently slow rank gives fewer gradients",
        choices=PACES,
    )
    hierarchical: bool | int = option(
        False,
        "the ranks of a host take each step together: their gradients go into the same round, and ``quorum``, "
        "``max_staleness`` and ``grace`` count hosts. True for the launcher's local ranks, or the number of ranks per "
        "host, numbered host by host",
        help="the ranks of a host take each step together, and the quorum counts hosts",
        absent="off",
        flags=("--hierarchical-gossip", "--hierarchical"),
    )
    weighting: str = option(
        "ranks",
        'how a round weights gradients: "ranks" (equally) or "samples" (by their number of samples, as one large '
        "batch would; report it by ``record_samples()``, which Keras' ``fit()`` does automatically)",
        help="ranks: a round weights all gradients equally; samples: by their number of images, as one large batch "
        "would",
        choices=WEIGHTINGS,
    )
    nonfinite: str = option(
        "skip",
        'what to do if a gradient holds NaN or an infinity: "skip" (hand its bucket over empty; counted in '
        '``stats().gradients_skipped``) or "raise" FloatingPointError',
        flags=(),
    )
    buffers: str = option(
        "average",
        'what to do with batch-norm statistics: "average" them, keep each rank\'s own ("local"), or take rank 0\'s '
        '("root")',
        flags=(),
    )

    def check(self, ranks: int | None, local_size: int | None = None) -> None:
        """Check that a job can have these options.

        Args:
            ranks: number of ranks that share the optimizer; None if it is not known yet.
            local_size: number of ranks that step together; None: as ``hierarchical`` says.

        Raises:
            ValueError: an option has an invalid value, or two options contradict each other.
        """
        together = self.hierarchical if local_size is None and not isinstance(self.hierarchical, bool) else local_size
        if ranks is not None and together is not None:
            check_hosts(ranks, together)
            ranks //= together
        check_quorum(self.quorum, ranks, "ranks" if together in (None, 1) else "hosts")
        check_bounds(self, EagerOptions)
        check_one_of("buffers", self.buffers, BUFFERS)
        check_one_of("pace", self.pace, PACES)
        check_one_of("nonfinite", self.nonfinite, NONFINITE)
        check_one_of("weighting", self.weighting, WEIGHTINGS)
        if self.pace == "rounds" and (self.quorum == "all" or self.max_staleness == 0):
            raise ValueError(
                f'pace="rounds" lets late ranks give fewer gradients, which quorum={self.quorum!r}, max_staleness='
                f'{self.max_staleness} never does: take pace="steps", or a quorum that does not wait for all'
            )

    def config(self, buckets: int, parties: int, local_size: int = 1) -> EagerConfig:
        """Return the configuration of a job with these options.

        Args:
            buckets: as in ``EagerConfig``.
            parties: number of ranks, or of hosts that step together.
            local_size: as in ``EagerConfig``.
        """
        may_be_late = self.max_staleness > 0 and not waits_for_all(self.quorum, parties)
        ahead = rounds_ahead(self.weight_prediction, may_be_late) if parties > 1 else 0.0
        shared = {name: value for name, value in vars(self).items() if name in EagerConfig.__struct_fields__}
        shared |= {
            "grace": self.grace if isinstance(self.grace, str) else float(self.grace),
            "weight_prediction": ahead,
        }
        return EagerConfig(**shared, buckets=buckets, local_size=local_size, confirm=confirms(), agree=agrees())


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
"""The algorithms of the family, by name."""
