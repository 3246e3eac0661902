#!/usr/bin/env python3
"""Run a job on virtual hosts: network namespaces on this machine, joined by links of a limited bandwidth."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder that scripts/ is in
from scripts.gloo_ranks import assign, environment, rendezvous

NAME = "hva"
"""Prefix of the names of namespaces and links; the number of the process that has made them follows."""
NETWORKS = range(64, 128)
"""10.N.0.0/24 is a cluster's, the first that no other has."""
FILES = Path("/etc/netns")
"""Folder in which ``ip netns exec`` finds a namespace's own /etc/hosts: there is no DNS on virtual hosts."""
QUEUE = 0.1
"""Seconds' worth of data that wait before a link; what comes then is lost."""
TORCH_PORT = "29500"
"""At which rank 0 listens where ranks meet by torch.distributed (``HVD_ASYNC_TRANSPORT=torch``): its host has no other
job."""
GOODBYE = 5.0
"""Seconds that ranks may take to end once one has failed."""
SSH = """#!/bin/sh
# in the place of ssh: options, a host's address, and a command, which runs in its network namespace
while [ $# -gt 2 ]; do shift; done
export {CLUSTER}={pid}
name="{tag}-$((${{1##*.}} - 2))"
ip netns exec "$name" unshare --uts sh -c 'hostname "$0"; exec sh -c "$1"' "$name" "$2" &
# As with ServerAliveInterval: while a link is down it is not known what has ended there, and soon not waited for.
heard=$(date +%s)
silent=0
while kill -0 $! 2>/dev/null || [ $silent -gt 0 ]; do
  sleep 0.2
  ip -brief link show "$name" | grep -q -w DOWN || heard=$(date +%s)
  silent=$(($(date +%s) - heard))
  [ $silent -lt {SSH_GIVES_UP} ] || exit 255
done
wait $!
"""
SSH_GIVES_UP = 7
"""Seconds of silence after which ``horovodrun``'s ssh does, as ``scripts/install_horovod.sh`` builds it."""
CLUSTER = "VIRTUAL_CLUSTER"
"""In a rank's environment: the process in whose network namespace are the hosts' links. A link has its host's name."""


class ClusterError(RuntimeError):
    """Virtual hosts cannot be had here; the message says why."""


@dataclass(frozen=True)
class Host:
    """One virtual host.

    Attributes:
        name: of its namespace.
        address: in the cluster's network.
        inner, outer: its link's two ends: in the namespace, and at the bridge.
    """

    name: str
    address: str
    inner: str
    outer: str

    @property
    def inside(self) -> tuple[str, ...]:
        """The command that runs another one on it, under its host name."""
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name)
        return ("ip", "netns", "exec", self.name, *named)


@dataclass(frozen=True)
class Cluster:
    """Virtual hosts.

    Attributes:
        hosts: in order.
        address: this machine's, where the hosts find it.
        bridge: the device that joins the hosts' links; it has this address.
    """

    hosts: tuple[Host, ...]
    address: str
    bridge: str

    def limit(self, mbit: float) -> None:
        """Limit each host's link to ``mbit`` Mbit/s in each direction.

        Where all hosts send and receive at a time, acknowledgements that wait behind data keep TCP at 75 to 80% of a
        plain token bucket's limit. So that it is the limit that counts, packets without data go first here, and senders
        keep their windows from one message to the next.
        """
        for host in self.hosts:
            inside = ("ip", "netns", "exec", host.name)
            _limit((), host.outer, mbit)
            _limit(inside, host.inner, mbit)
            for setting in ("slow_start_after_idle=0", "congestion_control=reno"):
                _do(*inside, "sysctl", "-qw", f"net.ipv4.tcp_{setting}")


def _limit(where: Sequence[str], device: str, mbit: float) -> None:
    """Limit what a device sends; ``where`` goes before commands for it."""

    def tc(command: str) -> None:
        _do(*where, "tc", *command.split())

    burst = max(65536, round(mbit * 1e6 / 8 / 250))  # bytes: at least those of a timer's tick
    most = f"ceil {mbit:g}mbit burst {burst} cburst {burst} quantum 60000"
    with contextlib.suppress(ClusterError):  # (there is no limit yet)
        tc(f"qdisc delete dev {device} root")
    tc(f"qdisc add dev {device} root handle 1: htb default 20")
    tc(f"class add dev {device} parent 1: classid 1:1 htb rate {mbit:g}mbit {most}")
    tc(f"class add dev {device} parent 1:1 classid 1:10 htb rate {0.1 * mbit:g}mbit prio 0 {most}")
    tc(f"class add dev {device} parent 1:1 classid 1:20 htb rate {0.9 * mbit:g}mbit prio 1 {most}")
    tc(f"qdisc add dev {device} parent 1:20 bfifo limit {burst + round(mbit * 1e6 / 8 * QUEUE)}")
    # What has less than 64 bytes: nothing but acknowledgements.
    tc(f"filter add dev {device} parent 1: protocol ip u32 match u16 0 0xffc0 at 2 flowid 1:10")


