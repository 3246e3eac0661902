"""Which data plane torch ranks take, by their environment, and what the environment says of ranks without Horovod."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NamedTuple

import pytest

from hvd_async.errors import NotInitializedError
from hvd_async.runtime import launch
from hvd_async.runtime.data_plane import (
    HOROVOD,
    STAGE,
    TORCH,
    VARIABLE,
    choose,
    find_horovod,
    hint_of_absence,
    understand,
)
from hvd_async.runtime.launch import Group, Seat, first_host, place_of, read, refuse_alone, warn_of_child
from tests.unit.forks import End, run_scripts

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500",
}  # fmt: skip
HOROVODRUN = {
    "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_HOSTNAME": "h", "HOROVOD_GLOO_RENDEZVOUS_PORT": "7",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_UNIVERSE_SIZE": "2", "PMIX_RANK": "1", "PMIX_NAMESPACE": "197440307",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[03-05,11]", "SLURM_NTASKS": "8",
}  # fmt: skip
SBATCH = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "7"}
KUBERNETES = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
ADDRESS = {"MASTER_ADDR": "a", "MASTER_PORT": "9"}
WORKER = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **ADDRESS}
"""Variables that a script, or a notebook's launcher, sets in a process that it starts."""
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}


SEVERAL_HOSTS = {**HOROVODRUN, "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}
MPI_ON_HOSTS = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}


@pytest.mark.parametrize(
    ("environment", "plane"),
    [
        ({}, TORCH),
        (TORCHRUN, TORCH),
        (HOROVODRUN, TORCH),
        (MPIRUN, TORCH),
        (SRUN, TORCH),
        (SEVERAL_HOSTS, HOROVOD),
        ({**SEVERAL_HOSTS, "MASTER_ADDR": "a"}, TORCH),
        ({**MPI_ON_HOSTS, "MASTER_ADDR": "a"}, TORCH),
        ({**SEVERAL_HOSTS, **ADDRESS}, TORCH),
        (MPI_ON_HOSTS, HOROVOD),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, HOROVOD),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", **ADDRESS}, TORCH),
        ({**HOROVODRUN, "HOROVOD_ELASTIC": "1"}, HOROVOD),
        ({**HOROVODRUN, **ADDRESS, "HOROVOD_ELASTIC": "1"}, HOROVOD),
        ({**HOROVODRUN, STAGE: "1"}, HOROVOD),
        ({**HOROVODRUN, STAGE: "0"}, TORCH),
        ({**HOROVODRUN, VARIABLE: "horovod"}, HOROVOD),
        ({**MPIRUN, VARIABLE: "horovod"}, HOROVOD),
    ],
)
def test_the_choice_on_a_gpu(environment: dict[str, str], plane: str) -> None:
    """And the other ranks of the job, of which only their own numbers and hosts differ, choose alike."""
    chosen = choose(environment, True, has_gpu=True)
    own = {"HOROVOD_RANK": "0", "HOROVOD_HOSTNAME": "g", "OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "0",
           "SLURM_NODEID": "0"}  # fmt: skip
    other = environment | {name: value for name, value in own.items() if name in environment}
    assert chosen.name == plane
    assert choose(other, True, has_gpu=True) == chosen


def test_a_script_that_calls_horovods_init_stays_on_horovod() -> None:
    for environment in ({}, HOROVODRUN, MPIRUN):
        assert choose(environment, True, has_gpu=True, horovods_script=True).name == HOROVOD
    assert choose(TORCHRUN, True, has_gpu=True, horovods_script=True).name == TORCH


@pytest.mark.parametrize(
    ("environment", "installed", "there"),
    [
        (HOROVODRUN, True, True),
        (MPIRUN, True, True),
        (MPIRUN, False, False),
        (TORCHRUN, True, False),
        ({**HOROVODRUN, VARIABLE: "torch"}, True, False),
    ],
)
def test_ranks_that_miss_others_hear_of_ranks_without_a_gpu(
    environment: dict[str, str], installed: bool, there: bool
) -> None:
    assert ("set HVD_ASYNC_TRANSPORT=horovod on all ranks" in hint_of_absence(environment, installed)) is there


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    """The environment without some variables."""
    return {name: value for name, value in environment.items() if name not in names}


