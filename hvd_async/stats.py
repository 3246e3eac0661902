"""Counts of an optimizer, as ``stats()`` returns them."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

__all__ = ["GossipStats", "LeaderStats", "Stats"]

# -- how the counts of two runs are merged: metadata of a field; addition for fields without ---------------------------


def _by_value(counts: dict[int, int], others: dict[int, int]) -> dict[int, int]:
    return dict(sorted((Counter(counts) + Counter(others)).items()))


def _by_rank(seconds: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in itertools.zip_longest(seconds, others, fillvalue=0.0))


LATER = {"merge": lambda _, later: later}
LARGEST = {"merge": max}
HISTOGRAM = {"merge": _by_value}
PER_RANK = {"merge": _by_rank}
MEAN_OVER = "mean_over"
"""Key of the field with the number of values that a field is the mean of."""
Own = TypeVar("Own", bound="_Mergeable")


@dataclass(frozen=True)
class _Mergeable:
    """Counts that can be added up over several runs."""

    def __add__(self: Own, later: Own) -> Own:
        """Return the counts of both runs, the later of which may be among other ranks."""
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


# -- counts of each family ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stats(_Mergeable):
    """Counts of one rank's EagerOptimizer so far.

    Attributes:
        steps: of this rank.
        rounds: fired and received by this rank.
        rounds_applied: rounds among them that carried a gradient.
        gradients_produced: by this rank, those restored from an earlier run included.
        gradients_applied: of all ranks, by this rank.
        gradients_skipped: steps of this rank in which a gradient was replaced by zeros: NaN, an infinity, an overflow.
        total_produced: by all ranks; None before the first ``drain()``.
        staleness: number of this rank's gradients by their staleness in rounds.
        contributors: number of rounds by how many ranks contributed.
        wait_s: seconds this rank's training thread waited for rounds in ``step()`` and ``drain()``.
        held_s: for each rank (of the process set, in order) the seconds that others in ``step()`` waited until it made
            their round fire, added up.
        bytes_sent: passed to collectives by this rank.
        latency_s: mean seconds from a round's first command to its end.
        latency_max_s: the longest.
        held_bytes: bytes of gradients that are held now, besides the framework's own.
        peak_bytes: the most that were held.
        resets: number of membership changes (elastic training).
        gradients_lost: gradients of lost ranks that no applied round contains, as far as is known: not those of a loss
            of rank 0, whose coordinator counts them. (Other ranks produced them; no other count includes them.)
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


@dataclass(frozen=True)
class GossipStats(_Mergeable):
    """Counts of one rank's GossipOptimizer so far.

    Attributes:
        steps: of this rank.
        exchanges: completed on this rank; one carries messages of several ranks.
        messages_sent, messages_taken, messages_left: of this rank; when all ranks have drained, the number sent by all
            ranks is the number consumed or discarded by all. D-PSGD sends its messages a step ahead, and discards those
            of a step that no rank took.
        averagings: AD-PSGD: averagings of this rank with a neighbour. Else: averages over all ranks.
        staleness: number of messages by how many steps after the sender's step they were consumed.
        wait_s: seconds this rank's training thread waited in ``step()`` and ``drain()``.
        waited_for: for each rank (of the process set, in order) the seconds of it that ended with its message.
        bytes_sent: passed to collectives by this rank for others.
        latency_s: mean seconds of an exchange on this rank, from the command to its end.
        push_sum_weight: SGP's w of this rank now; 1 where all ranks send and receive alike.
        resets: number of membership changes (elastic training).
        rounds: exchanges and averages over all ranks that this rank's weights include, as ``optimizer.rounds``
            counts them, without those before a resumed checkpoint.
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


@dataclass(frozen=True)
class LeaderStats(_Mergeable):
    """Counts of one rank's LeaderOptimizer so far.

    Attributes:
        steps: of this rank.
        pulls: completed on this rank.
        led, led_group: number of pulls of all ranks, and of this rank's group, by the rank that led them; -1 is EASGD's
            centre.
        distance: of this rank from its leaders, or the centre, when it was pulled: |x - leader|, the mean over
            ``distances`` pulls.
        pull_s: mean seconds of a pull on this rank, from its submission to its end.
        bytes_received: by pulls; of EASGD's sums, those of a ring.
        wait_s: seconds this rank's training thread waited, in ends.
        mean_loss: of the last losses; None before there is one.
        history: (Unix time in s, group or -1 for all, leader) of each of the last 10,000 pulls.
        distances: number of pulls whose distance is known.
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