@contextlib.contextmanager
def virtual_cluster(count: int, mbit: float | None = None) -> Iterator[Cluster]:
    """Make virtual hosts for the duration of the block; they are removed afterwards, even after an error.

    Args:
        count: how many.
        mbit: Mbit/s that a host can send, and be sent; None for no limit.

    Raises:
        ClusterError: not root, or ``ip`` or ``tc`` is missing or has failed.
    """
    if os.geteuid() != 0:
        raise ClusterError("network namespaces need root: run it with sudo, or leave the virtual hosts out")
    remove_stale()
    tag = f"{NAME}{os.getpid()}"
    network = _free_network()
    bridge = f"{tag}-b"  # (a link's inner end has the same name: horovodrun wants one that all hosts have, this too)
    hosts = tuple(Host(f"{tag}-{i}", f"{network}.{i + 2}", bridge, f"{tag}-{i}") for i in range(count))
    cluster = Cluster(hosts, f"{network}.1", bridge)
    everybody = [("127.0.0.1", "localhost"), (cluster.address, socket.gethostname())]
    everybody += [(host.address, host.name) for host in hosts]
    names = "".join(f"{address} {name}\n" for address, name in everybody)
    try:
        _do("ip", "link", "add", bridge, "type", "bridge")
        _do("ip", "address", "add", f"{cluster.address}/24", "dev", bridge)
        _do("ip", "link", "set", bridge, "up")
        for host in hosts:
            inside = ["ip", "netns", "exec", host.name]
            (FILES / host.name).mkdir(parents=True)
            (FILES / host.name / "hosts").write_text(names)
            _do("ip", "netns", "add", host.name)
            _do("ip", "link", "add", host.outer, "type", "veth", "peer", "name", host.inner, "netns", host.name)
            _do("ip", "link", "set", host.outer, "master", bridge, "up")
            _do(*inside, "ip", "address", "add", f"{host.address}/24", "dev", host.inner)
            _do(*inside, "ip", "link", "set", host.inner, "up")
            _do(*inside, "ip", "link", "set", "lo", "up")
        if mbit is not None:
            cluster.limit(mbit)
        yield cluster
    finally:
        _remove(tag)


def remove_stale() -> None:
    """Remove what processes have left behind that were killed."""
    folders = "".join(f"{folder.name}\n" for folder in FILES.glob(f"{NAME}*"))  # (these outlive a restart)
    names = _do("ip", "netns", "list") + _do("ip", "-brief", "link", "show") + folders
    for tag in sorted({match[1] for match in re.finditer(rf"\b({NAME}\d+)-(?:\d+|b)\b", names)}):
        pid = int(tag.removeprefix(NAME))
        if pid == os.getpid() or not psutil.pid_exists(pid):  # (its own: of a process that once had its number)
            _remove(tag)


def _remove(tag: str) -> None:
    for name in re.findall(rf"^({tag}-\d+)", _do("ip", "netns", "list"), re.MULTILINE):
        _end_all(name)
        _do("ip", "netns", "delete", name)
    for folder in FILES.glob(f"{tag}-*"):
        shutil.rmtree(folder)
    for name in re.findall(rf"^({tag}-(?:\d+|b))\b", _do("ip", "-brief", "link", "show"), re.MULTILINE):
        with contextlib.suppress(ClusterError):  # (a link goes with its namespace, but a little later)
            _do("ip", "link", "delete", name)


def _end_all(namespace: str) -> None:
    """End what still runs on a host: what its ranks have started, or a run that was killed."""
    deadline = time.monotonic() + GOODBYE
    while (pids := _do("ip", "netns", "pids", namespace).split()) and time.monotonic() < deadline:
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _free_network() -> str:
    used = _do("ip", "-brief", "address", "show")
    for number in NETWORKS:
        if f" 10.{number}.0." not in used:
            return f"10.{number}.0"
    raise ClusterError(f"networks 10.{NETWORKS[0]}.0.0/24 to 10.{NETWORKS[-1]}.0.0/24 are all in use here")


