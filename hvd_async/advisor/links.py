"""Latency and bandwidth of the network: given, or fitted from a trace in which all ranks wait for all. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from hvd_async.simulation.network import Network, ring_bytes
from hvd_async.traces.reader import Trace

LATENCY = 0.0003
"""Seconds of a message between a rank and the coordinator, one way, where none are given."""
CYCLE = 0.001
"""Horovod looks for collectives that may start every so many seconds (``HOROVOD_CYCLE_TIME``)."""
SMALL = 1_000_000
"""Bytes of gradients up to which what an allreduce takes is put down to software, not to the link."""


class Given(msgspec.Struct, frozen=True):
    """A user's knowledge of the network; None: unknown.

    Attributes:
        latency_s: of a message, one way.
        bandwidth_bytes_s: of a rank's link, each way at once.
    """

    latency_s: float | None = None
    bandwidth_bytes_s: float | None = None


class Link(NamedTuple):
    """The network that is simulated.

    Attributes:
        network: its parameters.
        allreduce_s: seconds that an allreduce of the gradients took in the trace; None: cannot be told.
        origin: where the parameters come from, in words.
    """

    network: Network
    allreduce_s: float | None
    origin: str


def read_given(file: Path) -> Given:
    """Read what is known from a JSON file with ``latency_s`` and ``bandwidth_bytes_s``; other fields are ignored.

    Raises:
        ValueError: it is no such file, or a number is not above 0.
    """
    try:
        given = msgspec.json.decode(file.read_bytes(), type=Given)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} tells nothing of a network: {error}") from error
    return checked(given)


def checked(given: Given) -> Given:
    """Return what is known, if it can be.

    Raises:
        ValueError: a number is not above 0.
    """
    for name, value in (("latency", given.latency_s), ("bandwidth", given.bandwidth_bytes_s)):
        if value is not None and not value > 0:
            raise ValueError(f"the network's {name} is {value:g}: give a number above 0, or leave it out")
    return given


def allreduce_seconds(trace: Trace) -> float | None:
    """Return what an allreduce of a trace's gradients takes: how long the rank that came last waits, in the median.

    None where ranks do not all wait for all, so that it cannot be told.
    """
    return float(np.median(trace.waits.min(axis=1))) if trace.synchronous and trace.ranks > 1 else None


def fit(trace: Trace, given: Given = Given()) -> Link:  # noqa: B008  immutable
    """Return the network to simulate a trace's job on.

    Args:
        trace: of the job.
        given: what is known already.
    """
    size, ranks = trace.headers[0].parameter_bytes, trace.ranks
    latency = LATENCY if given.latency_s is None else given.latency_s
    found = allreduce_seconds(trace)
    sent = ring_bytes(size, ranks)
    bandwidth = float("inf") if given.bandwidth_bytes_s is None else given.bandwidth_bytes_s
    told = f"latency {1e3 * latency:.3g} ms ({'assumed' if given.latency_s is None else 'given'})"
    operation = 0.0
    if found is None:
        known = "given" if given.bandwidth_bytes_s is not None else "unknown: taken for free, so gains are optimistic"
        told += f"; bandwidth {known} (the trace is of a mode whose waits do not tell it)"
    else:
        # What came first of the wait: messages to and from the coordinator, or half of Horovod's cycle.
        rest = max(found - (CYCLE / 2 + (2 * latency if trace.headers[0].options else 0.0)), 0.0)
        if given.bandwidth_bytes_s is not None:
            operation = max(rest - sent / bandwidth, 0.0)
            told += f"; bandwidth {bandwidth / 1e6:.4g} MB/s (given)"
        elif size > SMALL and rest > 0:
            bandwidth = sent / rest
            told += f"; bandwidth {bandwidth / 1e6:.4g} MB/s (fitted: an allreduce took {1e3 * found:.3g} ms)"
        else:
            operation = rest
            told += f"; {1e3 * found:.3g} ms an allreduce, whatever its size (fitted)"
    network = Network(latency=latency, bandwidth=bandwidth, cycle=CYCLE, operation=operation)
    return Link(network, found, told)
