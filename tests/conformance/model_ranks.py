"""Ranks that train a model, one linear layer without bias, which checkpoints and elastic states hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch

import hvd_async.tensorflow.keras as hvd_keras
import hvd_async.torch as hvd_torch
from tests.conformance.reference import Array
from tests.conformance.torch_ranks import flat


class TorchModel:
    """A rank in torch.

    Args:
        wrapper: name of the factory, which is given the options.
        start: weights to begin with, inputs x outputs.
        momentum: of SGD.
        make: makes another optimizer of the parameters.
    """

    def __init__(
        self,
        wrapper: str,
        start: Any,
        momentum: float = 0.0,
        make: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        self.wrapper = wrapper
        self.model = torch.nn.Linear(*np.shape(start), bias=False)
        with torch.no_grad():
            self.model.weight.copy_(torch.as_tensor(start.T))
        plain = (make or functools.partial(torch.optim.SGD, lr=0.1, momentum=momentum))(self.model.parameters())
        self.opt: Any = getattr(hvd_torch, wrapper)(plain, self.model.named_parameters(), **options)

    def backward(self, inputs: Any) -> None:
        """Add a gradient: outputs should be 0."""
        loss = self.model(torch.as_tensor(inputs, dtype=torch.float32)).square().mean()
        loss.backward()
        if self.wrapper == "LeaderOptimizer":
            self.opt.record_loss(loss)

    def take(self, inputs: Any) -> None:
        """Take a step."""
        self.opt.zero_grad()
        self.backward(inputs)
        self.opt.step()

    def rate(self) -> float:
        """Return the learning rate."""
        return float(self.opt.param_groups[0]["lr"])

    def set_rate(self, rate: float) -> None:
        """Set it."""
        self.opt.param_groups[0]["lr"] = rate

    def weights(self) -> Array:
        """Return those of the model, flat."""
        return flat(self.model.parameters())

    def moments(self) -> Any:
        """Return the state of the wrapped optimizer."""
        return {number: flat(state.values()).tolist() for number, state in enumerate(self.opt.state.values()) if state}


class KerasModel:
    """A rank in Keras; arguments as of ``TorchModel``."""

    def __init__(self, wrapper: str, start: Any, momentum: float = 0.0, **options: Any) -> None:
        self.wrapper, self.options = wrapper, options
        inputs = keras.Input(np.shape(start)[:1])
        layer = keras.layers.Dense(np.shape(start)[1], use_bias=False, name="dense")
        self.model = keras.Model(inputs, layer(inputs))
        layer.kernel.assign(start)
        opt = getattr(hvd_keras, wrapper)(keras.optimizers.SGD(0.1, momentum=momentum), **options)
        opt.build(self.model.trainable_variables)
        self.model.compile(optimizer=opt, jit_compile=False)

    @property
    def opt(self) -> Any:
        """The wrapped optimizer; loading a file brings another."""
        return self.model.optimizer

    def apply(self, gradient: Any) -> None:
        """Take a step with a gradient."""
        self.opt.apply([tf.constant(gradient, tf.float32)], self.model.trainable_variables)

    def take(self, inputs: Any) -> None:
        """Take a step: outputs should be 0."""
        outputs = inputs @ np.asarray(self.model.trainable_variables[0])
        if self.wrapper == "LeaderOptimizer":
            self.opt.record_loss(float(np.mean(outputs**2)))
        self.apply(inputs.T @ outputs * 2 / outputs.size)

    def rate(self) -> float:
        """Return the learning rate."""
        return float(self.opt.learning_rate)

    def set_rate(self, rate: float) -> None:
        """Set it."""
        self.opt.learning_rate = rate

    def weights(self) -> Array:
        """Return those of the model, flat."""
        return np.asarray(self.model.trainable_variables[0]).reshape(-1).copy()

    def moments(self) -> Any:
        """Return the state of the wrapped optimizer."""
        return {number: np.asarray(v).reshape(-1).tolist() for number, v in enumerate(self.opt.momentums)}
