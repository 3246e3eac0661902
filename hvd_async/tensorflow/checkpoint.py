"""A rank's pending state as NumPy arrays by name, for any kind of checkpoint, in addition to the variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_async.tensorflow.variables import own_name

PREFIX = "hvd_async."
COPY = "copy."
"""Prefix of CHOCO-SGD's estimates, by the name of the edge's end."""
Arrays = dict[str, np.ndarray[Any, Any]]


def is_share(name: str) -> bool:
    """Return whether ``name`` is that of an array which this library has saved."""
    return name.startswith(PREFIX)


def own_variables(optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a wrapped optimizer's variables by name.

    Raises:
        ValueError: ``state``, arrays by name, has others.
    """
    names = {name for name in state if not is_share(name)}
    own = {own_name(variable): variable for variable in optimizer.variables}
    if own.keys() != names:
        differing = ", ".join(sorted(own.keys() ^ names)[:3])
        raise ValueError(f"the state is of another optimizer, or this one is not built: {differing} ...")
    return own


def pack(share: Mapping[str, Any]) -> Arrays:
    """Return ``EagerDriver.share`` as arrays."""
    arrays = {f"{PREFIX}{key}": np.asarray(share[key], np.int64) for key in ("size", "index", "rounds", "nbytes")}
    for bucket, (vector, versions) in enumerate(zip(share["vectors"], share["versions"], strict=True)):
        if vector is not None:
            arrays[f"{PREFIX}pending.{bucket}"] = np.asarray(vector).copy()
            arrays[f"{PREFIX}versions.{bucket}"] = np.asarray(versions, np.int64)
    return arrays


def unpack(state: Mapping[str, Any], dtypes: Sequence[tf.DType]) -> dict[str, Any] | None:
    """Return the share in ``state`` that ``pack`` has packed, for ``EagerDriver.take_share``; None if there is none.

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


def pack_leads(leads: Sequence[tf.Variable]) -> Arrays:
    """Return the leads of extrapolated updates as arrays."""
    return {f"{PREFIX}lead.{place}": lead.numpy() for place, lead in enumerate(leads)}


def unpack_leads(state: Mapping[str, Any], count: int) -> list[Any]:
    """Return ``count`` leads that ``pack_leads`` made, None for each that ``state`` does not have."""
    return [state.get(f"{PREFIX}lead.{place}") for place in range(count)]


def pack_local(share: Mapping[str, Any]) -> Arrays:
    """Return ``LocalDriver.share`` as arrays: numbers, lists of numbers and text, and vectors by name ("copies")."""
    numbers = {name: value for name, value in share.items() if name != "copies"}
    arrays = {f"{PREFIX}{name}": np.asarray(value) for name, value in numbers.items()}
    return arrays | {f"{PREFIX}{COPY}{name}": np.array(copy) for name, copy in share["copies"].items()}


def unpack_local(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the share in ``state`` that ``pack_local`` has packed, for ``LocalDriver.take_share``; None if none.

    Args:
        state: arrays by name, others among them; or the result of ``pack``.
    """
    if f"{PREFIX}size" not in state:
        return None
    own = {name.removeprefix(PREFIX): np.asarray(value) for name, value in state.items() if is_share(name)}
    copies = {name.removeprefix(COPY): np.array(own.pop(name)) for name in list(own) if name.startswith(COPY)}
    pending = [own.pop(name).tolist() for name in list(own) if name.startswith("versions.")]
    return {"copies": copies, "versions": pending} | {
        name: value.tolist() for name, value in own.items() if not name.startswith(("pending.", "lead."))
    }
