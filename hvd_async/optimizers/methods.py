"""The public methods that wrapped optimizers of both frameworks have: each calls the driver, which is ``_async``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class OptimizerMethods:
    """Methods of every wrapped optimizer."""

    _async: Any

    def drain(self) -> int:
        """Say "I am done", and wait until every rank is and all that was on its way has come.

        Afterwards the replicas are identical, which is checked, and batch-norm statistics agree by the ``buffers=``
        policy. (Of gossip nothing changes where no rank has stepped since the last drain: statistics computed anew
        agree in ``consensus()``.) All optimizers of this process that have begun to train with the same process set,
        here or on another rank, are drained together. A collective: every rank calls it equally often, also a rank that
        had no batch; a rank that has left, or has the optimizer no more, is waited for no longer. Where one rank drains
        and another cuts, all drain.

        Returns:
            The rank that was last to be done.

        Raises:
            GradientLossError: something was lost on its way, or counted twice.
            ReplicaMismatchError: replicas differ: weights or state were changed on some ranks alone.
            ReplicaStateError: an earlier step was broken off here.
        """
        last: int = self._async.end(True)
        return last

    def cut(self) -> None:
        """Stop at a point where nothing is on its way between ranks, and go on from there; for a checkpoint a rank.

        Afterwards each rank's state holds its own share: save every rank's, and load them into as many ranks. A
        collective, like ``drain()``, and like it for all of this process's optimizers.

        Raises:
            ReplicaStateError: an earlier step was broken off here.
        """
        self._async.end(False)

    def discard(self) -> None:
        """Forget this optimizer on this rank, at once: no collective. It can be used no more.

        The other ranks go on without this one. Gradients that were handed over go with their next round; of gossip and
        leaders, what this rank has learned since the last drain is lost. Deleting the optimizer does the same, whenever
        Python gets to it (gossip's and leaders' is kept until it is drained, since others count on its weights).
        """
        self._async.discard()

    @property
    def rounds(self) -> int:
        """Rounds that this rank's weights have seen, those before a resumed checkpoint included.

        A round of an ``EagerOptimizer`` is one partial allreduce; of a ``GossipOptimizer`` an exchange of messages or
        an average over all ranks (also that of a ``drain()``); of a ``LeaderOptimizer`` a pull. A rank that has nobody
        to exchange with counts the steps in which it would have: so ``while optimizer.rounds < n`` ends with any
        algorithm and any number of ranks, also after other ranks have finished.
        """
        rounds: int = self._async.rounds
        return rounds

    @property
    def settings(self) -> dict[str, Any]:
        """The algorithm in force, by ``schedule`` and ``switch()``, and its settings; strengths that are functions of
        the step as they were given."""
        settings: dict[str, Any] = self._async.settings
        return settings

    def stats(self) -> Any:
        """Return what this rank's optimizer has done so far."""
        return self._async.stats()

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """In it the model holds what stands for all ranks, for evaluation and export; afterwards its own weights again.

        That is the average of all ranks' weights (of partial allreduce: all are equal after a ``drain()``); of ranks
        that follow a leader, the weights of the one with the lowest mean loss (LSGD), or the center (EASGD).

        Batch-norm statistics agree in it by the ``buffers=`` policy. A collective, with a ``drain()`` at its start
        where gradients travel, and a ``cut()`` where weights do. Steps, drains and what begins with one are refused
        in it, also those of other optimizers that would drain this one.

        Raises:
            ReplicaStateError: an earlier step was broken off here.
        """
        with self._async.consensus():
            yield

    def consensus_distance(self) -> float:
        """Return sqrt(mean over ranks of |x_i - mean x|^2), x_i rank i's weights; 0 if all are equal.

        A collective; where weights travel, with a ``cut()`` at its start. No rank gets all weights.
        """
        distance: float = self._async.consensus_distance()
        return distance


class EagerMethods(OptimizerMethods):
    """Methods of every ``EagerOptimizer``, beside those of all."""

    def record_samples(self, samples: Any) -> None:
        """Say of how many samples this step's gradient is the mean, with ``weighting="samples"``, on every rank.

        Call it before ``backward()`` in torch, where gradients leave; of several backward passes before each, after
        ``zero_grad()``, which begins the step. A step's gradient is what its passes have added up, as in Horovod, and
        its samples are those of all passes: where each pass's loss is its part of the mean over all of them, the round
        is that of one large batch.

        Args:
            samples: a whole number, 0 or more. 0: this rank takes part with an empty batch, which has no weight.

        Raises:
            ValueError: no such number; or rounds are not weighted by samples.
            ReplicaStateError: gradients of this step have left.
        """
        self._async.record_samples(samples)


class GossipMethods(OptimizerMethods):
    """Methods of every ``GossipOptimizer``, beside those of all."""

    def switch(self, **changes: Any) -> None:
        """Go on with other settings, from the average of all ranks. A collective, with a ``drain()`` at its start.

        Args:
            changes: of ``algorithm``, ``topology``, ``peers``, ``mixing``, ``max_staleness``, ``gossip_every``,
                ``max_local_steps``, ``average_every``, ``fragments``, ``outer_lr``, ``outer_momentum``; what is not
                named stays as it is, but for ``peers``, which is 1 on another topology, and matrices given as
                ``mixing``, which are a topology.

        Raises:
            ValueError: settings that cannot be; nothing has changed then.
        """
        self._async.switch(changes)

    def set_epoch(self, epoch: int) -> None:
        """Call it at the start of each epoch, on every rank: ``peers`` and ``schedule`` by epoch take effect there.

        A ``switch()`` where something changes; it does not communicate where nothing does, nor the first time.
        """
        self._async.set_epoch(epoch)


class LeaderMethods(OptimizerMethods):
    """Methods of every ``LeaderOptimizer``, beside those of all."""

    def record_loss(self, loss: Any) -> None:
        """Say what this step's training loss was, before the step: the lowest mean of the last ones leads.

        Args:
            loss: a number, or a tensor of one. (torch: a closure's is recorded by ``step()``.)

        Raises:
            ValueError: it is several numbers.
        """
        self._async.record_loss(loss)