# -- real processes ------------------------------------------------------------------------------------------------

needs_horovod = pytest.mark.skipif(find_horovod() is None, reason="Horovod is not installed for torch")
GPUS = """
{before}
os.environ.update({environment})
from unittest import mock
from hvd_async.runtime import data_plane
with mock.patch.object(data_plane, 'find_horovod', lambda: '.'), \\
     mock.patch('torch.cuda.device_count', lambda: {gpus}), \\
     mock.patch('torch.cuda.is_available', side_effect=AssertionError('it would initialize CUDA')):
    from hvd_async.torch.horovod_api import hvd
print(hvd.plane.name, hvd._api.__name__)
"""
REFUSED = """
os.environ.update({environment})
import {horovods}, {ours} as hvd
def refused(call):
    try:
        call()
    except ValueError as error:
        assert 'the only rank, but WORLD_SIZE says that there are 2' in str(error)
    else:
        raise AssertionError
refused(hvd.init)
refused(hvd.init)
{horovods}.init()
from {ours}.collectives import LIFECYCLE
refused(LIFECYCLE.engine)
"""
WITHOUT_HOROVOD = """
sys.modules['horovod'] = None
import hvd_async.torch as hvd
hvd.init()
assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()) == (0, 1, 0, 1)
p = torch.nn.Parameter(torch.ones(2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
p.grad = torch.ones(2)
optimizer.step()
optimizer.drain()
assert p.tolist() == [0.0, 0.0]
try:
    hvd.elastic.TorchState()
except NotImplementedError as error:
    assert 'torchrun --max-restarts' in str(error)
hvd.shutdown()
assert not hvd.is_initialized()
"""


def refused(framework: str) -> str:
    """Return a script in which one rank has variables of two."""
    environment = {"RANK": "0", "WORLD_SIZE": "2", VARIABLE: HOROVOD}
    return REFUSED.format(environment=environment, horovods=f"horovod.{framework}", ours=f"hvd_async.{framework}")


SCRIPTS: dict[str, tuple[str, str]] = {
    "a GPU": (GPUS.format(before="", environment=HOROVODRUN, gpus=1), "torch hvd_async.torch.distributed"),
    "no GPU": (GPUS.format(before="", environment=HOROVODRUN, gpus=0), "horovod horovod.torch"),
    "a GPU, and a script that imports Horovod": (
        GPUS.format(before="import horovod.torch", environment=HOROVODRUN, gpus=1), "horovod horovod.torch",
    ),
    "one rank with variables of two": (refused("torch"), ""),
    "torch without Horovod": (WITHOUT_HOROVOD, ""),
}  # fmt: skip
"""A script with torch, and what it prints. The binding asks for GPUs, and initializes none; variables of two ranks are
refused also where the script calls Horovod's own ``init()``: when training begins."""
WITH_HOROVOD = {*SCRIPTS} - {"a GPU", "torch without Horovod"}


@pytest.fixture(scope="module")
def clean() -> dict[str, str]:
    """The environment without what chooses a plane."""
    return without({**os.environ}, VARIABLE, STAGE)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory, clean: dict[str, str]) -> dict[str, End]:
    """How the scripts have ended."""
    scripts = [script for script, _ in SCRIPTS.values()]
    found = run_scripts(tmp_path_factory.mktemp("ends"), scripts, before="import torch", environment=clean)
    return dict(zip(SCRIPTS, found, strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[needs_horovod] if name in WITH_HOROVOD else []) for name in SCRIPTS]
)
def test_the_plane_that_a_process_takes(name: str, ends: dict[str, End]) -> None:
    end = ends[name]
    assert (end.out.strip(), end.code) == (SCRIPTS[name][1], 0), end.err


