"""File descriptors of this process: whether they suffice for all connections, and which of them a forked child closes.

A leaf module: it imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket

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


def release_connections(port: int) -> None:
    """Close this process's copies of all TCP sockets that have ``port`` at either end (Linux only; elsewhere a no-op).

    A forked child calls it: if it kept them, peers would notice late that the parent's connections have ended. Each
    descriptor stays open and refers to /dev/null, so that a library that still uses its number finds no other file.
    """
    with contextlib.suppress(FileNotFoundError):
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in descriptors:
            if _has_port(descriptor, port):
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
