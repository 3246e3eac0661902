"""Model of the network and of the software around it: durations of messages and collectives. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

BYTES = {"none": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0 + 4 / 2048}
"""Bytes of an element in a message; int8 has a scale for every 2,048 elements."""


class Network(NamedTuple):
    """Parameters of the network, times in seconds. All are free by default.

    Attributes:
        latency: of a message between a rank, or its relay, and the coordinator, one way.
        relay: ranks of a host that share a relay; 0: each rank has its own connection.
        relay_latency: between a rank and its relay, one way.
        event: the coordinator's CPU time for an event.
        sending: the coordinator's CPU time for a message to a rank, or to a relay.
        bandwidth: of a rank's link in bytes/s, each way at once.
        hop: latency of data between two ranks.
        cycle: period in which Horovod starts collectives.
        operation: software overhead of a collective, independent of its size.
        peer: software overhead of an ``alltoall`` per participating rank, including ranks that receive nothing.
        allreduce: "ring", "tree", or "best", the faster of the two.
    """

    latency: float = 0.0
    relay: int = 0
    relay_latency: float = 0.0
    event: float = 0.0
    sending: float = 0.0
    bandwidth: float = math.inf
    hop: float = 0.0
    cycle: float = 0.0
    operation: float = 0.0
    peer: float = 0.0
    allreduce: str = "ring"

    def to_coordinator(self) -> float:
        """Return the seconds of a message to or from the coordinator."""
        return self.latency + (self.relay_latency if self.relay else 0.0)

    def command_cpu(self, ranks: int) -> float:
        """Return the coordinator's CPU time for one command to all ranks."""
        return self.sending * (math.ceil(ranks / self.relay) if self.relay else ranks)

    def agreement(self, ranks: int) -> float:
        """Return the seconds of the agreement that a collective is ready on all: a small reduction and its result."""
        return 2 * _levels(ranks) * self.hop

    def allreduce_seconds(self, size: float, ranks: int) -> float:
        """Return the seconds of an allreduce of ``size`` bytes on the wire."""
        if ranks < 2:
            return 0.0
        ring = 2 * (ranks - 1) * (size / ranks / self.bandwidth + self.hop)
        tree = 2 * (size / self.bandwidth + _levels(ranks) * self.hop)
        return {"ring": ring, "tree": tree, "best": min(ring, tree)}[self.allreduce]

    def alltoall_seconds(self, busiest: float, ranks: int) -> float:
        """Return the seconds of an ``alltoall`` of all ranks; ``busiest``: bytes of the busiest link, one way."""
        return busiest / self.bandwidth + (self.hop if busiest else 0.0) + self.peer * ranks

    def broadcast_seconds(self, size: float, ranks: int) -> float:
        """Return the seconds of a broadcast of ``size`` bytes over a binomial tree."""
        return _levels(ranks) * (size / self.bandwidth + self.hop)


def ring_bytes(size: float, ranks: int) -> float:
    """Return the bytes that a rank sends in a ring allreduce of ``size`` bytes."""
    return 2 * (ranks - 1) / ranks * size


def sent_bytes(megabytes: float, compression: str) -> float:
    """Return the bytes on the wire of ``megabytes`` of float32 weights or gradients."""
    return 1e6 * megabytes * BYTES[compression] / BYTES["none"]


def _levels(ranks: int) -> int:
    return math.ceil(math.log2(ranks)) if ranks > 1 else 0
