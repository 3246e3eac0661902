"""The table of ``scripts/gpu_experiments.sh``: ``python -m scripts.benchmarks.cases.experiments OUT``.

Reads what the parts have left in a folder, and says of each goal whether it is met. A part without a result misses its
goals; the table says how it ended.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..support.launch import SPAN, TRACED
from .overhead import OTHERS_WANTED, WANTED

CLOSE = 0.02
"""Largest difference of the virtual GPU's ratio from the measured one that is allowed."""
FLOORS_MS = {"plain": 30.0, "all": 33.0}
"""Limits of the host's time of a step."""
LEADS = {0: 0.79, 4: 0.88, 8: 0.98, 12: 0.98}
"""Ratios of ``solo`` that the virtual GPU predicts, by the lead, ms."""
GOALS = ("all", "solo", "sgp", "adpsgd", "lsgd")
NOTICED_WITHIN = 10.0
"""Seconds after which the other ranks of a rank that was killed must have noticed."""


class Line(NamedTuple):
    """A line of the table.

    Attributes:
        part: number of the part.
        what: was measured.
        value: as text.
        wanted: in words; what is read from the value if there is no goal.
        met: whether the goal is met; None without a goal.
    """

    part: int
    what: str
    value: str
    wanted: str
    met: bool | None

    def __str__(self) -> str:
        verdict = {True: "PASS", False: "MISS", None: ""}[self.met]
        return f"{self.part}  {verdict:4}  {self.what:34}  {self.value:28}  {self.wanted}".rstrip()


