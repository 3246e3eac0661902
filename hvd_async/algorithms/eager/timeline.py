"""Rounds in Horovod's timeline: why each started and how long it took, as further rows of the same file.

With HOROVOD_TIMELINE set, Horovod's rank 0 writes Chrome-trace JSON there and closes the list after every event. So
once Horovod is shut down, this library's events are inserted before the closing bracket, and Horovod's bytes stay
unchanged.

The clocks agree exactly: Horovod counts microseconds of CLOCK_MONOTONIC, which is Python's ``time.monotonic``, and its
first record contains the time since the epoch at which it began. (The first event of a tensor would be less precise:
Horovod writes it in the next cycle of its background thread, a few milliseconds after the tensor was submitted.)
"""

from __future__ import annotations

import atexit
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvd_async.algorithms.eager.config import RoundTrigger
from hvd_async.runtime.log import warn

PROCESS = 1_000_000
"""Process number of this library's rows in the trace; Horovod numbers its own from 0, one per tensor."""
MOST = 500_000
"""Maximum number of records, about 200 MB; later rounds of a longer job are left out."""
_BEGAN = re.compile(rb'"start_time_since_epoch_in_micros"\s*:\s*(\d+)')


class Record(NamedTuple):
    """A bucket of a round. Times are in seconds of ``time.monotonic``; ``staleness`` is of this rank's gradients."""

    optimizer: int
    bucket: int
    round: int
    firing: RoundTrigger
    submitted: float
    landed: float
    staleness: tuple[int, ...]


class Timeline:
    """Rank 0's record of rounds, to be merged into Horovod's file.

    Args:
        path: path of Horovod's file.
        epoch: value of ``time.time() - time.monotonic()`` (s).
    """

    def __init__(self, path: Path, epoch: float) -> None:
        self._path, self._epoch = path, epoch
        self._records: list[Record] = []
        self._applied: dict[tuple[int, int], float] = {}
        self._left_out = 0

    def round(
        self,
        optimizer: int,
        bucket: int,
        round: int,
        firing: RoundTrigger,
        submitted: float,
        landed: float,
        staleness: Iterable[int] = (),
    ) -> None:
        """Record that a bucket of a round has completed (engine thread). This only appends to a list."""
        if len(self._records) < MOST:
            self._records.append(Record(optimizer, bucket, round, firing, submitted, landed, tuple(staleness)))
        else:
            self._left_out += 1

    def applied(self, optimizer: int, round: int, when: float) -> None:
        """Record that a round is about to be applied (training thread), at ``when`` (s)."""
        if len(self._applied) < MOST:
            self._applied[optimizer, round] = when

    def merge(self) -> None:
        """Put the records into Horovod's file, which must be closed: call it after Horovod's shutdown.

        The records are dropped, so a second call does nothing. If they cannot be merged, a warning says why.
        """
        records, self._records = self._records, []
        applied, self._applied = self._applied, {}
        if not records:
            return
        try:
            merge_into(self._path, records, applied, self._epoch)
        except (OSError, ValueError) as error:
            warn(f"rounds are missing from the timeline: {error}")
        if self._left_out:
            warn(f"the timeline has the first {MOST} buckets of rounds; {self._left_out} later ones are left out")
            self._left_out = 0


_recorder: Timeline | None = None


def recorder(rank: int) -> Timeline | None:
    """Return this process's timeline; None unless ``rank`` is 0 and HOROVOD_TIMELINE names a file."""
    global _recorder
    name = os.environ.get("HOROVOD_TIMELINE", "")
    if rank != 0 or name in ("", "DYNAMIC"):  # DYNAMIC: Horovod starts and stops it on request
        return None
    if _recorder is None:
        _recorder = Timeline(Path(name).absolute(), time.time() - time.monotonic())
    return _recorder


def merge() -> None:
    """Merge this process's timeline, if it has one. Horovod must be shut down."""
    if _recorder is not None:
        _recorder.merge()


def watch_exit(shutdown: Callable[[], object]) -> None:
    """Merge the timeline when the process ends.

    Exit hooks run newest first and Horovod registers its own in ``hvd.init()``, so call this when the binding is
    imported. If ``hvd.init()`` was called even earlier, Horovod still runs when the hook does: it is shut down first.

    Args:
        shutdown: shuts Horovod down; must do nothing if Horovod is shut down already.
    """

    def at_exit() -> None:
        if _recorder is not None:
            shutdown()
            _recorder.merge()

    atexit.register(at_exit)


