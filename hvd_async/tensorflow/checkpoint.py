"""A rank's pending state as NumPy arrays by name, for any kind of checkpoint, in addition to the variables."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import h5py  # type: ignore[import-untyped]
import numpy as np
import tensorflow as tf

from hvd_async.tensorflow.variables import by_name, raw

PREFIX = "hvd_async."
COPY = "copy."
"""Prefix of CHOCO-SGD's estimates, by the name of the edge's end."""
Arrays = dict[str, np.ndarray[Any, Any]]


def is_share(name: str) -> bool:
    """Return whether ``name`` is that of an array which this library has saved."""
    return name.startswith(PREFIX)


def pack(share: Mapping[str, Any]) -> Arrays:
    """Return a driver's ``share`` as arrays: numbers, lists of numbers and text; vectors by name; pending gradients."""
    apart = {"copies", "vectors", "versions"}
    arrays = {f"{PREFIX}{name}": np.asarray(value) for name, value in share.items() if name not in apart}
    arrays |= {f"{PREFIX}{COPY}{name}": np.array(copy) for name, copy in share.get("copies", {}).items()}
    pending = zip(share.get("vectors", ()), share.get("versions", ()), strict=True)
    for bucket, (vector, versions) in enumerate(pending):
        if vector is not None:
            arrays[f"{PREFIX}pending.{bucket}"] = np.array(vector)
            arrays[f"{PREFIX}versions.{bucket}"] = np.asarray(versions, np.int64)
    return arrays


def unpack(state: Mapping[str, Any], dtypes: Sequence[tf.DType] = ()) -> dict[str, Any] | None:
    """Return the share in ``state`` that ``pack`` has packed, for a driver's ``take_share``; None if there is none.

    Args:
        state: arrays by name, others among them.
        dtypes: present dtypes of the buckets' vectors, if gradients travel.
    """
    if f"{PREFIX}size" not in state:
        return None
    own = {name.removeprefix(PREFIX): np.asarray(value) for name, value in state.items() if is_share(name)}
    share = {name: value.tolist() for name, value in own.items() if "." not in name}
    share["copies"] = {name.removeprefix(COPY): np.array(own[name]) for name in own if name.startswith(COPY)}
    share["vectors"], share["versions"] = [], []
    for bucket in range(len(share.setdefault("nbytes", []))):  # (a state of weights has none)
        vector = own.get(f"pending.{bucket}")
        dtype = dtypes[bucket] if bucket < len(dtypes) else None
        share["vectors"].append(None if vector is None else tf.convert_to_tensor(vector, dtype))
        share["versions"].append([] if vector is None else own[f"versions.{bucket}"].astype(int).tolist())
    return share


def packed(optimizer: Any, share: Mapping[str, Any]) -> Arrays:
    """Return a share of a wrapped optimizer as arrays, with the leads of its updates."""
    return pack(share) | {f"{PREFIX}lead.{i}": lead.numpy() for i, lead in enumerate(optimizer._async.replica.leads)}


def take_share(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load the share in a state, if it has one, into a built optimizer, and its leads; raises as the driver."""
    replica = optimizer._async.replica
    replica.prepare()
    share = unpack(state, replica.dtypes)
    if share is None:
        optimizer._async.warn_of_no_share()
    else:
        optimizer._async.take_share(share)
    for place, lead in enumerate(replica.leads):
        lead.assign(state.get(f"{PREFIX}lead.{place}", tf.zeros_like(lead)))


# -- files that Keras writes -------------------------------------------------------------------------------------------
# Keras asks each optimizer for the variables of its group in an HDF5 file. A plain optimizer, for which the file must
# load too, counts the entries of that group; so the share is a data set next to it.


SHARE = "hvd_async"
"""Name of the data set next to an optimizer's group: the bytes of an ``.npz`` file."""


def _parent(store: Any) -> Any:
    """Return the HDF5 group around that of a Keras store; None if the store is none of a file."""
    group = getattr(store, "_h5_entry_group", None) or getattr(store, "group", None)
    return getattr(group, "parent", None)


def _in_bytes(arrays: Arrays) -> np.ndarray[Any, Any]:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return np.frombuffer(file.getvalue(), np.uint8)


def _of_bytes(data: Any) -> Arrays:
    with np.load(io.BytesIO(np.asarray(data).tobytes()), allow_pickle=False) as arrays:
        return dict(arrays)


def share_in_file(path: Any) -> Arrays:
    """Return the share that a ``.keras`` file holds of the model's optimizer; empty if it holds none."""
    if not zipfile.is_zipfile(path):
        return {}
    with zipfile.ZipFile(path) as archive:
        if "model.weights.h5" not in archive.namelist():  # (a large model's weights are in several files)
            return {}
        with h5py.File(io.BytesIO(archive.read("model.weights.h5")), "r") as file:
            found = [file[f"{group}/{SHARE}"] for group in OPTIMIZERS if f"{group}/{SHARE}" in file]
            return _of_bytes(found[0]) if found else {}


OPTIMIZERS = ("optimizer", "optimizer/inner_optimizer")
"""Groups of a model's optimizer, and of the one in a ``LossScaleOptimizer``."""


class StateMethods:
    """Methods of every wrapped Keras optimizer that save and restore its state."""

    _async: Any
    _wrapped_class: ClassVar[type[Any]]
    built: bool

    def save_own_variables(self, store: Any) -> None:
        """Save the variables and this rank's share, for Keras' ``save()`` and ``save_weights()``, with a warning if
        something is in flight."""
        self._wrapped_class.save_own_variables(self, store)
        parent = _parent(store)
        if parent is not None and self.built:
            self._async.replica.prepare()
            parent.create_dataset(SHARE, data=_in_bytes(packed(self, self._async.share_for_file())))

    def load_own_variables(self, store: Any) -> None:
        """Load the variables and, before the ranks have met, the share, for Keras' ``load_weights()``."""
        self._wrapped_class.load_own_variables(self, store)
        parent = _parent(store)
        if parent is not None and self.built and self._async.worker is None:
            take_share(self, _of_bytes(parent[SHARE]) if SHARE in parent else {})

    def get_state(self: Any) -> Arrays:
        """Return the wrapped optimizer's variables (iterations, learning rate, velocities ...) by name, and this rank's
        share of the state between ranks.

        After a ``drain()`` the share is little more than a count. After a ``cut()`` it is this rank's pending
        gradients, or, where ranks exchange weights, all of the rank's own state.

        Raises:
            ReplicaStateError: gradients may be in flight, on this rank or another; or, where ranks exchange weights, a
                step was taken since the last drain or cut.
        """
        replica = self._async.replica
        replica.prepare()
        return {name: raw(v).numpy() for name, v in by_name(self.variables).items()} | packed(self, self._async.share())

    def set_state(self: Any, state: Arrays) -> None:
        """Restore what ``get_state`` returned, before the first step or after a ``drain()``; the optimizer must be
        built. Load the model's weights too: before the next step, in either order.

        Raises:
            ValueError: the state is of another optimizer, of another rank after a cut, or holds gradients of another
                rank.
            ReplicaStateError: gradients or messages of this run are in flight.
        """
        replica = self._async.replica
        replica.prepare()
        own, names = by_name(self.variables), {name for name in state if not is_share(name)}
        if own.keys() != names:
            differing = ", ".join(sorted(own.keys() ^ names)[:3])
            raise ValueError(f"the state is of another optimizer, or this one is not built: {differing} ...")
        take_share(self, state)
        for name, variable in own.items():
            variable.assign(state[name])
