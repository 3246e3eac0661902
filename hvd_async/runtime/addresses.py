"""Which host this is, its addresses, best guess first, and which address of another host accepts connections."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from hvd_async.errors import EngineError
from hvd_async.runtime.launch import Launch, Seat

STAGGER = 0.25
"""Seconds between the first attempts at consecutive addresses."""
AGAIN = 0.1
"""Seconds before an address that refused is tried again: its process may not be listening yet."""


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


@dataclass
class _Attempts:
    """Connection attempts, running or scheduled."""

    due: list[tuple[float, str, Any]] = field(default_factory=list)
    """Scheduled attempts: time (s), address, argument of ``connect``."""
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def begin(self, now: float) -> None:
        """Start the attempts that are due; reschedule each one that fails immediately."""
        for attempt in [attempt for attempt in self.due if attempt[0] <= now]:
            self.due.remove(attempt)
            _, address, where = attempt
            trying = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            trying.setblocking(False)
            try:
                trying.connect(where)
            except BlockingIOError:
                self.selector.register(trying, selectors.EVENT_WRITE, (address, where))
                continue
            except OSError:  # no route, no IPv6
                self.due.append((now + AGAIN, address, where))
            else:  # (connected at once: the selector reports it)
                self.selector.register(trying, selectors.EVENT_WRITE, (address, where))
                continue
            trying.close()

    def wait(self, timeout: float) -> str | None:
        """Return the first address that accepts a connection; None if none does within ``timeout`` seconds."""
        for key, _ in self.selector.select(max(0.0, timeout)):
            assert isinstance(key.fileobj, socket.socket)
            failed = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self.selector.unregister(key.fileobj)
            key.fileobj.close()
            address, where = key.data
            if not failed:
                return str(address)
            self.due.append((time.monotonic() + AGAIN, address, where))
        return None

    def close(self) -> None:
        """Abandon all attempts."""
        for key in list(self.selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self.selector.close()


def reachable(addresses: Sequence[str], port: int, limit: float, whose: str = "the coordinator on rank 0") -> str:
    """Return the first address on which ``port`` accepts a TCP connection.

    Addresses are tried in parallel, with staggered starts (RFC 8305), because the better ones come first.

    Args:
        addresses: IPv4 or IPv6 addresses, or names.
        port: the TCP port.
        limit: time limit in seconds; addresses that refuse are retried until then.
        whose: owner of the addresses, for the error message.

    Raises:
        EngineError: no address accepts a connection within the limit.
    """
    began = time.monotonic()
    attempts = _Attempts()
    try:
        for place, (address, where) in enumerate(_resolved(addresses, port)):
            attempts.due.append((began + place * STAGGER, address, where))
        while (now := time.monotonic()) < began + limit:
            attempts.begin(now)
            until = min([at for at, *_ in attempts.due] + [began + limit])
            if (found := attempts.wait(until - time.monotonic())) is not None:
                return found
    finally:
        attempts.close()
    raise EngineError(
        f"{whose} cannot be reached within {limit:g} s at port {port} of any of {', '.join(addresses)}. "
        f"Set the right address of rank 0's host in its environment: HVD_ASYNC_ADDRESS=10.0.0.1, or "
        f"HOROVOD_GLOO_IFACE=eth0; HVD_ASYNC_CONNECT_TIMEOUT is the limit in seconds."
    )


def _resolved(addresses: Sequence[str], port: int) -> list[tuple[str, Any]]:
    """Return the numeric addresses with their arguments of ``connect``; skip names that do not resolve."""
    found: dict[str, Any] = {}
    for address in addresses:
        with contextlib.suppress(OSError):
            for *_, where in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
                found.setdefault(str(where[0]), where)
    return list(found.items())
