"""What a gossiping Keras optimizer keeps between calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvd_async.gossip_wrapping import GossipState
from hvd_async.sharers import Sharers
from hvd_async.tensorflow.buffers import raw
from hvd_async.tensorflow.collectives import LIFECYCLE
from hvd_async.tensorflow.flat import Flat


class State(GossipState):
    """What the wrapper was given, and what it keeps between calls; Keras does not track it.

    Args:
        sharers: the ranks that share the optimizer.
        plan_options: of ``make_plan``, as ``GossipState``.
        schedule: algorithms by epoch.
        options: see the attributes.
    """

    def __init__(
        self, sharers: Sharers, plan_options: Mapping[str, Any], schedule: Mapping[int, str] | None, **options: Any
    ) -> None:
        super().__init__(LIFECYCLE, sharers, plan_options, schedule)
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