def _do(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        raise ClusterError(f"there is no {command[0]!r} here: install iproute2") from None
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def run_on(cluster: Cluster, command: Sequence[str], per_host: int = 1) -> int:
    """Run a command as Horovod ranks on the hosts (Gloo); when one fails the others are ended.

    Args:
        per_host: ranks on each.

    Returns:
        The exit code of the first rank that failed, 0 if none did.
    """
    by_name = {host.name: host for host in cluster.hosts}
    slots = assign(dict.fromkeys(by_name, per_host))
    ranks: list[subprocess.Popen[bytes]] = []
    with rendezvous(slots) as port:
        try:
            for slot in slots:
                host = by_name[slot.hostname]
                own = environment(slot, cluster.address, port, host.inner)
                own["HVD_ASYNC_ADDRESS"] = host.address
                if os.environ.get("HVD_ASYNC_TRANSPORT") == "torch":
                    own |= {"RANK": str(slot.rank), "WORLD_SIZE": str(slot.size)}
                    own |= {"MASTER_ADDR": cluster.hosts[0].address, "MASTER_PORT": TORCH_PORT}
                started = subprocess.Popen(
                    [*host.inside, *command],
                    env={**os.environ, **own},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
                ranks.append(started)
            return _wait(ranks)
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Until all have ended, or one has failed and the others had time to say so."""
    failed, deadline = 0, float("inf")
    while time.monotonic() < deadline:
        codes = [rank.poll() for rank in ranks]
        if None not in codes:
            return failed or next(filter(None, codes), 0)
        if not failed and any(codes):
            failed, deadline = next(filter(None, codes)), time.monotonic() + GOODBYE
        time.sleep(0.1)
    return failed


def run_elastic(cluster: Cluster, command: Sequence[str], file: Path, begin: int, per_host: int = 1) -> int:
    """Run a command as an elastic Horovod job (Gloo) on virtual hosts.

    Args:
        cluster: the hosts that there may be.
        command: what each rank runs.
        file: the hosts that there are: lines of "address:slots", which others may change. The hosts that do not begin
            are lines of the file with ".spare" after its name.
        begin: how many hosts there are at first.
        per_host: slots of each.

    Returns:
        The exit code of ``horovodrun``.
    """
    lines = [f"{host.address}:{per_host}\n" for host in cluster.hosts]
    file.write_text("".join(lines[:begin]))
    file.with_name(f"{file.name}.spare").write_text("".join(lines[begin:]))
    with tempfile.TemporaryDirectory(prefix="hvd_async_virtual_") as name:
        folder, tag = Path(name), cluster.bridge.rpartition("-")[0]
        ssh = SSH.format(tag=tag, pid=os.getpid(), CLUSTER=CLUSTER, SSH_GIVES_UP=SSH_GIVES_UP)
        for script, text in (("ssh", ssh), ("discover", f"#!/bin/sh\ncat {file.resolve()}\n")):
            (folder / script).write_text(text)
            (folder / script).chmod(0o755)
        most = len(lines) * per_host
        options = ["-np", begin * per_host, "--min-np", 1, "--max-np", most, "--network-interfaces", cluster.bridge]
        horovodrun = Path(sys.executable).parent / "horovodrun"
        started = subprocess.Popen(
            [*map(str, [horovodrun, "--gloo", *options, "--host-discovery-script", folder / "discover"]), *command],
            env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"},
            stdin=subprocess.DEVNULL,
        )
        try:
            return started.wait()
        finally:
            started.terminate()
            started.wait()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, usage="%(prog)s [OPTION ...] -- COMMAND ...")
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="virtual hosts (default: %(default)s)")
    parser.add_argument("--per-host", type=int, default=1, metavar="N", help="ranks on each (default: %(default)s)")
    parser.add_argument("--mbit", type=float, metavar="X", help="Mbit/s of each host's link (default: no limit)")
    parser.add_argument(
        "--elastic",
        type=Path,
        metavar="FILE",
        help="an elastic job: horovodrun with a discovery script that prints FILE, lines of ADDRESS:SLOTS. There, in "
        "the first --np lines, are the hosts that begin; the others stay in FILE.spare, and may be added",
    )
    parser.add_argument("--np", type=int, default=2, metavar="N", help="hosts that begin an elastic job (default: 2)")
    parser.add_argument("--clean", action="store_true", help="only remove what runs have left behind that were killed")
    parser.add_argument("command", nargs="*", help="what each rank runs, after --")
    args = parser.parse_args()
    if not args.command and not args.clean:
        parser.error("say what the ranks are to run, after --")

    def stop(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):  # (a shell's background jobs would ignore the second)
        signal.signal(number, stop)
    try:
        if args.clean:
            remove_stale()
            return 0
        with virtual_cluster(args.hosts, args.mbit) as cluster:
            if args.elastic:
                return run_elastic(cluster, args.command, args.elastic, args.np, args.per_host)
            return run_on(cluster, args.command, args.per_host)
    except ClusterError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
