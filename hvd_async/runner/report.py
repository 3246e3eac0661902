"""Reports of a run: counts and times of all ranks, the progress bar, logs, and the summary as JSON and as text."""

from __future__ import annotations

import csv
import io
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hvd_async.monitor.sinks import EventFile
from hvd_async.stats import GossipStats, LeaderStats, Stats, mean_of

from .course import Injector

Pull = tuple[float, int, int]
"""(Unix time in s; group, -1: all ranks; leader, -1: the center)."""

# -- counts and times --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerCounts:
    """Counts of one rank's optimizer so far, as in its ``stats()``; None if it does not count.

    With gossip, ``rounds`` are exchanges and averages, and ``staleness`` is the messages'; with leaders, ``rounds`` are
    pulls. ``latency_s`` is the sum over all rounds.
    """

    rounds: int = 0
    gradients_produced: int | None = None
    gradients_applied: int | None = None
    gradients_skipped: int = 0
    wait_s: float = 0.0
    staleness: Mapping[int, int] = field(default_factory=dict)
    contributors: Mapping[int, int] = field(default_factory=dict)
    held_s: tuple[float, ...] | None = None
    waited_for: tuple[float, ...] | None = None
    bytes_sent: int | None = None
    latency_s: float | None = None
    peak_bytes: int | None = None
    led: Mapping[int, int] | None = None
    distance: float | None = None
    history: tuple[Pull, ...] = ()

    @classmethod
    def synchronous(cls, steps: int, size: int, wait_s: float, skipped: int = 0) -> OptimizerCounts:
        """Return the counts of plain allreduce: a round per step, with every rank's gradient."""
        fresh, all_in = ({0: steps}, {size: steps}) if steps else ({}, {})
        return cls(steps, steps, steps * size, skipped, wait_s, fresh, all_in)

    @classmethod
    def of(cls, stats: Stats | GossipStats | LeaderStats, skipped: int) -> OptimizerCounts:
        """Return the counts in an optimizer's ``stats()``; ``skipped``: steps that overflowed, if it does not count."""
        names = {each.name: each.name for each in fields(cls)}
        if isinstance(stats, LeaderStats):
            names |= {"rounds": "pulls", "latency_s": "pull_s"}
        found = {name: getattr(stats, theirs) for name, theirs in names.items() if hasattr(stats, theirs)}
        found["latency_s"] *= found["rounds"]
        return cls(**{"gradients_skipped": skipped} | found)

    def since(self, before: OptimizerCounts | None) -> OptimizerCounts:
        """Return the counts since ``before``, without pulls; counts that are not sums are unchanged."""
        names = {each.name for each in fields(self)} - {"peak_bytes", "distance", "history"}
        changes = {name: _difference(getattr(self, name), before and getattr(before, name)) for name in names}
        return replace(self, history=(), **changes)


def _difference(now: Any, before: Any) -> Any:
    if not now or not before:
        return now
    if isinstance(now, Mapping):
        return dict(Counter(now) - Counter(before))
    if isinstance(now, tuple):
        return tuple(one - other for one, other in zip(now, before, strict=True))
    return now - before


