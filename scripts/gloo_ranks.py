"""Horovod ranks on Gloo without ``horovodrun``: who is which rank, the environment that tells them, where they meet.

For launchers that start processes on other hosts by means of their own: network namespaces, SLURM, tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer


def assign(hosts: Mapping[str, int]) -> list[Any]:
    """The ranks of a job, in order: Horovod's ``SlotInfo`` of each.

    Args:
        hosts: how many ranks each host has, in the hosts' order.
    """
    listed = ",".join(f"{name}:{count}" for name, count in hosts.items())
    return list(get_host_assignments(parse_hosts(listed), sum(hosts.values())))


@contextlib.contextmanager
def rendezvous(slots: Sequence[Any]) -> Iterator[int]:
    """Horovod's rendezvous server, while the block runs; yields its port, on all interfaces."""
    server = RendezvousServer()
    port = int(server.start())
    server.init(slots)
    try:
        yield port
    finally:
        server.stop()


def environment(slot: Any, address: str, port: int, interface: str | None = None) -> dict[str, str]:
    """Return the variables that a rank's environment must have.

    Args:
        slot: the rank.
        address: of the rendezvous server, as the rank sees it.
        port: the server's.
        interface: what the rank's own traffic goes through; None leaves it to Gloo, which takes the host name's.
    """
    values = {
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_RANK": slot.rank,
        "HOROVOD_SIZE": slot.size,
        "HOROVOD_LOCAL_RANK": slot.local_rank,
        "HOROVOD_LOCAL_SIZE": slot.local_size,
        "HOROVOD_CROSS_RANK": slot.cross_rank,
        "HOROVOD_CROSS_SIZE": slot.cross_size,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    if interface is not None:
        values["HOROVOD_GLOO_IFACE"] = interface
    return {name: str(value) for name, value in values.items()}
