"""What neighbours know of a rank's weights, where messages are differences to it (CHOCO-SGD, Koloskova et al., 2019).

Both ends of an edge keep the same copy and add to it what was sent, as the receiver decodes it: what compression has
left out is part of the next difference.
"""

from __future__ import annotations

from typing import NamedTuple

from hvd_async.algorithms.gossip.message_exchange import MessageFormat
from hvd_async.runtime.interfaces import Vector

SHARED = "everywhere"
"""What all ranks know: the weights that they began with, or that the last drain gave them."""


class SavedState(NamedTuple):
    """What of a rank's gossip a checkpoint after ``cut()`` holds, beside its weights z."""

    weight: float
    copies: dict[str, Vector]
    """CHOCO-SGD: what neighbours know, by the name of the edge's end."""
    base: int
    """Steps since the last drain, of the rank that took most."""


class ErrorFeedback:
    """One optimizer's. Where messages are no differences, it only codes them.

    Args:
        post: how messages look.
        graph: on another one both ends begin anew.
    """

    def __init__(self, post: MessageFormat, graph: str) -> None:
        self._post, self._graph = post, graph
        self._copies: dict[str, Vector] = {}

    def begin(self, weights: Vector) -> None:
        """All ranks know these now, and nothing else."""
        self._copies.clear()
        if self._post.differences:
            self._copies[SHARED] = weights + 0

    @property
    def begun(self) -> bool:
        """Whether there is something to take a difference to."""
        return bool(self._copies)

    def forget_edges(self) -> None:
        """Go on from what all ranks know."""
        if self._copies:
            self._copies = {SHARED: self._copies[SHARED]}

    def encode(self, edge: str, vector: Vector) -> tuple[Vector, Vector]:
        """Bytes to send over an edge, and what the receiver makes of them."""
        post = self._post
        if not post.differences:
            data = post.encode(vector)
            return data, vector if post.lossless else post.decode(data)
        known = self._known(edge)
        data = post.encode(vector - known)
        return data, self._add(edge, known, data)

    def decode(self, edge: str, data: Vector) -> Vector:
        """What has come over an edge."""
        return self._add(edge, self._known(edge), data) if self._post.differences else self._post.decode(data)

    def _known(self, edge: str) -> Vector:
        name = self._name(edge)
        return self._copies[name] if name in self._copies else self._copies[SHARED]

    def _add(self, edge: str, known: Vector, data: Vector) -> Vector:
        copy = self._copies[self._name(edge)] = known + self._post.decode(data)
        return copy

    def _name(self, edge: str) -> str:
        return f"{self._graph}: {edge}"

    # -- checkpoints ------------------------------------------------------------------------------------------

    def kept(self) -> dict[str, Vector]:
        """The copies, by name."""
        return dict(self._copies)

    def restore(self, copies: dict[str, Vector]) -> None:
        """Take back what ``kept`` gave, as far as it is of this graph."""
        here = (SHARED, self._name(""))
        self._copies = {name: copy for name, copy in copies.items() if name.startswith(here)}
