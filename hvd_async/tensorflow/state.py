"""What a wrapped Keras optimizer keeps between calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from hvd_async.algorithms.eager.gradient_format import ReducedRound
from hvd_async.optimizers.eager import EagerState
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.tensorflow.apply_round import RoundTransform, Update
from hvd_async.tensorflow.buffers import Layout
from hvd_async.tensorflow.collectives import LIFECYCLE
from hvd_async.tensorflow.compression import Codec
from hvd_async.tensorflow.gradient_feed import Feed


class State(EagerState):
    """What the wrapper was given, and what it keeps between calls; Keras does not track it.

    Args:
        sharers: the ranks that share the optimizer.
        options: see the attributes.
    """

    def __init__(self, sharers: RankGroup, **options: Any) -> None:
        super().__init__(LIFECYCLE, sharers, options["config"], options["late_cap_mb"])
        self.scales: tuple[float, float] = options["scales"]
        self.compression: Any = options["compression"]
        self.cap_bytes: float = options["cap_bytes"]
        self.groups: Any = options["groups"]
        self.passes: int = options["passes"]
        self.average_passes: bool = options["average_passes"]
        self.nonfinite: str = options["nonfinite"]
        self.devices: tuple[str, str] = options["devices"]
        """For dense and for sparse gradients."""
        self.round_transform: RoundTransform | None = options["round_transform"]
        self.model: Any = options["model"]
        self.buffer_policy: str = options["buffers"]
        self.momentum_correction = False
        self.codec: Codec | None = None
        self.layout: Layout | None = None
        self.feed: Feed | None = None
        self.update: Update | None = None
        self.waiting: deque[ReducedRound] = deque()
        """Rounds that this step's loop has not come to yet."""
        self.put_back: Callable[[], None] = lambda: None
        """Ends the application of the round that the loop has come to: see ``Update.keep``."""
