"""``Monitor``: samples an optimizer's ``stats()`` while it trains, and shows what it finds."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from hvd_async.errors import ranks_text
from hvd_async.monitor.sample import Counts, Sample
from hvd_async.monitor.sinks import Destinations, Sinks, Totals
from hvd_async.monitor.slow_ranks import Warner

EPOCHS = 2
"""In so many comparisons of all ranks, one after the other, a rank must stand out to be called slow."""


class WaitReport(NamedTuple):
    """One rank's waits since its report before; ``compare`` takes those of all.

    Attributes:
        rank: its number.
        share: of its time that it waited, in [0, 1].
        step_s: seconds of a step.
    """

    rank: int
    share: float
    step_s: float


class _Ranks(NamedTuple):
    """The ranks that share an optimizer, in order, and the place of this one."""

    place: int
    ranks: tuple[int, ...]

    @property
    def own(self) -> int:
        """This rank's number."""
        return self.ranks[self.place]


class Monitor:
    """Shows what an optimizer of this rank does, while it trains. Make one on every rank, before or during training.

    Call ``step()`` after each of the optimizer's. It communicates with no other rank. It does not keep the optimizer
    alive, and goes on where ranks are lost or join (elastic training).

    Args:
        optimizer: an ``EagerOptimizer``, a ``GossipOptimizer`` or a ``LeaderOptimizer``, of any framework.
        every: calls of ``step()`` from one sample to the next.
        seconds: from one sample to the next, in place of ``every``; looked at in ``step()``.
        tensorboard: a folder, for TensorBoard.
        prometheus: a file in Prometheus' text format, replaced at each sample.
        prometheus_port: where to serve the same by HTTP, under ``/metrics``; 0: a free port. Needs
            ``pip install 'hvd_async[monitor]'``.
        all_ranks: whether every rank writes; else the first of those that share the optimizer. Rank R then writes into
            the folder ``rankR``, the file ``NAME.rankR.prom``, and serves at its place + ``prometheus_port``.
        warn: whether to say on stderr, once, that a rank holds up the others for good. The first rank does.
        window: steps over which waits are added up before they are judged; three such windows make a warning.
        name: of the optimizer, where a script has several; a label and a part of tags.
        clock: seconds, rising.

    Attributes:
        last: the last sample; None before the first.

    Raises:
        ValueError: an argument cannot be, or a package is not installed.
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
                f"Monitor wants a wrapped optimizer, and {type(optimizer).__name__} is none: pass what EagerOptimizer, "
                f"GossipOptimizer or LeaderOptimizer has returned"
            )
        _check_steps("every", every)
        _check_steps("window", window)
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds={seconds!r} is no time between samples: take a number above 0, or every=")
        if prometheus_port is not None and not 0 <= prometheus_port <= 65535:
            raise ValueError(f"prometheus_port={prometheus_port!r} is no port: take one from 1 to 65535, or 0")
        self._optimizer = weakref.ref(optimizer)
        self._every, self._between, self._clock = every, seconds, clock
        self._warns, self._window = warn, window
        self._calls = 0
        self._ranks = self._ranks_of(optimizer)
        self._counts = self._reported = Counts.of(optimizer.stats())
        self._at = self._reported_at = clock()
        self._resets = self._counts.resets
        self._totals = Totals(name)
        self._begin_to_warn()
        self._distance: float | None = None
        self.last: Sample | None = None
        files = [None if place is None else Path(place) for place in (tensorboard, prometheus)]
        self._sinks = Sinks(Destinations(files[0], files[1], prometheus_port, all_ranks, name))
        self._sinks.open(*self._place())
        self._closed = False

    @staticmethod
    def _ranks_of(optimizer: Any) -> _Ranks:
        group = optimizer._async.rank_group
        return _Ranks(group.index, tuple(group.ranks))

    def _place(self) -> tuple[int, int]:
        return self._ranks.place, self._ranks.own

    def _begin_to_warn(self) -> None:
        size = len(self._ranks.ranks)
        self._warner = Warner(size, self._window)
        self._comparer = Warner(size, self._window, EPOCHS)

    def _hosts(self, optimizer: Any) -> list[str]:
        """Return each rank's host by place, "?" where it is not known."""
        worker = optimizer._async.worker
        hosts: Sequence[str] = () if worker is None else getattr(worker.engine, "hosts", ())
        return [hosts[rank] if rank < len(hosts) else "?" for rank in self._ranks.ranks]

    @property
    def port(self) -> int | None:
        """The port at which this rank serves its metrics; None if it does not."""
        return self._sinks.port

    def step(self) -> None:
        """Count a step of the optimizer, and take a sample if one is due."""
        self._calls += 1
        if self._is_due():
            self.sample()

    def _is_due(self) -> bool:
        if self._between is None:
            return self._calls >= self._every
        return self._clock() - self._at >= self._between

    def sample(self) -> Sample | None:
        """Take a sample now, write it, and judge who is waited for; None where the optimizer or the monitor is gone."""
        optimizer = self._optimizer()
        self._calls = 0
        if optimizer is None or self._closed:
            return None
        now, counts = self._clock(), Counts.of(optimizer.stats())
        self._follow(optimizer, counts)
        sample = Sample.between(self._counts, counts, now - self._at, self._distance)
        self._counts, self._at, self.last = counts, now, sample
        ranks, hosts = self._ranks.ranks, self._hosts(optimizer)
        self._totals.add(sample, ranks, hosts)
        own = self._ranks.own
        self._sinks.write(sample, lambda: self._totals.metrics(sample, own, time.time(), self._ranks.place == 0), ranks)
        knows = sample.of_all and len(sample.waits) == len(ranks) > 1
        if self._warns and knows and self._ranks.place == 0 and (found := self._warner.add(sample)) is not None:
            self._warner.say(*found, ranks, hosts, optimizer._async.settings)
        return sample

    def _follow(self, optimizer: Any, counts: Counts) -> None:
        """Go on among other ranks, where they have changed: who is slow is to be seen anew."""
        ranks = self._ranks_of(optimizer)
        if ranks == self._ranks and counts.resets == self._resets:
            return
        self._resets = counts.resets
        moved = (ranks.place, ranks.own) != self._place()
        self._ranks = ranks
        self._begin_to_warn()
        if moved:
            self._sinks.reopen(*self._place())

    def record_consensus_distance(self, distance: float) -> None:
        """Show a distance of the ranks' weights from their mean with each sample from now on.

        Args:
            distance: what ``optimizer.consensus_distance()`` returns, a collective of all ranks.
        """
        self._distance = float(distance)

    def report(self) -> WaitReport:
        """Return this rank's waits since its last report, for ``compare``."""
        optimizer = self._optimizer()
        now, counts = self._clock(), self._reported if optimizer is None else Counts.of(optimizer.stats())
        since = Sample.between(self._reported, counts, now - self._reported_at)
        self._reported, self._reported_at = counts, now
        return WaitReport(self._ranks.own, since.wait_share, since.seconds / max(1, since.steps))

    def compare(self, reports: Sequence[WaitReport]) -> None:
        """Judge by all ranks' reports who holds up the others, and have the first rank say so; two of them, one after
        the other, make a warning.

        It is for gossip, where each rank knows its own waits alone, and a rank that waits makes its neighbours wait.
        Partial allreduce needs no reports.

        Args:
            reports: of all ranks that share the optimizer, and maybe of others: those that
                ``hvd.allgather_object(monitor.report())`` returns.

        Raises:
            ValueError: one is missing.
        """
        optimizer = self._optimizer()
        if optimizer is None or self._closed:
            return
        self._follow(optimizer, Counts.of(optimizer.stats()))
        ranks = self._ranks.ranks
        known = {one.rank: one for one in reports}
        if missing := set(ranks) - known.keys():
            raise ValueError(
                f"compare() lacks the report of {ranks_text(missing)}: give it what "
                f"hvd.allgather_object(monitor.report()) returns"
            )
        own = [known[rank] for rank in ranks]
        blames = self._comparer.compare([one.share for one in own]) if len(ranks) > 1 else None
        if blames is not None and self._warns and self._ranks.place == 0:
            step_s = sum(one.step_s for one in own) / len(own)
            self._comparer.say(blames, step_s, ranks, self._hosts(optimizer), optimizer._async.settings)

    def close(self) -> None:
        """Take a last sample, if there were steps since the one before, and close the files."""
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


def _check_steps(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is not a number of steps: take 1 or more, 50 is usual")
