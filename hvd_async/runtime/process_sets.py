"""The ranks that share an optimizer: all ranks of the job, a Horovod process set, or one rank outside of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SingleRank:
    """Process set of one rank, for which Horovod has none. Its collectives return their input.

    Attributes:
        rank: its rank.
    """

    rank: int

    @property
    def ranks(self) -> list[int]:
        """A list of its rank, as in Horovod's process sets."""
        return [self.rank]

    @property
    def process_set_id(self) -> int:
        """A number that no process set of Horovod has."""
        return -1 - self.rank


@dataclass(frozen=True)
class RankGroup:
    """Ranks that share an optimizer.

    Attributes:
        process_set: Horovod's process set, or ``SingleRank``; None for all ranks.
        ranks: the ranks, in order.
        index: the position of this rank among them.
        id: number of the process set, 0 for all ranks.
        named: number of ranks of the process set that the user has passed; this rank may be outside of it.
    """

    process_set: Any
    ranks: tuple[int, ...]
    index: int
    id: int
    named: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks; empty for all ranks of the job."""
        return () if self.process_set is None else self.ranks


def rank_group_of(process_set: Any, everyone: Any, rank: int, size: int) -> RankGroup:
    """Return the ranks of a process set; a rank outside of it is alone, as with Horovod's ``DistributedOptimizer``.

    Args:
        process_set: the user's argument; ``everyone``, its like on another data plane, or None for all ranks.
        everyone: Horovod's global process set.
        rank, size: this rank, and the number of ranks in the job.

    Raises:
        ValueError: it is not a process set, or Horovod does not know it.
    """
    if process_set is None or process_set is everyone or getattr(process_set, "process_set_id", None) == 0:
        return RankGroup(None, tuple(range(size)), rank, 0, size)
    if not hasattr(process_set, "process_set_id"):
        raise ValueError(f"process_set must be an hvd.ProcessSet that was passed to hvd.init(), got {process_set!r}")
    if process_set.process_set_id is None:
        raise ValueError("process_set is not known to Horovod yet: pass it to hvd.init(process_sets=[...]) first")
    ranks, named = tuple(process_set.ranks), len(process_set.ranks)
    if rank not in ranks:
        process_set, ranks = SingleRank(rank), (rank,)
    return RankGroup(process_set, ranks, ranks.index(rank), process_set.process_set_id, named)


def process_set_among(
    process_sets: Any, known_ranks: Mapping[int, Sequence[int]], groups: Sequence[Sequence[int]], rank: int, make: bool
) -> Any:
    """Return the Horovod process set of the group to which a rank belongs, None if it belongs to none.

    Args:
        process_sets: Horovod's module of that name.
        known_ranks: the ranks of the existing process sets, by number.
        groups: the ranks of each group; the same on all ranks that call it.
        rank: this rank.
        make: whether all ranks of the job call it, so that missing process sets can be added; then it waits for them.

    Raises:
        ValueError: a group has no process set, and none can be added now.
    """
    known = {tuple(ranks): number for number, ranks in known_ranks.items()}
    own = None
    for ranks in groups:
        one = process_sets.ProcessSet(list(ranks))
        if tuple(ranks) in known:
            one.process_set_id = known[tuple(ranks)]
        else:
            try:
                if not make:
                    raise ValueError("other ranks of the job have no part in it")
                one = process_sets.add_process_set(one)
            except ValueError as error:
                raise ValueError(
                    f"ranks {list(ranks)} need a Horovod process set, to have a leader of their own, and none could be "
                    f"created ({error}). Call hvd.init(process_sets=[hvd.ProcessSet({list(ranks)}), ...]) with one for "
                    f"each group, or hvd.init(process_sets='dynamic'), or pass the number of all ranks as group=: a "
                    f"group of all ranks needs none"
                ) from None
        own = one if rank in ranks else own
    return own
