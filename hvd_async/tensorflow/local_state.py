"""What a Keras optimizer keeps between calls whose rank has weights of its own: gossip, followers of a leader."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_async.optimizers.local import LocalState
from hvd_async.tensorflow.buffers import raw
from hvd_async.tensorflow.flat import Flat


class LocalSettings(LocalState):
    """What the wrapper was given, and what it keeps between calls; Keras does not track it."""

    def take_options(self, **options: Any) -> None:
        """What the wrapper was given; see the attributes."""
        self.passes: int = options["passes"]
        self.average_passes: bool = options["average_passes"]
        self.devices: tuple[str, str] = options["devices"]
        """For the vector of all weights, and for sparse gradients that are added up."""
        self.scale_local: bool = options["scale_local"]
        """Whether gradients of local variables are divided by the number of ranks, as in Horovod."""
        self.model: Any = options["model"]
        self.buffer_policy: str = options["buffers"]
        self.local: dict[int, Any] = {}
        """Variables that are not mixed, by the id of their ``tf.Variable``."""
        self.flat: Flat | None = None
        self.weight: tf.Tensor | None = None
        """The push-sum weight by which the variables are multiplied while the wrapped optimizer works on them."""
        self.sums: dict[int, tf.Variable] = {}
        """Gradients of backward passes before the last, by the variable's index."""
        self.done: tf.Variable | None = None
        """Backward passes since the last step."""
        self.stepping = False
        """Whether a step has begun and its weights were not mixed yet."""

    def is_local(self, variable: Any) -> bool:
        """Whether this rank keeps a variable to itself."""
        return id(raw(variable)) in self.local
