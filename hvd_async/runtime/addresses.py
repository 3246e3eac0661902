"""Addresses: those of this host, best guess first, and which of another host's takes connections."""

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

STAGGER = 0.25
"""Seconds between the beginnings of attempts at one address and the next."""
AGAIN = 0.1
"""Seconds until an address that has refused is tried again: nobody may be listening yet."""


def own_addresses(told: bool = True) -> list[str]:
    """This host's addresses, best guess first: HVD_ASYNC_ADDRESS, HOROVOD_GLOO_IFACE's, its name's, all others.

    Args:
        told: whether HVD_ASYNC_ADDRESS counts, which is rank 0's address, also where it is set on all ranks.
    """
    if told and os.environ.get("HVD_ASYNC_ADDRESS"):
        return [os.environ["HVD_ASYNC_ADDRESS"]]
    by_interface = {
        name: [a.address for a in found if a.family in (socket.AF_INET, socket.AF_INET6) and "%" not in a.address]
        for name, found in psutil.net_if_addrs().items()
    }  # (what has a "%" is good for one link only, and named after this host's interface)
    ordered = list(by_interface.get(os.environ.get("HOROVOD_GLOO_IFACE", ""), []))
    with contextlib.suppress(OSError):
        ordered.append(socket.gethostbyname(socket.gethostname()))
    ordered += [address for found in by_interface.values() for address in found]
    # Those of this host alone come last, and IPv6 after IPv4, which more networks route.
    return sorted(dict.fromkeys(ordered), key=lambda a: (a.startswith("127.") or a == "::1", ":" in a))


@dataclass
class _Attempts:
    """Attempts to connect that are under way, and those to come."""

    due: list[tuple[float, str, Any]] = field(default_factory=list)
    """When to try (s), address, what ``connect`` takes."""
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def begin(self, now: float) -> None:
        """Start those that are due; one that fails at once comes again."""
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
            else:  # (connected at once: the selector says so)
                self.selector.register(trying, selectors.EVENT_WRITE, (address, where))
                continue
            trying.close()

    def wait(self, timeout: float) -> str | None:
        """The address that has taken a connection, if one does within so many seconds."""
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
        """Give up all that are under way."""
        for key in list(self.selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self.selector.close()


def reachable(addresses: Sequence[str], port: int, limit: float, whose: str = "the coordinator on rank 0") -> str:
    """The first address on which ``port`` takes a TCP connection: they are tried side by side, each begun a little
    after the one before it (RFC 8305), as the better ones come first.

    Args:
        addresses: IPv4, IPv6, or names.
        limit: seconds; until then those that refuse are tried again.
        whose: they are, for people.

    Raises:
        EngineError: none does.
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
        f"Name the right address of rank 0's host in its environment: HVD_ASYNC_ADDRESS=10.0.0.1, or "
        f"HOROVOD_GLOO_IFACE=eth0; HVD_ASYNC_CONNECT_TIMEOUT is the limit in seconds."
    )


def _resolved(addresses: Sequence[str], port: int) -> list[tuple[str, Any]]:
    """Addresses as numbers, and as ``connect`` takes them; names that are not known are left out."""
    found: dict[str, Any] = {}
    for address in addresses:
        with contextlib.suppress(OSError):
            for *_, where in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
                found.setdefault(str(where[0]), where)
    return list(found.items())
