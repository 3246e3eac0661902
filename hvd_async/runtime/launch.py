"""Launch of this process, read from its launcher's environment and the default process group: its rank, the number of
ranks, its place on its host, and where the ranks meet.

A launch that is not understood is an error, never a job of one rank.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hvd_async.runtime.log import warn

FIRST_PORT, PORTS = 20000, 20000
"""Ports at which the ranks of SLURM's, Open MPI's and horovodrun's jobs meet, below Linux' ephemeral ports."""


class Launcher(NamedTuple):
    """The variables by which a launcher tells a process its place; empty where it has none.

    Attributes:
        name: for messages.
        rank, size: this process's number, and how many there are.
        local_rank, local_size: the same on its host.
        nodes: numbers of the host, the first that is set counts.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    nodes: tuple[str, ...] = ()


TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("GROUP_RANK", "NODE_RANK"))
"""Also of all that set the same variables: accelerate, Ray, PyTorchJob, notebooks, scripts."""
HOROVODRUN = Launcher("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
OPEN_MPI = Launcher(
    "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
JSRUN = Launcher(
    "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"
)
MVAPICH = Launcher(
    "mpiexec", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
)
SRUN = Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nodes=("SLURM_NODEID",))
HYDRA = Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""MPICH's launcher, Intel MPI's and others of the process management interface (PMI)."""
LAUNCHERS = (TORCHRUN, HOROVODRUN, OPEN_MPI, JSRUN, MVAPICH, SRUN, HYDRA)
"""The inner ones first: ``srun`` may start a ``torchrun`` on each host."""
MORE_SIZES = ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "OMPI_APP_CTX_NUM_PROCS")
"""More variables that are over 1 only where there are several ranks. (The last is all that children of a process have
in which MPI was started without a launcher.)"""
PMIX = "PMIX_RANK"
"""All that PRRTE's ``prun`` sets; other launchers set it too, with their own."""


class Group(NamedTuple):
    """torch.distributed's default process group, as far as it says who this process is.

    Attributes:
        rank, size: in it; 0 and 0 for one that was ended, of which torch keeps no more.
    """

    rank: int
    size: int


class Launch(NamedTuple):
    """One rank of a job.

    Attributes:
        rank: this process's.
        size: number of ranks.
        address, port: where rank 0 listens; empty and 0 where there is only one rank, or a default process group.
        launcher: what started the process, for messages.
        local_rank, local_size: its place among the ranks of its host; None where the environment does not say.
        node: number of its host; empty where the environment does not say.
        host: name of its host, if the launcher has given it one.
    """

    rank: int
    size: int
    address: str = ""
    port: int = 0
    launcher: str = "no launcher"
    local_rank: int | None = None
    local_size: int | None = None
    node: str = ""
    host: str = ""


ALONE = Launch(0, 1)


def read(environment: Mapping[str, str], group: Group | None = None) -> Launch:
    """Return this process's place in a job whose ranks meet on torch.distributed.

    The ranks are those of the default process group if there is one; else the environment says which rank this is.

    Args:
        environment: variables by name.
        group: the default process group; None if there is none.

    Raises:
        ValueError: a variable is missing, or cannot be; the group or a variable says that there are more ranks; or the
            job is an elastic one of horovodrun.
    """
    if group is not None and group.size > 1:
        return _of_group(environment, group)
    started = parse(environment)
    _refuse_one_host(environment, started)
    if started.launcher == HOROVODRUN.name and is_elastic(environment):
        raise ValueError("an elastic job of horovodrun needs Horovod's data plane: unset HVD_ASYNC_TRANSPORT.")
    if started.size == 1:
        refuse_alone(environment, 1, group)
        return started
    if group is not None and group.size == 1:
        raise _smaller(environment, group, started.size)
    return _with_address(environment, started)


def _smaller(environment: Mapping[str, str], group: Group, size: int) -> ValueError:
    variable = next(one.size for one in LAUNCHERS if environment.get(one.size) == str(size))
    return ValueError(
        f"the default process group has {group.size} rank(s), but {variable} says that there are {size}. Call "
        f"hvd.init() before init_process_group(), or make the group of all ranks."
    )


def _of_group(environment: Mapping[str, str], group: Group) -> Launch:
    """Return a rank of a default process group; its place on the host is the environment's, if that is of this rank.

    Raises:
        ValueError: the environment is of more ranks; or of one of several torchruns that do not know each other.
    """
    started = known(environment)
    if started.size > group.size:
        raise _smaller(environment, group, started.size)
    if (started.rank, started.size) == group:
        _refuse_one_host(environment, started)
    else:
        started = Launch(*group)
    return started._replace(launcher="torch.distributed.init_process_group()")


def _refuse_one_host(environment: Mapping[str, str], started: Launch) -> None:
    """Refuse a torchrun that is alone, where the launcher that started it has several tasks: each would train apart.

    Raises:
        ValueError: the launcher has.
    """
    if started.launcher != TORCHRUN.name or started.size == 1 or environment.get("GROUP_WORLD_SIZE") != "1":
        return
    for outer in LAUNCHERS[1:]:
        tasks = environment.get(outer.size, "")
        if tasks.isdecimal() and int(tasks) > 1:
            raise ValueError(
                f"torchrun finds itself the only one, but {outer.size} says that there are {tasks}, and each would "
                f"train apart. Start one per host, as in `{outer.name} torchrun --nnodes {tasks} --rdzv-backend c10d "
                f"--rdzv-endpoint HOST:29500 ...`, without --standalone. If this one is to train alone, unset "
                f"{outer.size}."
            )


def parse(environment: Mapping[str, str]) -> Launch:
    """Return what a launcher's variables say, apart from where the ranks meet; ``ALONE`` if there are none.

    Raises:
        ValueError: one of a launcher's variables is missing while others are set, or is not a number that can be.
    """
    started = partly = None
    for launcher in _in_order(environment):
        there = [environment[name] for name in (launcher.rank, launcher.size) if environment.get(name)]
        if len(there) < 2:
            if there and environment.get(launcher.size) != "1":
                partly = partly or launcher
        elif started is None:
            started = _parsed(environment, launcher)
        elif started.local_rank is None and there == [str(started.rank), str(started.size)]:
            other = _parsed(environment, launcher)  # (a script has set RANK and WORLD_SIZE by these)
            started = started._replace(local_rank=other.local_rank, local_size=other.local_size, node=other.node)
    if started is not None:
        return started
    if "TORCHELASTIC_RUN_ID" in environment:
        partly = partly or TORCHRUN
    if partly is not None:
        missing = partly.size if environment.get(partly.rank) else partly.rank
        there_text = next((f"{n} is set" for n in (partly.rank, partly.size) if environment.get(n)), "torchrun's are")
        raise ValueError(
            f"{missing} is not set, and {there_text}: which rank of how many is this? Start the ranks with a launcher, "
            f"such as torchrun, or set {partly.rank} and {partly.size} before hvd.init()."
        )
    return ALONE


def known(environment: Mapping[str, str]) -> Launch:
    """Return what ``parse`` does, ``ALONE`` where it raises."""
    try:
        return parse(environment)
    except ValueError:
        return ALONE


def _in_order(environment: Mapping[str, str]) -> Iterator[Launcher]:
    """Yield the launchers that can have started this process, the innermost first."""
    pod = "HOROVOD_RANK" in environment and "TORCHELASTIC_RUN_ID" not in environment
    tasks, pmi = environment.get(SRUN.size), environment.get(HYDRA.size)
    for launcher in (HOROVODRUN, TORCHRUN, *LAUNCHERS[2:]) if pod else LAUNCHERS:
        # A batch script has SLURM_PROCID=0 and no step. Where mpiexec has started a proxy on each host by srun, the
        # step's tasks are the proxies; and srun that serves one task, or PMI itself, says the same as PMI.
        if launcher is not SRUN or (tasks and (pmi in (None, "1", tasks) or "PMI_RANK" not in environment)):
            yield launcher


def _parsed(environment: Mapping[str, str], launcher: Launcher) -> Launch:
    size = _number(environment, launcher.size, 1, None)
    rank = _number(environment, launcher.rank, 0, size - 1, launcher.size)
    local_size = local_rank = None
    if environment.get(launcher.local_size):
        local_size = _number(environment, launcher.local_size, 1, size, launcher.size)
    if environment.get(launcher.local_rank):
        most, of = (size - 1, launcher.size) if local_size is None else (local_size - 1, launcher.local_size)
        local_rank = _number(environment, launcher.local_rank, 0, most, of)
    node = next((environment[name] for name in launcher.nodes if environment.get(name)), "")
    host = environment.get("HOROVOD_HOSTNAME", "") if launcher is HOROVODRUN else ""
    return Launch(rank, size, "", 0, launcher.name, local_rank, local_size, node, host)


def _number(environment: Mapping[str, str], name: str, least: int, most: int | None, of: str = "") -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{name} must be a number, got {text!r}. Start the ranks with a launcher, such as torchrun.")
    if int(text) < least or (most is not None and int(text) > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {limits}, got {text}{f' with {of}={environment[of]}' if of else ''}.")
    return int(text)


def _with_address(environment: Mapping[str, str], started: Launch) -> Launch:
    """Return a rank with the place at which it meets the others: MASTER_ADDR and MASTER_PORT, or what all ranks can
    derive from the launcher's variables."""
    address, job = "127.0.0.1" if started.local_size == started.size else "", ""
    if started.launcher == HOROVODRUN.name:
        job = environment.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    elif started.launcher in (OPEN_MPI.name, JSRUN.name):
        job = environment.get("PMIX_NAMESPACE", "")
    elif started.launcher == SRUN.name:
        address = first_host(environment.get("SLURM_STEP_NODELIST", ""))
        job = ".".join(environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")).strip(".")
    elif started.launcher == TORCHRUN.name:
        address = ""
    address = environment.get("MASTER_ADDR") or address
    port = _number(environment, "MASTER_PORT", 1, 65535) if environment.get("MASTER_PORT") else _port(job)
    if not (address and port):
        how = {"mpirun": "mpirun -x MASTER_ADDR=HOST ...", "torchrun": "start the ranks with torchrun"}
        export = f"export both before {started.launcher}"
        raise ValueError(
            f"rank {started.rank} of {started.size} does not know where rank 0 is. Set MASTER_ADDR to the host of rank "
            f"0 and MASTER_PORT to a free port there ({how.get(started.launcher, export)})."
        )
    if not re.fullmatch(r"[\w.-]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[\w:.%-]*", address):
        raise ValueError(f"MASTER_ADDR must be the name or address of a host, without a protocol or port: {address!r}.")
    return started._replace(address=address, port=port)


def _port(job: str) -> int:
    """Return a port that all ranks of a job derive from its name; 0 without one, since all jobs would have it."""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS if job else 0


def is_elastic(environment: Mapping[str, str]) -> bool:
    """Return whether horovodrun has started an elastic job, whose size changes, also to 1."""
    return environment.get("HOROVOD_ELASTIC", "0") not in ("", "0")


def refuse_alone(environment: Mapping[str, str], size: int, group: Group | None = None, unknown: bool = True) -> None:
    """Refuse a job of one rank where anything says that there are more, which would train apart.

    Args:
        environment: variables by name.
        size: number of ranks of the job.
        group: the default process group.
        unknown: whether ``hvd.init()`` is still to find out how many ranks there are.

    Raises:
        ValueError: a variable, or the default process group, says that there are more ranks.
    """
    if is_elastic(environment):
        return
    if group is not None and group.size > size:
        raise ValueError(
            f"the job has {size} rank(s), but the default process group has {group.size}. Call hvd.init() after "
            f"init_process_group()."
        )
    if size > 1:
        return
    sizes = [(name, environment.get(name, "")) for name in (*(one.size for one in LAUNCHERS), *MORE_SIZES)]
    unknown = unknown and not any(text for _, text in sizes)
    sizes.append(("TF_CONFIG", str(_tasks(environment.get("TF_CONFIG", "")))))
    found = [f"{name} says that there are {text}" for name, text in sizes if text.isdecimal() and int(text) > 1]
    only = "this process finds itself the only rank, but"
    if unknown and group is not None and group.size == 0:
        raise ValueError(
            f"{only} a default process group was ended before. Call hvd.init() before destroy_process_group(), or set "
            f"RANK=0 and WORLD_SIZE=1 if it is to train alone."
        )
    if unknown and environment.get(PMIX):
        found.append(f"{PMIX} is set, without the number of ranks")
    if found:
        how = (
            "Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT before hvd.init(), start the ranks with torchrun"
            if environment.get("HVD_ASYNC_TRANSPORT") != "horovod"
            else "Unset HVD_ASYNC_TRANSPORT"
        )
        raise ValueError(
            f"{only} {found[0]}. {how}, or start them with horovodrun, or an mpirun that Horovod was built for. If "
            f"this process is to train alone, unset {found[0].split()[0]}."
        )


def warn_of_child(environment: Mapping[str, str], size: int, group: Group | None = None) -> None:
    """Warn if ``multiprocessing`` has started this process, which finds itself the only rank, and nothing says more.

    Args:
        environment: variables by name.
        size: number of ranks of the job.
        group: the default process group.
    """
    is_known = group is not None or any(environment.get(one.size) for one in LAUNCHERS)
    if size == 1 and not is_known and multiprocessing.parent_process() is not None:
        warn(
            "this process finds itself the only rank, but multiprocessing has started it: if it has started more, each "
            "trains apart. Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or call init_process_group(), before "
            "hvd.init(). If this process is to train alone, set RANK=0 and WORLD_SIZE=1."
        )


def _tasks(cluster: str) -> int:
    """Return the number of training processes in TensorFlow's ``TF_CONFIG``, 1 if it cannot be read."""
    try:
        roles = json.loads(cluster)["cluster"]
        return max(1, sum(len(roles.get(role, ())) for role in ("chief", "master", "worker")))
    except (ValueError, KeyError, TypeError, AttributeError):
        return 1


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: "gpu03" of "gpu[03-05,11],cpu1", "rack1n3" of "rack[1-2]n[3-4]"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())


class Seat(NamedTuple):
    """Place of a rank, as far as the rank knows it: name and number of its host, and its place there."""

    host: str
    node: str = ""
    local_rank: int | None = None
    local_size: int | None = None


class Place(NamedTuple):
    """A rank among its host's, and its host among all; see Horovod's functions of these names.

    Attributes:
        host: its name, which no other host of the job has.
    """

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool
    host: str


def place_of(rank: int, seats: Sequence[Seat]) -> Place:
    """Return the place of a rank.

    Two hosts of one name are two if their numbers differ, or if two ranks have the same place there.

    Args:
        rank: which.
        seats: every rank's.
    """
    by_name: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for one, seat in enumerate(seats):
        by_name[seat.host, seat.node].append(one)
    hosts: list[dict[int, int]] = []
    for ranks in by_name.values():
        known = all(seats[one].local_rank is not None for one in ranks)
        own: defaultdict[int, dict[int, int]] = defaultdict(dict)
        taken: Counter[int] = Counter()
        for place, one in enumerate(ranks):
            local = seats[one].local_rank if known else place
            assert local is not None
            own[taken[local]][local] = one  # (the n-th rank of a place is on the n-th host of the name)
            taken[local] += 1
        hosts += own.values()
    hosts.sort(key=lambda host: min(host.values()))
    (mine,) = (host for host in hosts if rank in host.values())
    (local_rank,) = (local for local, one in mine.items() if one == rank)
    peers = [host[local_rank] for host in hosts if local_rank in host]
    sizes, name = {len(host) for host in hosts}, seats[rank].host
    namesakes = [host for host in hosts if seats[min(host.values())].host == name]
    number = namesakes.index(mine)
    return Place(
        local_rank, seats[rank].local_size or len(mine), peers.index(rank), len(peers), len(sizes) == 1,
        f"{name}#{number}" if number else name,
    )  # fmt: skip
