"""Where samples go: TensorBoard, a file for Prometheus, an HTTP endpoint; one that fails is dropped with a warning."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from hvd_async.monitor.sample import Sample
from hvd_async.runner.report import EventFile
from hvd_async.runtime.log import warn

# -- Prometheus --------------------------------------------------------------------------------------------------------


PREFIX = "hvd_async_"


@dataclass(frozen=True)
class Metric:
    """One metric with all its samples.

    Attributes:
        name: without the prefix; a counter's ends with "_total".
        kind: as Prometheus has it.
        help: what it is, with its unit.
        samples: labels and value of each.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    samples: Sequence[tuple[Mapping[str, str], float]]


def text_of(metrics: Sequence[Metric]) -> str:
    """Return metrics in Prometheus' text format (0.0.4); those without a sample are left out."""
    lines: list[str] = []
    for metric in metrics:
        if not metric.samples:
            continue
        name = PREFIX + metric.name
        lines += [f"# HELP {name} {_escaped(metric.help)}", f"# TYPE {name} {metric.kind}"]
        for labels, value in metric.samples:
            inside = ",".join(f'{key}="{_escaped(text, quoted=True)}"' for key, text in labels.items())
            lines.append(f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}")
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


class TextFile:
    """A file that always holds the last metrics, whole.

    Args:
        path: of the file; node-exporter reads those that end with ".prom".

    Raises:
        OSError: its folder cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # (no .prom: the collector passes it by)
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, metrics: Sequence[Metric]) -> None:
        """Put new metrics in the place of the old ones, at once.

        Raises:
            OSError: it could not be written; the old ones stay.
        """
        try:
            self._unfinished.write_text(text_of(metrics), encoding="utf-8")
            self._unfinished.replace(self._path)
        except OSError:
            self._unfinished.unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        """Take the file away: its rank is another now, and would be read twice."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the file with the last metrics."""


class Endpoint:
    """The last metrics by HTTP, at ``/metrics``, with ``prometheus_client``.

    Args:
        port: to listen on, of all addresses; 0: a free one, which ``port`` then says.

    Raises:
        ValueError: ``prometheus_client`` is not installed.
        OSError: the port is taken.
    """

    def __init__(self, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise ValueError(
                "prometheus_port= needs prometheus_client: pip install 'hvd_async[monitor]', or write a file for "
                "node-exporter by prometheus="
            ) from None
        self._metrics: Sequence[Metric] = ()
        self._lock = threading.Lock()
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, registry=registry)
        self.port: int = self._server.server_port

    def write(self, metrics: Sequence[Metric]) -> None:
        """Serve these from now on."""
        with self._lock:
            self._metrics = metrics

    def describe(self) -> list[Any]:
        """Return nothing: which metrics there are depends on the optimizer. (The registry asks.)"""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the metrics as ``prometheus_client`` has them. (A thread of the server calls it.)"""
        from prometheus_client import Metric as Family

        with self._lock:
            metrics = self._metrics
        for metric in metrics:
            name = PREFIX + metric.name
            family = Family(name.removesuffix("_total"), metric.help, metric.kind)
            for labels, value in metric.samples:
                family.add_sample(name, dict(labels), value)
            yield family

    def remove(self) -> None:
        """Stop serving: the rank is another now."""
        self.close()

    def close(self) -> None:
        """Stop serving, and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10.0)


# -- counters that only rise -------------------------------------------------------------------------------------------
# Counters of one rank that only rise, whatever becomes of the ranks, and the metrics made of them.


MOST_CULPRITS = 64
"""Ranks with a time series of their own; the seconds of all further ones are added up as culprit "other"."""
OTHER = ("other", "")


