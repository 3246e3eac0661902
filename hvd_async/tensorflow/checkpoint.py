"""What a rank has pending, as NumPy arrays by name, so that it fits into any checkpoint beside the variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

PREFIX = "hvd_async."
Arrays = dict[str, np.ndarray[Any, Any]]


def is_share(name: str) -> bool:
    """Whether an array's name says that it is one of ours."""
    return name.startswith(PREFIX)


def pack(share: Mapping[str, Any]) -> Arrays:
    """``Wrapped._async_share`` as arrays."""
    arrays = {f"{PREFIX}{key}": np.asarray(share[key], np.int64) for key in ("size", "index", "rounds", "nbytes")}
    for bucket, (vector, versions) in enumerate(zip(share["vectors"], share["versions"], strict=True)):
        if vector is not None:
            arrays[f"{PREFIX}pending.{bucket}"] = np.asarray(vector).copy()
            arrays[f"{PREFIX}versions.{bucket}"] = np.asarray(versions, np.int64)
    return arrays


def unpack(state: Mapping[str, Any], dtypes: Sequence[tf.DType]) -> dict[str, Any] | None:
    """What ``pack`` made, as ``Wrapped._async_take_share`` takes it; None if there is none in ``state``.

    Args:
        state: arrays by name, others among them.
        dtypes: of the buckets' vectors now.
    """
    if f"{PREFIX}size" not in state:
        return None
    share: dict[str, Any] = {key: int(state[f"{PREFIX}{key}"]) for key in ("size", "index", "rounds")}
    share["nbytes"] = np.asarray(state[f"{PREFIX}nbytes"]).tolist()
    share["vectors"], share["versions"] = [], []
    for bucket in range(len(share["nbytes"])):
        vector = state.get(f"{PREFIX}pending.{bucket}")
        dtype = dtypes[bucket] if bucket < len(dtypes) else None
        share["vectors"].append(None if vector is None else tf.convert_to_tensor(vector, dtype))
        share["versions"].append(np.asarray(state.get(f"{PREFIX}versions.{bucket}", [])).astype(int).tolist())
    return share
