"""Metrics for Prometheus: a text file for node-exporter's textfile collector, and an HTTP endpoint."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
