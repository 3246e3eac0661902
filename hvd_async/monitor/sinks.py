"""Where samples go: TensorBoard, a file for Prometheus, an HTTP endpoint; one that fails is dropped with a warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hvd_async.monitor.prometheus import Endpoint, Metric, TextFile
from hvd_async.monitor.sample import Sample
from hvd_async.monitor.totals import scalars
from hvd_async.runner.report import EventFile
from hvd_async.runtime.log import warn


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

    def open(self, index: int, rank: int) -> Iterator[tuple[str, Sink]]:
        """Open what a rank writes to, and yield each with its name.

        Args:
            index: its place among the ranks that share the optimizer.
            rank: its number.

        Raises:
            ValueError: a package is not installed.
            OSError: a file or a port cannot be opened.
        """
        if index and not self.all_ranks:
            return
        if self.tensorboard is not None:
            folder = self.tensorboard / f"rank{rank}" if index else self.tensorboard
            yield f"tensorboard={str(folder)!r}", _Events(folder, self.name)
        if self.prometheus is not None:
            path = self.prometheus
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if index else path
            yield f"prometheus={str(path)!r}", _Prometheus(TextFile(path))
        if self.prometheus_port is not None:
            port = self.prometheus_port + index if self.prometheus_port else 0
            yield f"prometheus_port={port}", _Prometheus(Endpoint(port))


class Sinks:
    """The open sinks of a rank.

    Args:
        destinations: what the user wants.
    """

    def __init__(self, destinations: Destinations) -> None:
        self._destinations = destinations
        self._open: list[tuple[str, Sink]] = []

    def open(self, index: int, rank: int) -> None:
        """Open what this rank writes to, all or nothing; raises as ``Destinations.open``."""
        try:
            for one in self._destinations.open(index, rank):
                self._open.append(one)
        except (OSError, ValueError):
            self.close()
            raise

    @property
    def port(self) -> int | None:
        """The port at which this rank serves its metrics; None if it does not."""
        return next((sink.port for _, sink in self._open if sink.port is not None), None)

    def reopen(self, index: int, rank: int) -> None:
        """Go on as another rank; where that fails a warning says so."""
        self.close(moved=True)
        try:
            self.open(index, rank)
        except (OSError, ValueError) as error:
            warn(f"the monitor writes nothing more: {error}")

    def write(self, sample: Sample, metrics: Callable[[], Sequence[Metric]], ranks: Sequence[int]) -> None:
        """Write a sample to all; one that cannot take it is dropped."""
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
        while self._open:
            name, sink = self._open.pop()
            try:
                sink.close(moved)
            except OSError as error:
                warn(f"the monitor could not close {name}: {error}")