@dataclass(frozen=True, kw_only=True)
class JobCounts:
    """Counts of all ranks' optimizers together, with the keys of --summary; None if there is nothing to count.

    ``fresh`` is the share of gradients, or messages, that were not late; ``latency_s`` the mean of a round.
    """

    rounds: int
    gradients_produced: int | None
    gradients_applied: int | None
    gradients_skipped: int
    staleness: Mapping[str, float | None]
    fresh: float | None
    contributors: Mapping[str, float | None]
    wait_s_by_rank: tuple[float, ...]
    held_s_by_rank: tuple[float, ...] | None
    bytes_sent: int | None
    latency_s: float | None
    peak_bytes: int | None
    led: Mapping[int, int] | None
    leader_distance_by_rank: tuple[float, ...] | None

    @classmethod
    def of(cls, ranks: Sequence[OptimizerCounts]) -> JobCounts:
        """Return the counts of all ranks, given in order."""
        late = sum((Counter(rank.staleness) for rank in ranks), Counter[int]())
        waited = [rank.waited_for for rank in ranks if rank.waited_for and any(rank.waited_for)]
        latencies = [rank.latency_s / rank.rounds for rank in ranks if rank.latency_s and rank.rounds]
        led = ranks[0].led
        return cls(
            rounds=max(rank.rounds for rank in ranks),
            gradients_produced=_combined(sum, (rank.gradients_produced for rank in ranks)),
            gradients_applied=_combined(max, (rank.gradients_applied for rank in ranks)),
            gradients_skipped=sum(rank.gradients_skipped for rank in ranks),
            staleness={"mean": mean_of(late), "max": max(late, default=None)},
            fresh=late[0] / late.total() if late else None,
            contributors={"mean": mean_of(ranks[0].contributors)},
            wait_s_by_rank=tuple(rank.wait_s for rank in ranks),
            held_s_by_rank=tuple(map(math.fsum, zip(*waited, strict=True))) if waited else ranks[0].held_s,
            bytes_sent=_combined(sum, (rank.bytes_sent for rank in ranks)),
            latency_s=sum(latencies) / len(latencies) if latencies else None,
            peak_bytes=_combined(max, (rank.peak_bytes for rank in ranks)),
            led=None if led is None else dict(sorted(led.items())),
            leader_distance_by_rank=None if led is None else tuple(rank.distance or 0.0 for rank in ranks),
        )

    def columns(self) -> dict[str, Any]:
        """Return the columns of metrics.csv that are counts."""
        return {
            "rounds": self.rounds,
            "contributors": self.contributors["mean"],
            "staleness_mean": self.staleness["mean"],
            "staleness_max": self.staleness["max"],
            "fresh": self.fresh,
            "skipped": self.gradients_skipped,
            "wait_s": self.wait_s_by_rank,
            "held_s": self.held_s_by_rank,
            "latency_s": self.latency_s,
            "bytes_sent": self.bytes_sent,
        }


