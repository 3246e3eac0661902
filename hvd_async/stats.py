"""Counts of an optimizer, as ``stats()`` returns them."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

__all__ = ["GossipStats", "LeaderStats", "Stats"]

# -- merging the counts of two runs: by the metadata of each field; without metadata, by addition ----------------------


def _by_value(counts: dict[int, int], others: dict[int, int]) -> dict[int, int]:
    return dict(sorted((Counter(counts) + Counter(others)).items()))


def _by_rank(seconds: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in itertools.zip_longest(seconds, others, fillvalue=0.0))


LATER = {"merge": lambda _, later: later}
LARGEST = {"merge": max}
HISTOGRAM = {"merge": _by_value}
PER_RANK = {"merge": _by_rank}
MEAN_OVER = "mean_over"
"""Metadata key of a mean: the name of the field with the number of its values."""
Own = TypeVar("Own", bound="_Mergeable")


@dataclass(frozen=True)
class _Mergeable:
    """Counts that can be added over several runs."""

    def __add__(self: Own, later: Own) -> Own:
        """Return the counts of both runs; the later run may have other ranks."""
        found: dict[str, Any] = {}
        for each in fields(self):
            first, second = getattr(self, each.name), getattr(later, each.name)
            if count := each.metadata.get(MEAN_OVER):
                before, after = getattr(self, count), getattr(later, count)
                total = before + after
                found[each.name] = (first * before + second * after) / total if total else 0.0
            else:
                found[each.name] = each.metadata.get("merge", operator.add)(first, second)
        return type(self)(**found)


# -- in words ----------------------------------------------------------------------------------------------------------


def _waited(seconds: float, steps: int) -> str:
    return f"waited: this rank waited {seconds:.1f} s in all, {1e3 * seconds / max(1, steps):.1f} ms a step"


def _most(what: str, seconds: Sequence[float]) -> str:
    if not any(seconds):
        return f"stragglers: {what} no rank"
    rank = max(range(len(seconds)), key=lambda each: seconds[each])
    return f"stragglers: {what} rank {rank} most, {seconds[rank]:.1f} s of {sum(seconds):.1f} s in all"


def mean_of(histogram: Mapping[int, int]) -> float | None:
    """Return the mean of values, given how often each occurred; None if none did."""
    count = sum(histogram.values())
    return sum(value * times for value, times in histogram.items()) / count if count else None


def _late(what: str, unit: str, staleness: dict[int, int]) -> str:
    mean, count = mean_of(staleness), sum(staleness.values())
    if mean is None:
        return f"late: no {what} yet"
    return (
        f"late: {staleness.get(0, 0) / count:.0%} of {what} were on time; {mean:.1f} {unit} late on average, "
        f"{max(staleness)} at most"
    )


# -- counts of each family ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stats(_Mergeable):
    """Counts of the EagerOptimizer of a rank so far.

    Attributes:
        steps: number of steps of this rank.
        rounds: number of rounds that this rank has received.
        rounds_applied: number of these rounds that contained a gradient.
        gradients_produced: number of gradients of this rank, including those restored from an earlier run.
        gradients_applied: number of gradients, of all ranks, that this rank has applied.
        gradients_skipped: number of steps of this rank in which a gradient was replaced by zeros, because of NaN, an
            infinity or an overflow.
        total_produced: number of gradients of all ranks; None before the first ``drain()``.
        staleness: number of this rank's gradients by their staleness in rounds.
        contributors: number of rounds by their number of contributing ranks.
        wait_s: seconds for which this rank's training thread waited for rounds in ``step()`` and ``drain()``.
        held_s: for each rank (of the process set, in order) the total seconds that other ranks waited in ``step()``
            until it made their round start.
        bytes_sent: bytes that this rank has passed to collectives.
        latency_s: mean seconds from the first command of a round to its end.
        latency_max_s: maximum of these seconds.
        held_bytes: bytes of gradients that are held now, in addition to those of the framework.
        peak_bytes: maximum of ``held_bytes``.
        resets: number of membership changes (elastic training).
        gradients_lost: number of gradients of lost ranks that no applied round contains, as far as is known. After a
            loss of rank 0 it is unknown, since its coordinator counts them. No other count includes them.
    """

    steps: int = 0
    rounds: int = 0
    rounds_applied: int = 0
    gradients_produced: int = 0
    gradients_applied: int = 0
    gradients_skipped: int = 0
    total_produced: int | None = field(default=None, metadata=LATER)
    staleness: dict[int, int] = field(default_factory=dict, metadata=HISTOGRAM)
    contributors: dict[int, int] = field(default_factory=dict, metadata=HISTOGRAM)
    wait_s: float = 0.0
    held_s: tuple[float, ...] = field(default=(), metadata=LATER)
    bytes_sent: int = 0
    latency_s: float = field(default=0.0, metadata={MEAN_OVER: "rounds"})
    latency_max_s: float = field(default=0.0, metadata=LARGEST)
    held_bytes: int = field(default=0, metadata=LATER)
    peak_bytes: int = field(default=0, metadata=LARGEST)
    resets: int = 0
    gradients_lost: int = 0

    def __str__(self) -> str:
        """Return the counts in five lines; ``repr()`` has all fields."""
        mean = mean_of(self.contributors) or 0.0
        applied = f"{self.gradients_applied} gradients of all ranks were applied"
        if self.total_produced is None:
            lost = f"lost: known after drain(); so far {applied}"
        elif self.total_produced == self.gradients_applied and not self.gradients_lost:
            lost = f"lost: nothing; all ranks produced {self.total_produced} gradients, all were applied"
        else:
            lost = (
                f"lost: {self.gradients_lost} gradients, of lost ranks; all ranks had produced {self.total_produced} "
                f"at the last drain(), {applied}"
            )
        skipped = f"; {self.gradients_skipped} steps were not finite and count as zero" * bool(self.gradients_skipped)
        return "\n".join(
            [
                f"steps: {self.steps} of this rank; {self.rounds} rounds, with {mean:.1f} ranks on average",
                _waited(self.wait_s, self.steps),
                _most("the others waited for", self.held_s),
                _late("this rank's gradients", "rounds", self.staleness),
                lost + skipped,
            ]
        )


@dataclass(frozen=True)
class GossipStats(_Mergeable):
    """Counts of the GossipOptimizer of a rank so far.

    Attributes:
        steps: number of steps of this rank.
        exchanges: number of exchanges completed on this rank; an exchange carries messages of several ranks.
        messages_sent, messages_taken, messages_left: number of messages that this rank has sent, consumed and
            discarded. When all ranks have drained, the number sent by all ranks is the number consumed or discarded by
            all. D-PSGD sends its messages a step ahead, and discards the messages of a step that no rank took.
        averagings: AD-PSGD: averagings of this rank with a neighbour. Other algorithms: averages over all ranks.
        staleness: number of messages by the number of steps between the sender's step and their consumption.
        wait_s: seconds for which this rank's training thread waited in ``step()`` and ``drain()``.
        waited_for: for each rank (of the process set, in order) the part of ``wait_s`` that ended with its message.
        bytes_sent: bytes that this rank has passed to collectives for other ranks.
        latency_s: mean seconds of an exchange on this rank, from the command to its end.
        push_sum_weight: SGP's current weight w of this rank; 1 if all ranks send and receive equally.
        resets: number of membership changes (elastic training).
        rounds: number of exchanges and averages over all ranks that this rank's weights include, as in
            ``optimizer.rounds``, without those before a resumed checkpoint.
    """

    steps: int = 0
    exchanges: int = 0
    messages_sent: int = 0
    messages_taken: int = 0
    messages_left: int = 0
    averagings: int = 0
    staleness: dict[int, int] = field(default_factory=dict, metadata=HISTOGRAM)
    wait_s: float = 0.0
    waited_for: tuple[float, ...] = field(default=(), metadata=PER_RANK)
    bytes_sent: int = 0
    latency_s: float = field(default=0.0, metadata={MEAN_OVER: "exchanges"})
    push_sum_weight: float = field(default=1.0, metadata=LATER)
    resets: int = 0
    rounds: int = 0

    def __str__(self) -> str:
        """Return the counts in five lines; ``repr()`` has all fields."""
        return "\n".join(
            [
                f"steps: {self.steps} of this rank; {self.exchanges} exchanges, {self.averagings} averages",
                _waited(self.wait_s, self.steps),
                _most("this rank waited for", self.waited_for),
                _late("messages", "steps", self.staleness),
                f"messages: this rank sent {self.messages_sent}, used {self.messages_taken} and discarded "
                f"{self.messages_left}; after drain() all that any rank has sent are used or discarded",
            ]
        )


@dataclass(frozen=True)
class LeaderStats(_Mergeable):
    """Counts of the LeaderOptimizer of a rank so far.

    Attributes:
        steps: number of steps of this rank.
        pulls: number of pulls completed on this rank.
        led, led_group: number of pulls of all ranks, and of this rank's group, by the rank that led them; -1 is EASGD's
            center.
        distance: mean distance |x - leader| of this rank from its leaders, or from the center, at its pulls; over
            ``distances`` pulls.
        pull_s: mean seconds of a pull on this rank, from its submission to its end.
        bytes_received: bytes received by pulls; for EASGD's sums, those of a ring.
        wait_s: seconds for which this rank's training thread waited in ends.
        mean_loss: mean of the last losses; None before the first one.
        history: (Unix time in s, group or -1 for all, leader) of each of the last 10,000 pulls.
        distances: number of pulls with a known distance.
        resets: number of membership changes (elastic training).
    """

    steps: int = 0
    pulls: int = 0
    led: dict[int, int] = field(default_factory=dict, metadata=HISTOGRAM)
    led_group: dict[int, int] = field(default_factory=dict, metadata=HISTOGRAM)
    distance: float = field(default=0.0, metadata={MEAN_OVER: "distances"})
    pull_s: float = field(default=0.0, metadata={MEAN_OVER: "pulls"})
    bytes_received: int = 0
    wait_s: float = 0.0
    mean_loss: float | None = field(default=None, metadata=LATER)
    history: tuple[tuple[float, int, int], ...] = ()
    distances: int = 0
    resets: int = 0

    def __str__(self) -> str:
        """Return the counts in five lines; ``repr()`` has all fields."""
        most = max(self.led, key=lambda rank: self.led[rank], default=None)
        leader = "no rank" if most is None else "the center" if most < 0 else f"rank {most}"
        loss = "none recorded" if self.mean_loss is None else f"{self.mean_loss:.4g}"
        return "\n".join(
            [
                f"steps: {self.steps} of this rank; {self.pulls} pulls, {self.pull_s:.3f} s each",
                _waited(self.wait_s, self.steps),
                f"leader: {leader} led most of {sum(self.led.values())} pulls of all ranks",
                f"distance: {self.distance:.4g} from the leader or center, mean over {self.distances} pulls",
                f"loss: {loss}, mean of the last ones",
            ]
        )
