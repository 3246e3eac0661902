"""Horovod's API without Horovod: each result is that of Horovod itself, from the same program."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launch import REPOSITORY, Job, RunJob

pytestmark = pytest.mark.multiproc

CASES = (
    "places", "reductions", "forms_of_reductions", "gathers", "broadcasts", "exchanges", "scatters", "gradients",
    "sets", "objects", "joins", "errors", "shut down",
)  # fmt: skip


@pytest.fixture(scope="module")
def jobs(forked: RunJob) -> Callable[[int, str], Job]:
    """The job of a number of ranks over Horovod ("gloo") or "torch", which runs once."""
    return functools.cache(lambda ranks, transport: forked("torch", "torch_api.py", ranks, transport=transport))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_results_are_horovods(jobs: Callable[[int, str], Job], case: str, ranks: int) -> None:
    ours = jobs(ranks, "torch").check().case(case)
    for own, expected in zip(ours, jobs(ranks, "gloo").case(case), strict=True):
        assert own["found"] == expected["found"]


def test_horovodrun_starts_ranks_without_horovod() -> None:
    code = (
        "import torch, hvd_async.torch as hvd\nhvd.init()\nassert hvd.allreduce.__module__.startswith('hvd_async')\n"
        "assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (2, 2, 1)\n"
        "assert hvd.allreduce(torch.tensor(1.0 + hvd.rank())).item() == 1.5\nhvd.shutdown()\n"
    )
    launcher = str(Path(__file__).with_name("horovodrun.py"))
    command = [sys.executable, launcher, "-np", "2", "--gloo", sys.executable, "-c", code]
    env = {**os.environ, "HVD_ASYNC_TRANSPORT": "torch", "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


CHOICE = (
    "import os, sys\nfrom unittest import mock\nimport torch\n"
    "gpus = int(sys.argv[1][int(os.environ['HOROVOD_RANK'])])\n"
    "with mock.patch('torch.cuda.device_count', lambda: gpus):\n    import hvd_async.torch as hvd\n"
    "hvd.init()\nassert hvd.allreduce.__module__.startswith('hvd_async')\n"
    "assert hvd.allreduce(torch.tensor(1.0 + hvd.rank())).item() == 1.5\nhvd.shutdown()\n"
)


def on_gpus(gpus: str) -> subprocess.CompletedProcess[str]:
    """Run two ranks under horovodrun that believe that they see GPUs, one digit each."""
    launcher = str(Path(__file__).with_name("horovodrun.py"))
    command = [sys.executable, launcher, "-np", "2", "--gloo", sys.executable, "-c", CHOICE, gpus]
    env = {name: value for name, value in os.environ.items() if name not in ("HVD_ASYNC_TRANSPORT", "HVD_ASYNC_STAGE")}
    env |= {"PYTHONPATH": str(REPOSITORY), "HVD_ASYNC_INIT_TIMEOUT": "30" if gpus == "11" else "3"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_ranks_with_gpus_meet_on_torch_distributed() -> None:
    ended = on_gpus("11")
    assert ended.returncode == 0, ended.stderr


def test_a_rank_without_a_gpu_next_to_one_with_a_gpu_ends_the_job_and_is_explained() -> None:
    ended = on_gpus("10")
    assert ended.returncode != 0
    assert "Ranks without a GPU use Horovod: if there are some, set HVD_ASYNC_TRANSPORT=horovod" in ended.stderr
