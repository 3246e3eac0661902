"""Real jobs are recorded, by ``hvd_async record`` and by hand, under Horovod and under ``torchrun``, and advised on."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from jobs.torchrun_training import COMPUTE
from launch import JOBS, REPOSITORY, ForkServer, forking, run_job

from hvd_async.cli.main import main
from hvd_async.doctor import programs
from hvd_async.traces.format import read_trace
from tests.conftest import LONG_RUN

pytestmark = pytest.mark.multiproc
UNDER_TORCHRUN = {"ddp": "ddp", **({"fsdp": "fsdp", "own": "none", "hvd": "eager"} if LONG_RUN else {})}
"""Kinds of scripts without Horovod, with the algorithm that their traces name."""
KINDS = {"horovod": "horovod", "eager": "eager", **UNDER_TORCHRUN}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Traces of jobs of 2 ranks, the second of which is slow. (Ranks that are recorded import torch themselves.)"""
    folder = tmp_path_factory.mktemp("traces")
    script = str(JOBS / "recorded_training.py")
    args = (str(folder / "horovod"), script, str(folder), "--steps", "30")  # (it records "eager" by hand)
    output = run_job("recorded.py", 2, args=args).check().output
    assert "a second optimizer was made, by EagerOptimizer" in output
    script = str(JOBS / "torchrun_training.py")
    for kind in UNDER_TORCHRUN:
        args = ("--without-horovod", str(folder / kind), script, kind, "23")
        run_job("recorded.py", 2, transport="torch", args=args).check()
    return {kind: folder / kind for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_is_recorded_whole_and_the_slow_rank_works_while_the_other_one_waits(
    folders: dict[str, Path], kind: str
) -> None:
    """If waits in one of the passes of a script for torchrun counted as work, half of the difference would be gone."""
    trace, own = read_trace(folders[kind]), kind in UNDER_TORCHRUN
    assert (trace.ranks, trace.steps) == (2, 20 if own else 27)
    assert [header.algorithm for header in trace.headers] == [KINDS[kind]] * 2
    assert trace.headers[0].parameter_bytes == 4 * ((9 * 4 + 2 * 4 + 5) if own else (8 * 4 + 4))
    assert all(header.synchronized and header.run is not None for header in trace.headers)
    assert trace.synchronous == (kind != "own")
    slept = 0.75 * (COMPUTE[1] - COMPUTE[0]) if own else 0.0
    assert np.median(trace.work[:, 1] - trace.work[:, 0]) > slept
    assert np.median(trace.waits[:, 0] - trace.waits[:, 1]) > slept
    assert abs(trace.begin[1:] - trace.done[:-1]).max() < 1e-5
    assert (np.diff([trace.begin, trace.arrived, trace.released, trace.done], axis=0) >= 0).all()


BASES = {"horovod": "Horovod", "eager": "synchronous SGD", "ddp": "DDP", "fsdp": "FSDP"}


@pytest.mark.parametrize("kind", [kind for kind in BASES if kind in KINDS])
def test_the_advisor_blames_the_slow_rank_and_compares_with_what_the_job_runs(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    few, base = [str(folders[kind]), "--modes", "solo,adpsgd", "--resamples", "2", "--steps", "50"], BASES[kind]
    assert main(["advise", *few]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("Rank 1 on host ")
    assert "Fix that first" in text
    assert f"({base} has 1.00:" in text
    assert f"the recorded job ({base})" in text or kind == "eager"
    assert ("Horovod" in text) == (base == "Horovod")
    assert main(["advise", *few, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trace"]["compared_with"] == base
    gains = {each["mode"]: each["gain"] for each in found["modes"]}
    assert gains["adpsgd"]["mean"] > 1.0
    assert gains["adpsgd"]["low"] > 1.2 or kind not in UNDER_TORCHRUN


@pytest.mark.skipif(not LONG_RUN, reason="tried in a long run: HVD_ASYNC_TEST_LONG=1")
def test_a_job_that_trains_with_no_other_rank_is_not_recorded(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("import torch\nw = torch.ones(1, requires_grad=True)\ntorch.optim.SGD([w], lr=0.1).step()\n")
    job = run_job("recorded.py", 2, transport="torch", args=(str(tmp_path / "trace"), str(script)))
    assert job.returncode not in (0, None), str(job)
    assert "none stepped after torch.distributed.init_process_group" in job.output


def test_the_demo_compares_three_modes(
    server: Callable[[str], ForkServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(programs.subprocess, "Popen", forking(subprocess.Popen, server("torch alone")))
    plot = ["--plot", str(tmp_path / "demo.png")] if importlib.util.find_spec("matplotlib") else []
    assert main(["demo", "--steps", "12", *plot]) == 0
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith("  ")]
    modes = ('quorum="all"', 'quorum="majority"', 'algorithm="local"')
    assert all(mode in row and row.endswith("yes") for mode, row in zip(modes, rows[1:], strict=True))
    assert "lost: nothing; all ranks produced 24 gradients" in text
    assert not plot or (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("missing", "options"), [("torch", []), ("matplotlib", ["--plot", "x.png"])])
def test_the_demo_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str, options: list[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(SystemExit):
        main(["demo", *options])
    assert f"pip install {missing}" in capsys.readouterr().err


@pytest.mark.skipif(not LONG_RUN, reason="tried in a long run: HVD_ASYNC_TEST_LONG=1")
def test_the_printed_answers_have_the_form_of_real_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line of the answers in README.md and docs/advisor.md is one that the example gives, apart from figures and
    the order of the modes."""

    def form(text: str) -> list[str]:
        text = re.sub(r"on host \S+ is", "on host H is", text)
        text = re.sub(r"(Eager|Gossip)Optimizer\(.*?\) {2,}.*$", "MODE", text, flags=re.MULTILINE)
        first, *tables = text.split("\n\n")
        lines = [first, *"\n".join(tables).splitlines()]
        return [re.sub(r"\d[\d.]*", "0", " ".join(line.split())) for line in lines if line.strip()]

    folder, script = str(tmp_path / "run"), str(REPOSITORY / "docs" / "examples" / "torchrun" / "slow_ddp.py")
    run_job("recorded.py", 2, transport="torch", args=(folder, script)).check()
    assert main(["advise", folder]) == 0
    real = form(capsys.readouterr().out)
    for page in ("README.md", "docs/advisor.md"):
        text = (REPOSITORY / page).read_text("utf-8")
        (answer,) = re.findall(r"^```\n(Rank 1 .*?)^```", text, re.MULTILINE | re.DOTALL)
        assert {*form(answer)} <= {*real}, page
