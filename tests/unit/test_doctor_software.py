"""The doctor on Python, frameworks and Horovod: what it reads, and what it makes of builds that do not fit."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from hvd_async.doctor import software
from hvd_async.doctor.findings import Verdict
from hvd_async.doctor.processes import RESULT, Outcome
from hvd_async.doctor.software import Build

BOTH = {"torch": "2.13.0+cpu", "tensorflow": "2.21.0", "keras": "3.15.1"}
FITTING = Build("0.28.1", {"torch": "2.13.0+cpu", "tensorflow": "2.21.0"}, True)


def verdicts(findings: list[Any]) -> dict[str, str]:
    return {finding.name: finding.verdict.value for finding in findings}


def answer(*results: dict[str, Any], code: int | None = 0, output: str = "") -> Outcome:
    lines = [RESULT + json.dumps(result) for result in results]
    return Outcome(code, "\n".join([*lines, output]), 1.0)


FRAMEWORK = {"step": "framework", "version": "2.13.0", "gpus": 0, "cuda": ""}


@pytest.mark.parametrize(
    ("version", "verdict"), [((3, 11, 7), "ok"), ((3, 13, 0), "ok"), ((3, 14, 0), "note"), ((3, 9, 1), "problem")]
)
def test_python(version, verdict):
    assert software.judge_python(version).verdict.value == verdict


def test_frameworks_that_fit():
    assert verdicts(software.judge_frameworks(BOTH)) == {"torch": "ok", "tensorflow": "ok", "keras": "ok"}
    assert verdicts(software.judge_frameworks({"torch": "2.3.0"})) == {"torch": "ok"}


@pytest.mark.parametrize(
    ("versions", "name"),
    [
        ({}, "frameworks"),
        ({**BOTH, "torch": "2.2.2"}, "torch"),
        ({**BOTH, "tensorflow": "2.15.0"}, "tensorflow"),
        ({**BOTH, "keras": "2.15.0"}, "keras"),
        ({"tensorflow": "2.21.0"}, "keras"),
    ],
)
def test_frameworks_that_do_not_fit(versions, name):
    found = {finding.name: finding for finding in software.judge_frameworks(versions)}
    assert found[name].verdict is Verdict.PROBLEM
    assert "pip install" in found[name].advice
    assert [one.name for one in found.values() if one.verdict is not Verdict.OK] == [name]


def test_a_build_that_fits():
    assert verdicts(software.judge_build(FITTING, BOTH)) == {"horovod": "ok"}


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (Build(), {"horovod": "problem"}),
        (Build("0.28.1", {}), {"horovod": "problem"}),
        (Build("0.28.1", {"torch": "2.13.0+cpu"}, True), {"horovod": "note"}),
        (Build("0.27.0", FITTING.built_for, True), {"horovod": "note"}),
        (Build("0.28.1", {**FITTING.built_for, "torch": "2.0.1"}, True), {"horovod": "ok", "horovod build": "problem"}),
        (Build("0.28.1", FITTING.built_for, False), {"horovod": "ok", "horovod changes": "note"}),
    ],
    ids=["none", "for nothing", "for torch only", "older", "for another torch", "not ours"],
)
def test_builds_that_do_not_fit(build, expected):
    found = software.judge_build(build, BOTH)
    assert verdicts(found) == expected
    assert all("install_horovod.sh" in one.advice for one in found if one.verdict is not Verdict.OK)


def test_without_horovod_torch_trains_and_tensorflow_does_not():
    assert verdicts(software.judge_build(Build(), {"torch": "2.13.0"})) == {"horovod": "note"}
    assert verdicts(software.judge_build(Build(), {"tensorflow": "2.21.0"})) == {"horovod": "problem"}


@pytest.mark.parametrize(
    ("build", "environment", "fact"),
    [
        (FITTING, {}, "Horovod for torch, as Horovod is installed; under torchrun torch.distributed"),
        (FITTING, {"HOROVOD_RANK": "0"}, "Horovod for torch, as horovodrun has started this process"),
        (FITTING, {"HVD_ASYNC_TRANSPORT": "horovod"}, "Horovod for torch, as HVD_ASYNC_TRANSPORT=horovod"),
        (FITTING, {"TORCHELASTIC_RUN_ID": "x"}, "torch.distributed for torch, as torchrun has started this process"),
        (Build(), {}, "torch.distributed for torch, as Horovod is not installed for torch"),
    ],
)
def test_the_data_plane_is_told_with_its_reason(build, environment, fact):
    found = software.judge_data_plane(build, environment)
    assert (found.verdict, found.fact) == (Verdict.OK, fact)


def test_a_data_plane_that_there_is_not(monkeypatch):
    found = software.judge_data_plane(FITTING, {"HVD_ASYNC_TRANSPORT": "smoke"})
    assert found.verdict is Verdict.PROBLEM
    assert "HVD_ASYNC_TRANSPORT" in found.advice


def test_a_build_is_read_from_its_folder(tmp_path: Path):
    assert software.read_folder("0.28.1", tmp_path) == Build("0.28.1")
    (tmp_path / "torch").mkdir()
    library = tmp_path / f"torch/mpi_lib_v2{sysconfig.get_config_var('EXT_SUFFIX')}"
    library.write_bytes(b"\0HOROVOD_GLOO_TIMEOUT_SECONDS\0")
    assert software.read_folder("0.28.1", tmp_path) == Build("0.28.1", {"torch": ""}, False)
    library.write_bytes(b"\0HOROVOD_GLOO_OPERATION_TIMEOUT_SECONDS\0")
    (tmp_path / "metadata.json").write_text('{"pytorch": "2.0.1", "tensorflow": "2.12.0"}')
    assert software.read_folder("0.28.1", tmp_path) == Build("0.28.1", {"torch": "2.0.1"}, True)


def test_packages_under_other_names_are_found(monkeypatch):
    there = {"tensorflow-cpu": "2.21.0"}

    def version(name: str) -> str:
        if name not in there:
            raise software.importlib.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(software.importlib.metadata, "version", version)
    assert software.installed("tensorflow") == "2.21.0"
    assert software.installed("torch") == ""


@pytest.mark.parametrize(
    ("outcome", "name", "verdict", "says"),
    [
        (answer(code=1, output="ImportError: libcudart.so.12"), "import torch", "problem", "libcudart"),
        (answer(code=None), "import torch", "problem", "not done within 60 s"),
        (answer(FRAMEWORK, code=-11), "horovod.torch", "problem", "killed by signal 11"),
        (
            answer(FRAMEWORK, {"step": "horovod", "gloo": False, "mpi": False, "nccl": False}),
            "horovod.torch",
            "problem",
            "no transport",
        ),
        (
            answer({**FRAMEWORK, "gpus": 2}, {"step": "horovod", "gloo": True, "mpi": False, "nccl": False}),
            "horovod.torch",
            "note",
            "Gloo",
        ),
        (
            answer(FRAMEWORK, {"step": "horovod", "gloo": False, "mpi": True, "nccl": True}),
            "horovod.torch",
            "note",
            "built with MPI, NCCL",
        ),
        (
            answer({**FRAMEWORK, "gpus": 2}, {"step": "horovod", "gloo": True, "mpi": True, "nccl": True}),
            "horovod.torch",
            "ok",
            "Gloo, MPI, NCCL",
        ),
    ],
)
def test_what_imports_say(outcome, name, verdict, says):
    (found,) = software.judge_answer("torch", outcome, FITTING, 60)
    assert (found.name, found.verdict.value) == (name, verdict)
    assert says in found.fact
    assert bool(found.advice) == (verdict != "ok")


def test_a_framework_that_horovod_was_not_built_for_is_not_named_twice():
    assert software.judge_answer("torch", answer(FRAMEWORK, code=1), Build("0.28.1"), 60) == []


@pytest.mark.parametrize(
    ("gpus", "driver", "verdict"), [(0, False, "ok"), (2, True, "ok"), (0, True, "note"), (2, False, "ok")]
)
def test_gpus(gpus, driver, verdict):
    assert software.judge_gpus({"torch": answer({**FRAMEWORK, "gpus": gpus})}, driver).verdict.value == verdict


# -- imports that fail, in processes of their own --------------------------------------------------------------


def packages(folder: Path, monkeypatch, **sources: str) -> None:
    """Put packages before all others for processes that are started: names with ``__`` for a dot."""
    for name, source in sources.items():
        path = folder / name.replace("__", "/")
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text(source)
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{root}")


TORCH = "class cuda:\n    device_count = staticmethod(lambda: 0)\nclass version:\n    cuda = None\n__version__ = '9.9'"


def test_a_horovod_that_crashes_is_told_from_a_framework_that_does(tmp_path, monkeypatch):
    packages(tmp_path, monkeypatch, torch=TORCH, horovod="", horovod__torch="import os; os.abort()")
    outcome = software.ask("torch", 60)
    assert outcome.returncode == -6
    assert [result["step"] for result in outcome.results()] == ["framework"]
    (found,) = software.judge_answer("torch", outcome, Build("0.28.1", {"torch": "9.9"}), 60)
    assert (found.name, found.verdict) == ("horovod.torch", Verdict.PROBLEM)


def test_an_import_that_never_ends_is_ended(tmp_path, monkeypatch):
    packages(tmp_path, monkeypatch, torch="import threading; threading.Event().wait()")
    outcome = software.ask("torch", 3)
    assert outcome.returncode is None
    assert software.judge_answer("torch", outcome, FITTING, 3)[0].verdict is Verdict.PROBLEM


def test_an_import_error_is_told(tmp_path, monkeypatch):
    packages(tmp_path, monkeypatch, torch=TORCH, horovod="", horovod__torch="raise ImportError('undefined symbol: x')")
    (found,) = software.judge_answer("torch", software.ask("torch", 60), Build("0.28.1", {"torch": "9.9"}), 60)
    assert "undefined symbol: x" in found.fact


def test_transports_are_asked_for(tmp_path, monkeypatch):
    built = "gloo_built = lambda: True\nmpi_built = lambda: False\nnccl_built = lambda: 0"
    packages(tmp_path, monkeypatch, torch=TORCH, horovod="", horovod__torch=built)
    outcome = software.ask_all(["torch"], 60)["torch"]
    assert outcome.results()[1] == {"step": "horovod", "gloo": True, "mpi": False, "nccl": False}
