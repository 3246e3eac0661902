"""Averages with those neighbours that take the same step, on one rank: what exact diffusion and NoLoCo have in common.

A message of a step that only one end of an edge has taken counts at neither, so push-sum weights stay 1.
"""

from __future__ import annotations

from hvd_async.algorithms.gossip.adpsgd import check_weight
from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.sender import edge
from hvd_async.algorithms.gossip.worker import PushSumWorker
from hvd_async.runtime.interfaces import Vector


class NeighbourAverageWorker(PushSumWorker):
    """One optimizer of one rank that averages with neighbours on a symmetric graph."""

    def _exchanged(self, vector: Vector) -> tuple[Vector, dict[int, Vector]]:
        """Send a vector to this step's neighbours, and wait for theirs.

        Args:
            vector: shape (n,); it must stay as it is until it is sent.

        Returns:
            The vector as its receivers decode it, and those of the neighbours that take this step, by place.
        """
        self._await(lambda: self._sender.offered - self._exchanges.own_sent <= 1)
        sent = self._offer(self._step, vector, 1.0)
        self._await_messages()
        messages = self._receive_buffer.take(self._step)
        self._taken += len(messages)
        self._staleness[0] += len(messages)
        phase, there = self._base + self._step, [message for message in messages if message.weight]
        if self.log is not None:
            self._noted += [(message.sender, self._step) for message in there]
        others = {each.sender: self._known.decode(edge(each.sender, self.plan, phase), each.data) for each in there}
        return vector if sent is None else sent.message.x, others

    # -- ends -------------------------------------------------------------------------------------------------

    def gather(self, weights: Vector, flush: bool) -> Vector:
        self._together = flush
        self._discarded += len(self._receive_buffer.take(None))  # of steps that this rank has not taken
        if flush:
            weights = self.consensus(weights)
            self._known.begin(weights)
        elif self._uneven:
            self._known.forget_edges()
        return weights

    # -- checkpoints ------------------------------------------------------------------------------------------

    def restore(self, kept: SavedState) -> None:
        check_weight(kept, self.config.algorithm)
        super().restore(kept)
