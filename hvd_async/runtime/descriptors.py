"""File descriptors of this process: whether they suffice for all connections, and which of them a forked child closes.

A leaf module: it imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator, Sequence

# -- the limit ------------------------------------------------------------------------------------------------

EACH = 2
"""Descriptors per connection from below: the connection, and a second one while the peer tries several addresses."""
SPARE = 128
"""Descriptors for other uses of ZeroMQ and Python."""


def shortage(connections: int, here: bool = True) -> str:
    """Return an error with a hint if a process cannot open that number of connections; otherwise an empty string.

    Args:
        connections: the number of connections.
        here: whether it is this process. If so, a soft limit that is too low is raised, up to the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = needed_for(connections)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return ""
    if hard == resource.RLIM_INFINITY or needed <= hard:
        if here:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return ""
    return (
        f"{connections} connections to this host need {needed} file descriptors, and it allows {hard}: raise the limit "
        f"there (ulimit -Hn {needed}; LimitNOFILE= of the service that starts jobs; docs/clusters.md)"
    )


def needed_for(connections: int) -> int:
    """Return the number of descriptors that this process needs for ``connections``, including those now open."""
    return _open_now() + EACH * connections + SPARE


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # (not Linux)
        return 0


# -- in a forked child ----------------------------------------------------------------------------------------


_sockets_of_collectives: set[str] = set()
"""Sockets to close in a forked child, as /proc names them."""


@contextlib.contextmanager
def closed_in_children() -> Iterator[None]:
    """Have forked children close the sockets that are opened meanwhile (see ``release_connections``). A killed rank's
    peers would else wait for it as long as its children live."""
    before = _sockets()
    try:
        yield
    finally:
        now = _sockets()
        _sockets_of_collectives.intersection_update(now)
        _sockets_of_collectives.update(now.keys() - before.keys())


def _sockets() -> dict[str, int]:
    """Return the descriptors of this process's sockets, by name; empty elsewhere than on Linux."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # (closed meanwhile)
                found[os.readlink(f"/proc/self/fd/{descriptor}")] = int(descriptor)
    return {name: descriptor for name, descriptor in found.items() if name.startswith("socket:")}


def _close_in_child() -> None:
    if _sockets_of_collectives:
        _redirect([number for name, number in _sockets().items() if name in _sockets_of_collectives])


os.register_at_fork(after_in_child=_close_in_child)


def release_connections(port: int) -> None:
    """Close this process's copies of all TCP sockets that have ``port`` at either end (Linux only; elsewhere a no-op).

    A forked child calls it: if it kept them, peers would notice late that the parent's connections have ended. Each
    descriptor stays open and refers to /dev/null, so that a library that still uses its number finds no other file.
    """
    with contextlib.suppress(FileNotFoundError):
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
        _redirect([descriptor for descriptor in descriptors if _has_port(descriptor, port)])


def _redirect(descriptors: Sequence[int]) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor)
    os.close(nothing)


def _has_port(descriptor: int, port: int) -> bool:
    try:
        copy = socket.socket(fileno=os.dup(descriptor))
    except OSError:  # not a socket, or closed meanwhile
        return False
    with copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if copy.getsockname()[1] == port:
            return True
        with contextlib.suppress(OSError):  # a listening socket has no other end
            return bool(copy.getpeername()[1] == port)
    return False
