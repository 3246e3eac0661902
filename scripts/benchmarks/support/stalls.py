"""Who must wait when one rank stands still: what the graph of a push-sum gossip says. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from hvd_async.topology import Topology


class Stall(NamedTuple):
    """Where a rank stands still: in this step, for the messages of these ranks."""

    step: int
    senders: tuple[int, ...]


def stalls(graph: Topology, sleeper: int, step: int, staleness: int = 0) -> dict[int, Stall]:
    """Where each rank comes to a stand if ``sleeper`` sends no more messages.

    A rank sends its message of a step and then waits for those of its in-neighbours that are ``staleness`` steps
    older; the sleeper has not sent that of ``step`` yet. So rank r stops in the first step k in which an in-neighbour's
    message of step k - ``staleness`` is not sent.

    Args:
        graph: connected; at step k (from 1) its phase k - 1 holds.
        sleeper: the rank.
        step: of the first message that it does not send: of the step that it does not end, or the one after (D-PSGD).
        staleness: 0 of SGP and D-PSGD.

    Returns:
        By rank, without the sleeper; in the order in which they stop.
    """
    last: dict[int, float] = dict.fromkeys(range(graph.size), math.inf)
    last[sleeper] = step - 1
    found: dict[int, Stall] = {}
    now = step + staleness
    while len(found) < graph.size - 1:
        needed = now - staleness
        for rank in range(graph.size):
            missing = tuple(sender for sender in graph.into(rank, needed - 1) if last[sender] < needed)
            if missing and rank != sleeper and rank not in found:
                found[rank] = Stall(now, missing)
        for rank, stall in found.items():
            last[rank] = stall.step
        now += 1
    return found
