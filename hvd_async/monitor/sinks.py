"""Where samples go: TensorBoard, a file for Prometheus, an HTTP endpoint; one that fails is dropped with a warning."""

from __future__ import annotations

import functools
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
