"""Horovod's Keras callbacks, made to work on Keras 3 and with our optimizers.

All have the ranks meet before they communicate, before evaluation inside ``fit()``, and when ``fit()`` ends, so that
ranks with different numbers of batches do: they drain the optimizer. Of a ``GossipOptimizer``, evaluation inside
``fit()`` sees the average of all ranks, of a ``LeaderOptimizer`` the leader or the centre, and each rank goes on with
its own weights, until ``fit()`` ends with a drain.
Use the same callbacks, in the same order, on every rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.tensorflow.functions import allgather_object
from horovod.tensorflow.keras.callbacks import *  # noqa: F403  elastic's and BestModelCheckpoint

from hvd_async.tensorflow.buffers import raw
from hvd_async.tensorflow.functions import broadcast_variables
from hvd_async.tensorflow.gossip_mixin import GossipMixin
from hvd_async.tensorflow.local_mixin import LocalMixin
from hvd_async.tensorflow.mixin import EagerMixin


def our_optimizer(model: Any) -> Any:
    """The model's optimizer if it is one of ours (also inside a LossScaleOptimizer), else None."""
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return optimizer if isinstance(optimizer, EagerMixin | LocalMixin) else None


class _Meeting:
    """Where the ranks of one ``fit()`` have met; the callbacks of a model share it.

    Attributes:
        at: the point where they were last.
        drains: whether ranks with weights of their own are drained at the end of each epoch.
        evaluation: closed when it ends.
    """

    def __init__(self) -> None:
        self.at: tuple[str, int] | None = None
        self.drains = False
        self.evaluation = contextlib.ExitStack()


