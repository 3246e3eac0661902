"""One TCP connection to another rank, on which its messages to the coordinator would go: how long do they take?"""

from __future__ import annotations

import contextlib
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Sequence

from hvd_async.errors import EngineError
from hvd_async.runtime.addresses import reachable

ROUNDS = 50
"""Messages there and back."""
PATIENCE = 5.0
"""Seconds for a connection, and for each answer."""
TOKEN = 16
"""Bytes by which an ``Echo`` is known: the address of another host's bridge may be this host's, too."""


class Echo:
    """Tells connections its ``token``, then sends back what they send, one connection at a time, until it is closed."""

    def __init__(self) -> None:
        if socket.has_dualstack_ipv6():
            self._server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            self._server = socket.create_server(("", 0))
        self._server.settimeout(0.2)
        self.port = int(self._server.getsockname()[1])
        self.token = secrets.token_bytes(TOKEN)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="hvd_async-doctor-echo", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            with connection, contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(PATIENCE)
                connection.sendall(self.token)
                while not self._closed.is_set() and (data := connection.recv(64)):
                    connection.sendall(data)

    def close(self) -> None:
        """Stop; a connection that is open ends."""
        self._closed.set()
        self._thread.join(2 * PATIENCE)
        self._server.close()


def latency(addresses: Sequence[str], port: int, token: bytes, whose: str) -> float:
    """Return how long a short message to an ``Echo`` takes, one way, in seconds: half of the median there and back.

    Args:
        addresses: of its host; the first that answers is taken.
        port: it listens at.
        token: the ``Echo``'s.
        whose: they are, for people.

    Raises:
        EngineError: none answers within ``PATIENCE``, or something else than the ``Echo`` does.
    """
    address = reachable(addresses, port, PATIENCE, whose)
    times = []
    try:
        with socket.create_connection((address, port), PATIENCE) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if connection.recv(TOKEN, socket.MSG_WAITALL) != token:
                raise EngineError(f"something else answers at the address {address} of {whose}, port {port}")
            for _ in range(ROUNDS):
                began = time.perf_counter()
                connection.sendall(b"?")
                if not connection.recv(1):
                    raise EngineError(f"the connection to {whose} has ended before its answer")
                times.append(time.perf_counter() - began)
    except OSError as error:
        raise EngineError(f"the connection to {whose} has failed: {error}") from error
    return statistics.median(times) / 2
