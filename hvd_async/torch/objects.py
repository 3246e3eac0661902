"""Collectives of objects and single tensors that are waited for asleep.

Horovod's own ask without end whether they are done. Where ranks share cores this keeps the threads that they wait for
from running, for many seconds at times.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

import torch

from hvd_async.runtime.interfaces import Handle
from hvd_async.torch.buffers import bytes_of, from_bytes
from hvd_async.torch.collectives import PlaneCollectives
from hvd_async.torch.tensor_collectives import FINEST_POLL


def gather_objects(value: Any, name: str) -> list[Any]:
    """Return all ranks' values, which can be pickled, in order. A collective."""
    every = PlaneCollectives().allgather_bytes(pickle.dumps(value), name)
    return [pickle.loads(one) for one in every]


def object_of(root: int, value: Any, name: str) -> Any:
    """Return a rank's value, which can be pickled. A collective."""
    own = value if PlaneCollectives().rank == root else None
    return gather_objects(own, name)[root]


def tensors_of(root: int, tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    """Return a rank's tensors; those of this rank are not changed. A collective."""
    collectives = PlaneCollectives()
    copies = [bytes_of(tensor) for tensor in tensors]  # (Horovod does not carry all dtypes)
    handles = [collectives.broadcast(copy, root, f"{name}.{number}") for number, copy in enumerate(copies)]
    return [from_bytes(_result(handle), tensor) for handle, tensor in zip(handles, tensors, strict=True)]


def _result(handle: Handle) -> torch.Tensor:
    while not handle.done():
        time.sleep(handle.seconds_to_poll() or FINEST_POLL)
    result: torch.Tensor = handle.result()
    return result
