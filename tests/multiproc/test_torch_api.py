"""Horovod's API without Horovod: each result is that of Horovod itself, from the same program."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from launch import REPOSITORY, ForkServer, Job, RunJob, rank_command, run_alone, torchrun

from tests.conftest import LONG_RUN

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


@pytest.fixture
def torch_alone(launched: RunJob, tmp_path: Path) -> Callable[..., Job]:
    """Runs code, its arguments and variables of its environment, under horovodrun by ranks that have imported torch."""

    def run(code: str, *args: str, **env: str) -> Job:
        script = tmp_path / "script.py"
        script.write_text(code)
        return launched("torch alone", str(script), 2, args=args, env=env)

    return run


def test_horovodrun_starts_ranks_without_horovod(torch_alone: Callable[..., Job]) -> None:
    code = (
        "import torch, hvd_async.torch as hvd\nhvd.init()\nassert hvd.allreduce.__module__.startswith('hvd_async')\n"
        "assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (2, 2, 1)\n"
        "assert hvd.allreduce(torch.tensor(1.0 + hvd.rank())).item() == 1.5\nhvd.shutdown()\n"
    )
    torch_alone(code, HVD_ASYNC_TRANSPORT="torch").check()


# -- ranks that no launcher of Horovod's has started ----------------------------------------------------------------


TRAINED = [[0, 0, 2, 0, 2, 2.0, -1.5], [1, 1, 2, 1, 2, 2.0, -1.5]]
"""Results by rank: the intended rank, rank, size, local rank, local size, a sum of ones, its weight."""
WAYS: dict[str, str] = {
    "by_variables": "", "with_sets": "", "by_tcp": "", "by_file": "", "group_before": "", "group_ended": "",
    "group_after": "", "file_ended": "hvd.init() before destroy_process_group()",
    "init_before_ranks": "hvd.init() after init_process_group()", "init_in_the_parent": "",
}  # fmt: skip
"""Ways to make ranks, and what the error says where there is one."""


STARTS = [("fork", ""), ("fork", "torch"), *([("spawn", "")] if LONG_RUN else [])]


@pytest.mark.parametrize(("start", "transport"), STARTS)
def test_ranks_that_a_script_makes_are_one_job(server: Callable[..., ForkServer], start: str, transport: str) -> None:
    """Whether Horovod is installed or not."""
    ways = WAYS if start == "fork" else {"by_variables": ""}
    script = server("torch", transport) if start == "fork" else None
    job = run_alone("spawned.py", args=(start, *ways), env={"HVD_ASYNC_TRANSPORT": transport}, server=script).check()
    found = {way: json.loads(answers) for way, answers in job.kept.items()}
    assert found.keys() == ways.keys(), str(job)
    for way, error in ways.items():
        if error:
            assert all(error in text for _, text in found[way])
        else:
            assert found[way] == TRAINED


NODE = (
    "import os, sys\nimport torch.distributed as dist\nimport hvd_async.torch as hvd\n"
    "if sys.argv[1] == 'group':\n    dist.init_process_group('gloo')\n"
    "hvd.init()\nfrom hvd_async.torch.collectives import plane_collectives\n"
    "print(hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(),"
    " plane_collectives()().host.partition('#')[2], sep=',')\nhvd.shutdown()\n"
)


@pytest.mark.parametrize("group", ["group", "none"] if LONG_RUN else ["none"])
def test_two_containers_of_one_host_name_are_two_hosts(
    server: Callable[[str], ForkServer], group: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = tmp_path / "node.py"
    script.write_text(NODE)
    forks = server("torch alone")
    where = ["--nnodes=2", "--nproc-per-node=1", "--no-python", "--master-addr=127.0.0.1", f"--master-port={port}"]
    rank = rank_command(str(script), [group], forks)
    with contextlib.ExitStack() as nodes:
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        started = [
            nodes.enter_context(
                subprocess.Popen(
                    [*torchrun(forks), f"--node-rank={node}", *where, *rank], env=env, stdout=subprocess.PIPE, text=True
                )
            )
            for node in range(2)
        ]
        said = [node.communicate(timeout=120)[0].strip() for node in started]
    assert said == ["0,0,1,0,2,", "1,0,1,1,2,1"]


CHOICE = (
    "import os, sys\nfrom unittest import mock\nimport torch\n"
    "gpus = int(sys.argv[1][int(os.environ['HOROVOD_RANK'])])\n"
    "with mock.patch('torch.cuda.device_count', lambda: gpus):\n    import hvd_async.torch as hvd\n    hvd.init()\n"
    "assert hvd.ProcessSet.__module__.startswith('hvd_async')\n"
    "assert hvd.allreduce(torch.tensor(1.0 + hvd.rank())).item() == 1.5\nhvd.shutdown()\n"
)


@pytest.mark.parametrize(
    ("gpus", "said"),
    [("11", ""), ("10", "Ranks without a GPU use Horovod: if there are some, set HVD_ASYNC_TRANSPORT=horovod")],
    ids=["both", "one"],
)
def test_ranks_that_see_gpus_meet_on_torch_distributed_or_the_job_ends_and_says_why(
    torch_alone: Callable[..., Job], gpus: str, said: str
) -> None:
    """``gpus``: how many each rank sees, one digit a rank."""
    job = torch_alone(CHOICE, gpus, HVD_ASYNC_INIT_TIMEOUT="3" if said else "30")
    assert (job.returncode == 0) == (not said), str(job)
    assert said in job.output
