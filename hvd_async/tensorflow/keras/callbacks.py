"""Horovod's Keras callbacks for Keras 3 and this library's optimizers.

All make the ranks meet before they communicate, before evaluation inside ``fit()``, at the end of each epoch and of
``fit()``, so that ranks may have different numbers of batches: they drain the optimizer, or all of a model with several
(a GAN in ``train_step()``). With a ``GossipOptimizer``, evaluation inside ``fit()`` sees the average of all ranks, with
a ``LeaderOptimizer`` the leader or the center, and each rank continues with its own weights, until ``fit()`` ends with
a drain. Use the same callbacks, in the same order, on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras.callbacks as _horovods
import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow.functions import allgather_object, broadcast_object
from horovod.tensorflow.keras.callbacks import *  # noqa: F403  elastic's

from hvd_async.optimizers.public_names import public_names
from hvd_async.tensorflow.checkpoint import packed, take_share
from hvd_async.tensorflow.eager_methods import EagerMethods
from hvd_async.tensorflow.functions import broadcast_variables, notice_if_long
from hvd_async.tensorflow.keras.fit import Draining, our_optimizer, our_optimizers, when_built
from hvd_async.tensorflow.methods import WeightMethods
from hvd_async.tensorflow.variables import raw


class GossipEpochCallback(Draining):
    """Make a ``GossipOptimizer`` follow the epochs, with ``peers`` and ``schedule`` by epoch and epochs of different
    lengths; or a ``LeaderOptimizer``.

    (The other callbacks here do so too; one of them is enough.)

    Args:
        drain: whether all ranks take the average (the leader's weights, or the center) at the end of each epoch, so
            that ``ModelCheckpoint`` saves it there, and training continues from it. Otherwise a rank saves its own
            weights there, and the average when ``fit()`` has ended.
    """

    def __init__(self, drain: bool = False) -> None:
        super().__init__()
        self.drain = drain

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._meeting.drains = self.drain


class BroadcastGlobalVariablesCallback(Draining):
    """Send the weights and optimizer state of ``root_rank`` to every rank when ``fit()`` begins; to a model that has no
    weights yet, before its first step: the shapes of the first batch build it.

    Random seeds of layers (``keras.random.SeedGenerator``) stay each rank's own.

    Args:
        root_rank: the rank whose weights and state are sent.
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
        self.drain_begun()
        when_built(self.model, self._broadcast)

    def _broadcast(self) -> None:
        variables = [*self.model.variables, *(v for one in self._optimizers() for v in one.variables)]
        unique = {id(raw(v)): v for v in variables}
        with tf.device(self.device):
            broadcast_variables([v for key, v in unique.items() if key not in self._local], root_rank=self.root_rank)
        for place, one in enumerate(our_optimizers(self.model)):
            if one.built:  # (as on all ranks, which have the same variables)
                _broadcast_share(one, self.root_rank, f"hvd_async.broadcast_share.{place}")

    def _optimizers(self) -> list[Any]:
        """Return the optimizers whose state is sent: the model's own, built; of several, those this library wraps."""
        own, ours = getattr(self.model, "optimizer", None), our_optimizers(self.model)
        if ours and our_optimizer(self.model) is None:
            return ours
        if own is not None and not own.built:
            own.build(self.model.trainable_variables)
        others = [one for one in ours if one is not our_optimizer(self.model)]
        return [*([] if own is None else [own]), *others]


def _broadcast_share(optimizer: Any, root_rank: int, name: str) -> None:
    """Give a wrapped optimizer the share of ``root_rank``, unless the ranks have met. A collective.

    Raises:
        ValueError: a rank has loaded a state that was saved after ``cut()``, which is its own.
    """
    driver = optimizer._async
    driver.replica.prepare()
    if driver.sends_share(allgather_object(driver.resumed, name=f"{name}.resumed")):
        take_share(optimizer, broadcast_object(packed(optimizer, driver.drained_share()), root_rank, name=name))


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Save the whole model whenever the monitored metric is the best so far; on rank 0, after the other callbacks here.

    Args:
        monitor: the metric, as in ``keras.callbacks.ModelCheckpoint``.
        verbose: likewise; 1 says when a model is saved.
        mode: likewise; "min", "max" or "auto".
        save_freq: likewise; "epoch", or a number of batches.
        filepath: a path that ends in ``.keras``. None: set the attribute ``filepath`` before ``fit()``, as scripts for
            Horovod's Spark estimator expect.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: Any = None,
    ) -> None:
        super().__init__(
            "best.keras" if filepath is None else filepath,  # (Keras checks it here)
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that there is a path.

        Raises:
            ValueError: ``filepath`` is None.
        """
        super().on_train_begin(logs)
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint: filepath must be a path that ends in .keras, got None. Pass filepath=, or set "
                "the callback's attribute before fit()"
            )


class MetricAverageCallback(Draining):
    """Average every epoch's metrics over the ranks that have them (a rank without batches has none).

    Numbers and arrays of one shape are averaged element by element, also inside lists and dictionaries. Everything else
    (booleans, strings, None, arrays whose shapes differ between ranks) stays each rank's own. Put the callback before
    others that read metrics (ReduceLROnPlateau, TensorBoard).
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        own = tf.nest.map_structure(_number, dict(logs or {}))
        with notice_if_long("MetricAverageCallback"):
            everyone = allgather_object(own, name="hvd_async.metric_average")
        if logs is not None:
            logs.update(_averaged(dict(logs), everyone))


def _number(value: Any) -> Any:
    """Return a metric as the other ranks receive it: numbers as an array, None as it is, anything else as ""."""
    value = raw(value)
    if isinstance(value, tf.Variable | tf.Tensor):
        value = (tf.cast(value, tf.float64) if value.dtype.is_floating else tf.convert_to_tensor(value)).numpy()
    if isinstance(value, int | float | np.generic | np.ndarray):
        return np.asarray(value) if np.asarray(value).dtype.kind in "iuf" else ""
    return None if value is None else ""


def _averaged(own: Any, everyones: Sequence[Any]) -> Any:
    """Return the mean of the ranks' values, part by part; where there is none this rank's own.

    Args:
        own: this rank's value; None if it has none.
        everyones: as ``_number`` gives them, of the ranks that have one, in one order on all ranks.
    """
    present = [one for one in everyones if one is not None]
    first = present[0] if present else None
    if any(type(one) is not type(first) for one in present):
        return own
    if isinstance(first, dict):
        own = own or {}
        keys = {key: [one[key] for one in present if key in one] for one in present for key in one}
        means = {key: _averaged(own.get(key), values) for key, values in keys.items()}
        return {key: mean for key, mean in means.items() if key in own or mean is not None}
    if isinstance(first, list | tuple) and all(len(one) == len(first) for one in present):
        owns = own or [None] * len(first)
        return [_averaged(mine, values) for mine, values in zip(owns, zip(*present, strict=True), strict=True)]
    if not isinstance(first, np.ndarray) or any(one.shape != first.shape for one in present):
        return own
    if first.shape:
        return np.mean(np.stack(present), axis=0, dtype=np.float64)
    return math.fsum(present) / len(present)


class StopAtRounds(Draining):
    """End ``fit()`` when the weights have seen ``rounds`` rounds: the end of a job with ``pace="rounds"``.

    Ranks then take different numbers of steps, so give ``fit()`` a single epoch of a data set that repeats. Callbacks
    that average metrics at the end of the epoch may be used with it. With ``compile(steps_per_execution=n)`` a rank
    stops after the execution in which it has seen them.

    Args:
        rounds: of the optimizer, those before a resumed checkpoint included.
    """

    def __init__(self, rounds: int) -> None:
        super().__init__()
        if rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {rounds!r}")
        self.rounds = rounds

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        optimizers = our_optimizers(self.model)
        if optimizers and min(optimizer.rounds for optimizer in optimizers) >= self.rounds:
            self.model.stop_training = True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Do nothing: other ranks may not reach this point."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Do nothing: other ranks may not reach this point."""


class LearningRateScheduleCallback(Draining):
    """Set the learning rate to ``initial_lr * multiplier`` between epochs ``start_epoch`` and ``end_epoch``.

    Args:
        initial_lr: at the start of training.
        multiplier: a constant (decay per epoch: ``multiplier ** (epoch - start_epoch)``) or ``epoch -> factor``.
        start_epoch: the first epoch in which it is in force.
        end_epoch: the epoch after the last; None: it is in force until the end.
        staircase: adjust once an epoch (True) or with every batch, the epoch being a fraction (False). With
            ``compile(steps_per_execution=n)`` the rate changes every n batches. From ``end_epoch`` on, it is that of
            the last batch before.
        momentum_correction: scale SGD's velocity by new over old rate when it changes; with ``EagerOptimizer`` when
            the round that carries the new rate is applied, so the replicas stay equal.
        steps_per_epoch: for ``staircase=False``; that of ``fit()`` if None.
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
        self.steps_per_epoch, self._finds_steps = steps_per_epoch, not steps_per_epoch
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        if not hasattr(raw(self.model.optimizer.learning_rate), "assign"):
            raise ValueError(
                f"{type(self).__name__} sets the optimizer's learning_rate, which must be a number, got a schedule or "
                f"a function. Pass a number, or put the warm-up into the schedule, as the warmup_steps= of "
                f"keras.optimizers.schedules.CosineDecay does, and leave this callback out"
            )
        optimizer = our_optimizer(self.model)
        if isinstance(optimizer, EagerMethods) and self.momentum_correction:
            replica: Any = optimizer._async.replica
            replica.momentum_correction = True
        if not self.staircase and self._finds_steps:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(f"{type(self).__name__} cannot tell the steps per epoch: pass steps_per_epoch=")

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._adjust(self._epoch_at(batch))
        elif batch == 0:
            self._adjust(float(self._epoch))

    def _epoch_at(self, batch: int) -> float:
        """Return the epoch as a fraction. (Keras also announces the batch that a generator turns out not to have.)"""
        assert self.steps_per_epoch is not None
        return self._epoch + min(batch, self.steps_per_epoch - 1) / self.steps_per_epoch

    def _adjust(self, epoch: float) -> None:
        optimizer, rate = self.model.optimizer, self.initial_lr * self.multiplier(epoch)
        before = float(raw(optimizer.learning_rate))
        optimizer.learning_rate.assign(rate)
        ours = our_optimizer(self.model)
        # (where there are no rounds, it is done here and now)
        if isinstance(ours, WeightMethods) and self.momentum_correction and before > 0:
            for velocity in getattr(ours, "momentums", None) or []:
                velocity.assign(raw(velocity) * (rate / before))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs.setdefault("lr", float(raw(self.model.optimizer.learning_rate)))  # (the next one finds it adjusted)
        if not self.staircase and self.end_epoch is not None and self.start_epoch <= epoch == self.end_epoch - 1:
            assert self.steps_per_epoch is not None
            self._adjust(self._epoch_at(self.steps_per_epoch - 1))  # (that batch may have begun no execution)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from ``initial_lr / size`` to ``initial_lr`` over ``warmup_epochs`` (Goyal et al., 2017).

    Args:
        initial_lr: the rate after warm-up.
        warmup_epochs: length of the warm-up.
        momentum_correction: as in ``LearningRateScheduleCallback``.
        steps_per_epoch: likewise.
        verbose: 1 to print on rank 0 when the warm-up is over.
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


_ours = (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    GossipEpochCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    StopAtRounds,
)
__all__ = public_names(globals(), _horovods, _ours)
