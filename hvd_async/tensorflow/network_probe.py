"""Tensors on the CPU, by which ``hvd_async doctor`` measures what Horovod's collectives take; and Horovod itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

FRAMEWORK = f"tensorflow {tf.__version__}"
horovod: Any = hvd
tf.config.set_visible_devices([], "GPU")  # (this process only measures)


def floats(count: int) -> tf.Tensor:
    """Return so many zeros, float32."""
    return tf.zeros(count)


def raw(count: int) -> tf.Tensor:
    """Return so many bytes, uint8."""
    return tf.zeros(count, dtype=tf.uint8)


def counts(numbers: Sequence[int]) -> tf.Tensor:
    """Return numbers as int32."""
    return tf.constant(numbers, dtype=tf.int32)
