#!/usr/bin/env python3
"""Run a command with its own SLURM: real daemons, nodes in network namespaces of this machine, gone at the end.

Needs root and Debian's packages slurm-wlm, munge and iproute2. Nothing of a SLURM that the machine may have is touched:
configuration, keys, sockets, state and logs are in a temporary folder, which SLURM_CONF leads to.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.virtual_cluster import Cluster, ClusterError, virtual_cluster

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "ip", "tc", "setpriv")
PACKAGES = "slurm-wlm munge iproute2 util-linux"
PARTITION = "trial"
SOON = 60.0
"""Seconds that daemons may take to be up, and all processes to be gone."""
CREDENTIAL = 10
"""Seconds after which a job that is requeued may start again: the lifetime of a job's credential."""
CONFIGURATION = """\
ClusterName={partition}
SlurmctldHost={here}({address})
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credential}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
TmpFS={folder}/tmp.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
MpiDefault=none
{nodes}
PartitionName={partition} Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A SLURM that runs.

    Attributes:
        folder: of its configuration, state and logs.
        nodes: their names, in order.
        env: the environment of its commands.
    """

    folder: Path
    nodes: tuple[str, ...]
    env: dict[str, str]

    def do(self, *command: str, timeout: float = 30.0) -> str:
        """Return the output of a command, such as ``sbatch``.

        Raises:
            ClusterError: it failed, or took longer than ``timeout`` seconds.
        """
        try:
            done = subprocess.run(
                command, env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{' '.join(command)}: no answer within {timeout:g} s") from None
        if done.returncode:
            raise ClusterError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
        return done.stdout


def missing() -> str | None:
    """Why there can be no SLURM here, and what to do about it; None if there can."""
    if os.geteuid() != 0:
        return "SLURM's nodes are network namespaces, which need root: run it with sudo"
    absent = [program for program in PROGRAMS if not shutil.which(program)]
    if absent:
        return f"there is no {', '.join(absent)} here: apt-get install {PACKAGES}"
    return None


def until(true: Callable[[], bool], what: str, limit: float = SOON) -> None:
    """Wait.

    Raises:
        ClusterError: it is not so within ``limit`` seconds; ``what`` says what was waited for.
    """
    deadline = time.monotonic() + limit
    while not true():
        if time.monotonic() > deadline:
            raise ClusterError(f"after {limit:g} s {what}")
        time.sleep(0.1)


@contextlib.contextmanager
def slurm(nodes: int = 2, cpus: int = 4) -> Iterator[Slurm]:
    """Start a SLURM for the duration of the block; its jobs, daemons, nodes and files are always removed afterwards.

    Args:
        nodes: how many.
        cpus: that each says it has.

    Raises:
        ClusterError: it cannot be had here, or did not come up; the message has the end of the logs.
    """
    why_not = missing()
    if why_not:
        raise ClusterError(why_not)
    with tempfile.TemporaryDirectory(prefix="hvd_async_slurm_") as name, virtual_cluster(nodes) as cluster:
        folder = Path(name)
        _configure(folder, cluster, cpus)
        env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        up = Slurm(folder, tuple(host.name for host in cluster.hosts), env)
        daemons: list[subprocess.Popen[bytes]] = []
        try:
            _start(up, cluster, daemons)
            yield up
        finally:
            for one in daemons:  # (what jobs have left on the nodes goes with these)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.pid, signal.SIGKILL)
                one.wait()


def _configure(folder: Path, cluster: Cluster, cpus: int) -> None:
    folder.chmod(0o711)  # munged wants everybody to get at its socket
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    for host in cluster.hosts:
        (folder / f"tmp.{host.name}").mkdir()  # (PMIx makes files there, which nodes would share in /tmp)
    with contextlib.ExitStack() as stack:  # (both are held until both are known)
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(2)]
        controller, daemon = (one.getsockname()[1] for one in sockets)
    nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs={cpus} State=UNKNOWN" for host in cluster.hosts]
    text = CONFIGURATION.format(
        partition=PARTITION,
        here=socket.gethostname(),
        address=cluster.address,
        controller=controller,
        daemon=daemon,
        folder=folder,
        credential=CREDENTIAL,
        nodes="\n".join(nodes),
    )
    (folder / "slurm.conf").write_text(text)
    # Nothing here needs cgroups, but slurmd looks for their kind, and `ip netns exec` has put another /sys in the way.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def _start(up: Slurm, cluster: Cluster, daemons: list[subprocess.Popen[bytes]]) -> None:
    def daemon(name: str, *command: str) -> None:
        # (What runs on without us, should we be killed, would hold a port, or a node that is no more.)
        bound = ("setpriv", "--pdeathsig", "KILL", *command)
        with (up.folder / f"{name}.output").open("wb") as log:
            daemons.append(
                subprocess.Popen(
                    bound,
                    env=up.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    folder = up.folder
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    daemon("munged", "munged", "--foreground", *(f"--{flag}={folder}/munge.{name}" for flag, name in files.items()))
    try:
        until((folder / "munge.socket").exists, "munged has no socket")
        daemon("slurmctld", "slurmctld", "-D")
        for host in cluster.hosts:
            daemon(f"slurmd.{host.name}", *host.inside, "slurmd", "-D")
        until(lambda: _idle(up) == len(up.nodes), "not all nodes are idle")
    except ClusterError as error:
        logs = "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for kind in ("log", "output")
            for path in sorted(folder.glob(f"*.{kind}"))
        )
        raise ClusterError(f"{error}\n{logs}") from None


def _idle(up: Slurm) -> int:
    with contextlib.suppress(ClusterError):
        return up.do("sinfo", "--noheader", "--Node", "--format=%T").split().count("idle")
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, usage="%(prog)s [OPTION ...] -- COMMAND ...")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--cpus", type=int, default=4, metavar="N", help="a node says it has (default: %(default)s)")
    parser.add_argument("command", nargs="+", help="what to run, after --: sbatch, a shell; SLURM_CONF is set for it")
    args = parser.parse_args()

    def stop(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        with slurm(args.nodes, args.cpus) as up:
            return subprocess.run(args.command, env=up.env).returncode
    except ClusterError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
