"""Limits that people set by environment variable; docs/clusters.md lists them with all others."""

from __future__ import annotations

import math
import os


def seconds(name: str, default: float) -> float:
    """The environment variable ``name`` as seconds.

    Raises:
        ValueError: it is set to something else than a number above 0.
    """
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ValueError(f"{name}={text!r} is no number of seconds: take one above 0, or leave it out ({default:g})")
    return value


def timeout() -> float:
    """Hard limit in seconds on every wait for other ranks; infinite unless it is set."""
    return seconds("HVD_ASYNC_TIMEOUT", math.inf)


def warn_after() -> float:
    """Seconds of waiting for a rank before each warning."""
    return seconds("HVD_ASYNC_WARN_AFTER", 60.0)


def connect_timeout() -> float:
    """Seconds from when all ranks have met by Horovod until all must have reached the coordinator; few in an elastic
    job, where one that was only slow joins the others again."""
    return seconds("HVD_ASYNC_CONNECT_TIMEOUT", dead_after() if in_elastic_job() else 60.0)


def dead_after() -> float:
    """Seconds of silence on a connection after which the other end counts as dead.

    Less than the 30 s after which Gloo gives up on a silent peer, without knowing which one it is; and little in an
    elastic job, where a rank that was only slow joins the others again.
    """
    return seconds("HVD_ASYNC_DEAD_AFTER", 7.0 if in_elastic_job() else 25.0)


def relays_from() -> float:
    """Return the number of ranks from which a job has relays and a separate coordinator process; infinite: it has
    neither, not even that process where tensors are on a GPU.

    Raises:
        ValueError: HVD_ASYNC_RELAYS_FROM is set to something else than a whole number.
    """
    text = os.environ.get("HVD_ASYNC_RELAYS_FROM", "") or "64"
    if not text.isdecimal():
        raise ValueError(f"HVD_ASYNC_RELAYS_FROM={text!r} is no number of ranks: take one, 0 for never (default: 64)")
    return int(text) or math.inf


def in_elastic_job() -> bool:
    """Whether ``horovodrun`` has a host discovery script, and lets ranks go on without others."""
    return os.environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")


def limit_gloo() -> None:
    """In an elastic job: have Gloo give up on a silent rank soon after the coordinator has named it.

    The variable is read by Horovod as ``scripts/install_horovod.sh`` builds it: Horovod's own limit is that of meeting,
    too, which has to bear how long a new rank takes to begin.
    """
    limit = min(math.ceil(dead_after()) + 2, math.ceil(seconds("HOROVOD_GLOO_TIMEOUT_SECONDS", 30.0)))
    if in_elastic_job():
        os.environ.setdefault("HOROVOD_GLOO_OPERATION_TIMEOUT_SECONDS", str(limit))