class _Draining(keras.callbacks.Callback):
    """Has ranks meet at the points where they must; several callbacks of one model share each meeting."""

    _training = False

    @property
    def _meeting(self) -> _Meeting:
        meeting: _Meeting | None = getattr(self.model, "_hvd_async_meeting", None)
        if meeting is None:
            meeting = _Meeting()
            object.__setattr__(self.model, "_hvd_async_meeting", meeting)
        return meeting

    def _optimizer_at(self, point: tuple[str, int]) -> Any:
        """The optimizer, ready to meet the other ranks' at ``point``; None if it has, or is none of ours."""
        optimizer = our_optimizer(self.model)
        if optimizer is None or self._meeting.at == point:
            return None
        self._meeting.at = point
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        return optimizer

    def _together(self, optimizer: Any) -> contextlib.AbstractContextManager[None]:
        """In it the model is the same on all ranks; afterwards too, unless ranks go on with weights of their own."""
        if isinstance(optimizer, LocalMixin) and not self._meeting.drains:
            return optimizer.consensus()
        if optimizer is not None:
            optimizer.drain()
        return contextlib.nullcontext()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._training, self._epoch = True, 0
        self._meeting.at = None
        self._meeting.evaluation.pop_all()  # one that was broken off: what was loaded since is not to be overwritten
        optimizer = our_optimizer(self.model)
        if optimizer is not None and optimizer._async.model is None:
            optimizer._async.model = self.model  # so that batch-norm statistics agree too

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        self._meeting.at = None
        optimizer = our_optimizer(self.model)
        if isinstance(optimizer, GossipMixin):
            optimizer.set_epoch(epoch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        optimizer = self._optimizer_at(("epoch", self._epoch)) if self._training else None
        self._meeting.evaluation.enter_context(self._together(optimizer))

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._meeting.evaluation.close()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # Also where only some ranks validate: all meet once an epoch, these before it and the others here.
        with self._together(self._optimizer_at(("epoch", epoch))):
            pass

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        optimizer = self._optimizer_at(("end", 0))
        if optimizer is not None:
            optimizer.drain()
        self._training = self._meeting.drains = False


class GossipEpochCallback(_Draining):
    """Have a ``GossipOptimizer`` follow the epochs: its ``peers`` and ``schedule`` by epoch, ends of different lengths;
    or a ``LeaderOptimizer``.

    (The other callbacks here do so too; one of them is enough.)

    Args:
        drain: average all ranks (have them take the leader's weights, or the centre) at the end of each epoch, so that
            what is saved there (``ModelCheckpoint``) is that, and training goes on from it. Without it a rank saves its
            own weights there, and the average when ``fit()`` has ended.
    """

    def __init__(self, drain: bool = False) -> None:
        super().__init__()
        self.drain = drain

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._meeting.drains = self.drain


class BroadcastGlobalVariablesCallback(_Draining):
    """Give every rank the weights and optimizer state of ``root_rank`` when ``fit()`` begins.

    Args:
        root_rank: whose to send.
        device: as in Horovod; where to place the operation.
        local_variables: variables that stay each rank's own.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self._local = {id(raw(v)) for v in local_variables or []}

    def register_local_var(self, variable: Any) -> None:
        """Keep this variable each rank's own."""
        self._local.add(id(raw(variable)))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        if not self.model.built:
            raise ValueError(
                "BroadcastGlobalVariablesCallback: the model has no weights yet. Call model.build(input_shape) before "
                "fit(), so that all ranks can start from the same ones."
            )
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        ours = our_optimizer(self.model)
        if ours is not None and ours._async.worker is not None:
            ours.drain()
        variables = [*self.model.variables, *(optimizer.variables if optimizer is not None else [])]
        with tf.device(self.device):
            broadcast_variables([v for v in variables if id(raw(v)) not in self._local], root_rank=self.root_rank)


class MetricAverageCallback(_Draining):
    """Average every epoch's metrics over the ranks that have them (a rank without batches has none).

    Put it before callbacks that read metrics (ReduceLROnPlateau, TensorBoard).
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        own = {key: float(value) for key, value in (logs or {}).items()}
        everyone = allgather_object(own, name="hvd_async.metric_average")
        if logs is None:
            return
        for key in sorted({key for one in everyone for key in one}):
            values = [one[key] for one in everyone if key in one]
            logs[key] = math.fsum(values) / len(values)


class StopAtRounds(_Draining):
    """End ``fit()`` when the weights have seen so many rounds: how a job with ``pace="rounds"`` comes to its end.

    Ranks then take different numbers of steps, so there is no epoch that all of them end: give ``fit()`` one epoch of a
    data set that repeats, and no callbacks that meet at epochs (metric average).

    Args:
        rounds: of the optimizer, those before a resumed checkpoint included.
    """

    def __init__(self, rounds: int) -> None:
        super().__init__()
        if rounds < 1:
            raise ValueError(f"rounds={rounds!r} is not a number of rounds: take 1 or more")
        self.rounds = rounds

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        optimizer = our_optimizer(self.model)
        if optimizer is not None and optimizer.rounds >= self.rounds:
            self.model.stop_training = True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Nothing: other ranks may not come here."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Nothing: other ranks may not come here."""


class LearningRateScheduleCallback(_Draining):
    """Set the learning rate to ``initial_lr * multiplier`` between epochs ``start_epoch`` and ``end_epoch``.

    Args:
        initial_lr: at the start of training.
        multiplier: a constant (decay per epoch: ``multiplier ** (epoch - start_epoch)``) or ``epoch -> factor``.
        start_epoch, end_epoch: where it holds; ``end_epoch`` None: to the end.
        staircase: adjust once an epoch (True) or with every batch, the epoch being a fraction (False).
        momentum_correction: scale SGD's velocity by new over old rate when it changes; with ``EagerOptimizer`` when
            the round that carries the new rate is applied, so the replicas stay equal.
        steps_per_epoch: for ``staircase=False``; found out from ``fit()`` if None.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is required: the learning rate at the start of training")
        self.initial_lr, self.start_epoch, self.end_epoch = float(initial_lr), start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        optimizer = our_optimizer(self.model)
        if isinstance(optimizer, EagerMixin) and self.momentum_correction:
            optimizer._async.momentum_correction = True
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(f"{type(self).__name__} cannot tell the steps per epoch: pass steps_per_epoch=")

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._adjust(float(self._epoch))
        elif not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self._epoch + batch / self.steps_per_epoch)

    def _adjust(self, epoch: float) -> None:
        optimizer, rate = self.model.optimizer, self.initial_lr * self.multiplier(epoch)
        before = float(raw(optimizer.learning_rate))
        optimizer.learning_rate.assign(rate)
        ours = our_optimizer(self.model)
        if isinstance(ours, LocalMixin) and self.momentum_correction and before > 0:  # (no rounds: done here and now)
            for velocity in getattr(ours, "momentums", None) or []:
                velocity.assign(raw(velocity) * (rate / before))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs["lr"] = float(raw(self.model.optimizer.learning_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from ``initial_lr / size`` to ``initial_lr`` over ``warmup_epochs`` (Goyal et al., 2017).

    Args:
        initial_lr: the rate after warm-up.
        warmup_epochs: how long.
        momentum_correction, steps_per_epoch: as in ``LearningRateScheduleCallback``.
        verbose: 1 to say on rank 0 when warm-up is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        size = hvd.size()

        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            return ((epoch + 1.0 / self.steps_per_epoch) * (size - 1) / warmup_epochs + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and hvd.rank() == 0:
            rate = float(raw(self.model.optimizer.learning_rate))
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")
