"""A number for each of some ranks, equal ones counted together: the least is known at once, however many there are."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass
class Levels:
    """Numbers, each as often as it was added and not removed.

    Few differ at a time: ranks that are waited for stand at steps close to each other.
    """

    _values: list[int] = field(default_factory=list)
    """Those that differ, in order; and how often each is there."""
    _counts: list[int] = field(default_factory=list)
    _size: int = 0

    def add(self, value: int, times: int = 1) -> None:
        """Add a number, so many times."""
        at = bisect_left(self._values, value)
        if at == len(self._values) or self._values[at] != value:
            self._values.insert(at, value)
            self._counts.insert(at, 0)
        self._counts[at] += times
        self._size += times

    def remove(self, value: int) -> None:
        """Remove a number that is there, once."""
        at = bisect_left(self._values, value)
        self._size -= 1
        self._counts[at] -= 1
        if not self._counts[at]:
            del self._values[at], self._counts[at]

    def __len__(self) -> int:
        return self._size

    @property
    def least(self) -> int:
        """The least; of none, 0."""
        return self._values[0] if self._values else 0
