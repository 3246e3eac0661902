"""AD-PSGD's requests: when a rank, or a host, asks to be averaged with a neighbour, and when it has to wait for one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable


class Pairing:
    """One optimizer's requests on this rank.

    Args:
        most: steps that may be taken between two averagings.
        neighbours: places of those with which there may be averagings.
        may_ask: whether this rank is to request them now.
        request: sends a request.

    Attributes:
        left: neighbours that have not finished.
    """

    def __init__(
        self, most: int, neighbours: Iterable[int], may_ask: Callable[[], bool], request: Callable[[], None]
    ) -> None:
        self._most, self._neighbours = most, frozenset(neighbours)
        self._may_ask, self._request = may_ask, request
        self.left = self._neighbours
        self._lock = threading.Lock()
        self._local = 0
        """Steps since the last averaging."""
        self._owed = 0
        """Averagings that this rank is behind its steps; -1: one before (engine thread)."""
        self._asked = False
        """Whether it has requested one that no exchange has (engine thread)."""

    # -- training thread --------------------------------------------------------------------------------------

    def may_step(self) -> bool:
        """Return whether a step needs no averaging before it."""
        return self._local < self._most or not self.left

    def stepped(self) -> None:
        """Count a step; the engine's ``ask`` must follow."""
        with self._lock:
            self._local += 1

    def ended(self) -> None:
        """Count steps anew after a drain or cut."""
        with self._lock:
            self._local = 0

    # -- engine thread ----------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Request an averaging for a step, if none was done in advance."""
        self._owed = min(self._owed + 1, self._most)
        self.want()

    def want(self) -> None:
        """Request an averaging that is owed, if none is requested."""
        if self._owed > 0 and not self._asked and self.left and self._may_ask():
            self._asked = True
            self._request()

    def granted(self) -> None:
        """Note that an exchange has the averaging."""
        self._asked = False

    def averaged(self) -> None:
        """Count an averaging that has completed here."""
        with self._lock:
            self._local = 0
        # a rank limited to one step must request a pair in it: two that wait for each other would never be paired
        self._owed = max(self._owed - 1, -1 if self._most > 1 else 0)
        self.want()

    def finished(self, neighbour: int) -> None:
        """Ask no more for a neighbour that has finished."""
        self.left = self.left - {neighbour}

    def begin_anew(self, gone: Iterable[int]) -> None:
        """Start after an end, with all neighbours but these."""
        self.left = self._neighbours - frozenset(gone)
        self._owed, self._asked = 0, False