class Totals:
    """Sums over a monitor's samples.

    Args:
        name: of the optimizer, which becomes a label; "": none.
    """

    def __init__(self, name: str = "") -> None:
        self._own = {"optimizer": name} if name else {}
        self._waits: dict[tuple[str, str], float] = {}

    def add(self, sample: Sample, ranks: Sequence[int], hosts: Sequence[str]) -> None:
        """Add the waits of a sample, whose places are these ranks on these hosts."""
        largest = sorted(zip(sample.waits, ranks, hosts, strict=False), key=lambda one: -one[0])
        for seconds, rank, host in largest:
            if seconds > 0.0:
                key = (str(rank), host)
                if key not in self._waits and len(self._waits) >= MOST_CULPRITS:
                    key = OTHER
                self._waits[key] = self._waits.get(key, 0.0) + seconds

    def metrics(self, sample: Sample, rank: int, now: float, first: bool = True) -> list[Metric]:
        """Return all metrics as they are after a sample.

        Args:
            sample: the last one, which has been added.
            rank: this one.
            now: Unix time of the sample in s.
            first: whether it is the first of those that share the optimizer. What all ranks know alike it tells alone:
                else a sum over the ranks' files would count it several times.
        """
        own, counts = {**self._own, "rank": str(rank)}, sample.counts
        waiter = "all" if sample.of_all else str(rank)
        waits = [
            ({**self._own, "waiter": waiter, "culprit": culprit, "host": host}, seconds)
            for (culprit, host), seconds in sorted(self._waits.items())
            if first or not sample.of_all
        ]

        def counter(name: str, help_: str, value: float) -> Metric:
            return Metric(f"{name}_total", "counter", help_, [(own, float(value))])

        def gauge(name: str, help_: str, value: float | None) -> Metric:
            return Metric(name, "gauge", help_, [] if value is None else [(own, float(value))])

        return [
            counter("steps", "Steps of this rank.", counts.steps),
            counter(
                "rounds", "Rounds (of gossip exchanges and averages, of leaders pulls) of this rank.", counts.rounds
            ),
            counter("own_wait_seconds", "Seconds that this rank's training thread waited.", counts.wait_s),
            Metric(
                "wait_seconds_total",
                "counter",
                "Seconds that the waiter (all: all ranks, added up) waited for the culprit.",
                waits,
            ),
            counter("transferred_bytes", "Bytes sent (of leaders: received) by this rank.", counts.nbytes),
            counter("resets", "How often the ranks became others (elastic training).", counts.resets),
            counter("gradients_lost", "Gradients of lost ranks that are in no round.", counts.gradients_lost),
            counter("gradients_skipped", "Steps of which something was handed over empty.", counts.gradients_skipped),
            gauge("steps_per_second", "Steps of this rank per second, lately.", sample.steps_per_s),
            gauge("contributors", "Mean number of ranks in a round, lately.", sample.contributors),
            gauge("staleness_mean", "Mean staleness in rounds (of gossip steps), lately.", sample.staleness_mean),
            gauge("staleness_max", "Highest staleness in rounds (of gossip steps), lately.", sample.staleness_max),
            gauge("leader_distance", "Mean distance to the leader or center, lately.", sample.leader_distance),
            gauge(
                "consensus_distance",
                "Root mean square distance of all ranks' weights from their mean, when last measured.",
                sample.consensus_distance if first else None,
            ),
            gauge("sample_timestamp_seconds", "Unix time of the last sample.", now),
        ]


def scalars(sample: Sample, ranks: Sequence[int], prefix: str = "hvd_async/") -> dict[str, float]:
    """Return a sample's values for TensorBoard, by tag: of the ranks waited for the ``MOST_CULPRITS`` first.

    Args:
        sample: the values.
        ranks: by place.
        prefix: of the tags.
    """
    values: dict[str, float | None] = {
        "steps_per_second": sample.steps_per_s,
        "own_wait_share": sample.wait_share,
        "contributors": sample.contributors,
        "staleness_mean": sample.staleness_mean,
        "staleness_max": sample.staleness_max,
        "megabytes_per_second": sample.bytes_per_s / 1e6,
        "leader_distance": sample.leader_distance,
        "consensus_distance": sample.consensus_distance,
        "resets": sample.counts.resets,
        "gradients_lost": sample.counts.gradients_lost,
    }
    by_rank = zip(ranks[:MOST_CULPRITS], sample.shares(), strict=False)
    values |= {f"wait_share_for/rank_{rank}": share for rank, share in by_rank}
    return {prefix + tag: float(value) for tag, value in values.items() if value is not None}


# -- where samples go --------------------------------------------------------------------------------------------------


class Sink(Protocol):
    """One place that samples go to; ``port``: where it listens."""

    port: int | None

    def write(self, sample: Sample, metrics: Sequence[Metric], ranks: Sequence[int]) -> None:
        """Take in a sample, what Prometheus makes of it, and the ranks by place; may raise OSError."""

    def close(self, moved: bool) -> None:
        """End; ``moved``: this rank is another now, and what others write under its old number is theirs."""


class _Events:
    port: int | None = None

    def __init__(self, folder: Path, name: str) -> None:
        try:
            self._file = EventFile(folder)
        except ImportError:
            raise ValueError("tensorboard= needs TensorBoard: pip install tensorboard") from None
        self._prefix = f"hvd_async/{name}/" if name else "hvd_async/"

    def write(self, sample: Sample, metrics: Sequence[Metric], ranks: Sequence[int]) -> None:
        self._file.scalars(sample.step, scalars(sample, ranks, self._prefix))

    def close(self, moved: bool) -> None:
        self._file.close()