def merge_into(path: Path, records: Sequence[Record], applied: dict[tuple[int, int], float], epoch: float) -> None:
    """Append the records to Horovod's closed timeline at ``path``, without changing its content.

    Records from before Horovod was restarted, as elastic jobs do, are left out.

    Args:
        path: path of the file.
        records: records to append.
        applied: time (s, monotonic) at which a round was about to be applied, by (optimizer, round).
        epoch: value of ``time.time() - time.monotonic()`` (s).

    Raises:
        OSError: the file cannot be read or written.
        ValueError: it is not a complete Horovod timeline; it is left unchanged.
    """
    with path.open("r+b") as file:
        head = _BEGAN.search(file.read(1024))
        if head is None:
            raise ValueError(f"{path} does not begin like a timeline of Horovod 0.28")
        began = int(head[1]) / 1e6 - epoch
        end = _closing_bracket(file, path)
        events = trace_events([r for r in records if r.firing.first >= began], applied, began)
        file.seek(end)
        file.write(b"".join(b",\n" + json.dumps(event).encode() for event in events) + b"\n]\n")
        file.truncate()


def _closing_bracket(file: Any, path: Path) -> int:
    """Return the position of the bracket that closes the list."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - 1024)
    file.seek(start)
    tail = file.read().rstrip()
    if not tail.endswith(b"}]"):
        raise ValueError(f"{path} is not complete: Horovod was not shut down properly")
    return int(start + len(tail) - 1)


def trace_events(
    records: Sequence[Record], applied: dict[tuple[int, int], float], began: float
) -> list[dict[str, Any]]:
    """Return the records as Chrome-trace events: a row per bucket, a slice per round, with its waits as nested slices.

    Overlapping rounds of a bucket take further rows, since slices of a row must nest.

    Args:
        records: records, in any order.
        applied: as in ``merge_into``.
        began: time (s, monotonic) at which Horovod's timeline began; events are in microseconds since.
    """
    several = len({record.optimizer for record in records}) > 1
    spans = [(r, max(r.landed, applied.get((r.optimizer, r.round), r.landed))) for r in records]
    lanes: dict[tuple[int, int, int], int] = {}
    slices: list[dict[str, Any]] = []
    for (r, end), lane in zip(spans, _lanes(spans), strict=True):
        row = lanes.setdefault((r.optimizer, r.bucket, lane), len(lanes) + 1)

        def piece(name: str, start: float, stop: float, row: int = row, **more: Any) -> dict[str, Any]:
            ts, till = round(1e6 * (start - began)), round(1e6 * (stop - began))
            return {"ph": "X", "name": name, "pid": PROCESS, "tid": row, "ts": ts, "dur": max(0, till - ts), **more}

        why = {"reason": r.firing.reason, "by": r.firing.by, "arrived": r.firing.arrived, "held_s": r.firing.held}
        slices += [
            piece(f"round {r.round}", r.firing.first, end, args=why | {"staleness_rank0": list(r.staleness)}),
            piece("gathering ranks", r.firing.first, r.firing.fired),
            piece("collective", r.submitted, r.landed),
            piece("waiting to be applied", r.landed, end),
        ]
    rows = []
    for (optimizer, bucket, lane), row in lanes.items():
        name = f"optimizer {optimizer}, bucket {bucket}" if several else f"bucket {bucket}"
        rows.append(_label("thread_name", row, f"{name} ({lane + 1})" if lane else name))
    return [_label("process_name", 0, "hvd_async rounds"), *rows, *slices]


def _label(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": row, "args": {"name": name}}


def _lanes(spans: Sequence[tuple[Record, float]]) -> list[int]:
    """Return, for each (record, end), the first lane of its bucket that is free when its round begins."""
    ends: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    """The end of the last round of each lane, by bucket; few rounds overlap."""
    lanes = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: spans[i][0].firing.first):
        record, end = spans[index]
        taken = ends[record.optimizer, record.bucket]
        lane = next((lane for lane, until in enumerate(taken) if until <= record.firing.first), len(taken))
        taken[lane : lane + 1] = [end]
        lanes[index] = lane
    return lanes
