"""Sinks of samples: TensorBoard, a file for Prometheus, an HTTP endpoint. One that fails is dropped with a warning."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hvd_async.monitor.sample import Metric, Sample, scalars
from hvd_async.runtime.log import warn


class Sink(Protocol):
    """Destination of samples; ``port``: where it listens, if it does."""

    port: int | None

    def write(self, sample: Sample, metrics: Sequence[Metric], ranks: Sequence[int]) -> None:
        """Write a sample, the metrics made of it, and the ranks by place; may raise OSError."""

    def close(self, moved: bool) -> None:
        """Close the sink; ``moved``: this rank has a new number, and its old file or port belongs to another rank."""


# -- TensorBoard -------------------------------------------------------------------------------------------------------


class EventFile:
    """Event file of scalars for TensorBoard, written with its own records and messages.

    Its EventFileWriter and torch's SummaryWriter import TensorFlow wherever that is installed.

    Args:
        folder: of the file; created if missing.
        prefix: of the tags of samples.

    Raises:
        ImportError: TensorBoard is not installed.
        OSError: the file cannot be opened.
    """

    port: int | None = None

    def __init__(self, folder: Path, prefix: str = "") -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._prefix = Event, Summary, prefix
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(path.open("wb"))
        self._append(file_version="brain.Event:2")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of a step, by tag."""
        listed = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._append(step=step, summary=self._summary(value=listed))

    def _append(self, **event: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **event).SerializeToString())
        self._records.flush()

    def write(self, sample: Sample, metrics: Sequence[Metric], ranks: Sequence[int]) -> None:
        self.scalars(sample.step, scalars(sample, ranks, self._prefix))

    def close(self, moved: bool = False) -> None:
        """Close the file."""
        self._records.close()


# -- Prometheus --------------------------------------------------------------------------------------------------------


class _Collector:
    """Collector of the last metrics for ``prometheus_client``, whose server thread reads them."""

    def __init__(self) -> None:
        self.metrics: Sequence[Metric] = ()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics."""
        from prometheus_client import Metric as Family

        for name, kind, text, samples in self.metrics:
            family = Family(f"hvd_async_{name}", text, kind)
            for labels, value in samples:
                family.add_sample(family.name + "_total" * (kind == "counter"), labels, value)
            yield family


class TextFile:
    """File that always holds the last metrics, complete.

    Args:
        path: of the file; node-exporter reads files with the suffix ".prom".

    Raises:
        OSError: its folder cannot be created.
    """

    port: int | None = None

    def __init__(self, path: Path) -> None:
        self._path, self._collector = path, _Collector()
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, sample: Sample, metrics: Sequence[Metric], ranks: Sequence[int]) -> None:
        from prometheus_client import write_to_textfile

        self._collector.metrics = metrics
        write_to_textfile(str(self._path), self._collector)

    def close(self, moved: bool) -> None:
        if moved:  # it would be read twice
            self._path.unlink(missing_ok=True)


class Endpoint:
    """HTTP endpoint of the last metrics, at ``/metrics``.

    Args:
        port: to listen on, at all addresses; 0: a free port.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._collector, registry = _Collector(), CollectorRegistry()
        registry.register(self._collector)
        self._server, self._thread = start_http_server(port, registry=registry)
        self.port: int | None = self._server.server_port

    def write(self, sample: Sample, metrics: Sequence[Metric], ranks: Sequence[int]) -> None:
        self._collector.metrics = metrics

    def close(self, moved: bool) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10.0)


# -- the open sinks of a rank ------------------------------------------------------------------------------------------


class Sinks:
    """Open sinks of a rank.

    Args:
        tensorboard: a folder, or None.
        prometheus: a file, or None.
        prometheus_port: of the HTTP endpoint, or None.
        all_ranks: whether every rank has sinks, each in its own place; else only the first rank.
        name: of the optimizer.
    """

    def __init__(
        self,
        tensorboard: Path | None = None,
        prometheus: Path | None = None,
        prometheus_port: int | None = None,
        all_ranks: bool = False,
        name: str = "",
    ) -> None:
        self._tensorboard, self._prometheus, self._port = tensorboard, prometheus, prometheus_port
        self._all_ranks, self._prefix = all_ranks, f"hvd_async/{name}/" if name else "hvd_async/"
        self._open: dict[str, Sink] = {}
        self._pending: dict[str, Callable[[], Sink]] = {}
        """Sinks that could not be opened yet: after a change of numbers another rank may still have them open."""

    def _openers(self, index: int, rank: int) -> dict[str, Callable[[], Sink]]:
        """Return openers of the sinks of a rank at place ``index`` among the ranks that share the optimizer."""
        found: dict[str, Callable[[], Sink]] = {}
        if index and not self._all_ranks:
            return found
        if (folder := self._tensorboard) is not None:
            folder = folder / f"rank{rank}" if index else folder
            found[f"tensorboard={str(folder)!r}"] = functools.partial(EventFile, folder, self._prefix)
        if (path := self._prometheus) is not None:
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if index else path
            found[f"prometheus={str(path)!r}"] = functools.partial(TextFile, path)
        if (port := self._port) is not None:
            port = port + index if port else 0
            found[f"prometheus_port={port}"] = functools.partial(Endpoint, port)
        return found

    def open(self, index: int, rank: int) -> dict[str, Exception]:
        """Open this rank's sinks instead of those of its earlier number; samples retry any that cannot be opened yet.

        Args:
            index: its place among the ranks that share the optimizer.
            rank: its number.

        Returns:
            The errors of sinks that cannot be opened, by name.
        """
        self.close(moved=True)
        self._pending = self._openers(index, rank)
        return self._open_pending()

    def _open_pending(self) -> dict[str, Exception]:
        errors: dict[str, Exception] = {}
        for name, opener in self._pending.items():
            try:
                self._open[name] = opener()
            except ImportError:
                errors[name] = ValueError("tensorboard= needs TensorBoard: pip install tensorboard")
            except OSError as error:
                errors[name] = error
        self._pending = {name: self._pending[name] for name in errors}
        return errors

    @property
    def port(self) -> int | None:
        """The port at which this rank serves its metrics; None if it does not."""
        return next((sink.port for sink in self._open.values() if sink.port is not None), None)

    def write(self, sample: Sample, metrics: Callable[[], Sequence[Metric]], ranks: Sequence[int]) -> None:
        """Write a sample to all sinks; drop one that fails."""
        self._open_pending()
        made = metrics() if self._open else ()
        for name, sink in list(self._open.items()):
            try:
                sink.write(sample, made, ranks)
            except OSError as error:
                del self._open[name]
                warn(f"the monitor stops writing to {name}: {error}")
                with contextlib.suppress(OSError):  # (it may write what is buffered)
                    sink.close(moved=False)

    def close(self, moved: bool = False) -> None:
        """Close all sinks; for ``moved`` see ``Sink.close``."""
        self._pending = {}
        while self._open:
            name, sink = self._open.popitem()
            try:
                sink.close(moved)
            except OSError as error:
                warn(f"the monitor could not close {name}: {error}")