@needs_horovod
def test_one_rank_with_variables_of_two_is_refused_by_tensorflow_too(tmp_path, clean: dict[str, str]) -> None:
    (end,) = run_scripts(tmp_path, [refused("tensorflow")], environment=clean)
    assert end.code == 0, end.err


def test_horovods_init_does_not_suffice_on_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvd_async.torch.distributed import world

    monkeypatch.setattr(world, "_world", None)
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)
    with pytest.raises(NotInitializedError, match=r"call hvd.init\(\) first, then wrap the optimizer$"):
        world.current()
    monkeypatch.setitem(sys.modules, "horovod.torch", sys)
    with pytest.raises(NotInitializedError, match=r"use hvd_async.torch instead of horovod.torch; or, .*=horovod"):
        world.current()


@pytest.mark.parametrize("environment", [HOROVODRUN, {**TORCHRUN, VARIABLE: "horovod"}])
def test_horovod_that_is_not_installed_is_an_error_that_says_what_to_do(environment: dict[str, str]) -> None:
    with pytest.raises(ImportError, match=f"{VARIABLE}=torch and start the job with torchrun; .*install_horovod.sh"):
        choose(environment, has_horovod=False)


def test_an_unknown_plane_is_refused() -> None:
    with pytest.raises(ValueError, match=f"{VARIABLE} must be 'horovod' or 'torch', got 'nccl'"):
        choose({VARIABLE: "nccl"}, has_horovod=True)


