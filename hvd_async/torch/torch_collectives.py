"""The data plane on torch.distributed: private process groups, of Gloo for tensors on a CPU and of NCCL on GPUs.

A process group matches collectives by the order in which each rank submits them.

On a CPU ranks may submit collectives of different lanes (``interfaces.lane_of``) in different orders: of another
bucket, of another optimizer. So each lane has a process group of its own. Within a lane collectives are submitted in
the order of the coordinator's commands, on all ranks. Completion wakes the engine, so nothing is polled.

On GPUs that would not be safe: NCCL's kernels wait on the device for the other ranks', and two kernels that share a
hardware queue run in the order in which they were launched. So all collectives are submitted in the order of the
coordinator's commands (``in_order``), and the ranks share one process group.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level
from torch.futures import Future

from hvd_async.runtime import time_limits
from hvd_async.runtime.exit_status import exit_status
from hvd_async.runtime.interfaces import CompletedHandle, Handle, lane_of
from hvd_async.runtime.process_sets import SingleRank
from hvd_async.torch import streams
from hvd_async.torch.distributed import process_sets, world
from hvd_async.torch.distributed.collectives import gather_objects
from hvd_async.torch.distributed.world import FOREVER, HorovodInternalError
from hvd_async.torch.tensor_collectives import POLLS_OF_GPU, Staged, TensorCollectives


class _Handle:
    """A collective of a process group.

    Args:
        is_done, wait: of torch.distributed's work, or of its future.
        result: what ``result()`` returns, multiplied by ``scale``.
        polled: seconds between two calls of ``done``; None if completion wakes the engine.

    Attributes:
        take: see ``Handle``. None on a CPU, where no later work could wait instead of the host.
    """

    in_stages = False

    def __init__(
        self,
        is_done: Callable[[], bool],
        wait: Callable[[], object],
        result: torch.Tensor,
        scale: float,
        polled: float | None,
    ) -> None:
        self.done, self._wait = is_done, wait
        self._result, self._scale, self._polled = result, scale, polled
        self.take = self._take if polled is not None and scale == 1.0 else None

    def _take(self) -> torch.Tensor:
        self._finish()
        return self._result

    def result(self) -> torch.Tensor:
        self._finish()
        result = self._result if self._scale == 1.0 else self._result.mul_(self._scale)
        return streams.record_received(result)

    def _finish(self) -> None:
        """Wait for the collective; on a GPU, let this thread's stream wait for it."""
        try:
            self._wait()
        except RuntimeError as error:
            raise HorovodInternalError(
                f"a collective has failed; a rank has probably ended, see its output: {error}"
            ) from error

    def seconds_to_poll(self) -> float | None:
        return self._polled


