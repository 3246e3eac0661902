"""The table of ``scripts/gpu_experiments.sh``: goals, parts that failed, and what ``bench.py gpu`` runs for it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.cases import experiments
from scripts.benchmarks.support import launch

ROOT = Path(__file__).resolve().parents[2]
RECORDED: dict[str, Any] = json.loads((ROOT / "tests" / "fixtures" / "benchmarks" / "gpu_experiments.json").read_text())
"""By file without its suffix: what the parts write, with figures of an H100 of before rounds in stream order."""


def event(name: str, cat: str, ts: float, dur: float, tid: int, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"args": {"correlation": correlation}}
    return {"name": name, "cat": cat, "ph": "X", "ts": ts, "dur": dur, "tid": tid, **args}


TRACE = [
    event("hvd_async.steps", "gpu_user_annotation", 5.0, 990.0, 7),
    event("hvd_async.steps", "user_annotation", 0.0, 1000.0, 1),
    event("Optimizer.step#SGD.step", "user_annotation", 500.0, 100.0, 1),
    event("autograd::engine::evaluate_function: X", "cpu_op", 200.0, 100.0, 2),
    *(event("cudaLaunchKernel", "cuda_runtime", ts, 5.0, tid, n) for n, (ts, tid) in enumerate([
        (10.0, 1), (210.0, 2), (510.0, 1), (520.0, 3), (600.0, 1), (2000.0, 1)])),
    *(event("kernel", "kernel", ts, dur, 7, n) for n, (ts, dur) in enumerate([
        (20.0, 100.0), (220.0, 30.0), (550.0, 50.0), (640.0, 10.0), (700.0, 1.0), (2100.0, 1.0)])),
]  # fmt: skip
"""Kernels from 20 to 120, 220 to 250, 550 to 600, 640 to 650, and at 700; the last one is outside of the steps."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of a run."""
    for name, content in RECORDED.items():
        if name == "parts":
            (tmp_path / "parts.jsonl").write_text("".join(json.dumps(part) + "\n" for part in content))
        else:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "traces").mkdir()
    packed = gzip.compress(json.dumps({"traceEvents": TRACE}).encode())
    (tmp_path / "traces" / "all.json.gz").write_bytes(packed)
    return tmp_path


def found(folder: Path) -> dict[tuple[int, str], Any]:
    return {(line.part, line.what): line for line in experiments.lines_of(experiments.Results(folder))}


def test_a_recorded_run(folder: Path) -> None:
    lines = found(folder)
    verdicts = {f"{part} {what}": line.met for (part, what), line in lines.items() if line.met is not None}
    assert verdicts == {
        "1 virtual GPU, all": True, "1 virtual GPU, solo": True, "1 virtual GPU, sgp": True,
        "1 virtual GPU, adpsgd": True, "1 virtual GPU, lsgd": False,
        "2 host's time of a step, plain": True, "2 host's time of a step, all": False,
        "3 all over plain": False, "3 solo over plain": False, "3 sgp over plain": False,
        "3 adpsgd over plain": False, "3 lsgd over plain": False,
        "6 torch's CUDA sanitizer": True, "7 collectives of 2 NCCL ranks": True, "7 tests of 2 NCCL ranks": False,
        "7 a killed rank: others raise after": True, "8 fp16 with GradScaler, all over plain": False,
    }  # fmt: skip
    assert lines[1, "virtual GPU, lsgd"].value == "0.940, measured 0.910"
    assert lines[2, "host's time of a step, all"].value == "34.00 ms"
    assert lines[4, "all:confirm"].value == "0.780, -0.024 to all"
    assert lines[4, "all:item"].value == "0.850 of plain:item"
    assert lines[4, "solo, 8 ms ahead"].value == "0.960"
    assert lines[7, "tests of 2 NCCL ranks"].value == "out of time, 100 s"
    assert experiments.table(experiments.Results(folder)).endswith("8 of 17 goals are met")


SANITIZER, GOALS = (
    (6, "torch's CUDA sanitizer"),
    {"all": 0.985, "solo": 0.975, "sgp": 0.96, "adpsgd": 0.96, "lsgd": 0.96},
)
ROWS = [
    {"arm": arm, "ratio": ratio, "value": 3700.0, "setting": {"batch_size": 128}}
    for arm, ratio in {"plain": 1.0, **GOALS}.items()
]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("goals", {"rows": ROWS}, {(3, f"{arm} over plain"): (f"{ratio:.3f}", True) for arm, ratio in GOALS.items()}),
        ("goals", {"rows": ROWS}, {(1, "virtual GPU, all"): ("0.806, measured 0.985", False)}),
        ("sanitizer", {"checked": True, "complaints": {"sgp": "a race"}}, {SANITIZER: ("complains: sgp", False)}),
        ("sanitizer", {"checked": False, "complaints": {}}, {SANITIZER: ("done, 21 s", False)}),
    ],
)
def test_other_results(folder: Path, name: str, content: dict[str, Any], expected: dict[Any, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content))
    lines = found(folder)
    assert {key: (lines[key].value, lines[key].met) for key in expected} == expected


def test_parts_without_results_miss_and_say_why(tmp_path: Path) -> None:
    ends = [{"name": "goals", "rc": 137, "seconds": 170}, {"name": "floor", "skipped": "no GPU"}]
    (tmp_path / "parts.jsonl").write_text("".join(json.dumps(end) + "\n" for end in ends))
    lines = found(tmp_path)
    assert lines[3, "all over plain"][2:] == ("killed: out of time, 170 s", ">= 0.98", False)
    assert lines[2, "host's time of a step, all"].value == "skipped: no GPU"
    assert lines[6, "torch's CUDA sanitizer"][2:] == ("not run", "silence in all modes", False)
    assert not any(line.met for line in lines.values())


def test_idle_time_belongs_to_the_phase_whose_kernel_ends_it() -> None:
    idle = {phase: ms * 5 * 1e3 for phase, ms in experiments.idle_of(TRACE).items()}
    assert idle == pytest.approx({"backward": 100.0, "update": 300.0, "engine": 40.0, "forward": 50.0})


def test_without_horovod_torchrun_starts_the_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HVD_ASYNC_TRANSPORT", "torch")
    monkeypatch.setattr(launch, "find_horovod", lambda: None)
    assert launch._command(tmp_path, 2, False, None, 1, False)[1:3] == ["-m", "torch.distributed.run"]
    monkeypatch.setattr(launch, "find_horovod", lambda: tmp_path)
    assert launch._command(tmp_path, 2, False, None, 1, False)[0].endswith("horovodrun")


@pytest.mark.parametrize(
    ("argument", "words"), [(None, "name a folder"), ("out", "no torch that sees a GPU"), ("--x", "unknown")]
)
def test_the_script_says_what_it_needs(tmp_path: Path, argument: str | None, words: str) -> None:
    script = ["bash", str(ROOT / "scripts" / "gpu_experiments.sh"), "--python", sys.executable]
    script += [] if argument is None else [argument]
    settings = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=settings)
    assert ended.returncode == 1
    assert words in ended.stderr
