"""Objects that ranks send to each other: pickled, by cloudpickle where it is installed, as Horovod sends them."""

from __future__ import annotations

import pickle
from typing import Any

try:
    import cloudpickle as pickler  # type: ignore[import-untyped]
except ImportError:
    pickler = pickle

_OBJECT, _ERROR = b"o", b"e"


def pack(value: Any) -> bytes:
    """Return a pickled object, or why it cannot be pickled, which ``unpack`` raises on all ranks alike."""
    try:
        return _OBJECT + bytes(pickler.dumps(value))
    except Exception as error:  # noqa: BLE001  (an object's own methods may raise anything)
        return _ERROR + f"{type(error).__name__}: {error}".encode()


def unpack(data: bytes, rank: int) -> Any:
    """Return the object that a rank has packed.

    Raises:
        ValueError: that rank could not pickle it.
    """
    if data[:1] == _ERROR:
        raise ValueError(f"rank {rank} cannot send its object, since pickling it has failed: {data[1:].decode()}")
    return pickle.loads(data[1:])
