"""Optimizers that the same ranks share: which of them wait for ranks that are done with others. No clock, no I/O.

A rank that is done with one of its optimizers is done with all, but says so of each, and may have left one unopened
that other ranks wait in. Then they would wait for each other without end, so it is asked to open that one:

1. when it is about to be done with an optimizer: those that others are done with, or about to be (``to_open``);
2. when all that a drain of one optimizer still waits for are ranks that wait for others to open another (``after``).

Both compare sets of ranks, for each pair of an optimizer that is not open on all ranks and one that ranks wait in a
drain of. How many ranks keep them apart is counted as events come, so no event looks at all ranks. There are few such
pairs, and mostly none: optimizers are opened when a job begins, and drained when it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_async.runtime.state_machine import StateMachine

Machine = StateMachine[Any]


@dataclass
class _Pair:
    """An optimizer that is not open on all ranks, and one with ranks in a drain.

    Attributes:
        not_draining: ranks that wait for others to open the first, and are in no drain of the second.
        not_opening: ranks that the drain of the second waits for, and that do not wait for others to open the first.
        unasked: ranks that came to that drain and were not asked to open the first yet.
    """

    not_draining: int
    not_opening: int
    unasked: list[int]


class Siblings:
    """Those of one group of ranks. ``before`` and ``after`` frame each event that changes which ranks have one."""

    def __init__(self) -> None:
        self._opening: dict[int, Machine] = {}
        """Not open on all ranks, by number."""
        self._draining: dict[int, Machine] = {}
        """With ranks in a drain or cut, by number."""
        self._pairs: dict[tuple[int, int], _Pair] = {}
        """By the numbers of one that is opening, and one that is draining."""
        self._was = (False, False, False)

    def to_open(self, drained: int) -> list[Machine]:
        """Return what a rank that is about to be done with optimizer ``drained`` has to open before."""
        return [
            machine
            for number, machine in self._opening.items()
            if machine.only_drains or (machine.opening and self._all_drain(number, drained))
        ]

    def _all_drain(self, number: int, drained: int) -> bool:
        pair = self._pairs.get((number, drained))
        return pair is not None and not pair.not_draining

    def awaiting(self, rank: int) -> int | None:
        """Return the number of an optimizer whose ranks wait for ``rank`` to open it; None if there is none."""
        return next((number for number, machine in self._opening.items() if machine.awaits_registration_of(rank)), None)

    def before(self, machine: Machine, rank: int) -> None:
        """An event of ``rank`` is about to reach an optimizer's state machine."""
        self._was = _standing(machine, rank)

    def after(self, number: int, machine: Machine, rank: int) -> list[tuple[Machine, int]]:
        """It has reached optimizer ``number``: return the optimizers that are to be opened now, each with a rank."""
        opens, drains = machine.open_to_ranks and not machine.over, bool(machine.draining)
        self._keep(self._opening, 0, number, machine if opens else None)
        self._keep(self._draining, 1, number, machine if drains else None)
        keys = [(number, other) for other in self._draining] if opens else []
        keys += [(other, number) for other in self._opening] if drains else []
        found: list[tuple[Machine, int]] = []
        for key in keys:
            if key[0] == key[1]:
                continue  # (whoever drains an optimizer has opened it)
            if key in self._pairs:
                self._count(key, number, _standing(machine, rank), rank)
            else:
                self._pairs[key] = self._pair(key)
            found += self._stuck(key)
        return found

    def _keep(self, members: dict[int, Machine], place: int, number: int, machine: Machine | None) -> None:
        if machine is not None:
            members[number] = machine
        elif members.pop(number, None) is not None:
            self._pairs = {key: pair for key, pair in self._pairs.items() if key[place] != number}

    def _pair(self, key: tuple[int, int]) -> _Pair:
        opening, draining = self._opening[key[0]], self._draining[key[1]]
        return _Pair(
            len(opening.opening - draining.draining),
            len(draining.computing - opening.opening),
            list(draining.draining),
        )

    def _count(self, key: tuple[int, int], number: int, now: tuple[bool, bool, bool], rank: int) -> None:
        """An event of ``rank`` has changed where it stands with optimizer ``number``, and nothing else of the pair."""
        pair, opening, draining = self._pairs[key], self._opening[key[0]], self._draining[key[1]]
        computes, opens, drains = (after - before for before, after in zip(self._was, now, strict=True))
        if number == key[0]:
            pair.not_draining += opens * (rank not in draining.draining)
            pair.not_opening -= opens * (rank in draining.computing)
            return
        pair.not_draining -= drains * (rank in opening.opening)
        pair.not_opening += computes * (rank not in opening.opening)
        if drains > 0:
            pair.unasked.append(rank)

    def _stuck(self, key: tuple[int, int]) -> list[tuple[Machine, int]]:
        pair, opening, draining = self._pairs[key], self._opening[key[0]], self._draining[key[1]]
        if pair.not_opening or not draining.computing:
            return []
        unasked, pair.unasked = pair.unasked, []
        return [(opening, rank) for rank in sorted(unasked) if rank in draining.draining]


def _standing(machine: Machine, rank: int) -> tuple[bool, bool, bool]:
    """Return whether a rank computes, waits for others to open, and waits in a drain."""
    return rank in machine.computing, rank in machine.opening, rank in machine.draining
