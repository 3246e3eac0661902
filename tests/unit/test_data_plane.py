"""Which data plane torch ranks take, by their environment, and what the environment says of ranks without Horovod."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvd_async.errors import NotInitializedError
from hvd_async.runtime.data_plane import HOROVOD, STAGE, TORCH, VARIABLE, choose, find_horovod, hint_of_absence
from hvd_async.runtime.launch import Place, first_host, place_of, read

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "GROUP_RANK": "1",
    "MASTER_ADDR": "a", "MASTER_PORT": "29500",
}  # fmt: skip
HOROVODRUN = {
    "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_HOSTNAME": "h",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "7",
}  # fmt: skip
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NODEID": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-05,11]",
}  # fmt: skip
KUBERNETES = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environment", "installed", "plane"),
    [
        ({}, True, HOROVOD),
        ({}, False, TORCH),
        (TORCHRUN, True, TORCH),
        (TORCHRUN, False, TORCH),
        (KUBERNETES, True, TORCH),
        (HOROVODRUN, True, HOROVOD),
        (MPIRUN, True, HOROVOD),
        (MPIRUN, False, TORCH),
        (SRUN, True, HOROVOD),
        (SRUN, False, TORCH),
        ({**HOROVODRUN, **TORCHRUN}, True, HOROVOD),
        ({**HOROVODRUN, VARIABLE: "torch"}, True, TORCH),
        ({**TORCHRUN, VARIABLE: "horovod"}, True, HOROVOD),
        ({VARIABLE: ""}, True, HOROVOD),
    ],
)
def test_the_choice(environment: dict[str, str], installed: bool, plane: str) -> None:
    chosen = choose(environment, installed)
    assert chosen.name == plane
    assert chosen.reason


SEVERAL_HOSTS = {**HOROVODRUN, "HOROVOD_LOCAL_SIZE": "1"}
ADDRESS = {"MASTER_ADDR": "a", "MASTER_PORT": "9"}


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
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "a"}, TORCH),
        ({**SEVERAL_HOSTS, **ADDRESS}, TORCH),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, HOROVOD),
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
    assert choose(environment, True, has_gpu=True).name == plane


@pytest.mark.parametrize("environment", [HOROVODRUN, SEVERAL_HOSTS, {**SEVERAL_HOSTS, **ADDRESS}, MPIRUN, SRUN])
def test_all_ranks_of_a_job_choose_alike(environment: dict[str, str]) -> None:
    """Only ranks' own numbers and hosts differ."""
    own = {"HOROVOD_RANK": "0", "HOROVOD_HOSTNAME": "g", "OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "0",
           "SLURM_NODEID": "0"}  # fmt: skip
    other = environment | {name: value for name, value in own.items() if name in environment}
    assert choose(environment, True, has_gpu=True) == choose(other, True, has_gpu=True)


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


IMPORT = (
    "import sys\n{before}\nfrom unittest import mock\nimport torch\nfrom hvd_async.runtime import data_plane\n"
    "with mock.patch.object(data_plane, 'find_horovod', lambda: '.'), \\\n"
    "     mock.patch('torch.cuda.device_count', lambda: {gpus}), \\\n"
    "     mock.patch('torch.cuda.is_available', side_effect=AssertionError('it would initialize CUDA')):\n"
    "    from hvd_async.torch.horovod_api import PLANE, hvd\n"
    "print(PLANE.name, hvd.__name__)\n"
)
needs_horovod = pytest.mark.skipif(find_horovod() is None, reason="Horovod is not installed for torch")


@pytest.mark.parametrize(
    ("before", "gpus", "printed"),
    [
        ("", 1, "torch hvd_async.torch.distributed"),
        pytest.param("", 0, "horovod horovod.torch", marks=needs_horovod),
        pytest.param("import horovod.torch", 1, "horovod horovod.torch", marks=needs_horovod),
    ],
)
def test_the_binding_asks_for_gpus_and_initializes_none(before: str, gpus: int, printed: str) -> None:
    env = {name: value for name, value in os.environ.items() if name not in (VARIABLE, STAGE)} | HOROVODRUN
    code = IMPORT.format(before=before, gpus=gpus)
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert (ended.stdout.strip(), ended.returncode) == (printed, 0), ended.stderr


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


