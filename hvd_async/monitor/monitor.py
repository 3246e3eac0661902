"""``Monitor``: samples an optimizer's ``stats()`` while it trains, writes the samples, and warns of stragglers."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from hvd_async.errors import ranks_text
from hvd_async.monitor.sample import Counts, Sample, Totals, scalars
from hvd_async.monitor.sinks import Sinks
from hvd_async.monitor.slow_ranks import Warner
from hvd_async.runtime.log import warn

COMPARISONS = 2
"""Consecutive comparisons in which a rank must stand out to be called slow."""


class WaitReport(NamedTuple):
    """Waits of a rank since its previous report; ``compare`` takes the reports of all ranks.

    Attributes:
        rank: number of the rank.
        share: share of its time that it waited, in [0, 1].
        step_s: mean seconds of a step.
    """

    rank: int
    share: float
    step_s: float


class Monitor:
    """Live monitor of this rank's optimizer. Make one on every rank, before or during training.

    Call ``step()`` after each step of the optimizer. The monitor does not communicate with other ranks, nor keep the
    optimizer alive. It continues after membership changes (elastic training).

    Args:
        optimizer: an ``EagerOptimizer``, a ``GossipOptimizer`` or a ``LeaderOptimizer``, of any framework.
        every: steps from one sample to the next, as ``step()`` counts them.
        seconds: from one sample to the next, instead of ``every``; checked in ``step()``.
        tensorboard: a folder, for TensorBoard.
        prometheus: a file in Prometheus' text format, replaced at each sample.
        prometheus_port: port of an HTTP server of the same text, under ``/metrics``; 0: a free port.
        all_ranks: whether every rank writes; else only the first rank that shares the optimizer. Rank R then writes
            into the folder ``rankR`` and the file ``NAME.rankR.prom``, and serves at ``prometheus_port`` + its place.
        warn: whether the first rank warns on stderr of permanent stragglers, each time they change.
        window: steps over which waits are added up before they are judged; three such windows make a warning.
        name: of the optimizer, if a script has several; it becomes a label and a part of tags.
        clock: returns monotonic seconds.

    Attributes:
        last: the last sample; None before the first.

    Raises:
        ValueError: an argument is not valid, or a package is not installed.
        OSError: a file or a port cannot be opened.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 50,
        seconds: float | None = None,
        tensorboard: str | Path | None = None,
        prometheus: str | Path | None = None,
        prometheus_port: int | None = None,
        all_ranks: bool = False,
        warn: bool = True,
        window: int = 50,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # (inside a LossScaleOptimizer)
        if not hasattr(optimizer, "_async"):
            raise ValueError(
                f"Monitor needs an optimizer wrapped by this library, got {type(optimizer).__name__}: pass the result "
                f"of EagerOptimizer, GossipOptimizer or LeaderOptimizer"
            )
        for option, value in (("every", every), ("window", window)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{option} must be a number of steps, at least 1, got {value!r}: 50 is usual")
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds must be above 0, got {seconds!r}: correct it, or pass every=")
        if prometheus_port is not None and not 0 <= prometheus_port <= 65535:
            raise ValueError(f"prometheus_port must be a port from 1 to 65535, or 0, got {prometheus_port!r}")
        self._optimizer = weakref.ref(optimizer)
        self._every, self._between, self._clock = every, seconds, clock
        self._warns, self._window = warn, window
        self._calls, self._closed = 0, False
        self._counts = self._reported = Counts.of(optimizer.stats())
        self._at = self._reported_at = clock()
        self._distance: float | None = None
        self.last: Sample | None = None
        self._join(optimizer, self._counts.resets)
        self._totals = Totals(name)
        folder, file = (None if place is None else Path(place) for place in (tensorboard, prometheus))
        self._sinks = Sinks(folder, file, prometheus_port, all_ranks, name)
        for error in self._sinks.open(self._place, self._rank).values():
            self._sinks.close()
            raise error

    def _join(self, optimizer: Any, resets: int) -> None:
        """Begin with the ranks that currently share the optimizer, and the place of this rank among them."""
        group = optimizer._async.rank_group
        self._ranks: tuple[int, ...] = tuple(group.ranks)
        self._place: int = group.index
        self._resets = resets
        self._warner = Warner(self._ranks, self._window)
        self._comparer = Warner(self._ranks, self._window, COMPARISONS)

    @property
    def _rank(self) -> int:
        return self._ranks[self._place]

    def _follow(self, optimizer: Any, resets: int) -> None:
        """Continue with the new ranks if the membership has changed."""
        before, group = (self._place, self._rank), optimizer._async.rank_group
        if (group.index, tuple(group.ranks), resets) != (self._place, self._ranks, self._resets):
            self._join(optimizer, resets)
            if (self._place, self._rank) != before:
                for name, error in self._sinks.open(self._place, self._rank).items():
                    warn(f"the monitor cannot write to {name} yet: {error}")

    def _hosts(self, optimizer: Any) -> list[str]:
        """Return each rank's host by place; "?" before the first step, while there is no engine."""
        worker = optimizer._async.worker
        known: Sequence[str] = () if worker is None else getattr(worker.engine, "hosts", ())
        return [known[rank] if rank < len(known) else "?" for rank in self._ranks]

    @property
    def port(self) -> int | None:
        """The port at which this rank serves its metrics; None if it does not."""
        return self._sinks.port

    def step(self, steps: int = 1) -> None:
        """Count ``steps`` steps of the optimizer, and take a sample if one is due."""
        self._calls += steps
        due = self._calls >= self._every if self._between is None else self._clock() - self._at >= self._between
        if due:
            self.sample()

    def sample(self) -> Sample | None:
        """Take a sample now, write it, and look for stragglers. Return None if the optimizer or the monitor is gone."""
        optimizer = self._optimizer()
        self._calls = 0
        if optimizer is None or self._closed:
            return None
        now, counts = self._clock(), Counts.of(optimizer.stats())
        self._follow(optimizer, counts.resets)
        sample = Sample.between(self._counts, counts, now - self._at, self._distance)
        self._counts, self._at, self.last = counts, now, sample
        ranks, hosts, first = self._ranks, self._hosts(optimizer), self._place == 0
        self._totals.add(sample, ranks, hosts)
        self._sinks.write(sample, lambda: self._totals.metrics(sample, self._rank, time.time(), first), ranks)
        if self._warns and first and sample.of_all and len(sample.waits) == len(ranks) > 1:
            self._warner.add(sample, hosts, optimizer._async.settings)
        return sample

    def record_consensus_distance(self, distance: float) -> None:
        """Show the distance of the ranks' weights from their mean with each sample from now on.

        Args:
            distance: what ``optimizer.consensus_distance()`` returns, a collective of all ranks.
        """
        self._distance = float(distance)

    def values(self, prefix: str = "hvd_async/") -> dict[str, float]:
        """Return the last sample as a flat dict, for ``logging``, W&B or MLflow; empty before the first sample.

        Args:
            prefix: of the names.
        """
        return {} if self.last is None else scalars(self.last, self._ranks, prefix)

    def report(self) -> WaitReport:
        """Return this rank's waits since its previous report, for ``compare``."""
        optimizer = self._optimizer()
        now, counts = self._clock(), self._reported if optimizer is None else Counts.of(optimizer.stats())
        since = Sample.between(self._reported, counts, now - self._reported_at)
        self._reported, self._reported_at = counts, now
        return WaitReport(self._rank, since.wait_share, since.seconds / max(1, since.steps))

    def compare(self, reports: Sequence[WaitReport]) -> None:
        """Find the rank that delays the others, from the reports of all; the first rank warns after two comparisons in
        a row.

        This is for gossip, where each rank knows only its own waits, and a rank that waits makes its neighbours wait.
        Partial allreduce needs no reports.

        Args:
            reports: of at least all ranks that share the optimizer, as ``hvd.allgather_object(monitor.report())``
                returns them.

        Raises:
            ValueError: a report is missing.
        """
        optimizer = self._optimizer()
        if optimizer is None or self._closed:
            return
        self._follow(optimizer, Counts.of(optimizer.stats()).resets)
        known = {one.rank: one for one in reports}
        if missing := set(self._ranks) - known.keys():
            raise ValueError(
                f"compare() lacks the report of {ranks_text(missing)}: pass the result of "
                f"hvd.allgather_object(monitor.report())"
            )
        own = [known[rank] for rank in self._ranks]
        if self._warns and self._place == 0 and len(own) > 1:
            step_s = sum(one.step_s for one in own) / len(own)
            hosts, settings = self._hosts(optimizer), optimizer._async.settings
            self._comparer.compare([one.share for one in own], step_s, hosts, settings)

    def close(self) -> None:
        """Take a last sample, if there were steps since the previous one, and close the files."""
        if not self._closed:
            try:
                if self._calls:
                    self.sample()
            finally:
                self._closed = True
                self._sinks.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
