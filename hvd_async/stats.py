"""Counts of an optimizer, as ``stats()`` returns them."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["GossipStats", "LeaderStats", "Stats"]


@dataclass(frozen=True)
class Stats:
    """Counts of one rank's EagerOptimizer so far.

    Attributes:
        steps: of this rank.
        rounds: fired and taken in by this rank.
        rounds_applied: of these, how many carried a gradient.
        gradients_produced: by this rank, those brought from an earlier run included.
        gradients_applied: of all ranks, by this rank.
        gradients_skipped: steps of this rank of which something was handed over empty: NaN, an infinity, an overflow.
        total_produced: by all ranks; None before the first ``drain()``.
        staleness: how many of this rank's gradients were how many rounds stale when a round took them.
        contributors: how many rounds fired with how many ranks there.
        wait_s: seconds this rank's training thread waited for rounds in ``step()`` and ``drain()``.
        held_s: for each rank (of the process set, in order) the seconds that others in ``step()`` waited until it made
            their round fire, added up.
        bytes_sent: what this rank has given to collectives.
        latency_s: mean seconds from a round's first command until all of it was back.
        latency_max_s: the longest.
        held_bytes: bytes of gradients that are held now, apart from the framework's own.
        peak_bytes: the most that were.
        resets: how often the ranks became others (elastic training).
        gradients_lost: of ranks that were lost, in no round that was applied, as far as is known: not those of a loss
            of rank 0, whose coordinator counts them. (They had been produced by others, and are in no other count.)
    """

    steps: int = 0
    rounds: int = 0
    rounds_applied: int = 0
    gradients_produced: int = 0
    gradients_applied: int = 0
    gradients_skipped: int = 0
    total_produced: int | None = None
    staleness: dict[int, int] = field(default_factory=dict)
    contributors: dict[int, int] = field(default_factory=dict)
    wait_s: float = 0.0
    held_s: tuple[float, ...] = ()
    bytes_sent: int = 0
    latency_s: float = 0.0
    latency_max_s: float = 0.0
    held_bytes: int = 0
    peak_bytes: int = 0
    resets: int = 0
    gradients_lost: int = 0

    def __add__(self, later: Stats) -> Stats:
        """Add the counts of a later run among other ranks; ``held_s`` is of these."""
        rounds = self.rounds + later.rounds
        seconds = self.latency_s * self.rounds + later.latency_s * later.rounds
        return Stats(
            steps=self.steps + later.steps,
            rounds=rounds,
            rounds_applied=self.rounds_applied + later.rounds_applied,
            gradients_produced=self.gradients_produced + later.gradients_produced,
            gradients_applied=self.gradients_applied + later.gradients_applied,
            gradients_skipped=self.gradients_skipped + later.gradients_skipped,
            total_produced=later.total_produced,
            staleness=_added(self.staleness, later.staleness),
            contributors=_added(self.contributors, later.contributors),
            wait_s=self.wait_s + later.wait_s,
            held_s=later.held_s,
            bytes_sent=self.bytes_sent + later.bytes_sent,
            latency_s=seconds / rounds if rounds else 0.0,
            latency_max_s=max(self.latency_max_s, later.latency_max_s),
            held_bytes=later.held_bytes,
            peak_bytes=max(self.peak_bytes, later.peak_bytes),
            resets=self.resets + later.resets,
            gradients_lost=self.gradients_lost + later.gradients_lost,
        )


def _added(counts: dict[int, int], others: dict[int, int]) -> dict[int, int]:
    return dict(sorted((Counter(counts) + Counter(others)).items()))


@dataclass(frozen=True)
class GossipStats:
    """Counts of one rank's GossipOptimizer so far.

    Attributes:
        steps: of this rank.
        exchanges: that this rank has seen land; one carries messages of several ranks.
        messages_sent, messages_taken, messages_left: of this rank; when all ranks have drained, as many in all were
            sent as were taken in or left aside. D-PSGD sends its messages a step ahead, and leaves aside those of a
            step that no rank took.
        averagings: AD-PSGD: how often this rank was averaged with a neighbour. Else: averages over all ranks.
        staleness: how many messages were taken in how many steps after the step of the sender.
        wait_s: seconds this rank's training thread waited in ``step()`` and ``drain()``.
        waited_for: for each rank (of the process set, in order) the seconds of it that ended with its message.
        bytes_sent: what this rank has given to collectives for others.
        latency_s: mean seconds of an exchange on this rank, from the command until all of it was there.
        push_sum_weight: SGP's w of this rank now; 1 where all send and get as much.
        resets: how often the ranks became others (elastic training).
        rounds: exchanges and averages over all ranks that this rank's weights have seen, as ``optimizer.rounds``
            counts them, but for those before a resumed checkpoint.
    """

    steps: int = 0
    exchanges: int = 0
    messages_sent: int = 0
    messages_taken: int = 0
    messages_left: int = 0
    averagings: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    wait_s: float = 0.0
    waited_for: tuple[float, ...] = ()
    bytes_sent: int = 0
    latency_s: float = 0.0
    push_sum_weight: float = 1.0
    resets: int = 0
    rounds: int = 0

    def __add__(self, later: GossipStats) -> GossipStats:
        """Add the counts of a later run."""
        exchanges = self.exchanges + later.exchanges
        seconds = self.latency_s * self.exchanges + later.latency_s * later.exchanges
        pairs = itertools.zip_longest(self.waited_for, later.waited_for, fillvalue=0.0)
        return GossipStats(
            steps=self.steps + later.steps,
            exchanges=exchanges,
            messages_sent=self.messages_sent + later.messages_sent,
            messages_taken=self.messages_taken + later.messages_taken,
            messages_left=self.messages_left + later.messages_left,
            averagings=self.averagings + later.averagings,
            staleness=_added(self.staleness, later.staleness),
            wait_s=self.wait_s + later.wait_s,
            waited_for=tuple(a + b for a, b in pairs),
            bytes_sent=self.bytes_sent + later.bytes_sent,
            latency_s=seconds / exchanges if exchanges else 0.0,
            push_sum_weight=later.push_sum_weight,
            resets=self.resets + later.resets,
            rounds=self.rounds + later.rounds,
        )


@dataclass(frozen=True)
class LeaderStats:
    """Counts of one rank's LeaderOptimizer so far.

    Attributes:
        steps: of this rank.
        pulls: that this rank has seen land.
        led, led_group: how often each rank led those of all ranks, and of this rank's group, by rank; -1 stands for
            EASGD's centre.
        distance: how far this rank was from its leaders, or the centre, when it was pulled: |x - leader|, mean of
            ``distances`` times.
        pull_s: mean seconds of a pull on this rank, from its submission until it was there.
        bytes_received: by pulls; of EASGD's sums, those of a ring.
        wait_s: seconds this rank's training thread waited, in ends.
        mean_loss: of the last losses; None before there is one.
        history: (Unix time in s, group or -1 for all, leader) of each of the last 10,000 pulls.
        resets: how often the ranks became others (elastic training).
    """

    steps: int = 0
    pulls: int = 0
    led: dict[int, int] = field(default_factory=dict)
    led_group: dict[int, int] = field(default_factory=dict)
    distance: float = 0.0
    pull_s: float = 0.0
    bytes_received: int = 0
    wait_s: float = 0.0
    mean_loss: float | None = None
    history: tuple[tuple[float, int, int], ...] = ()
    distances: int = 0
    resets: int = 0

    def __add__(self, later: LeaderStats) -> LeaderStats:
        """Add the counts of a later run."""
        pulls = self.pulls + later.pulls

        total = self.distance * self.distances + later.distance * later.distances
        distances = self.distances + later.distances
        return LeaderStats(
            steps=self.steps + later.steps,
            pulls=pulls,
            led=_added(self.led, later.led),
            led_group=_added(self.led_group, later.led_group),
            distance=total / distances if distances else 0.0,
            pull_s=(self.pull_s * self.pulls + later.pull_s * later.pulls) / pulls if pulls else 0.0,
            bytes_received=self.bytes_received + later.bytes_received,
            wait_s=self.wait_s + later.wait_s,
            mean_loss=later.mean_loss,
            history=self.history + later.history,
            distances=distances,
            resets=self.resets + later.resets,
        )
