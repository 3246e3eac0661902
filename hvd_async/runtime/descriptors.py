"""Are there file descriptors enough for all connections? Looked at when a job starts.

A leaf module.
"""

from __future__ import annotations

import os
import resource

EACH = 2
"""Descriptors for a connection from below: its own, and one while it tries several addresses."""
SPARE = 128
"""For what else ZeroMQ and Python open."""


def shortage(connections: int, here: bool = True) -> str:
    """Return what is wrong, and what mends it, if a process may not open so many connections; else nothing.

    Args:
        connections: how many.
        here: whether it is this process: then a soft limit that is too low is raised, as far as the hard one lets it.
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
    """Return how many descriptors this process needs for so many connections, those that it has open included."""
    return _open_now() + EACH * connections + SPARE


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # (not Linux)
        return 0
