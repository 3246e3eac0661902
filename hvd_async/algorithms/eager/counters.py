"""Counts of one optimizer's gradients and rounds: that none is lost, and for ``stats()``."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hvd_async.algorithms.eager.gradient_format import ReducedRound
from hvd_async.errors import GradientLossError
from hvd_async.runtime.messages import Drained
from hvd_async.stats import Stats


class Counters:
    """Counts that both the engine thread and the training thread add to.

    Args:
        ranks: that share the optimizer.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._lock = threading.Lock()
        self._staleness: Counter[int] = Counter()
        self._contributors: Counter[int] = Counter()
        self._held_s = dict.fromkeys(ranks, 0.0)
        self._sent = self._bytes = self._peak = self._rounds = 0
        self._latency = self._longest = 0.0

    def add_held_bytes(self, nbytes: int) -> None:
        """So many bytes of gradients more (or, negative, fewer) are held."""
        with self._lock:
            self._bytes += nbytes
            self._peak = max(self._peak, self._bytes)

    def took(self, staleness: Sequence[int]) -> None:
        """A round has taken gradients that were so many rounds stale."""
        with self._lock:
            self._staleness.update(staleness)

    def started(self, by: int, held: float) -> None:
        """Buckets of a round have started by an event of rank ``by``; ranks have waited ``held`` s in all for that."""
        with self._lock:
            self._held_s[by] += held

    def went(self, bucket: int, arrived: int, nbytes: int) -> None:
        """A bucket's part has been given to a collective, for which so many ranks had arrived."""
        with self._lock:
            self._sent += nbytes
            if bucket == 0:
                self._contributors[arrived] += 1

    def came(self, seconds: float) -> None:
        """A whole round was back so many seconds after its first command."""
        with self._lock:
            self._rounds += 1
            self._latency += seconds
            self._longest = max(self._longest, seconds)

    def stats(self, **own: int | float | None) -> Stats:
        """A snapshot, with what the caller counts itself."""
        with self._lock:
            return Stats(
                **own,  # type: ignore[arg-type]
                staleness=dict(sorted(self._staleness.items())),
                contributors=dict(sorted(self._contributors.items())),
                held_s=tuple(self._held_s.values()),
                bytes_sent=self._sent,
                latency_s=self._latency / self._rounds if self._rounds else 0.0,
                latency_max_s=self._longest,
                held_bytes=self._bytes,
                peak_bytes=self._peak,
            )


class GradientLedger:
    """Gradients that the training thread has handed over, and those it has applied; each is to be applied once.

    Args:
        buckets: how many gradients come in.

    Attributes:
        produced: gradients handed over, by bucket, since the start.
        applied: gradients of all ranks in the rounds that were applied, by bucket.
    """

    def __init__(self, buckets: int) -> None:
        self.produced, self.applied = [0] * buckets, [0] * buckets
        self._rounds = self._skipped = 0
        self._total: int | None = None
        self._lacks = False
        """Whether a bucket of the step that is under way holds no gradient."""

    def hand_over(self, bucket: int, empty: bool) -> None:
        """Count a bucket of the step that is under way; an empty one holds no gradient."""
        self._lacks = self._lacks or empty
        self.produced[bucket] += not empty

    def end_step(self) -> None:
        """Count the step whose buckets have all been handed over."""
        self._skipped, self._lacks = self._skipped + self._lacks, False

    def take_back(self, buckets: Sequence[int]) -> None:
        """Uncount buckets of a step that have turned out to hold no gradient."""
        for bucket in buckets:
            self.produced[bucket] -= 1
        self._skipped += bool(buckets)

    def restore(self, bucket: int, gradients: int) -> None:
        """Count gradients of an earlier run that are pending here."""
        self.produced[bucket] += gradients

    def apply(self, round_: ReducedRound) -> None:
        """Count a round that was applied."""
        self.applied = [a + b for a, b in zip(self.applied, round_.counts, strict=True)]
        self._rounds += round_.gradients > 0

    def note_drained(self, drained: Drained[Any]) -> None:
        """Keep how many gradients all ranks have produced, who have finished."""
        self._total = max(drained.produced)

    def check_drained(self, drained: Drained[Any], rank: int) -> None:
        """Compare the gradients produced with those applied, after a drain.

        Raises:
            GradientLossError: they differ.
        """
        if drained.flushed and self.applied != drained.produced:
            raise GradientLossError(
                f"drain: {drained.produced} gradients (of each bucket) were produced but {self.applied} were applied "
                f"on rank {rank}. This is a bug in hvd_async; please report it with stats()."
            )

    def stats(self) -> dict[str, int | None]:
        """Return what ``Stats`` shows of it."""
        return {
            "rounds_applied": self._rounds,
            "gradients_produced": max(self.produced),
            "gradients_applied": max(self.applied),
            "gradients_skipped": self._skipped,
            "total_produced": self._total,
        }
