"""Process sets: some of the ranks, which run collectives of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hvd_async.torch.distributed import world
from hvd_async.torch.distributed.calls import Calls


class ProcessSet:
    """Some of the ranks.

    Args:
        ranks: of the job, in any order.

    Attributes:
        ranks: in ascending order.
        process_set_id: its number, once ``hvd.init(process_sets=...)`` or ``hvd.add_process_set`` knows it.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.process_set_id: int | None = None
        self._calls: Calls | None = None
        """Its collectives, on its ranks, once it is known."""
        if not isinstance(ranks, Iterable):
            raise ValueError(f"ProcessSet takes a list of ranks, got {ranks!r}: there is no MPI on torch.distributed.")
        self.ranks = sorted(ranks)
        if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in self.ranks):
            raise ValueError(f"ProcessSet takes a list of ranks, got {self.ranks}.")

    def included(self) -> bool:
        """Return whether this rank is one of them."""
        return world.current().rank in self.ranks

    def size(self) -> int | None:
        """Return the number of ranks, None before the set is known."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this rank's place among them, None before the set is known.

        Raises:
            ValueError: this rank is outside.
        """
        if self.process_set_id is None:
            return None
        if not self.included():
            raise ValueError(f"rank {world.current().rank} is not in process set {self.ranks}.")
        return self.ranks.index(world.current().rank)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0  # (always, as Horovod's)
_known: dict[int, ProcessSet] = {}
engine_calls: list[Calls] = []
"""Collectives of all ranks that their engines call, in no order with those of the scripts; empty before ``init``. They
are connected from the beginning: to connect later would mean to wait for a rank that has ended."""
_next_id = 0


def initialize(process_sets: str | Sequence[ProcessSet] | None) -> None:
    """Make the global process set and those of ``hvd.init(process_sets=...)``. A collective.

    Raises:
        ValueError: ``process_sets`` is something else, or two sets have the same ranks.
    """
    global _next_id
    _next_id = 0
    _known.clear()  # (a forked child has copies of its parent's, which it cannot end)
    engine_calls.clear()
    global_process_set.ranks = list(range(world.current().size))
    _register(global_process_set)
    engine_calls.append(Calls("calls.engine", global_process_set.ranks))
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ValueError(f"process_sets must be 'dynamic' or a list of ProcessSet, got {process_sets!r}.")
    for one in () if process_sets is None or isinstance(process_sets, str) else process_sets:
        add_process_set(one)


def _register(process_set: ProcessSet) -> None:
    """Give a process set the next number; its ranks connect to each other."""
    global _next_id
    process_set.process_set_id = _next_id
    _known[_next_id] = process_set
    if process_set.included():
        process_set._calls = Calls(f"calls.{_next_id}", process_set.ranks)
    _next_id += 1


def forget(process_set: ProcessSet) -> None:
    """End a process set's collectives, and make it unknown."""
    assert process_set.process_set_id is not None
    del _known[process_set.process_set_id]
    process_set.process_set_id = None if process_set is not global_process_set else 0
    if process_set._calls is not None:
        process_set._calls.close()
        process_set._calls = None


def forget_all() -> None:
    """Undo ``initialize``."""
    for one in list(_known.values()):
        forget(one)
    while engine_calls:
        engine_calls.pop().close()


def calls_of(process_set: ProcessSet) -> Calls:
    """Return a process set's collectives.

    Raises:
        ValueError: the process set is not known, or this rank is outside.
    """
    own = world.current().rank
    if process_set.process_set_id not in _known:
        raise ValueError(
            f"{process_set} is not known. Pass it to hvd.init(process_sets=[...]) or hvd.add_process_set()."
        )
    calls = _known[process_set.process_set_id]._calls
    if calls is None:
        raise ValueError(f"rank {own} is not in {process_set}: only its ranks may call its collectives.")
    return calls


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set known; all ranks of the job call it in the same order.

    Returns:
        The process set.

    Raises:
        ValueError: a rank does not exist, or the ranks have a process set already.
    """
    # (before ``init()`` a script may have made it by Horovod's class, see ``horovod_api``)
    made = (
        process_set if isinstance(process_set, ProcessSet) else ProcessSet(getattr(process_set, "ranks", process_set))
    )
    size = world.current().size
    if not made.ranks or made.ranks[0] < 0 or made.ranks[-1] >= size or len({*made.ranks}) < len(made.ranks):
        raise ValueError(f"process set {made.ranks} must have different ranks of 0 to {size - 1}.")
    if any(one.ranks == made.ranks for one in _known.values()):
        raise ValueError(f"ranks {made.ranks} have a process set already. Use that one.")
    _register(made)
    if hasattr(process_set, "process_set_id"):
        process_set.process_set_id = made.process_set_id
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set; all ranks of the job call it. Returns whether it was known, and not the global one."""
    if not process_set.process_set_id:
        return False
    forget(_known[process_set.process_set_id])
    process_set.process_set_id = None
    return True


def ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of all process sets by number, the global one's first."""
    return {number: list(one.ranks) for number, one in _known.items()}