def test_torch_works_without_horovod() -> None:
    code = (
        "import sys\nsys.modules['horovod'] = None\nimport torch, hvd_async.torch as hvd\nhvd.init()\n"
        "assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()) == (0, 1, 0, 1)\n"
        "p = torch.nn.Parameter(torch.ones(2))\n"
        "optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))\n"
        "p.grad = torch.ones(2)\noptimizer.step()\noptimizer.drain()\nassert p.tolist() == [0.0, 0.0]\n"
        "try:\n    hvd.elastic.TorchState()\nexcept NotImplementedError as error:\n"
        "    assert 'torchrun --max-restarts' in str(error)\n"
        "hvd.shutdown()\nassert not hvd.is_initialized()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr


def test_torchruns_environment() -> None:
    assert read(TORCHRUN) == (3, 4, "a", 29500, "node 1", "torchrun")


def test_horovodruns_environment() -> None:
    own, other = read(HOROVODRUN), read({**HOROVODRUN, "HOROVOD_RANK": "0"})
    assert (own.rank, own.size, own.address, own.host, own.launcher) == (1, 2, "127.0.0.1", "h", "horovodrun")
    assert own.port == other.port
    assert own.port != read({**HOROVODRUN, "HOROVOD_GLOO_RENDEZVOUS_PORT": "8"}).port


def test_several_hosts_of_horovodrun_need_an_address() -> None:
    with pytest.raises(ValueError, match=r"rank 1 of 2 does not know.*export both before horovodrun"):
        read(SEVERAL_HOSTS)
    assert read({**SEVERAL_HOSTS, **ADDRESS})[2:4] == ("a", 9)


def test_variables_of_a_pod_do_not_hide_horovodruns() -> None:
    assert read({**HOROVODRUN, "RANK": "0", "WORLD_SIZE": "1"})[:2] == (1, 2)
    assert read({**HOROVODRUN, **TORCHRUN})[:2] == (3, 4)


def test_a_proxy_that_srun_has_started_does_not_hide_its_ranks() -> None:
    hydra = {"PMI_RANK": "3", "PMI_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "9"}
    assert read({**hydra, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"})[:2] == (3, 8)
    assert read({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}).launcher == "srun"


def test_an_elastic_job_is_refused() -> None:
    with pytest.raises(ValueError, match="needs Horovod's data plane: unset HVD_ASYNC_TRANSPORT"):
        read({**HOROVODRUN, "HOROVOD_ELASTIC": "1"})


def test_other_mpis_need_an_address() -> None:
    with pytest.raises(ValueError, match=r"rank 1 of 2 does not know.*export both before mpiexec"):
        read({"PMI_RANK": "1", "PMI_SIZE": "2"})


def test_open_mpis_environment() -> None:
    own = read({**MPIRUN, "PMIX_NAMESPACE": "job1"})
    other = read({**MPIRUN, "PMIX_NAMESPACE": "job1", "OMPI_COMM_WORLD_RANK": "0"})
    assert (own.rank, own.size, own.address) == (1, 2, "127.0.0.1")
    assert own.port == other.port
    assert own.port != read({**MPIRUN, "PMIX_NAMESPACE": "job2"}).port


def test_several_hosts_of_open_mpi_need_an_address() -> None:
    with pytest.raises(ValueError, match="mpirun -x MASTER_ADDR=HOST"):
        read({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_slurms_environment() -> None:
    own = read(SRUN)
    assert (own.rank, own.size, own.address, own.host) == (5, 8, "gpu03", "node 1")
    assert read({**SRUN, "MASTER_ADDR": "b", "MASTER_PORT": "99"})[2:4] == ("b", 99)


def test_a_batch_script_is_one_process() -> None:
    """(SLURM tells it the number of tasks that srun would start.)"""
    assert read({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"})[:2] == (0, 1)


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_half_an_environment_is_refused(missing: str) -> None:
    with pytest.raises(ValueError, match=r"rank 3 of 4 does not know where rank 0 is.*torchrun"):
        read({name: value for name, value in TORCHRUN.items() if name != missing})


def test_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="RANK must be a number, got 'x'"):
        read({**TORCHRUN, "RANK": "x"})


@pytest.mark.parametrize(
    ("nodes", "first"), [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[07,09]-ib,m1", "n07-ib"), ("x-1,y", "x-1")]
)
def test_the_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_places_on_hosts() -> None:
    hosts = ["a", "a", "b", "b"]
    assert [place_of(rank, hosts) for rank in range(4)] == [
        Place(0, 2, 0, 2, True), Place(1, 2, 0, 2, True), Place(0, 2, 1, 2, True), Place(1, 2, 1, 2, True),
    ]  # fmt: skip
    assert place_of(2, ["a", "b", "a"]) == Place(1, 2, 0, 1, False)
    assert place_of(0, ["a"]) == Place(0, 1, 0, 1, True)
