"""This host's name and addresses, best guess first, and the address of another host that accepts connections."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence

import psutil

from hvd_async.errors import EngineError
from hvd_async.runtime.launch import Launch, Seat

FIRST_PATIENCE = 0.25
"""Seconds in which an address must answer at first."""
SHORTEST = 0.001
"""Shortest time limit of a connection, s."""
AGAIN = 0.1
"""Seconds before addresses are tried again: the process may not be listening yet."""


def machine() -> str:
    """Return an identifier of this machine, its boot and its network namespace; empty if it is unknown."""
    named = os.environ.get("HVD_ASYNC_MACHINE", "")
    if named:
        return named
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def own_seat(started: Launch) -> Seat:
    """Return this rank's place, as far as it is known. If no variable names the host, the machine does."""
    host = os.environ.get("HVD_ASYNC_HOST") or started.host or socket.gethostname()
    node = started.node or (machine() if started.local_rank is None else "")
    return Seat(host, node, started.local_rank, started.local_size)


def own_addresses(configured: bool = True) -> list[str]:
    """Return the addresses of this host, best guess first.

    If HVD_ASYNC_ADDRESS is set, it is the only one. Otherwise the addresses of HOROVOD_GLOO_IFACE come first, then that
    of the host's name, then all others.

    Args:
        configured: whether to use HVD_ASYNC_ADDRESS, which is the address of rank 0 even if it is set on all ranks.
    """
    if configured and os.environ.get("HVD_ASYNC_ADDRESS"):
        return [os.environ["HVD_ASYNC_ADDRESS"]]
    by_interface = {
        name: [a.address for a in found if a.family in (socket.AF_INET, socket.AF_INET6) and "%" not in a.address]
        for name, found in psutil.net_if_addrs().items()
    }  # (an address with "%" is valid on one link only, and names an interface of this host)
    ordered = list(by_interface.get(os.environ.get("HOROVOD_GLOO_IFACE", ""), []))
    with contextlib.suppress(OSError):
        ordered.append(socket.gethostbyname(socket.gethostname()))
    ordered += [address for found in by_interface.values() for address in found]
    # Loopback addresses come last, and IPv6 after IPv4, which more networks route.
    return sorted(dict.fromkeys(ordered), key=lambda a: (a.startswith("127.") or a == "::1", ":" in a))


def reachable(addresses: Sequence[str], port: int, limit: float, whose: str = "the coordinator on rank 0") -> str:
    """Return the first address on which ``port`` accepts a TCP connection.

    Addresses are tried in order, the better ones first, and again with twice the patience if none has answered.

    Args:
        addresses: IPv4 or IPv6 addresses, or names.
        port: the TCP port.
        limit: time limit in seconds; addresses that refuse are retried until then.
        whose: owner of the addresses, for the error message.

    Raises:
        EngineError: no address accepts a connection within the limit.
    """
    end, patience = time.monotonic() + limit, FIRST_PATIENCE
    while time.monotonic() < end:
        for address in _resolved(addresses, port):
            left = max(end - time.monotonic(), SHORTEST)
            with contextlib.suppress(OSError):  # (refused, silent, or without a route)
                socket.create_connection((address, port), min(patience, left)).close()
                return address
        patience *= 2
        time.sleep(AGAIN)
    raise EngineError(
        f"{whose} cannot be reached within {limit:g} s at port {port} of any of {', '.join(addresses)}. "
        f"Set the right address of rank 0's host in its environment: HVD_ASYNC_ADDRESS=10.0.0.1, or "
        f"HOROVOD_GLOO_IFACE=eth0; HVD_ASYNC_CONNECT_TIMEOUT is the limit in seconds."
    )


def _resolved(addresses: Sequence[str], port: int) -> list[str]:
    """Return the numeric addresses; skip names that do not resolve."""
    found: list[str] = []
    for address in addresses:
        with contextlib.suppress(OSError):
            found += [str(where[0]) for *_, where in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys(found))
