"""What a launcher's environment says about this process: its rank, the number of ranks, and where they meet."""

from __future__ import annotations

import re
import socket
import zlib
from collections.abc import Mapping
from typing import NamedTuple

FIRST_PORT, PORTS = 20000, 20000
"""Ports at which the ranks of SLURM's, Open MPI's and horovodrun's jobs meet, below Linux' ephemeral ports."""


class Launch(NamedTuple):
    """One rank of a job.

    Attributes:
        rank: this process's.
        size: number of ranks.
        address, port: where rank 0 listens; empty and 0 where there is only one rank.
        host: the name of this rank's host, equal for the ranks of one host.
        launcher: what started the process, for messages.
    """

    rank: int
    size: int
    address: str
    port: int
    host: str
    launcher: str


def read(environment: Mapping[str, str]) -> Launch:
    """Return what the environment says: torchrun's and compatible variables, horovodrun's, those of Open MPI, SLURM and
    other MPIs, or a single process.

    Raises:
        ValueError: a variable is missing or is not a number, or the job is an elastic one of horovodrun.
    """
    host = socket.gethostname()
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment or "HOROVOD_RANK" not in environment
    if by_torchrun and "RANK" in environment and "WORLD_SIZE" in environment:
        host = f"node {environment['GROUP_RANK']}" if "GROUP_RANK" in environment else host
        return _launch(environment, "torchrun", ("RANK", "WORLD_SIZE"), host, "", 0)
    if "HOROVOD_RANK" in environment:
        if "HOROVOD_ELASTIC" in environment:
            raise ValueError("an elastic job of horovodrun needs Horovod's data plane: unset HVD_ASYNC_TRANSPORT.")
        names, job = ("HOROVOD_RANK", "HOROVOD_SIZE"), environment.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
        host = environment.get("HOROVOD_HOSTNAME", host)
        one_host = environment.get("HOROVOD_LOCAL_SIZE") == environment.get("HOROVOD_SIZE")
        return _launch(environment, "horovodrun", names, host, "127.0.0.1" if one_host else "", _port(job))
    if "OMPI_COMM_WORLD_RANK" in environment:
        names, job = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), environment.get("PMIX_NAMESPACE", "")
        one_host = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environment.get("OMPI_COMM_WORLD_SIZE")
        return _launch(environment, "mpirun", names, host, "127.0.0.1" if one_host else "", _port(job))
    pmi, tasks = environment.get("PMI_SIZE", "1"), environment.get("SLURM_STEP_NUM_TASKS", "1")
    if int(tasks) > 1 and pmi in ("1", tasks):  # (else mpiexec has started a proxy on each host by srun)
        job = f"{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"
        host = f"node {environment['SLURM_NODEID']}" if "SLURM_NODEID" in environment else host
        first = first_host(environment.get("SLURM_STEP_NODELIST", ""))
        return _launch(environment, "srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), host, first, _port(job))
    if int(pmi) > 1:  # (MPICH, Intel MPI)
        return _launch(environment, "mpiexec", ("PMI_RANK", "PMI_SIZE"), host, "", 0)
    return Launch(0, 1, "", 0, host, "no launcher")


def _launch(
    environment: Mapping[str, str], launcher: str, names: tuple[str, str], host: str, address: str, port: int
) -> Launch:
    rank, size = (_number(environment, name) for name in names)
    address = environment.get("MASTER_ADDR", address)
    port = _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else port
    if size > 1 and not (address and port):
        how = {"mpirun": "mpirun -x MASTER_ADDR=HOST ...", "torchrun": "start the ranks with torchrun"}
        export = f"export both before {launcher}"
        raise ValueError(
            f"rank {rank} of {size} does not know where rank 0 is. Set MASTER_ADDR to the host of rank 0 and "
            f"MASTER_PORT to a free port there ({how.get(launcher, export)})."
        )
    return Launch(rank, size, address, port, host, launcher)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise ValueError(f"{name} must be a number, got {text!r}. Start the ranks with a launcher, such as torchrun.")
    return int(text)


def _port(job: str) -> int:
    """Return a port that all ranks of a job derive from its name."""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: "gpu03" of "gpu[03-05,11],cpu1"."""
    match = re.match(r"([^,\[]*)(?:\[([^\]]*)\])?([^,\[]*)", nodes)
    assert match is not None
    prefix, ranges, suffix = match.groups()
    return f"{prefix}{re.split('[-,]', ranges)[0] if ranges else ''}{suffix}"


class Place(NamedTuple):
    """A rank among its host's, and its host among all; see Horovod's functions of these names."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool


def place_of(rank: int, hosts: list[str]) -> Place:
    """Return the place of a rank.

    Args:
        rank: which.
        hosts: every rank's host.
    """
    local: dict[str, list[int]] = {}
    for one, host in enumerate(hosts):
        local.setdefault(host, []).append(one)
    mates = local[hosts[rank]]
    local_rank = mates.index(rank)
    peers = [ranks[local_rank] for ranks in local.values() if len(ranks) > local_rank]
    sizes = {len(ranks) for ranks in local.values()}
    return Place(local_rank, len(mates), peers.index(rank), len(peers), len(sizes) == 1)
