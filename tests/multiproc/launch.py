"""Starts real Horovod jobs for tests, collects what their ranks wrote, and sees to it that no process is left behind.

A job is a script of ``jobs/``. Every process of it carries a job id in its environment, which is how processes are
found that the launcher has lost sight of. Results travel by files (one JSON a rank), never by the launcher's output.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from forked_rank import connect, read
from horovod.runner.http.http_server import RendezvousServer

from scripts.gloo_ranks import assign, environment

JOBS = Path(__file__).parent / "jobs"
REPOSITORY = Path(__file__).parents[2]
PLANE = os.environ.get("HVD_ASYNC_TEST_PLANE", "horovod")
"""The data plane of the torch jobs that run on either: "torch" has all of them tried without Horovod."""
JOB_VARIABLE = "HVD_ASYNC_TEST_JOB"
OUT_VARIABLE = "HVD_ASYNC_TEST_OUT"
DEVICE_VARIABLE = "HVD_ASYNC_TEST_DEVICE"
DEVICE = os.environ.get(DEVICE_VARIABLE, "cpu")
"""Where the torch jobs of gpu_check.sh have their tensors: one rank on NCCL, several by way of the CPU, or if
``HVD_ASYNC_TEST_NCCL`` is set on NCCL too."""
STAGED = DEVICE == "cuda" and "HVD_ASYNC_TEST_NCCL" not in os.environ
START = 150.0
"""Seconds that a fork server may take to import a framework before it forks another server."""
GOODBYE = 10.0
"""Seconds that processes may take to end once the launcher (or every rank) has."""
STACKS = 2.0
"""Seconds that ranks have to print where they are, when a job has run out of time."""
RUNNERS = (
    *("sklearn.datasets", "sklearn.model_selection", "PIL.Image"),
    *("tensorboard.summary.writer.event_file_writer", "psutil"),
)
"""Modules that the runners, the examples and many jobs import besides."""
FRAMEWORKS = {"torch alone": ("torch._dynamo", *RUNNERS), "tensorflow alone": ("keras", *RUNNERS)}
"""Modules of the fork servers that import a framework. (Torch's first optimizer imports ``torch._dynamo``.)"""
SERVERS = {
    "torch": ("torch alone", ("hvd_async.torch",)),
    "tensorflow": ("tensorflow alone", ("horovod.tensorflow.keras", "hvd_async.tensorflow.keras")),
    "plain torch": ("torch alone", ("horovod.torch",)),
    "plain tensorflow": ("tensorflow alone", ("horovod.tensorflow.keras",)),
}
"""The others: the server that each is forked from, and modules that it imports besides: ours, or Horovod alone."""


@dataclass
class Job:
    """What became of a job.

    Attributes:
        name: for reports and messages.
        returncode: the launcher's; without launcher the first rank's that is not 0. None: it ran out of time.
        output: of everybody, mixed.
        results: one dictionary a rank, case -> result; what was written before a rank ended, if it ended early.
        left_behind: processes that outlived the launcher by ``GOODBYE`` seconds (they have been killed).
        seconds: from start to end.
        kept: what ranks left in files ``keep.NAME`` of the job's folder, by name.
        returncodes, outputs, exited: by rank, only without launcher; ``exited`` in seconds since 1970.
    """

    name: str
    returncode: int | None
    output: str
    results: list[dict[str, Any]]
    left_behind: list[str]
    seconds: float
    kept: dict[str, str] = field(default_factory=dict)
    returncodes: list[int | None] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    exited: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        tail = "\n".join(self.output.splitlines()[-120:])
        return f"{self.name}: exit {self.returncode} after {self.seconds:.1f} s; output:\n{tail}"

    def check(self) -> Job:
        """This job, if it ended well: exit 0, nothing left behind."""
        assert self.returncode == 0, str(self)
        return self.check_clean()

    def check_clean(self) -> Job:
        """This job, if it left no process behind."""
        assert not self.left_behind, f"left behind: {self.left_behind}\n{self}"
        return self

    def case(self, name: str) -> list[dict[str, Any]]:
        """Every rank's result of a case."""
        missing = [rank for rank, cases in enumerate(self.results) if name not in cases]
        assert not missing, f"rank(s) {missing} did not get to the end of case {name!r}. {self}"
        return [cases[name] for cases in self.results]


def same(ranks: Sequence[dict[str, Any]], key: str) -> bool:
    """Whether all ranks have the same value."""
    return all(rank[key] == ranks[0][key] for rank in ranks)


HOROVODS = {"HVD_ASYNC_TRANSPORT": "horovod"} if DEVICE == "cuda" else {}
"""Environment of jobs on Horovod's data plane, which is not the default on GPUs."""
RunJob = Callable[..., Job]
"""What the fixtures ``job`` and ``forked`` give: functions that run jobs, the first with a memory."""


class _Folder:
    """A job's temporary folder and environment."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.path = Path(tempfile.mkdtemp(prefix="hvd_async_job_"))
        self.job = uuid.uuid4().hex

    def environment(self, extra: Mapping[str, str] | None) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "OMPI_", "HVD_ASYNC_"))}
        binaries = str(Path(sys.executable).parent)
        return {
            **inherited,
            "PATH": f"{binaries}{os.pathsep}{inherited.get('PATH', '')}",
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests' / 'conformance'}",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_ENABLE_ONEDNN_OPTS": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1"),
            **({} if DEVICE == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}),
            "HVD_ASYNC_STAGE": str(int(STAGED and self.ranks > 1)),
            DEVICE_VARIABLE: DEVICE,
            "HOROVOD_CYCLE_TIME": "3",  # ms; 1 takes a quarter more of the CPUs, for nothing where ranks share them
            "OMPI_MCA_mpi_yield_when_idle": "1",  # more ranks than cores: waiting busily would take twice as long
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            JOB_VARIABLE: self.job,
            OUT_VARIABLE: str(self.path),
            **(extra or {}),
        }

    def results(self) -> list[dict[str, Any]]:
        files = [self.path / f"rank.{rank}.json" for rank in range(self.ranks)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]

    def saved_state(self) -> dict[str, str]:
        return {file.name.partition(".")[2]: file.read_text() for file in self.path.glob("keep.*")}

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def processes_of(job: str, spared: Collection[int] = ()) -> list[psutil.Process]:
    """Every process of this machine except ``spared`` and zombies whose environment carries the job id."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in spared and process.environ().get(JOB_VARIABLE) == job:
                found.append(process)
        except psutil.Error:  # it has ended, or is a zombie, or not ours
            continue
    return found


def _ranks_of(job: str, script: str) -> list[psutil.Process]:
    """The job's ranks proper, without the shells and launchers around them."""
    found = []
    for process in processes_of(job):
        try:
            of_a_rank = {"HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK"} & process.environ().keys()
            if of_a_rank and script in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _dump_stacks(job: str, script: str) -> None:
    """Have every rank print where its threads are (``jobs/common.py`` listens): the job has run out of time."""
    ranks = _ranks_of(job, script)
    for process in ranks:
        process.send_signal(signal.SIGUSR1)
    psutil.wait_procs(ranks, timeout=STACKS)


def sweep(job: str, patience: float, spared: Collection[int] = ()) -> list[str]:
    """Wait for the job's processes to end, kill those still running, and return them; ``spared`` is left alone."""
    deadline = time.monotonic() + patience
    while (alive := processes_of(job, spared)) and (left := deadline - time.monotonic()) > 0:
        psutil.wait_procs(alive, timeout=left)
    descriptions = []
    while alive := processes_of(job, spared):
        for process in alive:
            try:
                descriptions.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=5.0)
    return descriptions