class Results:
    """Results of the parts in a folder.

    Args:
        folder: of the results.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._ends = folder, dict[str, dict[str, Any]]()
        parts = folder / "parts.jsonl"
        for line in parts.read_text().splitlines() if parts.exists() else ():
            end = json.loads(line)
            self._ends[end["name"]] = end

    def ending(self, name: str) -> str:
        """Return how a command has ended, in words."""
        end = self._ends.get(name)
        if end is None:
            return "not run"
        if end.get("skipped"):
            return f"skipped: {end['skipped']}"
        words = {0: "done", 124: "out of time", 137: "killed: out of time"}.get(end["rc"], f"exit code {end['rc']}")
        return f"{words}, {end['seconds']} s"

    def succeeded(self, name: str) -> bool:
        """Return whether a command has ended well."""
        return self._ends.get(name, {}).get("rc") == 0

    def read(self, name: str) -> Any:
        """Return a command's JSON; None if there is none."""
        path = self._folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() and path.stat().st_size else None

    def arms(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the rows of a run of ``bench.py gpu``, by arm; empty if there are none."""
        return {row["arm"]: row for row in (self.read(name) or {"rows": []})["rows"]}

    def traces(self) -> dict[str, Any]:
        """Return the profiler's traces by arm."""
        files = sorted((self._folder / "traces").glob("*.json.gz"))
        return {path.name.removesuffix(".json.gz"): json.loads(gzip.decompress(path.read_bytes())) for path in files}


def lines_of(results: Results) -> Iterator[Line]:
    """Return the table, part by part."""
    yield from _prices(results)
    yield from _floor(results)
    measured = results.arms("goals")
    for arm in GOALS:
        yield _least(3, f"{arm} over plain", _ratio(measured, arm), WANTED.get(arm, OTHERS_WANTED), results, "goals")
    yield from _ablations(results)
    yield from _traces(results)
    found = results.read("sanitizer")
    complaints = None if found is None else found["complaints"]
    silent = results.succeeded("sanitizer") and complaints == {} and found["checked"]
    value = results.ending("sanitizer") if not complaints else f"complains: {', '.join(complaints)}"
    yield Line(6, "torch's CUDA sanitizer", value, "silence in all modes", silent)
    for name, what in (("nccl", "collectives of 2 NCCL ranks"), ("promises", "tests of 2 NCCL ranks")):
        yield Line(7, what, results.ending(name), "right, no hang", results.succeeded(name))
    seconds = (results.read("killed") or {}).get("seconds")
    value = results.ending("killed") if seconds is None else f"{seconds:.2f} s"
    met = seconds is not None and seconds <= NOTICED_WITHIN
    yield Line(7, "a killed rank: others raise after", value, f"<= {NOTICED_WITHIN:g} s", met)
    yield _least(
        8, "fp16 with GradScaler, all over plain", _ratio(results.arms("scaler"), "all"), 1.0, results, "scaler"
    )


def _prices(results: Results) -> Iterator[Line]:
    found = results.read("prices")
    if found is None or found["failed"]:
        words = results.ending("prices") if found is None else f"failed: {', '.join(found['failed'])}"
        yield Line(1, "prices", words, "all measured", False)
    measured, predicted = results.arms("goals"), {row["mode"]: row for row in results.read("virtual") or ()}
    for arm in GOALS:
        ratio, virtual = _ratio(measured, arm), predicted.get(arm, {}).get("ratio")
        if ratio is None or virtual is None:
            missing = "goals" if virtual is not None else "virtual"
            yield Line(1, f"virtual GPU, {arm}", f"{missing}: {results.ending(missing)}", "within 0.02", False)
        else:
            value = f"{virtual:.3f}, measured {ratio:.3f}"
            yield Line(1, f"virtual GPU, {arm}", value, f"within {CLOSE}", round(abs(virtual - ratio), 3) <= CLOSE)


def _floor(results: Results) -> Iterator[Line]:
    found = results.arms("floor")
    for arm, limit in FLOORS_MS.items():
        if arm not in found:
            yield Line(2, f"host's time of a step, {arm}", results.ending("floor"), f"< {limit:g} ms", False)
    for arm, row in found.items():
        ms = 1e3 * row["setting"]["batch_size"] / row["value"]
        limit = FLOORS_MS.get(arm, 0.0)
        wanted, met = (f"< {limit:g} ms", ms < limit) if limit else ("", None)
        yield Line(2, f"host's time of a step, {arm}", f"{ms:.2f} ms", wanted, met)


def _ablations(results: Results) -> Iterator[Line]:
    found = results.arms("ablations")
    if not found:
        yield Line(4, "ablations", results.ending("ablations"), "", None)
    base = _ratio(found, "all")
    for arm in found:
        ratio = _ratio(found, arm)
        if ratio is None or ":" not in arm:
            continue
        if arm == "all:item":
            plain = _ratio(found, "plain:item")
            value = f"{ratio:.3f}" if plain is None else f"{ratio / plain:.3f} of plain:item"
            yield Line(4, arm, value, "predicted: 0.91 to 0.94", None)
        else:
            change = "" if base is None or arm.startswith("plain") else f", {ratio - base:+.3f} to all"
            yield Line(4, arm, f"{ratio:.3f}{change}", "", None)
    found = results.arms("leads")
    if not found:
        yield Line(4, "leads of solo", results.ending("leads"), "", None)
    for ms, predicted in LEADS.items():
        ratio = _ratio(found, f"solo:lead={ms}")
        if ratio is not None:
            yield Line(4, f"solo, {ms} ms ahead", f"{ratio:.3f}", f"predicted: {predicted}", None)


def _traces(results: Results) -> Iterator[Line]:
    traces = results.traces()
    if not traces:
        yield Line(5, "traces", results.ending("traces"), "", None)
    for arm, trace in traces.items():
        idle = idle_of(trace["traceEvents"])
        value = ", ".join(f"{phase} {ms:.1f}" for phase, ms in sorted(idle.items()))
        yield Line(5, f"the GPU idles, ms a step, {arm}", value or "never", "before a kernel of each phase", None)
    for arm, row in results.arms("traces").items():
        waits = {name: row[name] for name in ("cudaStreamSynchronize", "cudaEventSynchronize") if row.get(name)}
        value = ", ".join(f"{name} {count:.1f}" for name, count in waits.items())
        yield Line(5, f"waits for the device, a step, {arm}", value or "none", "", None)


def _least(part: int, what: str, ratio: float | None, wanted: float, results: Results, name: str) -> Line:
    value = results.ending(name) if ratio is None else f"{ratio:.3f}"
    return Line(part, what, value, f">= {wanted:g}", ratio is not None and ratio >= wanted)


def _ratio(rows: Mapping[str, Mapping[str, Any]], arm: str) -> float | None:
    return rows[arm]["ratio"] if arm in rows else None


def idle_of(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return how long the device idles, ms a step, by the phase whose kernel ends the gap.

    The phase is that of the kernel's launch: "update" within an optimizer's step, "backward" on autograd's threads,
    "forward" elsewhere on the training thread, "engine" on other threads.

    Args:
        events: of a Chrome trace of torch's profiler, in which ``SPAN`` covers the steps.
    """
    spans = [event for event in events if event.get("name") == SPAN and event.get("ph") == "X"]
    span = min(spans, key=lambda event: event.get("cat", "") != "user_annotation")
    begin, end = span["ts"], span["ts"] + span["dur"]
    launches = {event["args"]["correlation"]: event for event in events if event.get("cat") == "cuda_runtime"}
    updates, threads = list[tuple[float, float, Any]](), defaultdict[Any, Counter[str]](Counter)
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation") and event.get("ph") == "X":
            if event["name"].startswith("Optimizer.step"):
                updates.append((event["ts"], event["ts"] + event["dur"], event["tid"]))
            if event["name"].startswith("autograd::engine"):
                threads[event["tid"]]["backward"] += 1

    def phase_of(kernel: Mapping[str, Any]) -> str:
        launch = launches.get(kernel.get("args", {}).get("correlation"))
        if launch is None:
            return "unknown"
        if any(first <= launch["ts"] < last and launch["tid"] == thread for first, last, thread in updates):
            return "update"
        if threads[launch["tid"]]["backward"]:
            return "backward"
        return "forward" if launch["tid"] == span["tid"] else "engine"

    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and begin <= e["ts"] < end]
    idle, busy_until = Counter[str](), None
    for kernel in sorted(kernels, key=lambda event: event["ts"]):
        if busy_until is not None and kernel["ts"] > busy_until:
            idle[phase_of(kernel)] += kernel["ts"] - busy_until
        busy_until = max(busy_until or 0.0, kernel["ts"] + kernel["dur"])
    return {phase: micros / 1e3 / TRACED for phase, micros in idle.items()}


def table(results: Results) -> str:
    """Return the table, and the number of goals that are met."""
    lines = list(lines_of(results))
    goals = [line for line in lines if line.met is not None]
    count = f"{sum(line.met is True for line in goals)} of {len(goals)} goals are met"
    return "\n".join([*map(str, lines), count])


def main() -> None:
    """Print the table of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="OUT", help="of the results")
    print(table(Results(parser.parse_args().folder)))


if __name__ == "__main__":
    main()
