"""Run an elastic job on virtual hosts: ``horovodrun`` here, its workers in network namespaces instead of over ssh."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from virtual_cluster import Cluster

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
        folder = Path(name)
        tag = cluster.bridge.rpartition("-")[0]
        ssh = SSH.format(tag=tag, pid=os.getpid(), CLUSTER=CLUSTER, SSH_GIVES_UP=SSH_GIVES_UP)
        discover = _script(folder / "discover", f"#!/bin/sh\ncat {file.resolve()}\n")
        _script(folder / "ssh", ssh)
        most = len(lines) * per_host
        options = ["-np", begin * per_host, "--min-np", 1, "--max-np", most, "--network-interfaces", cluster.bridge]
        horovodrun = Path(sys.executable).parent / "horovodrun"
        started = subprocess.Popen(
            [*map(str, [horovodrun, "--gloo", *options, "--host-discovery-script", discover]), *command],
            env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"},
            stdin=subprocess.DEVNULL,
        )
        try:
            return started.wait()
        finally:
            started.terminate()
            started.wait()


def _script(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(0o755)
    return file