def run_job(
    script: str,
    ranks: int,
    *,
    transport: str = "gloo",
    env: Mapping[str, str] | None = None,
    server: ForkServer | None = None,
    **options: Any,
) -> Job:
    """Run a script of ``jobs/`` under ``horovodrun`` or ``torchrun`` and wait for its end.

    Args:
        script: its file name.
        ranks: how many.
        transport: "gloo" or "mpi", of Horovod; "torch": without Horovod, under ``torchrun``.
        env, server, options: as of ``_run``.
    """
    folder = _Folder(ranks)
    if transport == "torch":
        command = [*torchrun(server), "--standalone", "--nproc-per-node", str(ranks), "--no-python"]
        return _run(folder, command, f"{ranks} ranks, torchrun", script, env=env, server=server, **options)
    command = [sys.executable, str(Path(__file__).with_name("horovodrun.py")), "-np", str(ranks), f"--{transport}"]
    env = {**HOROVODS, **(env or {})}
    if transport == "mpi":
        assert server is None, "Open MPI has to start its processes"
        command.append("--mpi-args=--oversubscribe")
    return _run(folder, command, f"{ranks} ranks, {transport}", script, env=env, server=server, **options)


def run_alone(script: str, **options: Any) -> Job:
    """Run a script that starts its ranks itself, and wait for its end. Options as of ``_run``."""
    return _run(_Folder(0), [], "on its own", script, **options)