def _combined(combine: Callable[[list[int]], int], values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return combine(known) if known else None


@dataclass(frozen=True)
class Replicas:
    """Similarity of the ranks' weights: whether all bytes are equal, the largest difference of a weight, and the root
    mean square over the ranks of |weights - mean|."""

    identical: bool
    max_diff: float
    consensus_distance: float


@dataclass(frozen=True)
class RankMetrics:
    """Counts and times, in seconds, of one rank; ``step_times``: of each step, delays included."""

    counts: OptimizerCounts
    images: int
    train_s: float
    slept_s: float
    step_times: tuple[float, ...]


# -- files -------------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` write a file, then rename it to ``path``; an error leaves the old file in place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")  # (NumPy chooses a format by the suffix)
    try:
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())  # otherwise the new name may reach the disk before the contents
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_rows(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    write_atomically(path, lambda place: place.write_text(text.getvalue(), newline=""))


def write_step_times(path: Path, ranks: Sequence[Sequence[float]]) -> None:
    """Write percentiles of each rank's step times as CSV: columns ``percent`` (0 to 100), ``rank0``, ``rank1`` ..."""
    percents = range(101)
    columns = [
        [f"{each:.6f}" for each in np.percentile(times, percents)] if times else [""] * len(percents) for times in ranks
    ]
    head = ["percent", *(f"rank{rank}" for rank in range(len(ranks)))]
    _write_rows(path, [head, *zip(percents, *columns, strict=True)])


def write_leaders(path: Path, histories: Sequence[Sequence[Pull]]) -> None:
    """Write pulls as CSV: ``time_s`` since the first, ``group`` (empty: all ranks), ``leader`` (empty: the center).

    A group's pulls are taken from the history of its first rank.
    """
    first_of: dict[int, Sequence[Pull]] = {}
    for history in histories:
        for group in {pull[1] for pull in history}:
            first_of.setdefault(group, history)
    pulls = sorted(pull for group, history in first_of.items() for pull in history if pull[1] == group)
    rows = [
        (f"{at - pulls[0][0]:.6f}", "" if group < 0 else group, "" if leader < 0 else leader)
        for at, group, leader in pulls
    ]
    _write_rows(path, [("time_s", "group", "leader"), *rows])


COLUMNS = (
    *("epoch", "step", "learning_rate", "train_loss", "test_accuracy", "seconds", "images_per_sec"),
    *("step_time_p50", "step_time_p95", "slept_s", "consensus_distance"),
    *JobCounts.of([OptimizerCounts()]).columns(),
)
"""Columns of metrics.csv. ``seconds``: of training, on the slowest rank; ``slept_s`` and times of steps: of rank 0."""
Row = Mapping[str, Any]
"""Values of ``COLUMNS`` of an epoch."""
AT_THE_END = ("summary.json", "step_times.csv", "leaders.csv")
"""Files that a completed run writes in addition to metrics.csv."""


class MetricsFile:
    """Writer of metrics.csv, a line per epoch. It is opened for each line, so that it can be read at any time.

    Raises:
        ValueError: the file of a resumed run has other columns.
    """

    def __init__(self, path: Path, resumed: bool) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not resumed:  # the final files of an earlier run must not be mistaken for this run's
            for name in ("metrics.csv", *AT_THE_END):
                path.with_name(name).unlink(missing_ok=True)
        if not path.exists():
            path.write_text(",".join(COLUMNS) + "\r\n", newline="")
        elif path.read_text().partition("\n")[0].strip() != ",".join(COLUMNS):
            raise ValueError(f"{path} must have the columns of this version: move it away, or name another --log-dir")

    def add(self, row: Row) -> None:
        """Append a line; values per rank are separated by spaces."""
        texts = {
            name: " ".join(f"{each:.4g}" for each in value) if isinstance(value, tuple) else value
            for name, value in row.items()
        }
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(texts)


# -- while it trains ---------------------------------------------------------------------------------------------------

MINUTE = 60.0
"""Seconds between two lines about steps."""
BAR_COLUMNS = 100
"""Width of a bar under a launcher, which hides the terminal's."""
TAGS = {
    "train_loss": "train/loss",
    "consensus_distance": "train/consensus_distance",
    "test_accuracy": "test/accuracy",
    **{name: f"speed/{name}" for name in ("images_per_sec", "step_time_p50", "step_time_p95")},
    **{name: f"rounds/{name}" for name in JobCounts.of([OptimizerCounts()]).columns()},
}
"""TensorBoard's tags, by column."""


class Reporter:
    """Progress of rank 0 on the screen and in the logs, to which a resumed run appends; not ``enabled`` on other ranks.

    ``epochs`` is None if the clock ends the run; ``progress`` is as in the options. Without a bar, a line follows the
    first step, and each minute.
    """

    def __init__(
        self,
        epochs: int | None,
        progress: str = "auto",
        log_dir: Path | None = None,
        *,
        resumed: bool = False,
        enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._enabled, self._epochs = enabled, epochs
        self._clock, self._said_at, self._place = clock, clock(), ""
        self._steps = self._said_steps = 0
        self._terminal = sys.stderr.isatty()
        self._wants_bar = progress == "bar" or (progress == "auto" and self._terminal)
        self._bar: Any = None
        self._table = MetricsFile(log_dir / "metrics.csv", resumed) if enabled and log_dir else None
        self._events = EventFile(log_dir) if enabled and log_dir else None

    def begin_epoch(self, epoch: int, steps: int) -> None:
        """Show an epoch (0, 1, ...) of ``steps`` steps of rank 0."""
        self._place = f"{self._label(epoch + 1)} of {steps} steps"
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
        """Show and log a step of rank 0; ``step`` counts from the first of the first run."""
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            self._bar.update()
        elif self._enabled:
            self._steps, now, text = self._steps + 1, self._clock(), ""
            since = now - self._said_at
            if self._steps == 1:
                text = f"first step after {since:.1f} s: loss {loss:.4f}"
            elif since >= MINUTE:
                text = f"step {step + 1}: loss {loss:.4f}, {(self._steps - self._said_steps) / since:.2f} steps/s"
            if text:
                self.note(f"{text}; {self._place}")
                self._said_at, self._said_steps = now, self._steps
        if self._events is not None:
            self._events.scalars(step, {"train/loss_rank0": loss, "train/learning_rate": rate})

    def end_epoch(self, row: Row) -> None:
        """Show and log a completed epoch."""
        loss = "" if row["train_loss"] is None else f"loss {row['train_loss']:.4f}, "
        accuracy = "" if row["test_accuracy"] is None else f", test accuracy {row['test_accuracy']:.4f}"
        self.note(f"{self._label(row['epoch'])}: {loss}{row['images_per_sec']:.1f} images/s{accuracy}")
        if self._table is not None:
            self._table.add(row)
        if self._events is not None:
            values: dict[str, float] = {}
            for name, tag in TAGS.items():
                if isinstance(value := row[name], tuple):
                    values |= {f"{tag}/rank{rank}": each for rank, each in enumerate(value)}
                elif value is not None:
                    values[tag] = value
            self._events.scalars(row["step"], values)

    def note(self, text: str) -> None:
        """Print a text on rank 0."""
        if self._enabled:
            self._close_bar()
            # In the same stream as the bar: a launcher forwards the two streams in no particular order.
            print(text, file=sys.stderr if self._wants_bar else sys.stdout, flush=True)

    def _label(self, number: int) -> str:
        return f"epoch {number}" if self._epochs is None else f"epoch {number}/{self._epochs}"

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        """Close the bar and the files."""
        self._close_bar()
        if self._events is not None:
            self._events.close()


# -- at the end --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Summary(JobCounts):
    """Object of --summary. Other programs read it, so that its keys do not change.

    ``steps`` is the maximum over the ranks. Infinities and NaN are null in JSON.
    """

    framework: str
    algorithm: str
    quorum: str | int | float | None
    world_size: int
    steps: int
    images_per_sec: float | None
    step_time_s: Mapping[str, float | None]
    train_loss: float | None
    test_accuracy: float | None
    replicas_identical: bool
    max_replica_diff: float
    consensus_distance: float

    def write(self, path: Path) -> None:
        """Write the summary as JSON, completely or not at all."""
        text = msgspec.json.format(msgspec.json.encode({key: getattr(self, key) for key in KEYS}), indent=2)
        write_atomically(path, lambda place: place.write_bytes(text + b"\n"))


KEYS = (*Summary.__annotations__, *JobCounts.__annotations__)


def summarise(ranks: Sequence[RankMetrics], replicas: Replicas, **job: Any) -> Summary:
    """Return the summary of all ranks, in order; ``job``: framework, algorithm, quorum, train_loss, test_accuracy."""
    times = np.concatenate([rank.step_times for rank in ranks])
    train_s = max(rank.train_s for rank in ranks)
    return Summary(
        **vars(JobCounts.of([rank.counts for rank in ranks])),
        **job,
        world_size=len(ranks),
        steps=max(len(rank.step_times) for rank in ranks),
        images_per_sec=sum(rank.images for rank in ranks) / train_s if train_s else None,
        step_time_s={
            "mean": float(times.mean()) if len(times) else None,
            "p50": percentile(times, 50),
            "p95": percentile(times, 95),
        },
        replicas_identical=replicas.identical,
        max_replica_diff=replicas.max_diff,
        consensus_distance=replicas.consensus_distance,
    )


def percentile(values: Any, percent: float) -> float | None:
    """Return a percentile; None if there are no values."""
    return float(np.percentile(values, percent)) if len(values) else None


SHOWN_RANKS = 8
"""Maximum number of ranks that the text lists individually."""


def describe(summary: Summary, stragglers: Sequence[str], best_accuracy: float | None) -> str:
    """Return the summary in sentences, with those of ``straggler_lines``, and whether anything was lost."""
    quorum = "" if summary.quorum is None else f" ({summary.quorum})"
    head = f"{summary.framework} {summary.algorithm}{quorum} on {summary.world_size} ranks, {summary.steps} steps each"
    lines = [head, *_speed(summary), *_accuracy(summary, best_accuracy), *stragglers, *_waits(summary)]
    if summary.gradients_produced is None:
        lines.append(
            f"Before the last drain weights differed by {summary.consensus_distance:.4g} (root mean square over ranks)."
        )
    else:
        lost = summary.gradients_produced - (summary.gradients_applied or 0)
        verdict = f"{abs(lost)} were {'LOST' if lost > 0 else 'applied TWICE'}: this is an error"
        counts = f"{summary.gradients_produced} gradients were produced, {summary.gradients_applied} applied"
        lines.append(f"{counts}: {verdict if lost else 'no gradient was lost'}.")
    if summary.gradients_skipped:
        lines.append(f"{summary.gradients_skipped} steps had a gradient that was not finite, and counted as zero.")
    same = "bit-identical on all ranks" if summary.replicas_identical else "NOT identical"
    more = "" if summary.replicas_identical else f"; they differ by up to {summary.max_replica_diff:.4g}"
    return "\n  ".join([*lines, f"The replicas are {same}{more}."])


def _speed(summary: Summary) -> Iterator[str]:
    """Yield sentences about speed."""
    times = {name: value for name, value in summary.step_time_s.items() if value is not None}
    if summary.images_per_sec is not None and times:
        yield (
            f"All ranks trained {summary.images_per_sec:.1f} images/s. A step took {1e3 * times['mean']:.1f} ms on "
            f"average (median {1e3 * times['p50']:.1f} ms, 95% below {1e3 * times['p95']:.1f} ms)."
        )
    if summary.rounds:
        kind = (
            "pulls" if summary.led is not None else "rounds" if summary.gradients_produced is not None else "exchanges"
        )
        took = "" if summary.latency_s is None else f", {1e3 * summary.latency_s:.1f} ms each"
        sent = "" if summary.bytes_sent is None else f"; all ranks sent {summary.bytes_sent / 1e6:.1f} MB"
        held = (
            ""
            if summary.peak_bytes is None
            else f"; a rank held at most {summary.peak_bytes / 1e6:.1f} MB of gradients"
        )
        yield f"There were {summary.rounds} {kind}{took}{sent}{held}."


def _accuracy(summary: Summary, best_accuracy: float | None) -> Iterator[str]:
    """Yield sentences about loss and accuracy."""
    if summary.train_loss is not None:
        yield f"The training loss of the last epoch is {summary.train_loss:.4g}."
    if summary.test_accuracy is not None:
        best = "" if best_accuracy is None else f"; the best was {best_accuracy:.4f}"
        yield f"The test accuracy is {summary.test_accuracy:.4f}{best}."


def _waits(summary: Summary) -> Iterator[str]:
    """Yield sentences about waits and lateness."""
    yield f"Ranks waited, in order: {_text(summary.wait_s_by_rank)} s."
    if summary.held_s_by_rank is not None:
        yield f"The others waited for each rank, in order: {_text(summary.held_s_by_rank)} s."
    late = summary.staleness
    if late.get("mean") is not None:
        what, unit = ("Gradients", "rounds") if summary.gradients_produced is not None else ("Messages", "steps")
        mean = summary.contributors.get("mean")
        ranks = "" if mean is None else f"; a round had {mean:.1f} ranks on average"
        fresh = "" if summary.fresh is None else f", {summary.fresh:.0%} on time"
        yield f"{what} were {late['mean']:.2f} {unit} late on average, {late['max']} at most{fresh}{ranks}."
    if summary.led is not None:
        led = ", ".join(
            f"{'the center' if rank < 0 else f'rank {rank}'} {count}" for rank, count in summary.led.items()
        )
        yield f"Leaders of the pulls, by number: {led or 'none'}."
    if summary.leader_distance_by_rank is not None:
        yield f"Distance of each rank from its leader, mean over pulls: {_text(summary.leader_distance_by_rank)}."


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    if isinstance(value, tuple):
        return ", ".join([*map(_text, value[:SHOWN_RANKS]), *(["..."] if len(value) > SHOWN_RANKS else [])])
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def straggler_lines(ranks: Sequence[RankMetrics], injector: Injector) -> list[str]:
    """Return the lines about the cost of injected delays, compared with a synchronous run's."""
    if injector.kind == "none":
        return ["No delay was injected (--inject makes some)."]
    bound = max(len(rank.step_times) for rank in ranks) * max(injector.seconds(0, len(ranks)))
    saved = bound - sum(rank.slept_s + rank.counts.wait_s for rank in ranks) / len(ranks)
    verdict = "were saved" if saved > 0 else "more, which is waiting for computing and the network"
    return [
        f"Ranks slept for --inject, in order: {_text(tuple(rank.slept_s for rank in ranks))} s.",
        f"A synchronous run waits in every step for the slowest rank: {bound:.1f} s or more per rank.",
        f"Here a rank slept and waited {bound - saved:.1f} s on average: {abs(saved):.1f} s {verdict}.",
    ]
