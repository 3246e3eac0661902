"""Elastic jobs of ranks as threads: what an elastic state sends travels over a board, in the order of the calls."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import hvd_async.tensorflow.elastic as keras_elastic
import hvd_async.torch.elastic as torch_elastic
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.tensorflow.keras import callbacks as keras_callbacks
from hvd_async.testing import Cluster


class Board:
    """Where ranks give each other values."""

    def __init__(self, size: int) -> None:
        self.barrier, self.values = threading.Barrier(size), [None] * size

    def gather(self, rank: int, value: Any, pickles: bool = True) -> list[Any]:
        """Return all ranks' values, through pickles or as copies."""
        self.values[rank] = pickle.dumps(value) if pickles else copy.deepcopy(value)
        self.barrier.wait(240)
        every = [pickle.loads(one) if pickles else copy.deepcopy(one) for one in self.values]
        self.barrier.wait(240)
        return every


class Exchange:
    """The collectives of an elastic state, over a board."""

    board: Board

    def __init__(self) -> None:
        engine = local_engine()
        self.rank, self.size = engine.rank, engine.size

    def everyones(self, value: Any, name: str) -> list[Any]:
        return self.board.gather(self.rank, value)

    def object_of(self, root: int, value: Any, name: str) -> Any:
        return self.board.gather(self.rank, value)[root]

    vector_of = object_of


class TorchExchange(Exchange, torch_elastic._Exchange):
    def tensors_of(self, root: int, tensors: Any, name: str) -> list[Any]:
        return self.board.gather(self.rank, [t.detach() for t in tensors], pickles=False)[root]


class KerasExchange(Exchange, keras_elastic._Exchange):
    def tensors_of(self, root: int, tensors: Any, name: str) -> list[Any]:
        return self.board.gather(self.rank, [np.asarray(t) for t in tensors])[root]


@contextlib.contextmanager
def over_a_board() -> Iterator[None]:
    """Have elastic states use a board within the block."""
    with pytest.MonkeyPatch.context() as patch:
        for module, exchange in ((torch_elastic, TorchExchange), (keras_elastic, KerasExchange)):
            patch.setattr(module, "_Exchange", exchange)
            patch.setattr(module.LIFECYCLE, "elastic", False)
        yield


def keras_callbacks_over_a_board(patch: pytest.MonkeyPatch) -> None:
    """Have Keras' callbacks use a board too. Seeds stay each rank's own."""

    def broadcast(variables: Any, root_rank: int) -> None:
        sent = Exchange().object_of(root_rank, [np.asarray(v) for v in variables], "variables")
        for variable, value in zip(variables, sent, strict=True):
            if value.dtype != object and "seed" not in variable.path:
                variable.assign(value)

    patch.setattr(keras_callbacks, "broadcast_variables", broadcast)
    patch.setattr(keras_callbacks, "allgather_object", lambda value, name: Exchange().everyones(value, name))
    patch.setattr(
        keras_callbacks, "broadcast_object", lambda value, root, name: Exchange().object_of(root, value, name)
    )


def trained(size: int, work: Callable[[int], Any], timeout: float = 60.0, **cluster: Any) -> list[Any]:
    """Return the results of jobs of ``n`` ranks, which have an ``opt``, whose membership then changes."""
    Exchange.board = Board(size)

    def begun(rank: int) -> Any:
        local_engine().elastic = True
        job = work(rank)
        Exchange.board.barrier.wait(timeout)
        return job

    jobs = Cluster(size, **cluster).run(begun, timeout)
    for job in jobs:
        job.opt._async.leave()
    return jobs


def among_others(
    size: int,
    jobs: Sequence[Any],
    make: Callable[[], Any],
    work: Callable[[int, Any], Any],
    timeout: float = 60.0,
    **cluster: Any,
) -> list[Any]:
    """Continue with ``n`` ranks: survivors and new ones."""
    Exchange.board = Board(size)

    def proceed(rank: int) -> Any:
        local_engine().elastic = True
        if rank < len(jobs):
            job = jobs[rank]
            job.opt._async.rejoin()
        else:
            job = make()
        job.state.sync()
        return work(rank, job)

    return Cluster(size, **cluster).run(proceed, timeout)
