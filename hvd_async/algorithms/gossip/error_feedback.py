"""CHOCO-SGD error feedback (Koloskova et al., ICML 2019, Algorithm 2): messages are differences to estimates.

Both ends of each edge keep the same estimate c of the sender's weights x, and add each decoded message to it. So the
error of the compression Q is part of the next difference.

    c <- c + Q(x - c);   the receiver mixes c into its weights
"""

from __future__ import annotations

from typing import NamedTuple

from hvd_async.algorithms.gossip.message_format import MessageFormat
from hvd_async.runtime.interfaces import Vector

SHARED = "everywhere"
"""The name of the estimate that all ranks share: the initial weights, or those of the last drain."""


class SavedState(NamedTuple):
    """State of a rank in a checkpoint after ``cut()``, without its weights z."""

    weight: float
    copies: dict[str, Vector]
    """CHOCO-SGD's estimates, by the name of the edge's end."""
    base: int
    """Steps since the last drain, of the rank with the most steps."""


class ErrorFeedback:
    """Estimates of an optimizer's weights, by edge. If messages are not differences, it only encodes and decodes.

    Args:
        post: the format of messages.
        graph: name of the graph; saved estimates of another graph are not used.
        parts: number of parts of the weights; a message, and an estimate, holds one part.
    """

    def __init__(self, post: MessageFormat, graph: str, parts: int = 1) -> None:
        self._post, self._graph = post, graph if parts == 1 else f"{graph} of hosts with {parts} ranks"
        self._shared = SHARED if parts == 1 else self._name(SHARED)  # (an estimate of a part does not fit a vector)
        self._copies: dict[str, Vector] = {}

    def begin(self, weights: Vector) -> None:
        """Start from these weights as the only estimate, the same on all ranks."""
        self._copies.clear()
        if self._post.differences:
            self._copies[self._shared] = weights + 0

    @property
    def begun(self) -> bool:
        """Whether there is an estimate."""
        return bool(self._copies)

    def forget_edges(self) -> None:
        """Reset all edges to the estimate that all ranks share."""
        if self._copies:
            self._copies = {self._shared: self._copies[self._shared]}

    def encode(self, edge: str, vector: Vector) -> tuple[Vector, Vector]:
        """Return the bytes to send over an edge, and the vector that the receiver decodes."""
        post = self._post
        if not post.differences:
            data = post.encode(vector)
            return data, vector if post.lossless else post.decode(data)
        known = self._known(edge)
        data = post.encode(vector - known)
        return data, self._add(edge, known, data)

    def decode(self, edge: str, data: Vector) -> Vector:
        """Return the vector received over an edge."""
        return self._add(edge, self._known(edge), data) if self._post.differences else self._post.decode(data)

    def _known(self, edge: str) -> Vector:
        name = self._name(edge)
        return self._copies[name] if name in self._copies else self._copies[self._shared]

    def _add(self, edge: str, known: Vector, data: Vector) -> Vector:
        copy = self._copies[self._name(edge)] = known + self._post.decode(data)
        return copy

    def _name(self, edge: str) -> str:
        return f"{self._graph}: {edge}"

    # -- checkpoints ------------------------------------------------------------------------------------------

    def saved_state(self) -> dict[str, Vector]:
        """Return the estimates, by name."""
        return dict(self._copies)

    def restore(self, copies: dict[str, Vector]) -> None:
        """Load the estimates that ``saved_state`` returned, of this graph only."""
        here = (self._shared, self._name(""))
        self._copies = {name: copy for name, copy in copies.items() if name.startswith(here)}
