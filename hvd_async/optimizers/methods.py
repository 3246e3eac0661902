"""Public methods of wrapped optimizers in both frameworks. Each calls the driver, the attribute ``_async``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class OptimizerMethods:
    """Methods of every wrapped optimizer."""

    _async: Any

    def drain(self) -> int:
        """Announce that this rank is done, and wait until every rank is done and nothing is in flight.

        Afterwards the replicas are identical, which is checked, and batch-norm statistics agree by the ``buffers=``
        policy. (With gossip nothing changes if no rank has stepped since the last drain; statistics recomputed since
        then agree in ``consensus()``.) All optimizers that have begun to train with the same process set, on this rank
        or another, are drained together.

        A collective: every rank calls it the same number of times, including a rank without batches. Ranks that have
        left or discarded the optimizer are not waited for. If one rank drains and another cuts, all ranks drain.

        Returns:
            The rank that was done last.

        Raises:
            GradientLossError: a gradient or weight was lost in flight, or counted twice.
            ReplicaMismatchError: replicas differ: weights or state were changed on some ranks only.
            ReplicaStateError: an earlier step was interrupted on this rank.
        """
        last: int = self._async.end(True)
        return last

    def cut(self) -> None:
        """Wait until nothing is in flight between ranks, without making replicas equal; for one checkpoint per rank.

        Afterwards each rank's state holds its own share: save every rank's state, and load them into the same number of
        ranks. Like ``drain()``, a collective of all optimizers with the same process set.

        Raises:
            ReplicaStateError: an earlier step was interrupted on this rank.
        """
        self._async.end(False)

    def discard(self) -> None:
        """Forget this optimizer on this rank immediately; it cannot be used afterwards. Not a collective.

        The other ranks continue without this one. Gradients that were handed over go into the next round; with gossip
        and leaders, this rank's progress since the last drain is lost. Deleting the optimizer has the same effect, as
        soon as Python finalizes it, and warns if late gradients may be lost. (Optimizers of gossip and leaders stay
        alive until they are drained, since other ranks need their weights.)
        """
        self._async.discard()

    @property
    def rounds(self) -> int:
        """Number of rounds that this rank's weights have seen, including those before a resumed checkpoint.

        A round of an ``EagerOptimizer`` is one partial allreduce; of a ``GossipOptimizer`` an exchange of messages or
        an average over all ranks (including that of a ``drain()``); of a ``LeaderOptimizer`` a pull. A rank without a
        partner counts the steps in which it would have exchanged. So ``while optimizer.rounds < n`` ends with any
        algorithm and any number of ranks, even after other ranks have finished.
        """
        rounds: int = self._async.rounds
        return rounds

    @property
    def settings(self) -> dict[str, Any]:
        """The present algorithm, by ``schedule`` and ``switch()``, and its settings. Strengths that are functions of
        the step are returned as functions."""
        settings: dict[str, Any] = self._async.settings
        return settings

    def stats(self) -> Any:
        """Return this rank's statistics so far."""
        return self._async.stats()

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Return a context in which the model holds the consensus of all ranks, for evaluation and export.

        The consensus is the average of all ranks' weights; with a leader, the weights of the rank with the lowest mean
        loss (LSGD) or the center (EASGD). Under partial allreduce all ranks' weights are equal after a ``drain()``.
        On exit the model gets its own weights back. In the context batch-norm statistics agree by the ``buffers=``
        policy, and steps, drains and calls that begin with a drain are refused, including those of other optimizers
        that would drain this one.

        A collective. It begins with a ``drain()`` if ranks exchange gradients, and with a ``cut()`` if they exchange
        weights.

        Raises:
            ReplicaStateError: an earlier step was interrupted on this rank.
        """
        with self._async.consensus():
            yield

    def consensus_distance(self) -> float:
        """Return sqrt(mean over ranks of |x_i - mean x|^2), x_i rank i's weights; 0 if all are equal.

        A collective; if ranks exchange weights, it begins with a ``cut()``. No rank gathers all weights.
        """
        distance: float = self._async.consensus_distance()
        return distance


class EagerMethods(OptimizerMethods):
    """Methods of every ``EagerOptimizer``, in addition to those of all optimizers."""

    def record_samples(self, samples: Any) -> None:
        """Record the number of samples over which this step's gradient is the mean, with ``weighting="samples"``.

        Call it on every rank. In torch call it before ``backward()``, which hands gradients over; with several backward
        passes per step, before each of them and after ``zero_grad()``, which begins the step. A step's gradient is the
        sum over its passes, as in Horovod, and its samples are those of all passes. If each pass's loss is its part of
        the mean over all passes, the round equals that of one large batch.

        Args:
            samples: an integer, at least 0. 0: this rank takes part with an empty batch, which has no weight.

        Raises:
            ValueError: ``samples`` is not such a number, or rounds are not weighted by samples.
            ReplicaStateError: gradients of this step were handed over already.
        """
        self._async.record_samples(samples)


class GossipMethods(OptimizerMethods):
    """Methods of every ``GossipOptimizer``, in addition to those of all optimizers."""

    def switch(self, **changes: Any) -> None:
        """Change settings, and continue from the average of all ranks. A collective that begins with a ``drain()``.

        Args:
            changes: new values of options of ``GossipOptimizer``, except ``hierarchical``, ``schedule``,
                ``quasi_global`` and ``buffers``. Other settings keep their values, with two exceptions: a new topology
                resets ``peers`` to 1, and matrices passed as ``mixing`` also replace the topology.

        Raises:
            ValueError: the settings are invalid; nothing has changed then.
        """
        self._async.switch(changes)

    def set_epoch(self, epoch: int) -> None:
        """Apply the ``peers``, ``average_every`` and ``schedule`` of an epoch. Call it on every rank as epochs start.

        It acts as ``switch()`` if a setting changes. Else, and at the first call, it does not communicate.
        """
        self._async.set_epoch(epoch)


class LeaderMethods(OptimizerMethods):
    """Methods of every ``LeaderOptimizer``, in addition to those of all optimizers."""

    def record_loss(self, loss: Any) -> None:
        """Record this step's training loss, before the step. The rank with the lowest mean of recent losses leads.

        Args:
            loss: a number, or a tensor with one element. (torch: ``step()`` records the loss of a closure.)

        Raises:
            ValueError: it has several elements.
        """
        self._async.record_loss(loss)
