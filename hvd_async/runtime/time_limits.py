"""Time limits from environment variables; docs/clusters.md lists them with all other variables."""

from __future__ import annotations

import math
import os

from hvd_async.runtime import launch


def seconds(name: str, default: float) -> float:
    """Return the environment variable ``name`` as seconds.

    Raises:
        ValueError: it is set to something other than a positive number.
    """
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ValueError(
            f"{name} must be a positive number of seconds, got {text!r}. Unset it for the default ({default:g})."
        )
    return value


def timeout() -> float:
    """Return the hard limit of every wait for other ranks, in seconds; infinite by default."""
    return seconds("HVD_ASYNC_TIMEOUT", math.inf)


def warn_after() -> float:
    """Return the seconds of waiting for a rank until each warning."""
    return seconds("HVD_ASYNC_WARN_AFTER", 60.0)


def connect_timeout() -> float:
    """Return the seconds within which all ranks must connect to the coordinator, after the rendezvous through Horovod.

    The default is short in an elastic job, where a rank that was only slow can rejoin.
    """
    return seconds("HVD_ASYNC_CONNECT_TIMEOUT", dead_after() if in_elastic_job() else 60.0)


def dead_after() -> float:
    """Return the seconds of silence on a connection after which the other end is declared lost.

    The default is less than the 30 s after which Gloo gives up on a silent peer, without naming it. It is shorter still
    in an elastic job, where a rank that was only slow can rejoin.
    """
    return seconds("HVD_ASYNC_DEAD_AFTER", 7.0 if in_elastic_job() else 25.0)


def relays_from() -> float:
    """Return the number of ranks from which a job has relays and a separate coordinator process.

    If it is infinite, the job has neither, not even the separate process if tensors are on a GPU.

    Raises:
        ValueError: HVD_ASYNC_RELAYS_FROM is set to something other than a non-negative integer.
    """
    text = os.environ.get("HVD_ASYNC_RELAYS_FROM", "") or "64"
    if not text.isdecimal():
        raise ValueError(f"HVD_ASYNC_RELAYS_FROM must be a number of ranks, or 0 for never, got {text!r} (default: 64)")
    return int(text) or math.inf


def in_elastic_job() -> bool:
    """Return whether ``horovodrun`` has a host discovery script, so that training can continue without lost ranks."""
    return launch.is_elastic(os.environ)


def limit_gloo() -> None:
    """In an elastic job, make Gloo give up on a silent rank soon after the coordinator has named it.

    Horovod reads the variable if it was built by ``scripts/install_horovod.sh``. Horovod's own limit also applies to
    the rendezvous, which has to wait for new ranks to start.
    """
    limit = min(math.ceil(dead_after()) + 2, math.ceil(seconds("HOROVOD_GLOO_TIMEOUT_SECONDS", 30.0)))
    if in_elastic_job():
        os.environ.setdefault("HOROVOD_GLOO_OPERATION_TIMEOUT_SECONDS", str(limit))
