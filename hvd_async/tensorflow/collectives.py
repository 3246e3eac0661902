"""Horovod's collectives for TensorFlow tensors, and this process's TensorFlow engine.

A Horovod op blocks its caller, without spinning, until every rank has submitted it. So each runs in a helper thread of
its own, which later ops reuse; the engine stays free, and ranks may submit in different orders.

Ops run in a graph, by a session of their own. Run eagerly, TensorFlow gives every op of a kind the same name,
"HorovodAllreduce", whatever ``name=`` is, so that two could not be in flight at once. As a ``tf.function`` they would
need a thread of the pool whose threads the training step's py_function may hold: with one inter-op thread a hang, even
with SINGLE_THREADED_EXECUTOR.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common import process_sets
from horovod.common.exceptions import HorovodInternalError
from tensorflow.core.protobuf.config_pb2 import CallableOptions

from hvd_async.algorithms.registry import FAMILIES
from hvd_async.errors import NotInitializedError
from hvd_async.runtime import launch
from hvd_async.runtime.exit_status import exit_status
from hvd_async.runtime.interfaces import CompletedHandle, Handle, pack, unpack
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.runtime.process_sets import SingleRank, process_set_among
from hvd_async.tensorflow.variables import given_to_tensor

Call = Callable[[], tf.Tensor]
INLINE = -1
"""Number of threads of a session without a pool: ops run in the thread that calls it, and those after a collective in
the thread that completes the collective. (Threads of a pool spin before they sleep: 2 ms of CPU per collective.)"""


class _Handle(Future[tf.Tensor]):
    """A Horovod op in a helper thread, which wakes the engine when it is done."""

    in_stages = False
    take = None

    def seconds_to_poll(self) -> None:
        return None


class _Threads:
    """Daemon threads that run blocking calls; as many as were ever busy at once. (An executor refuses work while the
    process exits, which is when the last drain happens.)"""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Call, _Handle] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._busy = 0
        self.wake: Callable[[], None] = lambda: None

    def run(self, call: Call) -> _Handle:
        handle = _Handle()
        with self._lock:
            self._busy += 1
            if self._busy > self._threads:
                self._threads += 1
                threading.Thread(target=self._serve, name="hvd_async-horovod-op", daemon=True).start()
        self._calls.put((call, handle))
        return handle

    def stop(self) -> None:
        """End the threads when their calls return. If one has not, the process will run no C++ destructors."""
        with self._lock:
            if self._busy:
                exit_status.skip_destructors()
            for _ in range(self._threads):
                self._calls.put(None)

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            call, handle = item
            try:
                handle.set_result(call())
            except Exception as error:  # noqa: BLE001  raised by ``result()``
                handle.set_exception(horovod_error(error))
            with self._lock:
                self._busy -= 1
            self.wake()


class _Graph:
    """Horovod ops by name, each built once, and the session that runs them."""

    def __init__(self) -> None:
        self._graph = tf.Graph()
        self._lock = threading.Lock()
        self._calls: dict[tuple[Any, ...], Callable[..., Any]] = {}
        config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=INLINE, device_count={"GPU": 0})
        self._session = tf.compat.v1.Session(graph=self._graph, config=config)

    def run(self, key: tuple[Any, ...], build: Callable[..., tf.Tensor], *given: Any) -> Any:
        """Run an op.

        Args:
            key: identifies the op; its arguments may have another length later.
            build: makes the op, the first time.
            given: its arguments, of NumPy or TensorFlow.

        Returns:
            A tensor; if the first argument is NumPy's, a new NumPy array.
        """
        dtypes = [tf.as_dtype(one.dtype) for one in given]
        key = (*key, *dtypes)
        with self._lock:
            if key not in self._calls:
                with self._graph.as_default():
                    shapes = [[None, *one.shape[1:]] for one in given]
                    fed = list(map(tf.compat.v1.placeholder, dtypes, shapes))
                    self._calls[key] = self._callable(fed, [build(*fed)])
            call = self._calls[key]
        (result,) = call(*map(np.asarray, given))  # (not copied: it does not change)
        return result if isinstance(given[0], np.ndarray) else given_to_tensor(result)  # (a new array)

    def _callable(self, fed: Sequence[tf.Tensor], fetched: Sequence[tf.Tensor]) -> Callable[..., list[Any]]:
        """Return a function of NumPy arrays that returns NumPy arrays. (The
        session's ``make_callable`` looks up its arguments in the graph at each call: 50 us of Python instead of 4.)"""
        options = CallableOptions(feed=[one.name for one in fed], fetch=[one.name for one in fetched])
        call: Callable[..., list[Any]] = self._session._make_callable_from_options(options)
        return call

    def close(self) -> None:
        self._session.close()


def _sum(fed: tf.Tensor, name: str, ranks: Any, scale: float) -> tf.Tensor:
    """Return the sum of a vector over the ranks of a process set x ``scale``."""
    if fed.dtype == tf.bfloat16:
        return _sum_of_halves(fed, name, ranks, scale)
    total = hvd.allreduce(fed, op=hvd.Sum, name=name, process_set=ranks, ignore_name_scope=True)
    # (Horovod owns its output, so Python would get a copy; the product is not copied)
    return total * tf.constant(scale, fed.dtype)


def _sum_of_halves(fed: tf.Tensor, name: str, ranks: Any, scale: float) -> tf.Tensor:
    """Return the sum of bfloat16 vectors, which Horovod does not add, x ``scale``: every rank sums one part of all, in
    float32, and all gather the parts. It moves as many bytes as an allreduce.

    Args:
        fed: shape (n,), bfloat16.
        name: stem of the two collectives' names.
        ranks: a Horovod process set.
    """
    elements, size = tf.shape(fed)[0], ranks.size()
    part = (elements + size - 1) // size
    bits = tf.bitcast(tf.pad(fed, [[0, part * size - elements]]), tf.int16)
    counts, outside = tf.fill([size], part), {"process_set": ranks, "ignore_name_scope": True}
    parts, _ = hvd.alltoall(bits, counts, name=f"{name}.parts", **outside)
    halves = tf.reshape(tf.bitcast(parts, tf.bfloat16), [size, part])
    own = tf.cast(tf.reduce_sum(tf.cast(halves, tf.float32), axis=0) * scale, tf.bfloat16)
    sums = hvd.allgather(tf.bitcast(own, tf.int16), name=f"{name}.sums", **outside)
    return tf.bitcast(sums, tf.bfloat16)[:elements]


def horovod_error(error: Exception) -> Exception:
    """Return Horovod's error for one of TensorFlow's, which wraps Horovod's failures; elastic expects Horovod's."""
    if isinstance(error, tf.errors.OpError):
        return HorovodInternalError(str(error))
    return error


class HorovodCollectives:
    """The data plane on Horovod: over all ranks, or over those of a process set.

    Raises:
        NotInitializedError: ``hvd.init()`` was not called.
    """

    failure: type[Exception] = HorovodInternalError
    in_order = False

    def __init__(self) -> None:
        if not hvd.is_initialized():
            raise NotInitializedError()
        self.rank, self.size = hvd.rank(), hvd.size()
        self.host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
        self._threads = _Threads()
        self._graph = _Graph()

    @property
    def on_gpu(self) -> bool:
        return bool(tf.config.get_visible_devices("GPU"))

    def release(self, optimizer: int) -> None:
        pass

    def start(self, wake: Callable[[], None]) -> None:
        self._threads.wake = wake

    def stop(self) -> None:
        self._threads.stop()
        self._graph.close()

    def _run(self, key: tuple[Any, ...], build: Callable[..., tf.Tensor], *given: Any) -> _Handle:
        return self._threads.run(lambda: self._graph.run(key, build, *given))

    def allreduce_sum(
        self, vector: Any, name: str, process_set: Any = None, keep: bool = False, scale: float = 1.0
    ) -> Handle:
        # (a tensor, or a NumPy vector: the result is the same)
        if isinstance(process_set, SingleRank):
            return CompletedHandle(vector * np.asarray(scale, tf.as_dtype(vector.dtype).as_numpy_dtype))
        # (``keep`` needs nothing: ops do not change their inputs)
        ranks = hvd.global_process_set if process_set is None else process_set
        return self._run(("sum", name, scale), lambda fed: _sum(fed, name, ranks, scale), vector)

    def sum_in_graph(self, vector: tf.Tensor, name: str, process_set: Any, scale: float) -> tf.Tensor:
        """Return the sum of ``allreduce_sum``, by ops of the graph that is being built.

        Other ranks may submit their part by ``allreduce_sum``, which is on the CPU: Horovod refuses ranks on different
        devices.
        """
        if isinstance(process_set, SingleRank):
            return vector * tf.constant(scale, vector.dtype)
        # (a scope of its own, since TensorFlow would give a second op of this name another one)
        with tf.device("CPU:0"), tf.name_scope("hvd_async"):
            return _sum(vector, name, hvd.global_process_set if process_set is None else process_set, scale)

    def allreduce_extreme(self, vector: tf.Tensor, name: str, largest: bool) -> _Handle:
        op = hvd.Max if largest else hvd.Min
        return self._run(("extreme", name, largest), lambda fed: hvd.allreduce(fed, op=op, name=name), vector)

    def broadcast(self, vector: tf.Tensor, root: int, name: str, process_set: Any = None) -> Handle:
        if isinstance(process_set, SingleRank):
            return CompletedHandle(vector)
        ranks = hvd.global_process_set if process_set is None else process_set
        return self._run(
            ("broadcast", name, root), lambda fed: hvd.broadcast(fed, root, name=name, process_set=ranks), vector
        )

    def describe(self, vector: Any) -> tuple[int, str]:
        return int(vector.shape[0]), tf.as_dtype(vector.dtype).name

    def zeros(self, length: int, kind: str) -> Any:
        return np.zeros(length, tf.as_dtype(kind).as_numpy_dtype)

    def empty_like(self, vector: Any) -> Any:
        return np.empty_like(vector)

    def alltoall(
        self,
        rows: Any,
        splits: list[int],
        coming: list[int],
        name: str,
        process_set: Any = None,
        into: Any = None,
    ) -> Handle:
        if isinstance(process_set, SingleRank):
            return CompletedHandle(rows[:0])
        ranks = hvd.global_process_set if process_set is None else process_set

        def build(fed: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
            received, _ = hvd.alltoall(fed, counts, name=name, process_set=ranks)
            return received

        return self._run(("exchange", name), build, rows, np.asarray(splits, np.int32))

    def process_set_of(self, groups: Sequence[Sequence[int]], make: bool) -> Any:
        known = process_sets._basics._get_process_set_ids_and_ranks()
        return process_set_among(process_sets, known, groups, self.rank, make)

    def allgather_bytes(self, payload: bytes, name: str) -> list[bytes]:
        data = tf.constant(np.frombuffer(pack(payload), dtype=np.uint8))
        handle = self._run(("gather", name), lambda fed: hvd.allgather(fed, name=name), data)
        return unpack(handle.result().numpy().tobytes())


def refuse_alone(unknown: bool = True) -> None:
    """Refuse a job of one rank where a variable says that there are more; see ``launch.refuse_alone``.

    Raises:
        ValueError: one does.
    """
    launch.refuse_alone(os.environ, hvd.size(), unknown=unknown)


def _make() -> HorovodCollectives:
    """Return this rank's collectives; a script may have called Horovod's own ``init``."""
    made = HorovodCollectives()
    refuse_alone(unknown=False)
    return made


_horovods_hook = hvd.shutdown  # (``install`` replaces this name)
LIFECYCLE = Lifecycle(
    _make, FAMILIES, lambda: (hvd.rank(), hvd.size()) if hvd.is_initialized() else None, lambda: _horovods_hook
)