def _run(
    folder: _Folder,
    command: list[str],
    how: str,
    script: str,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 150.0,
    server: ForkServer | None = None,
) -> Job:
    """Run a launcher's command with a script of ``jobs/``, and wait for its end.

    Args:
        folder, command: the job's, and the launcher's.
        how: for the job's name.
        script: its file name.
        args: of the script.
        env: added to the environment.
        timeout: seconds; then the ranks print their stacks and the job is killed.
        server: forks the ranks; without it they import all that they need.
    """
    log = folder.path / "output"
    started = time.monotonic()
    try:
        with log.open("wb") as output:
            launcher = subprocess.Popen(
                [*command, *rank_command(script, args, server)],
                cwd=REPOSITORY,
                env=folder.environment(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                returncode: int | None = launcher.wait(timeout)
            except subprocess.TimeoutExpired:
                returncode = None
                _dump_stacks(folder.job, script)
            patience = 0.0 if returncode is None else GOODBYE
            left_behind = sweep(folder.job, patience) + (server.sweep(patience) if server else [])
            launcher.wait(timeout=10.0)
        return Job(
            f"{script} {' '.join(args)} ({how})",
            returncode,
            log.read_text(errors="replace"),
            folder.results(),
            left_behind if returncode is not None else [],
            time.monotonic() - started,
            folder.saved_state(),
        )
    finally:
        sweep(folder.job, 0.0)
        folder.remove()


def rank_command(script: str, args: Sequence[str], server: ForkServer | None) -> list[str]:
    """Return the command that a launcher starts for each rank."""
    forks = [] if server is None else ["-I", "-S", str(Path(__file__).with_name("forked_rank.py")), server.path]
    return [sys.executable, *forks, str(JOBS / script), *args]


def torchrun(server: ForkServer | None) -> list[str]:
    """Return torchrun's command, without arguments: it is forked like the ranks."""
    if server is None:
        return [sys.executable, "-m", "torch.distributed.run"]
    return rank_command("module.py", ["torch.distributed.run"], server)


def forking(popen: Callable[..., Any], server: ForkServer) -> Callable[..., Any]:
    """Return ``subprocess.Popen``, but that ranks that a launcher is to start as ``python -m MODULE`` are forked."""

    def start(command: Sequence[str], **options: Any) -> Any:
        words = list(command)
        last = max((place for place, word in enumerate(words) if word == "-m"), default=0)
        forked = rank_command("module.py", words[last + 1 :], server)
        if words[2:3] == ["torch.distributed.run"]:  # python -m torch.distributed.run ... -m MODULE ...
            words = [*torchrun(server), *words[3:last], "--no-python", *forked]
        elif last > 1:  # a launcher ... python -m MODULE ...
            own = [sys.executable, str(Path(__file__).with_name("horovodrun.py"))]
            words = [*(own if words[0].endswith("horovodrun") else words[:1]), *words[1 : last - 1], *forked]
        return popen(words, **options)

    return start


def run_elastic(script: str, ranks: int, **options: Any) -> Job:
    """Run a script of ``jobs/`` under ``horovodrun --host-discovery-script``: hosts are lines of the file ``hosts`` in
    the job's folder, at first this many names of this machine, with one rank each. Options as of ``_run``."""
    folder = _Folder(ranks)
    names = ["127.0.0.1", *(f"127.{'0' * place}1" for place in range(ranks - 1))]
    (folder.path / "hosts").write_text("".join(f"{name}:1\n" for name in names))
    discovery = folder.path / "discover"
    discovery.write_text(f"#!/bin/sh\ncat {folder.path / 'hosts'}\n")
    discovery.chmod(0o755)
    command = [sys.executable, str(Path(__file__).with_name("horovodrun.py")), "-np", str(ranks), "--min-np", "1"]
    command += ["--max-np", str(2 * ranks), "--host-discovery-script", str(discovery), "--network-interfaces", "lo"]
    return _run(folder, [*command, "--gloo"], f"elastic, {ranks} ranks", script, **options)


@contextlib.contextmanager
def _horovodruns(ranks: int) -> Iterator[list[dict[str, str]]]:
    """What Horovod's launcher tells each rank, for as long as this is entered."""
    slots = assign({"localhost": ranks})
    server = RendezvousServer()
    port = int(server.start())
    server._httpd.finished_list = _Finished(server._httpd.scope_size)
    server.init(slots)
    try:
        yield [environment(slot, "127.0.0.1", port, "lo") for slot in slots]
    finally:
        server.stop()


class _Finished(defaultdict[str, list[str]]):
    """Ranks that have left each scope of Horovod's rendezvous, which forgets a scope when all of its ranks have.

    Horovod clears the ranks of all scopes then. A scope of which only some had left would keep their addresses, where
    no rank listens any more, and a second ``hvd.init()`` would try these.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(list)
        self._sizes = sizes

    def clear(self) -> None:
        """Forget the ranks of scopes that all have left."""
        for scope in [scope for scope, ranks in self.items() if len(ranks) >= self._sizes.get(scope, 0)]:
            del self[scope]


@contextlib.contextmanager
def _torchruns(ranks: int) -> Iterator[list[dict[str, str]]]:
    """What torchrun tells each rank. Rank 0 listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["HVD_ASYNC_HOST"] = "localhost"  # (as Horovod's launcher calls it)
    yield [{"RANK": str(rank), **shared} for rank in range(ranks)]


class ForkServer:
    """Forks ranks from a process that has imported a framework: those of launchers, and of jobs without one.

    Args:
        modules: it imports them.
        transport: "gloo", of Horovod, or "torch": without Horovod, with the environment that torchrun gives.
        parent: the server that it is forked from; None: it is a new process.

    Attributes:
        path: its socket.
    """

    def __init__(self, modules: Sequence[str], transport: str = "gloo", parent: ForkServer | None = None) -> None:
        self._folder = _Folder(0)
        self._plane = {"HVD_ASYNC_TRANSPORT": "torch"} if transport == "torch" else HOROVODS
        self._as_torchrun = transport == "torch"
        self.path = str(self._folder.path / "socket")
        self._job: str = self._folder.job if parent is None else parent._job
        self._servers: set[int] = set() if parent is None else parent._servers
        command = [str(Path(__file__).with_name("fork_server.py")), *modules]
        environment = self._folder.environment(self._plane)
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.ExitStack() as given:
            reading, self._lives = os.pipe()
            given.callback(os.close, reading)
            listener = given.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(self.path)
            listener.listen(64)  # (ranks may come while it imports)
            if parent is None:
                self._process = subprocess.Popen(
                    [sys.executable, *command, str(listener.fileno())],
                    cwd=REPOSITORY,
                    env=environment,
                    stdin=reading,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
                self._pid = self._process.pid
            else:
                files = [reading, 1, 2, listener.fileno()]
                self._client = connect(parent.path, command, environment, str(REPOSITORY), files)
                self._client.settimeout(START)
                self._pid = read(self._client)
        self._servers.add(self._pid)

    def run(
        self,
        script: str,
        ranks: int,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        timeout: float = 150.0,
    ) -> Job:
        """Run a script of ``jobs/`` without a launcher, as a cluster's scheduler would, and wait for all of its ranks.

        Nothing ends the other ranks when one dies, so what they do about it can be seen. Arguments as of ``run_job``.
        """
        folder = _Folder(ranks)
        logs = [folder.path / f"output.{rank}" for rank in range(ranks)]
        started = time.monotonic()
        try:
            with _torchruns(ranks) if self._as_torchrun else _horovodruns(ranks) as environments:
                shared = folder.environment({**self._plane, **(env or {})})
                clients = []
                for own, log in zip(environments, logs, strict=True):
                    with log.open("wb") as output, open(os.devnull) as nothing:
                        files = [nothing.fileno(), output.fileno(), output.fileno()]
                        command = [str(JOBS / script), *args]
                        clients.append(connect(self.path, command, {**shared, **own}, str(REPOSITORY), files))
                codes, exited = _ends(clients, timeout)
                left_behind = self.sweep(0.0 if None in codes else GOODBYE)
            outputs = [log.read_text(errors="replace") for log in logs]
            return Job(
                f"{script} {' '.join(args)} ({ranks} ranks, no launcher)",
                None if None in codes else next((code for code in codes if code), 0),
                "\n".join(f"--- rank {rank}: exit {codes[rank]}\n{text}" for rank, text in enumerate(outputs)),
                folder.results(),
                left_behind if None not in codes else [],
                time.monotonic() - started,
                folder.saved_state(),
                codes,
                outputs,
                exited,
            )
        finally:
            folder.remove()

    def sweep(self, patience: float) -> list[str]:
        """``sweep`` of all that it, and servers of the same framework, have forked."""
        return sweep(self._job, patience, spared=self._servers)

    def close(self) -> None:
        """End the server; the one that has imported the framework, last, with whatever ranks have left."""
        os.close(self._lives)
        self._servers.remove(self._pid)
        if self._process is None:
            read(self._client)
            self._client.close()
        else:
            self._process.wait(timeout=10.0)
            sweep(self._job, 0.0)
        self._folder.remove()


def _ends(clients: list[socket.socket], timeout: float) -> tuple[list[int | None], list[float]]:
    """Return the exit codes and the times of the ends of forked ranks; None for the ones that have to be killed."""
    codes: list[int | None] = [None] * len(clients)
    exited = [0.0] * len(clients)
    deadline, overdue = time.monotonic() + timeout, False
    with contextlib.ExitStack() as stack:  # the server kills a rank whose connection ends
        for client in clients:
            stack.enter_context(client)
        pids = dict(zip(clients, map(read, clients), strict=True))
        while pids:
            ended = select.select(list(pids), [], [], max(0.0, deadline - time.monotonic()))[0]
            for client in ended:
                rank = clients.index(client)
                codes[rank], exited[rank] = read(client), time.time()
                del pids[client]
            if not ended:
                if overdue:
                    break
                for pid in pids.values():
                    os.kill(pid, signal.SIGUSR1)
                overdue, deadline = True, time.monotonic() + STACKS
    return codes, exited
