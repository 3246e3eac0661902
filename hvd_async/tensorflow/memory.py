"""NumPy's memory as TensorFlow's, and TensorFlow's as NumPy's, without a copy on a CPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_async.runtime.memory import ALIGNMENT

Array = np.ndarray[Any, Any]


def given_to_tensor(array: Array) -> tf.Tensor:
    """Return an array as a tensor, in the same memory if TensorFlow's kernels can take it; variables that are assigned
    the tensor, or a slice of it, share it too. So the array, which is given away, cannot be written to any more."""
    if array.dtype.kind != "f" or array.ctypes.data % ALIGNMENT or not array.flags.writeable or not array.size:
        return tf.convert_to_tensor(array)
    tensor = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    array.flags.writeable = False
    return tensor


@functools.lru_cache
def constant(value: bool | float | tuple[float, ...], dtype: tf.DType) -> tf.Tensor:
    """Return an eager tensor of one or several numbers, from a cache of recent ones: a new one takes 10 to 50 us."""
    return tf.constant(value, dtype)
