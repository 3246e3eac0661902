"""What a rank has pending, as NumPy arrays by name, so that it fits into any checkpoint beside the variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

PREFIX = "hvd_async."
COPY = "copy."
"""Of CHOCO-SGD, by the name of the edge's end."""
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
    share["cut"] = bool(state.get(f"{PREFIX}cut", False))
    share["nbytes"] = np.asarray(state.get(f"{PREFIX}nbytes", [])).tolist()  # (a gossiping optimizer has none)
    share["vectors"], share["versions"] = [], []
    for bucket in range(len(share["nbytes"])):
        vector = state.get(f"{PREFIX}pending.{bucket}")
        dtype = dtypes[bucket] if bucket < len(dtypes) else None
        share["vectors"].append(None if vector is None else tf.convert_to_tensor(vector, dtype))
        share["versions"].append(np.asarray(state.get(f"{PREFIX}versions.{bucket}", [])).astype(int).tolist())
    return share


def pack_gossip(share: Mapping[str, Any]) -> Arrays:
    """``GossipWrapped._async_share`` as arrays."""
    arrays = {f"{PREFIX}{key}": np.asarray(share[key], np.int64) for key in ("size", "index", "rounds", "cut", "base")}
    arrays[f"{PREFIX}weight"] = np.asarray(share["weight"], np.float64)
    return arrays | {f"{PREFIX}{COPY}{edge}": np.array(copy) for edge, copy in share["copies"].items()}


def unpack_gossip(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """What ``pack_gossip`` made, as ``GossipWrapped._async_take_share`` takes it; None if there is none in ``state``.

    Args:
        state: arrays by name, others among them; or what ``pack`` made.
    """
    if f"{PREFIX}size" not in state:
        return None
    share: dict[str, Any] = {key: int(state[f"{PREFIX}{key}"]) for key in ("size", "index", "rounds")}
    share["cut"] = bool(state.get(f"{PREFIX}cut", False))
    share["base"] = int(state.get(f"{PREFIX}base", 0))
    pending = (versions for name, versions in state.items() if name.startswith(f"{PREFIX}versions."))
    share["versions"] = [np.asarray(versions).tolist() for versions in pending]
    share["weight"] = float(state.get(f"{PREFIX}weight", 1.0))
    before = f"{PREFIX}{COPY}"
    share["copies"] = {n.removeprefix(before): np.array(copy) for n, copy in state.items() if n.startswith(before)}
    return share
