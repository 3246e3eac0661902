"""Models that elastic training is tried with, by framework: a vector of weights, whose gradient is 1 at one place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...support.nemesis import EAGER, HOROVOD, LEADERS
from .rank import counted

At = Callable[[str], None]
"""Called with the point that is reached."""


def wrapped(hvd: Any, plain: Any, kind: str) -> Any:
    """Return the optimizer of a kind."""
    if kind in EAGER:
        return hvd.EagerOptimizer(plain, quorum=kind)
    if kind in LEADERS:
        return hvd.LeaderOptimizer(plain, algorithm=kind)
    return hvd.GossipOptimizer(plain, algorithm=kind)


class _Model:
    """What both have in common.

    Attributes:
        hvd: the binding's module.
        optimizer: the wrapped one.
        ours: whether it is one of ours.
        horovod: Horovod's module, and what ``horovods`` of it a reset calls.
    """

    hvd: Any
    horovod: Any
    horovods: dict[str, Callable[..., Any]]
    optimizer: Any
    ours = True
    _at: At

    def drain(self) -> None:
        """Drain an optimizer of ours."""
        if self.ours:
            self.optimizer.drain()

    def cut(self) -> None:
        """Cut an optimizer of ours."""
        if self.ours:
            self.optimizer.cut()

    def counts(self) -> dict[str, Any]:
        """Return what an optimizer of ours has counted, and the staleness that it allows."""
        if not self.ours:
            return {}
        bound = self.optimizer._async.settings.get("max_staleness", 0)
        return {"stats": counted(self.optimizer.stats()), "max_staleness": bound}

    def _before_applying(self, at: At) -> None:
        """Have ``at("apply")`` called between the end of this step's waiting and what follows it."""
        if not self.ours:
            return
        self._at, driver = at, self.optimizer._async
        owner, name = (driver, "end_step") if hasattr(driver, "end_step") else (driver.worker, "begin")
        if owner is None or name in vars(owner):
            return
        function = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self._at("apply")
            return function(*arguments, **options)

        vars(owner)[name] = call


class TorchModel(_Model):
    """Weights that torch trains.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        import torch

        self.model = torch.nn.Linear(1, size, bias=False)
        torch.nn.init.zeros_(self.model.weight)

    @classmethod
    def begin(cls) -> Any:
        """Initialise; returns the binding's module."""
        import horovod.torch
        import torch

        import hvd_async.torch as hvd

        torch.set_num_threads(1)
        hvd.init()
        cls.hvd, cls.horovod = hvd, horovod.torch
        cls.horovods = {"shutdown": horovod.torch.shutdown, "init": horovod.torch.init}
        return hvd

    def state(self, kind: str, **attributes: Any) -> Any:
        """Return the elastic state, with a new optimizer."""
        import torch
        from horovod.torch.elastic import TorchState

        plain, self.ours = torch.optim.SGD(self.model.parameters(), lr=1.0), kind != HOROVOD
        if not self.ours:
            self.optimizer = self.hvd.DistributedOptimizer(plain, named_parameters=self.model.named_parameters())
            return TorchState(model=self.model, optimizer=self.optimizer, **attributes)
        self.optimizer = wrapped(self.hvd, plain, kind)
        return self.hvd.elastic.TorchState(model=self.model, optimizer=self.optimizer, **attributes)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = float(rate)

    def weights(self) -> Any:
        """Return the weights, a copy."""
        return self.model.weight.detach().numpy().reshape(-1).copy()

    def step(self, index: int, at: At) -> None:
        """Take a step whose gradient is 1 at ``index``."""
        self.optimizer.zero_grad()
        loss = self.model.weight.reshape(-1)[index]
        hook = self.model.weight.register_hook(lambda _: at("backward"))
        loss.backward()
        hook.remove()
        at("before step")
        if hasattr(self.optimizer, "record_loss"):
            self.optimizer.record_loss(loss.detach())
        self._before_applying(at)
        at("step")
        self.optimizer.step()

    def agreed(self, value: bool) -> bool:
        """Return rank 0's value. A collective of the user's."""
        import torch

        return bool(self.hvd.broadcast(torch.tensor([float(value)]), 0, name="nemesis.agreed"))

    def save(self, file: Path) -> None:
        """Write a checkpoint, after ``cut()``."""
        import torch

        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)


class KerasModel(_Model):
    """Weights that a Keras optimizer trains, eagerly.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        import keras

        # (named: Keras numbers layers by how many a process has made, and a new one has made fewer)
        layer = keras.layers.Dense(size, use_bias=False, kernel_initializer="zeros", name="layer")
        self.model = keras.Sequential([keras.Input((1,)), layer], name="model")

    @classmethod
    def begin(cls) -> Any:
        """Initialise; returns the binding's module."""
        import horovod.tensorflow
        import tensorflow as tf

        import hvd_async.tensorflow.keras as hvd

        tf.config.threading.set_intra_op_parallelism_threads(1)
        hvd.init()
        cls.hvd, cls.horovod = hvd, horovod.tensorflow
        cls.horovods = {"shutdown": horovod.tensorflow.shutdown, "init": horovod.tensorflow.init}
        return hvd

    def state(self, kind: str, **attributes: Any) -> Any:
        """Return the elastic state, with a new optimizer."""
        import keras

        self.optimizer = wrapped(self.hvd, keras.optimizers.SGD(1.0), kind)
        return self.hvd.elastic.KerasState(self.model, self.optimizer, **attributes)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        self.optimizer.learning_rate = float(rate)

    def weights(self) -> Any:
        """Return the weights, a copy."""
        return self.model.trainable_variables[0].numpy().reshape(-1).copy()

    def step(self, index: int, at: At) -> None:
        """Take a step whose gradient is 1 at ``index``."""
        import tensorflow as tf

        variable = self.model.trainable_variables[0]
        own = np.zeros(variable.shape, np.float32)
        own[0, index] = 1.0
        at("backward")
        at("before step")
        if hasattr(self.optimizer, "record_loss"):
            self.optimizer.record_loss(float(self.weights()[index]))
        self._before_applying(at)
        at("step")
        self.optimizer.apply([tf.constant(own)], self.model.trainable_variables)

    def agreed(self, value: bool) -> bool:
        """Return rank 0's value. A collective of the user's."""
        import tensorflow as tf

        return bool(self.hvd.broadcast(tf.constant([float(value)]), 0, name="nemesis.agreed"))

    def save(self, file: Path) -> None:
        """Write a checkpoint, after ``cut()``."""
        self.model.save_weights(file.with_name(f"{file.name}.weights.h5"))  # (the name has dots: a host is in it)


MODELS: dict[str, Any] = {"torch": TorchModel, "tensorflow": KerasModel}
