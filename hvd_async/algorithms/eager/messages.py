"""Messages of partial allreduce between ranks and coordinator, and the configuration that ranks must share."""

from __future__ import annotations

import msgspec

from hvd_async.runtime.messages import Config, Hyper, OptimizerCommand, OptimizerEvent


class EagerConfig(Config, frozen=True, tag=True):
    """Configuration that all ranks of an optimizer must have in common before the first round.

    Attributes:
        quorum: "solo", "majority", "all", "auto", an int (ranks) or a float (fraction of the ranks).
        max_staleness: rounds.
        grace: seconds to wait for more ranks once the quorum is there, or "auto".
        seed: of majority's initiator draw.
        buckets: how many buckets a round has.
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
    of ``buckets`` have come with it, as of ``GradientReady``."""

    step: int
    hyper: Hyper | None = None
    buckets: list[int] = msgspec.field(default_factory=list)
    landed: int = 0
    empty: list[int] = msgspec.field(default_factory=list)


class GradientReady(OptimizerEvent, frozen=True, tag=True, omit_defaults=True):
    """The gradients of these ``buckets`` of this rank's step (``empty``: of those, none) are with its engine, where so
    many rounds have landed."""

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
    """Why and when a bucket's round fired.

    Attributes:
        reason: for people.
        by: the rank whose event made it fire.
        arrived: how many ranks had arrived for it.
        first: when the first of them did, on the coordinator's clock (s).
        fired: when it fired, on the same clock.
        held: seconds that those ranks waited until then, added up.
    """

    reason: str
    by: int
    arrived: int
    first: float
    fired: float
    held: float


class HostSteps(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Gradients of a bucket that may go since the last drain or cut, as all ranks of their host have handed them over:
    how many of each rank, the same on most hosts, and of the ``others`` by the host's number."""

    most: int
    others: dict[int, int] = msgspec.field(default_factory=dict)

    def of(self, host: int) -> int:
        """Return the number of a host."""
        return self.others.get(host, self.most)


class StartRound(OptimizerCommand, frozen=True, tag=True, omit_defaults=True):
    """Submit the pending gradients of these buckets for this round.

    Attributes:
        by: the rank whose event made it start.
        arrived: of each of these buckets, how many ranks had arrived for it.
        held: seconds that the ranks in this step have waited until then, added up; 0 unless all buckets have started.
        settled: whether the round's hyperparameters are known now; else ``SetHyperparameters`` or the start of another
            bucket follows.
        hyper: where they are known: these; None if they are those of the round that had its own last.
        whole: None where each rank is by itself.
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
    """The ranks of a host have all handed over step number ``steps`` since the last end, too late for its round:
    it ends when their weights are at ``version``."""

    host: int
    steps: int
    version: int


class SetHyperparameters(OptimizerCommand, frozen=True, tag=True, omit_defaults=True):
    """The hyperparameters of a round that has started before they were known; None: as of ``StartRound``."""

    round: int
    hyper: Hyper | None = None


class ReportReceived(OptimizerCommand, frozen=True, tag=True):
    """A round is in flight for long: report at once that earlier commands have been submitted."""

    call: int


EVENTS = (StepEntered, GradientReady, VersionTaken, RoundsReceived)
COMMANDS = (StartRound, ExplainRound, EndStep, SetHyperparameters, ReportReceived)