class _Waiter:
    """A thread that waits for one lane's sends and receives on Gloo, which have no callback.

    It waits in the order in which they began. This delays nothing: a rank that takes part in a later exchange of a lane
    has begun its part of the earlier ones.
    """

    def __init__(self, lane: str) -> None:
        self._begun: SimpleQueue[tuple[list[Any], Future[None]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name=f"hvd_async-waiter {lane}", daemon=True).start()

    def wait_for(self, works: list[Any]) -> Future[None]:
        """Return a future that is done when all of these are, with the error of the first that has failed."""
        future: Future[None] = Future()
        self._begun.put((works, future))
        return future

    def close(self) -> None:
        """End the thread when all that it waits for is done."""
        self._begun.put(None)

    def _serve(self) -> None:
        while (begun := self._begun.get()) is not None:
            self._wait(*begun)
            del begun  # (its works hold the received rows, whose memory the next exchange can use)

    @staticmethod
    def _wait(works: list[Any], future: Future[None]) -> None:
        try:
            for work in works:
                work.wait(FOREVER)
        except RuntimeError as error:
            future.set_exception(error)  # type: ignore[arg-type]  # (annotated wrongly by torch)
        else:
            future.set_result(None)


class TorchCollectives(TensorCollectives):
    """The data plane on torch.distributed: over all ranks, or over those of a process set.

    Raises:
        NotInitializedError: ``hvd.init()`` was not called.
    """

    failure: type[Exception] = HorovodInternalError

    def __init__(self) -> None:
        super().__init__()
        self._world = world.current()
        self.rank, self.size = self._world.rank, self._world.size
        self.host = self._world.place.host
        staged = os.environ.get("HVD_ASYNC_STAGE", "0") not in ("", "0")
        self._nccl = self.in_order = streams.gpu.has_nccl and torch.cuda.is_available() and not staged
        self._groups: dict[tuple[Any, ...], Any] = {}
        self._waiters: dict[tuple[Any, ...], _Waiter] = {}
        self._unfinished: list[tuple[tuple[Any, ...], Callable[[], bool]]] = []
        """For each collective in flight, the lane, and a function that returns whether it is done."""
        self._ended: set[int] = set()
        """Optimizers whose groups are to be closed once nothing of them is in flight."""
        self._wake: Callable[[], None] = lambda: None

    def start(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def stop(self) -> None:
        """Close the process groups. If collectives are in flight, which will never end, Gloo's are left to the end of
        the process, which then runs no C++ destructors: these would wait for the other ranks."""
        self._wake = lambda: None
        for waiter in self._waiters.values():
            waiter.close()
        if all(is_done() for _, is_done in self._unfinished):
            self._world.close([group for (*_, on_gpu), group in self._groups.items() if not on_gpu])
        else:
            exit_status.skip_destructors()
        groups, self._groups = self._groups, {}
        for (*_, on_gpu), group in groups.items():
            if on_gpu:  # (it waits for no rank, unlike ``shutdown``, and ends kernels that wait for one)
                group.abort() if hasattr(group, "abort") else group._shutdown()  # (the latter up to torch 2.5)

    def release(self, optimizer: int) -> None:
        self._ended.add(optimizer)
        self._close_ended()

    def _close_ended(self) -> None:
        """Close the process groups of optimizers that have ended, and the threads that wait for their collectives."""
        self._unfinished = [(key, is_done) for key, is_done in self._unfinished if not is_done()]
        if not self._ended:
            return
        busy = {_optimizer_of(key) for key, _ in self._unfinished}
        over = self._ended - busy
        self._ended -= over
        for key in [key for key in self._waiters if _optimizer_of(key) in over]:
            self._waiters.pop(key).close()
        self._world.close([self._groups.pop(key) for key in list(self._groups) if _optimizer_of(key) in over])
        self._world.sweep()

    # -- process groups -------------------------------------------------------------------------------------------

    def _ranks(self, process_set: Any) -> tuple[int, ...]:
        return tuple(range(self.size)) if process_set is None else tuple(process_set.ranks)

    def _group(self, name: str, process_set: Any, on_gpu: bool) -> Any:
        """Return the process group of a collective's lane, on GPUs of all collectives; its ranks make it together."""
        key = ("" if on_gpu else lane_of(name), self._ranks(process_set), on_gpu)
        if key not in self._groups:
            name, ranks, _ = key
            limit = timedelta(seconds=time_limits.connect_timeout())
            made = self._nccl_group(ranks, limit) if on_gpu else self._world.group(f"engine.{name}", ranks, limit)
            self._groups[key] = made
        return self._groups[key]

    def _nccl_group(self, ranks: tuple[int, ...], limit: timedelta) -> Any:
        """Return a new NCCL process group, once its ranks are there: NCCL would wait for them without end."""
        store = self._world.store_of("engine.nccl", ranks)
        self._world.meet(store, ranks, limit)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        options.is_high_priority_stream = True
        with _unwatched():
            return dist.ProcessGroupNCCL(store, ranks.index(self.rank), len(ranks), options)

    def _start(
        self,
        tensor: torch.Tensor,
        name: str,
        process_set: Any,
        start: Callable[[Any, torch.Tensor], tuple[Any, torch.Tensor]],
        scale: float = 1.0,
    ) -> Handle:
        """Start a collective of a tensor: where it is, or by way of the CPU.

        Args:
            start: gets group and tensor; returns torch.distributed's work, or a future, and the result's tensor.
            scale: factor of the result.
        """
        on_gpu = streams.gpu.holds(tensor)
        lane = (lane_of(name), self._ranks(process_set), False)

        def begin(there: torch.Tensor) -> Handle:
            work, result = start(self._group(name, process_set, on_gpu and there is tensor), there)
            if streams.gpu.holds(there):
                handle = _Handle(work.is_completed, work.wait, result, scale, POLLS_OF_GPU[0])
            else:
                future = work if isinstance(work, Future) else work.get_future()
                future.add_done_callback(lambda _: self._wake())
                handle = _Handle(future.done, future.wait, result, scale, None)
            self._close_ended()
            self._unfinished.append((lane, handle.done))
            return handle

        self._cuda = tensor.device if on_gpu else self._cuda
        if on_gpu and not self._nccl:
            return Staged(tensor, begin)
        with streams.on_engine_stream_after(tensor):
            return begin(tensor)

    # -- collectives ----------------------------------------------------------------------------------------------

    def allreduce_sum(
        self, vector: torch.Tensor, name: str, process_set: Any = None, keep: bool = False, scale: float = 1.0
    ) -> Handle:
        if isinstance(process_set, SingleRank):
            return CompletedHandle(vector * scale if keep or scale != 1.0 else vector)
        own = vector.clone() if keep else vector
        options = dist.AllreduceOptions()
        options.timeout = FOREVER

        def start(group: Any, there: torch.Tensor) -> tuple[Any, torch.Tensor]:
            return group.allreduce([there], options), there

        return self._start(own, name, process_set, start, scale)

    def allreduce_extreme(self, vector: torch.Tensor, name: str, largest: bool) -> Handle:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN  # type: ignore[assignment]
        options.timeout = FOREVER
        return self._start(vector, name, None, lambda group, there: (group.allreduce([there], options), there))

    def broadcast(self, vector: torch.Tensor, root: int, name: str, process_set: Any = None) -> Handle:
        if isinstance(process_set, SingleRank):
            return CompletedHandle(vector)
        options = dist.BroadcastOptions()
        options.rootRank = self._ranks(process_set).index(root)
        options.timeout = FOREVER
        return self._start(vector, name, process_set, lambda group, there: (group.broadcast([there], options), there))

    def alltoall(
        self,
        rows: torch.Tensor,
        splits: list[int],
        coming: list[int],
        name: str,
        process_set: Any = None,
        into: torch.Tensor | None = None,
    ) -> Handle:
        if isinstance(process_set, SingleRank):
            return CompletedHandle(rows[:0])
        options = dist.AllToAllOptions()
        options.timeout = FOREVER

        def start(group: Any, there: torch.Tensor) -> tuple[Any, torch.Tensor]:
            out = there.new_empty((sum(coming), there.shape[1])) if into is None else into[: sum(coming)]
            if streams.gpu.holds(there):
                return group.alltoall_base(out, there[: sum(splits)], coming, splits, options), out
            # Gloo's own alltoall sends before it receives, so that one direction of a link waits for the other: 8 MB
            # each way took 1.5 times as long. (The tag is of no other exchange in flight.)
            key, tag = (lane_of(name), self._ranks(process_set)), int(name.rpartition(".")[2])
            works = [group.recv([part], place, tag) for place, part in enumerate(out.split(coming)) if len(part)]
            sent = there[: sum(splits)].split(splits)
            works += [group.send([part], place, tag) for place, part in enumerate(sent) if len(part)]
            if key not in self._waiters:
                self._waiters[key] = _Waiter(key[0])
            return self._waiters[key].wait_for(works), out

        return self._start(rows, name, process_set, start)

    def allgather_bytes(self, payload: bytes, name: str) -> list[bytes]:
        """Return all ranks' payloads, in rank order; block until every rank has called it."""
        atexit.register(exit_status.skip_destructors)  # (if the process ends meanwhile: as in ``stop``)
        try:
            return gather_objects(process_sets.engine_calls[0], payload, name)
        finally:
            atexit.unregister(exit_status.skip_destructors)


def _optimizer_of(key: tuple[Any, ...]) -> int | None:
    """Return the number of the optimizer that alone uses a lane; None if it is not one's own."""
    parts = key[0].split(".")
    return int(parts[2]) if len(parts) > 2 and parts[2].isdigit() else None


UNWATCHED = {
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # (its waits would stop the training thread, for ever if a rank is lost)
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # (it sets ASYNC_ERROR_HANDLING to 3)
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Variables that torch reads when a group is made: a late rank is no error, and a lost one is for the coordinator to
name, before torch ends the process."""


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Return a context in which process groups are made as ``UNWATCHED`` says, whatever the user has set for others."""
    before, level = {name: os.environ.get(name) for name in UNWATCHED}, get_debug_level()
    os.environ.update(UNWATCHED)
    if level == DebugLevel.DETAIL:  # (which turns DESYNC_DEBUG on)
        set_debug_level(DebugLevel.INFO)
    try:
        yield
    finally:
        set_debug_level(level)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