class _Prometheus:
    def __init__(self, one: TextFile | Endpoint) -> None:
        self._one = one
        self.port = one.port if isinstance(one, Endpoint) else None

    def write(self, sample: Sample, metrics: Sequence[Metric], ranks: Sequence[int]) -> None:
        self._one.write(metrics)

    def close(self, moved: bool) -> None:
        if moved:
            self._one.remove()
        else:
            self._one.close()


@dataclass(frozen=True)
class Destinations:
    """Places that a user wants samples to go to.

    Attributes:
        tensorboard: a folder.
        prometheus: a file.
        prometheus_port: of the HTTP endpoint.
        all_ranks: whether every rank has them, those after the first in places of their own; else the first alone.
        name: of the optimizer.
    """

    tensorboard: Path | None = None
    prometheus: Path | None = None
    prometheus_port: int | None = None
    all_ranks: bool = False
    name: str = ""

    def of(self, index: int, rank: int) -> Iterator[tuple[str, Callable[[], Sink]]]:
        """Yield the name of each place that a rank writes to, and what opens it.

        That raises ValueError if a package is not installed, OSError if a file or a port cannot be opened.

        Args:
            index: its place among the ranks that share the optimizer.
            rank: its number.
        """
        if index and not self.all_ranks:
            return
        if self.tensorboard is not None:
            folder = self.tensorboard / f"rank{rank}" if index else self.tensorboard
            yield f"tensorboard={str(folder)!r}", functools.partial(_Events, folder, self.name)
        if self.prometheus is not None:
            path = self.prometheus
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if index else path
            yield f"prometheus={str(path)!r}", functools.partial(_in_text, path)
        if self.prometheus_port is not None:
            port = self.prometheus_port + index if self.prometheus_port else 0
            yield f"prometheus_port={port}", functools.partial(_by_http, port)


def _in_text(path: Path) -> Sink:
    return _Prometheus(TextFile(path))


def _by_http(port: int) -> Sink:
    return _Prometheus(Endpoint(port))


class Sinks:
    """The open sinks of a rank.

    Args:
        destinations: what the user wants.
    """

    def __init__(self, destinations: Destinations) -> None:
        self._destinations = destinations
        self._open: list[tuple[str, Sink]] = []
        self._closed: list[tuple[str, Callable[[], Sink]]] = []
        """Places that could not be opened when this rank became another; another rank may have to leave them first."""

    def open(self, index: int, rank: int) -> None:
        """Open what this rank writes to, all or nothing.

        Raises:
            ValueError: a package is not installed.
            OSError: a file or a port cannot be opened.
        """
        try:
            for name, make in self._destinations.of(index, rank):
                self._open.append((name, make()))
        except (OSError, ValueError):
            self.close()
            raise

    @property
    def port(self) -> int | None:
        """The port at which this rank serves its metrics; None if it does not."""
        return next((sink.port for _, sink in self._open if sink.port is not None), None)

    def reopen(self, index: int, rank: int) -> None:
        """Go on as another rank; what cannot be opened yet is tried again with each sample, and a warning says so."""
        self.close(moved=True)
        self._closed = list(self._destinations.of(index, rank))
        self._try_again(tell=True)

    def _try_again(self, tell: bool = False) -> None:
        left, self._closed = self._closed, []
        for name, make in left:
            try:
                self._open.append((name, make()))
            except (OSError, ValueError) as error:
                self._closed.append((name, make))
                if tell:
                    warn(f"the monitor cannot write to {name} yet: {error}")

    def write(self, sample: Sample, metrics: Callable[[], Sequence[Metric]], ranks: Sequence[int]) -> None:
        """Write a sample to all; one that cannot take it is dropped."""
        self._try_again()
        if not self._open:
            return
        made = metrics()
        for one in list(self._open):
            name, sink = one
            try:
                sink.write(sample, made, ranks)
            except OSError as error:
                self._open.remove(one)
                warn(f"the monitor writes no more to {name}: {error}")

    def close(self, moved: bool = False) -> None:
        """Close all; ``moved`` as of ``Sink.close``."""
        self._closed = []
        while self._open:
            name, sink = self._open.pop()
            try:
                sink.close(moved)
            except OSError as error:
                warn(f"the monitor could not close {name}: {error}")
