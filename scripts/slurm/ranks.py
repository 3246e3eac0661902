#!/usr/bin/env python3
"""Programs of `train.sbatch` on SLURM's nodes: Horovod's rendezvous server, and each rank.

`serve` prints the server's port and runs until its standard input ends. `run` makes a task of a SLURM step a
Horovod rank and becomes its command; without --hosts the task is one of MPI's already. In both SIGUSR1 is blocked: one
that comes while a rank is still importing its framework waits until the runner looks.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def serve(hosts: Mapping[str, int]) -> None:
    """Be where the ranks meet, until standard input ends."""
    from scripts.gloo_ranks import assign, rendezvous

    with rendezvous(assign(hosts)) as port:
        print(port, flush=True)
        while sys.stdin.readline():
            continue


def rank_environment(
    hosts: Mapping[str, int], addresses: Sequence[str], port: int, env: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment that makes a task of a step a Horovod rank.

    Args:
        hosts: the tasks of each node, nodes in the step's order.
        addresses: the nodes', as SLURM knows them.
        port: of the rendezvous server, which is on the first node.
        env: the task's environment.
    """
    from scripts.gloo_ranks import assign, environment

    node, local = int(env["SLURM_NODEID"]), int(env["SLURM_LOCALID"])
    name = list(hosts)[node]
    slot = next(slot for slot in assign(hosts) if (slot.hostname, slot.local_rank) == (name, local))
    # A node's own name may mean 127.0.1.1 to itself. What it sends to another one by is where the others reach it.
    other = next((address for place, address in enumerate(addresses) if place != node), "127.0.0.1")
    own = address_towards(other)
    server = own if node == 0 else socket.gethostbyname(addresses[0])
    if env.get("HOROVOD_GLOO_IFACE"):
        return environment(slot, server, port)
    return {"HVD_ASYNC_ADDRESS": own, **environment(slot, server, port, interface_of(own))}


def address_towards(other: str) -> str:
    """This host's address on the way to another host; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None if none has."""
    import psutil

    for name, found in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == address for one in found):
            return name
    return None


def read_hosts(text: str) -> dict[str, int]:
    """Reads NAME:TASKS,NAME:TASKS."""
    pairs = (part.rpartition(":") for part in text.split(","))
    return {name: int(count) for name, _, count in pairs}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="do", required=True)
    serving = commands.add_parser("serve", help="the rendezvous server")
    running = commands.add_parser("run", help="a rank")
    for command in (serving, running):
        command.add_argument("--hosts", type=read_hosts, required=command is serving, metavar="NAME:TASKS,...")
    running.add_argument("--addresses", type=lambda text: text.split(","), metavar="ADDRESS,...")
    running.add_argument("--port", type=int)
    running.add_argument("command", nargs="+", help="after --")
    args = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    if args.do == "serve":
        serve(args.hosts)
        return
    own = rank_environment(args.hosts, args.addresses, args.port, os.environ) if args.hosts else {}
    os.execvpe(args.command[0], args.command, {**os.environ, "PYTHONUNBUFFERED": "1", **own})


if __name__ == "__main__":
    main()
