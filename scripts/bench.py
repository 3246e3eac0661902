"""Benchmarks: arms interleaved in one run, medians with their spread, as a table and as JSON.

A figure is a ratio against the arm `horovod` (its plain allreduce) in the same run on the same transport.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ARMS: dict[str, list[str]] = {
    "horovod": ["--algorithm", "allreduce"],
    "all": ["--algorithm", "eager", "--quorum", "all"],
    "majority": ["--algorithm", "eager", "--quorum", "majority"],
    "solo": ["--algorithm", "eager", "--quorum", "solo"],
}


@dataclass(frozen=True)
class Setting:
    """What a case measures: runs of a runner that differ in their arm only."""

    framework: str
    ranks: int
    delay: float
    steps: int
    repetitions: int
    arms: Sequence[str]

    @property
    def key(self) -> dict[str, Any]:
        """As it stands in the JSON."""
        return {"framework": self.framework, "delay": self.delay, "steps": self.steps, "seed": 0}


def run_arm(arm: str, setting: Setting) -> dict[str, Any]:
    """One job of the runner; its summary.

    Raises:
        RuntimeError: the job failed; the end of its output is in the message.
    """
    folder = {"torch": "torch_models", "tensorflow": "tf_models"}[setting.framework]
    with tempfile.TemporaryDirectory() as scratch:
        summary = Path(scratch) / "summary.json"
        binaries = Path(sys.executable).parent
        command = [
            *(str(binaries / "horovodrun"), "-np", str(setting.ranks), "--gloo", sys.executable),
            *(str(ROOT / folder / "resnet50.py"), *ARMS[arm], "--data", "digits", "--image-size", "32"),
            *("--batch-size", "16", "--optimizer", "sgd", "--lr", "0.02", "--threads", "1", "--progress", "lines"),
            *("--epochs", str(-(-setting.steps // (1437 // 16 // setting.ranks))), "--steps", str(setting.steps)),
            *("--eval-every", "1000", "--inject", f"random:1:{setting.delay:g}" if setting.delay else "none"),
            *("--summary", str(summary)),
        ]
        done = subprocess.run(
            command, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True, timeout=1800
        )
        if done.returncode != 0 or not summary.exists():
            raise RuntimeError(
                f"{' '.join(command)}\nended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
            )
        result: dict[str, Any] = json.loads(summary.read_text())
        return result


def straggler(setting: Setting, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Step time of the real ResNet-50 with one random rank held up in every step, arm by arm, interleaved."""
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in setting.arms}
    for repetition in range(setting.repetitions):
        for arm in setting.arms:
            summary = run_arm(arm, setting)
            found[arm].append(summary)
            mean = summary["step_time_s"]["mean"]
            say(f"repetition {repetition + 1}/{setting.repetitions}, {arm}: {mean:.3f} s a step")
    base = statistics.median(s["step_time_s"]["mean"] for s in found[setting.arms[0]])
    rows = []
    for arm, summaries in found.items():
        times = [s["step_time_s"]["mean"] for s in summaries]
        rows.append(
            {
                "arm": arm,
                "setting": setting.key,
                "value": statistics.median(times),
                "unit": "s/step",
                "low": min(times),
                "high": max(times),
                "speedup": base / statistics.median(times),
                "bound": None,
                "accuracy": statistics.median(s["test_accuracy"] for s in summaries),
                "replicas_identical": all(s["replicas_identical"] for s in summaries),
                "gradients_lost": sum(s["gradients_produced"] - s["gradients_applied"] for s in summaries),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For people."""
    lines = [f"{'arm':<10} {'s/step':>8} {'low':>8} {'high':>8} {'speed-up':>9} {'accuracy':>9}"]
    for row in rows:
        lines.append(
            f"{row['arm']:<10} {row['value']:>8.3f} {row['low']:>8.3f} {row['high']:>8.3f} {row['speedup']:>8.2f}x "
            f"{row['accuracy']:>9.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run a case as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("straggler",), help="straggler: one random rank held up in every step")
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: 4)")
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch", help="(default: torch)")
    parser.add_argument("--delay", type=float, default=0.3, metavar="S", help="seconds (default: 0.3)")
    parser.add_argument("--steps", type=int, default=44, help="optimizer steps a run (default: 44)")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each arm (default: 3)")
    parser.add_argument(
        "--arms", default="horovod,majority,solo", help="the first is the baseline (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="one repetition of 11 steps, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    given = parser.parse_args()
    arms = given.arms.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"--arms: {', '.join(unknown)} not known; there are {', '.join(ARMS)}")
    steps, repetitions = (11, 1) if given.quick else (given.steps, given.repetitions)
    setting = Setting(given.framework, given.ranks, given.delay, steps, repetitions, arms)
    rows = straggler(setting, lambda text: print(text, file=sys.stderr, flush=True))
    print(table(rows))
    if given.json is not None:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        content = {"case": given.case, "ranks": given.ranks, "transport": "gloo", "machine": machine, "rows": rows}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
