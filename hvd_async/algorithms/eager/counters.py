"""Thread-safe counts of one optimizer's rounds, for ``stats()``."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from hvd_async.algorithms.eager.messages import RoundTrigger
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

    def went(self, bucket: int, firing: RoundTrigger, nbytes: int) -> None:
        """A bucket's part has been given to a collective."""
        with self._lock:
            self._sent += nbytes
            self._held_s[firing.by] += firing.held
            if bucket == 0:
                self._contributors[firing.arrived] += 1

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
