"""The coordinator's half of collectives at ends: each runs when every rank that still has the optimizer waits in it.

A rank whose optimizer is gone (deleted, discarded, or its process is leaving) is waited for no more: its engine takes
part all the same, with zeros, since Horovod wants every member. No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from hvd_async.errors import ProtocolError, ranks_text
from hvd_async.runtime.compatibility import differing_replicas
from hvd_async.runtime.messages import CollectiveReady, RunCollective

KINDS = ("sum", "broadcast", "compare")
"""``compare``: no tensor travels; the coordinator compares names and checksums."""
SAME = (
    "every rank that still has the optimizer calls its collectives (drain, cut, consensus, consensus_distance, switch) "
    "in the same order"
)


@dataclass
class CollectiveQueue:
    """One optimizer's; a rank waits in one collective at a time, and numbers its own from 1.

    Attributes:
        optimizer: the number all its messages carry.
        ready: the ranks that wait, and in what.
        last: number of each rank's last collective.
    """

    optimizer: int
    ready: dict[int, CollectiveReady] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)

    def add(self, rank: int, event: CollectiveReady) -> None:
        """``rank`` waits in a collective.

        Raises:
            ProtocolError: it waits in one already, or this is not its next.
        """
        if event.kind not in KINDS or event.length < 0:
            raise ProtocolError(f"rank {rank} wants a collective {event.kind!r} of {event.length} elements")
        last = self.last.get(rank, 0)
        if rank in self.ready or event.index != last + 1:
            raise ProtocolError(f"rank {rank} is in collective {event.index} after {last}")
        self.last[rank] = event.index
        self.ready[rank] = event

    def remove(self, rank: int) -> None:
        """``rank`` has the optimizer no more."""
        self.ready.pop(rank, None)

    def due(self, present: Set[int], draining: Set[int] = frozenset()) -> list[RunCollective]:
        """The collective that may run now, if there is one; or why it never will.

        Args:
            present: ranks that still have the optimizer.
            draining: those that wait in a drain or cut.
        """
        if not self.ready or len(self.ready) + len(draining) < len(present):  # (looked at by each event: not by rank)
            return []
        if not present <= self.ready.keys() | draining:
            return []
        ready, self.ready = dict(sorted(self.ready.items())), {}
        first = next(iter(ready.values()))
        root = first.root if first.root in ready else next(iter(ready))
        problem, ranks = _problem(ready, draining - ready.keys()), list(ready)
        return [RunCollective(self.optimizer, first.kind, first.what, first.length, first.dtype, root, ranks, problem)]

    def waiting(self, present: Set[int]) -> tuple[str, frozenset[int]] | None:
        """Return the collective that ranks wait in, and the ranks it takes; None if none waits."""
        if not self.ready:
            return None
        return next(iter(self.ready.values())).what, frozenset(present - self.ready.keys())


def _problem(ready: dict[int, CollectiveReady], elsewhere: Set[int]) -> str | None:
    """Why the ranks' calls are not one and the same collective, or which replicas differ; None if all is well."""
    lowest, first = next(iter(ready.items()))
    if elsewhere:
        return f"rank {lowest} is in {first.what} while {ranks_text(elsewhere)} wait(s) in drain() or cut(): {SAME}"
    for rank, event in ready.items():
        own, other = ((one.kind, one.what, one.length, one.dtype, one.root) for one in (first, event))
        if own != other:
            return (
                f"rank {lowest} is in {first.what} ({first.length} x {first.dtype or 'checksums'}) while rank {rank} "
                f"is in {event.what} ({event.length} x {event.dtype or 'checksums'}): {SAME}"
            )
    if first.kind != "compare":
        return None
    difference = differing_replicas({rank: (event.names, event.checksums) for rank, event in ready.items()})
    if difference is None:
        return None
    ranks, name = difference
    return (
        f"replicas differ after {first.what}: {ranks_text(ranks)} from rank {lowest}, first in {name!r}. Weights or "
        f"optimizer state were changed on some ranks alone: call load_state_dict() and the like on every rank, or on "
        f"rank 0 before hvd.broadcast_parameters() and hvd.broadcast_optimizer_state() (torch), or "
        f"hvd.broadcast_variables() (TensorFlow); call these now to make replicas equal. Another cause is a "
        f"round_transform= whose sums depend on the number of threads: set the same number on all ranks"
    )
