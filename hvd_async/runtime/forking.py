"""Connections that a forked child lets go of: held by it, their end would be noticed late.

A leaf module: it imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import os
import socket


def release_connections(port: int) -> None:
    """Close this process's copies of all TCP sockets that have ``port`` at either end (Linux; elsewhere: nothing).

    Each descriptor goes on to exist, as one of /dev/null: a library that still knows its number must not meet another
    file there.
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
    except OSError:  # no socket, or one that was closed meanwhile
        return False
    with copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if copy.getsockname()[1] == port:
            return True
        with contextlib.suppress(OSError):  # one that listens has no other end
            return bool(copy.getpeername()[1] == port)
    return False