# -- one table of launches -----------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A launch.

    Attributes:
        environment, group: what ``hvd.init()`` finds.
        plane: the data plane if Horovod is installed.
        place: rank, size, local rank and local size; None if the launch is refused. (Where they are not said: None.)
        error: of torch.distributed's plane, if it refuses; of both without a place.
    """

    environment: dict[str, str]
    plane: str
    place: tuple[int, int, int | None, int | None] | None
    error: str = ""
    group: Group | None = None


ALONE = (0, 1, None, None)
AT_ADDRESS = "does not know where rank 0 is. Set MASTER_ADDR"
LAUNCHES = {
    "python": Row({}, HOROVOD, ALONE),
    "python, asked for nothing": Row({VARIABLE: ""}, HOROVOD, ALONE),
    "horovodrun, asked for torch": Row({**HOROVODRUN, VARIABLE: TORCH}, TORCH, (1, 2, 1, 2)),
    "torchrun, asked for Horovod": Row({**TORCHRUN, VARIABLE: HOROVOD}, HOROVOD, (3, 4, 1, 2)),
    "torchrun": Row(TORCHRUN, TORCH, (3, 4, 1, 2)),
    "torchrun of one": Row({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                            "GROUP_WORLD_SIZE": "1"}, TORCH, (0, 1, 0, 1)),
    "torchrun, its variables removed": Row(without(TORCHRUN, "RANK", "LOCAL_RANK", "WORLD_SIZE"), TORCH, None,
                                           "RANK is not set"),
    "spawn, fork or notebook with variables": Row({**WORKER, "FORK_LAUNCHED": "1"}, TORCH, (1, 2, 1, None)),
    "spawn with a group": Row({}, TORCH, (1, 2, None, None), group=Group(1, 2)),
    "spawn with both": Row(WORKER, TORCH, (1, 2, 1, None), group=Group(1, 2)),
    "accelerate's notebook in debug mode": Row({"WORLD_SIZE": "2", **ADDRESS}, TORCH, (1, 2, None, None),
                                               group=Group(1, 2)),
    "accelerate launch --cpu": Row({**MPIRUN, **ADDRESS}, HOROVOD, (1, 2, 1, 2)),
    "Lightning's children": Row({"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0", **ADDRESS}, HOROVOD, None,
                                "RANK is not set, and WORLD_SIZE is"),
    "Lightning's children with its group": Row({"WORLD_SIZE": "2", "LOCAL_RANK": "1", **ADDRESS}, TORCH,
                                               (1, 2, None, None), group=Group(1, 2)),
    "Ray": Row({**WORKER, "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}, TORCH, (1, 2, 1, 2), group=Group(1, 2)),
    "Ray by tcp": Row({**without(WORKER, *ADDRESS), "NODE_RANK": "0"}, TORCH, (1, 2, 1, None), group=Group(1, 2)),
    "srun": Row(SRUN, HOROVOD, (5, 8, 1, None)),
    "srun --mpi=pmi2": Row({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}, HOROVOD, (5, 8, 1, None)),
    "srun --mpi=pmix": Row({**SRUN, "PMIX_RANK": "5"}, HOROVOD, (5, 8, 1, None)),
    "srun of one, or a shell in an allocation": Row({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1",
                                                     "SLURM_LOCALID": "0", "PMIX_RANK": "0"}, HOROVOD, (0, 1, 0, None)),
    "sbatch": Row(SBATCH, HOROVOD, ALONE),
    "srun with RANK set late": Row({**SRUN, "RANK": "5", "WORLD_SIZE": "8", **ADDRESS}, TORCH, (5, 8, 1, None)),
    "srun with a group": Row(SRUN, TORCH, (5, 8, 1, None), group=Group(5, 8)),
    "srun torchrun": Row({**SRUN, "SLURM_STEP_NUM_TASKS": "2", **TORCHRUN}, TORCH, (3, 4, 1, 2)),
    "srun torchrun --standalone": Row({**SRUN, **TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
                                       "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}, TORCH, None,
                                      "SLURM_STEP_NUM_TASKS says that there are 8.*unset SLURM_STEP_NUM_TASKS"),
    "srun torchrun --standalone of several": Row({**SRUN, **TORCHRUN, "GROUP_WORLD_SIZE": "1"}, TORCH, None,
                                                 "torchrun finds itself the only one.*unset SLURM_STEP_NUM_TASKS"),
    "the same with a group": Row({**SRUN, **TORCHRUN, "GROUP_WORLD_SIZE": "1"}, TORCH, None, "torchrun finds itself",
                                 Group(3, 4)),
    "the same with a group of all": Row({**SRUN, **TORCHRUN, "GROUP_WORLD_SIZE": "1"}, TORCH, (7, 8, None, None),
                                        group=Group(7, 8)),
    "sbatch mpirun": Row({**MPIRUN, **SRUN, "SLURM_STEP_NUM_TASKS": "2"}, HOROVOD, (1, 2, 1, 2)),
    "mpirun": Row(MPIRUN, HOROVOD, (1, 2, 1, 2)),
    "mpirun -np 1": Row({**MPIRUN, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0",
                         "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, HOROVOD, (0, 1, 0, 1)),
    "mpirun on hosts": Row({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, HOROVOD,
                           (1, 2, 0, 1), f"{AT_ADDRESS}.*mpirun -x MASTER_ADDR=HOST"),
    "mpirun without a job's name": Row(without(MPIRUN, "PMIX_NAMESPACE"), HOROVOD, (1, 2, 1, 2), AT_ADDRESS),
    "MPICH": Row(HYDRA, HOROVOD, (1, 2, 0, 1), f"{AT_ADDRESS}.*export both before mpiexec"),
    "MPICH with an address": Row({**HYDRA, **ADDRESS}, HOROVOD, (1, 2, 0, 1)),
    "MPICH's proxies by srun": Row({"PMI_RANK": "3", "PMI_SIZE": "8", **ADDRESS, **SRUN, "SLURM_PROCID": "0",
                                    "SLURM_STEP_NUM_TASKS": "2"}, HOROVOD, (3, 8, None, None)),
    "MPICH's proxy by srun": Row({"PMI_RANK": "3", "PMI_SIZE": "8", **ADDRESS, **SRUN, "SLURM_PROCID": "0",
                                  "SLURM_STEP_NUM_TASKS": "1"}, HOROVOD, (3, 8, None, None)),
    "MVAPICH": Row({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", **ADDRESS}, HOROVOD, (1, 2, None, None)),
    "prun": Row({"PMIX_RANK": "1", "PMIX_NAMESPACE": "n"}, HOROVOD, None, "PMIX_RANK is set, without the number"),
    "a child of the only rank": Row({"PMIX_RANK": "0", "OMPI_APP_CTX_NUM_PROCS": "1"}, HOROVOD, ALONE),
    "prun with a group": Row({"PMIX_RANK": "1"}, TORCH, (1, 2, None, None), group=Group(1, 2)),
    "jsrun": Row({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_RANK": "1",
                  "JSM_NAMESPACE_LOCAL_SIZE": "2", "PMIX_RANK": "1", "PMIX_NAMESPACE": "n"}, HOROVOD, (1, 2, 1, 2)),
    "PyTorchJob": Row(KUBERNETES, TORCH, (0, 2, None, None)),
    "PyTorchJob of one": Row({**KUBERNETES, "WORLD_SIZE": "1"}, TORCH, ALONE),
    "horovodrun": Row(HOROVODRUN, HOROVOD, (1, 2, 1, 2)),
    "horovodrun on hosts": Row({**HOROVODRUN, "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}, HOROVOD,
                               (1, 2, 0, 1), f"{AT_ADDRESS}.*export both before horovodrun"),
    "horovodrun in a pod": Row({**HOROVODRUN, "RANK": "0", "WORLD_SIZE": "1"}, HOROVOD, (1, 2, 1, 2)),
    "torchrun in horovodrun": Row({**HOROVODRUN, **TORCHRUN}, HOROVOD, (3, 4, 1, 2)),
    "horovodrun of one in a PyTorchJob": Row({**without(KUBERNETES, "MASTER_ADDR"), "HOROVOD_RANK": "0",
                                              "HOROVOD_SIZE": "1"}, HOROVOD, None, "WORLD_SIZE says that there are 2"),
    "TF_CONFIG": Row({"TF_CONFIG": '{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}}'}, HOROVOD, None,
                     "TF_CONFIG says that there are 2.*unset TF_CONFIG"),
    "TF_CONFIG of one": Row({"TF_CONFIG": '{"cluster": {"worker": ["b:1"]}}'}, HOROVOD, ALONE),
    "a group made before": Row(TORCHRUN, TORCH, (3, 4, 1, 2), group=Group(3, 4)),
    "a group with other numbers": Row(TORCHRUN, TORCH, (2, 4, None, None), group=Group(2, 4)),
    "a group of one": Row(TORCHRUN, TORCH, None, "group has 1 rank.* WORLD_SIZE says that there are 4", Group(0, 1)),
    "a group of some": Row(TORCHRUN, TORCH, None, "group has 2 rank.* WORLD_SIZE says that there are 4", Group(1, 2)),
    "a group of several torchruns": Row(TORCHRUN, TORCH, (7, 8, None, None), group=Group(7, 8)),
    "a group of one, alone": Row({}, HOROVOD, ALONE, group=Group(0, 1)),
    "a group that was ended": Row(TORCHRUN, TORCH, (3, 4, 1, 2), group=Group(0, 0)),
    "a group by file that was ended": Row({}, HOROVOD, None, "group was ended before", Group(0, 0)),
    "RANK alone": Row({"RANK": "0"}, HOROVOD, None, "WORLD_SIZE is not set, and RANK is"),
    "WORLD_SIZE alone": Row({"WORLD_SIZE": "2", **ADDRESS}, HOROVOD, None, "RANK is not set, and WORLD_SIZE is"),
    "WORLD_SIZE of one alone": Row({"WORLD_SIZE": "1"}, HOROVOD, ALONE),
    "RANK and a launcher": Row({**MPIRUN, "RANK": "0"}, HOROVOD, (1, 2, 1, 2)),
    "RANK too large": Row({**KUBERNETES, "RANK": "2"}, TORCH, None, "RANK must be .* 0 to 1, got 2 with WORLD_SIZE=2"),
    "no rank": Row({**KUBERNETES, "WORLD_SIZE": "0"}, TORCH, None, "WORLD_SIZE must be at least 1, got 0"),
    "no number": Row({**TORCHRUN, "RANK": "x"}, TORCH, None, "RANK must be a number, got 'x'"),
    "LOCAL_RANK too large": Row({**TORCHRUN, "LOCAL_RANK": "2"}, TORCH, None, "LOCAL_RANK must be from 0 to 1, got 2"),
    "port too large": Row({**KUBERNETES, "MASTER_PORT": "99999"}, TORCH, None, "MASTER_PORT must be from 1 to 65535"),
    "no port": Row(without(TORCHRUN, "MASTER_PORT"), TORCH, None, AT_ADDRESS),
    "no address": Row(without(TORCHRUN, "MASTER_ADDR"), TORCH, None, AT_ADDRESS),
    "address with a protocol": Row({**KUBERNETES, "MASTER_ADDR": "tcp://h"}, TORCH, None, "MASTER_ADDR must be .*tcp:"),
    "address with a port": Row({**KUBERNETES, "MASTER_ADDR": "h:29500"}, TORCH, None, "MASTER_ADDR must be "),
    "address by IPv6": Row({**KUBERNETES, "MASTER_ADDR": "fe80::1%eth0"}, TORCH, (0, 2, None, None)),
}  # fmt: skip


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_launch_is_one_job_or_refused(launch: str, installed: bool) -> None:
    """Horovod finds one rank in all of these if its MPI does not know of the others; that is refused too."""
    row = LAUNCHES[launch]
    plane = row.plane if installed else TORCH
    # (without Horovod horovodrun's ranks get the error that it is missing, unless they ask for this)
    asked = {} if installed or not {"HOROVOD_RANK", VARIABLE} & row.environment.keys() else {VARIABLE: TORCH}

    def init(ranks: int) -> tuple[str, tuple[int, int, int | None, int | None]]:
        job = understand({**row.environment, **asked}, row.group, installed)
        refuse_alone(row.environment, ranks if plane == HOROVOD else job.launch.size, row.group)
        assert job.plane.reason
        return job.plane.name, (job.launch.rank, job.launch.size, job.launch.local_rank, job.launch.local_size)

    if row.place is None or (plane == TORCH and row.error):
        with pytest.raises(ValueError, match=row.error):
            init(1)
        return
    assert init(row.place[1]) == (plane, row.place)
    if plane == HOROVOD and row.place[1] > 1:
        with pytest.raises(ValueError, match=r"the only rank, but .* says that there are \d.*unset "):
            init(1)


@pytest.mark.parametrize(
    ("environment", "size", "group", "warned"),
    [({}, 1, None, True), ({"WORLD_SIZE": "1"}, 1, None, False), ({}, 1, Group(0, 1), False), ({}, 2, None, False)],
)
def test_a_child_of_multiprocessing_that_is_the_only_rank_is_warned_of(
    environment: dict[str, str], size: int, group: Group | None, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(launch, "warn", lines.append)
    warn_of_child(environment, size, group)
    assert lines == []
    monkeypatch.setattr("multiprocessing.parent_process", object)
    warn_of_child(environment, size, group)
    assert ["multiprocessing has started it" in line for line in lines] == [True] * warned


def test_an_elastic_job_may_be_of_one_and_needs_horovod() -> None:
    elastic = {**HOROVODRUN, "HOROVOD_ELASTIC": "1"}
    refuse_alone(elastic, 1)
    assert understand(elastic, has_horovod=True).plane.name == HOROVOD
    for sizes in ({}, {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}):
        with pytest.raises(ValueError, match="needs Horovod's data plane: unset HVD_ASYNC_TRANSPORT"):
            read(elastic | sizes)


@pytest.mark.parametrize(
    ("group", "environment", "error"),
    [
        (Group(0, 2), {}, "the job has 1 rank.* default process group has 2"),
        (None, {"WORLD_SIZE": "2"}, "WORLD_SIZE says that there are 2"),
        (Group(0, 1), {"TORCHELASTIC_RUN_ID": "x"}, ""),
        (Group(0, 0), {"PMIX_RANK": "0"}, ""),
    ],
)
def test_ranks_that_a_script_makes_after_init_are_refused(
    group: Group | None, environment: dict[str, str], error: str
) -> None:
    """When training begins. What merely was removed, or ended, says nothing then."""
    with pytest.raises(ValueError, match=error) if error else contextlib.nullcontext():
        refuse_alone(environment, 1, group, unknown=False)


@pytest.mark.parametrize(
    ("environment", "own", "jobs"),
    [
        (HOROVODRUN, {"HOROVOD_RANK": "0", "HOROVOD_LOCAL_RANK": "0"}, "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        (MPIRUN, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "PMIX_NAMESPACE"),
        (SRUN, {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}, "SLURM_JOB_ID"),
    ],
)
def test_ranks_derive_one_place_to_meet_and_jobs_different_ones(
    environment: dict[str, str], own: dict[str, str], jobs: str
) -> None:
    meets = [read(one)[2:4] for one in (environment, environment | own, {**environment, jobs: "8"})]
    assert meets[0] == meets[1] != meets[2]
    assert meets[0][0] == ("gpu03" if environment is SRUN else "127.0.0.1")
    assert read({**environment, **ADDRESS})[2:4] == ("a", 9)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[1-3]", "n1"),
        ("n[07,09]-ib,m1", "n07-ib"),
        ("x-1,y", "x-1"),
        ("rack[1-2]n[3-4]", "rack1n3"),
        ("rack[1,3]n4,m[1-2]", "rack1n4"),
    ],
)
def test_the_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("seats", "places"),
    [
        ([Seat("a")], [(0, 1, 0, 1, True, "a")]),
        (
            [Seat("a"), Seat("a"), Seat("b"), Seat("b")],
            [(0, 2, 0, 2, True, "a"), (1, 2, 0, 2, True, "a"), (0, 2, 1, 2, True, "b"), (1, 2, 1, 2, True, "b")],
        ),
        (
            [Seat("a"), Seat("b"), Seat("a")],
            [(0, 2, 0, 2, False, "a"), (0, 1, 1, 2, False, "b"), (1, 2, 0, 1, False, "a")],
        ),
        # containers of one name: by torchrun's numbers, by places that occur twice, by machines
        ([Seat("c", "0", 0, 1), Seat("c", "1", 0, 1)], [(0, 1, 0, 2, True, "c"), (0, 1, 1, 2, True, "c#1")]),
        ([Seat("c", "", 0), Seat("c", "", 0)], [(0, 1, 0, 2, True, "c"), (0, 1, 1, 2, True, "c#1")]),
        (
            [Seat("c", "", 0), Seat("d", "", 0), Seat("c", "", 0)],
            [(0, 1, 0, 3, True, "c"), (0, 1, 1, 3, True, "d"), (0, 1, 2, 3, True, "c#1")],
        ),
        ([Seat("c", "boot 1"), Seat("c", "boot 2")], [(0, 1, 0, 2, True, "c"), (0, 1, 1, 2, True, "c#1")]),
        # ranks that go round the hosts, and places in another order than the ranks
        (
            [Seat("a", "", 1, 2), Seat("b", "", 0, 2), Seat("a", "", 0, 2), Seat("b", "", 1, 2)],
            [(1, 2, 0, 2, True, "a"), (0, 2, 1, 2, True, "b"), (0, 2, 0, 2, True, "a"), (1, 2, 1, 2, True, "b")],
        ),
        ([Seat("a", "", 0), Seat("a")], [(0, 2, 0, 1, True, "a"), (1, 2, 0, 1, True, "a")]),
    ],
)
def test_places_on_hosts(seats: list[Seat], places: list[tuple[int, int, int, int, bool, str]]) -> None:
    assert [place_of(rank, seats) for rank in range(len(seats))] == places
