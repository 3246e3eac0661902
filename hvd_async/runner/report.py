"""Progress of a run, shown and logged on rank 0: a bar, CSV, TensorBoard events."""

from __future__ import annotations

import csv
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from .metrics import JobMetrics

BAR_COLUMNS = 100
"""The width of a bar that goes through a launcher, which hides the terminal's own."""


@dataclass(frozen=True)
class EpochRow:
    """One line of metrics.csv, of one epoch.

    Over all ranks: train_loss, test_accuracy, seconds (of training, by the slowest rank), images_per_sec,
    consensus_distance (of gossip, at the epoch's end), counted; rank 0's own: the rest. In the file the columns of
    COUNTED take the place of `counted`.
    """

    epoch: int
    step: int
    learning_rate: float
    train_loss: float | None
    test_accuracy: float | None
    seconds: float
    images_per_sec: float
    step_time_p50: float | None
    step_time_p95: float | None
    slept_s: float
    consensus_distance: float | None
    counted: JobMetrics


COUNTED = (
    "rounds",
    "contributors",
    "staleness_mean",
    "staleness_max",
    "fresh",
    "skipped",
    "wait_s",
    "held_s",
    "latency_s",
    "bytes_sent",
)
"""Columns of the logs, by attributes of JobMetrics; peak_bytes is not an epoch's own. By rank: wait_s, held_s."""
AT_THE_END = ("summary.json", "step_times.csv", "leaders.csv")
"""Files that a run which came to its end leaves beside metrics.csv."""


class Reporter:
    """Progress on the screen and under `log_dir`; does nothing where `enabled` is false (every rank but 0)."""

    def __init__(
        self,
        *,
        enabled: bool,
        epochs: int | None,
        progress: str = "auto",
        log_dir: Path | None = None,
        resumed: bool = False,
    ) -> None:
        """epochs: how many there will be, None if the clock ends the run. progress: bar, lines, or auto (a bar if
        stderr is a terminal). resumed: go on in the logs that are there."""
        self._enabled, self._epochs = enabled, epochs
        self._terminal = sys.stderr.isatty()
        self._wants_bar = progress == "bar" or (progress == "auto" and self._terminal)
        self._bar: Any = None
        self._table = MetricsFile(log_dir / "metrics.csv", resumed) if enabled and log_dir else None
        self._events = EventFile(log_dir) if enabled and log_dir else None

    def begin_epoch(self, epoch: int, steps: int) -> None:
        """epoch: 0, 1, ...; steps: how many steps rank 0 will do in it."""
        if self._enabled and self._wants_bar:
            from tqdm import tqdm

            self._bar = tqdm(
                total=steps,
                desc=self._label(epoch + 1),
                unit="step",
                file=sys.stderr,
                ncols=None if self._terminal else BAR_COLUMNS,
                dynamic_ncols=self._terminal,
                mininterval=0.1 if self._terminal else 1.0,
            )

    def step(self, step: int, loss: float, rate: float) -> None:
        """One step of rank 0 is done; `step` counts from the run's first."""
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            self._bar.update()
        if self._events is not None:
            self._events.scalars(step, {"train/loss_rank0": loss, "train/learning_rate": rate})

    def end_epoch(self, row: EpochRow) -> None:
        """Show and log an epoch that is done."""
        if not self._enabled:
            return
        accuracy = "" if row.test_accuracy is None else f", test accuracy {row.test_accuracy:.4f}"
        loss = "" if row.train_loss is None else f"loss {row.train_loss:.4f}, "
        self.note(f"{self._label(row.epoch)}: {loss}{row.images_per_sec:.1f} images/s{accuracy}")
        if self._table is not None:
            self._table.add(row)
        if self._events is not None:
            names = {
                "train/loss": row.train_loss,
                "train/consensus_distance": row.consensus_distance,
                "test/accuracy": row.test_accuracy,
                "speed/images_per_sec": row.images_per_sec,
                "speed/step_time_p50": row.step_time_p50,
                "speed/step_time_p95": row.step_time_p95,
            }
            names |= {f"rounds/{name}": value for name, value in flat_counts(row.counted).items()}
            self._events.scalars(row.step, {name: value for name, value in names.items() if value is not None})

    def note(self, text: str) -> None:
        """Say something to people, on rank 0."""
        if self._enabled:
            self._close_bar()
            # Beside a bar in its own stream: a launcher forwards the two streams in no particular order.
            print(text, file=sys.stderr if self._wants_bar else sys.stdout, flush=True)

    def _label(self, number: int) -> str:
        return f"epoch {number}" if self._epochs is None else f"epoch {number}/{self._epochs}"

    def close(self) -> None:
        """Close the bar and the files; nothing may be reported afterwards."""
        self._close_bar()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def flat_counts(counted: JobMetrics) -> dict[str, float | None]:
    """COUNTED as single numbers: `wait_s/rank0`, `wait_s/rank1` ... for what is by rank."""
    found: dict[str, float | None] = {}
    for name in COUNTED:
        value = getattr(counted, name)
        if isinstance(value, tuple):
            found |= {f"{name}/rank{rank}": seconds for rank, seconds in enumerate(value)}
        else:
            found[name] = value
    return found


class MetricsFile:
    """A CSV file of EpochRow; opened for each row, so that it can be read, and survives, at any time.

    Raises:
        ValueError: a resumed run's file is not like this.
    """

    def __init__(self, path: Path, resumed: bool) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not resumed:  # what is said of an earlier run must not be taken for this one's
            for name in AT_THE_END:
                path.with_name(name).unlink(missing_ok=True)
        columns = [*self._own_names(), *COUNTED]
        if not (resumed and path.exists()):
            with path.open("w", newline="") as file:
                csv.writer(file).writerow(columns)
            return
        with path.open(newline="") as file:
            if next(csv.reader(file), []) != columns:
                raise ValueError(
                    f"{path} has other columns than this version writes: move it away, or name another --log-dir"
                )

    def add(self, row: EpochRow) -> None:
        """Append a row."""
        with self._path.open("a", newline="") as file:
            values = [getattr(row, name) for name in self._own_names()]
            values += [getattr(row.counted, name) for name in COUNTED]
            csv.writer(file).writerow([self._text(value) for value in values])

    @staticmethod
    def _own_names() -> list[str]:
        return [field.name for field in fields(EpochRow) if field.name != "counted"]

    @staticmethod
    def _text(value: Any) -> Any:
        """Join figures by rank into one column: ranks in order, a space between two."""
        if isinstance(value, tuple):
            return " ".join(f"{seconds:.4g}" for seconds in value)
        return "" if value is None else value


class EventFile:
    """Scalars for TensorBoard, written with its own records and messages.

    Not by its EventFileWriter, nor torch's SummaryWriter: those import TensorFlow wherever it is installed.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(path.open("wb"))
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self._records.flush()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Append values, by tag, that belong to a step."""
        summary = self._summary(
            value=[self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        self._records.write(self._event(wall_time=time.time(), step=step, summary=summary).SerializeToString())
        self._records.flush()

    def close(self) -> None:
        """Close the file."""
        self._records.close()
