"""Functions of ``hvd_async.torch`` besides the wrappers.

They are replacements of names of ``horovod.torch`` that do not work with this library's optimizers, observers of an
optimizer, and declarations that let torchvision be imported."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hvd_async.algorithms.eager import timeline
from hvd_async.monitor import Monitor
from hvd_async.optimizers import elastic
from hvd_async.optimizers.methods import OptimizerMethods
from hvd_async.runtime import time_limits
from hvd_async.runtime.descriptors import closed_in_children
from hvd_async.torch.collectives import LIFECYCLE, outside_inference_mode
from hvd_async.torch.horovod_api import HorovodInternalError, forwarded, hvd
from hvd_async.torch.methods import SHARE, own_state
from hvd_async.torch.tensors import bytes_of, from_bytes, is_plain, write
from hvd_async.traces.recorded import recorded
from hvd_async.traces.recorder import Recorder

timeline.watch_exit(forwarded("shutdown"))


class _Shape(tuple[Any, ...]):
    """Placeholder of a tensor in a structure that is sent ahead of it: (shape, dtype)."""


HOROVODS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64}
"""Dtypes that Horovod broadcasts."""


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Send the tensors of ``root_rank`` to every rank, in place; unlike Horovod's, of every dtype, also expanded ones.

    Args:
        params: ``model.state_dict()``, or a list of tensors or of pairs (name, tensor); the same names on all ranks.
            Entries that are no tensors (a module's extra state) and sparse or quantized tensors stay each rank's own.
        root_rank: the rank whose tensors are sent.

    Raises:
        ValueError: ``params`` is something else.
    """
    if isinstance(params, dict):
        pairs: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, list):
        pairs = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise ValueError(f"params must be a dict or a list, got {type(params).__name__}. Pass model.state_dict()")
    begun: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
            continue
        data = None if tensor.dtype in HOROVODS and tensor.is_contiguous() else bytes_of(tensor)
        begun.append((hvd.broadcast_async_(tensor if data is None else data, root_rank, name), tensor, data))
    for handle, tensor, data in begun:
        hvd.synchronize(handle)
        if data is not None:
            write(tensor, from_bytes(data, tensor))


@outside_inference_mode
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None) -> None:
    """Send the optimizer state of ``root_rank`` to every rank.

    Horovod's own creates missing state by calling ``step()``, which would start a round here; this one sends the state
    as it is, so all ranks may call it before the first step. Before the first step it also sends what a loaded state
    holds of this library's: outer momentum, and the counts of rounds and steps.

    Args:
        optimizer: a wrapped optimizer, or any torch optimizer (then Horovod's function is called).
        root_rank: the rank whose state is sent.
        model: as in Horovod; not needed.

    Raises:
        ValueError: a rank has loaded a state that was saved after ``cut()``, which is its own.
    """
    if not isinstance(optimizer, OptimizerMethods):
        hvd.horovods_broadcast(optimizer, root_rank, model)
        return
    driver = optimizer._async
    if driver.worker is not None:
        optimizer.drain()  # (no round may be in flight)
    resumed = hvd.allgather_object(driver.resumed, name="hvd_async.resumed")
    rounds = _object_of(root_rank, optimizer.rounds, "hvd_async.optimizer_rounds")
    with_share, name = driver.sends_share(resumed), "hvd_async.optimizer_state"
    state = receive_state(optimizer, hvd.rank(), root_rank, name, _object_of, _tensors_of, with_share)
    optimizer.load_state_dict(state)
    driver.count_from(rounds)


def _object_of(root_rank: int, value: Any, name: str) -> Any:
    return hvd.broadcast_object(value, root_rank, name=name)


def _tensors_of(root_rank: int, tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    # (as bytes: Horovod does not carry all dtypes)
    return [from_bytes(hvd.broadcast(bytes_of(tensor), root_rank, name=name), tensor) for tensor in tensors]


def receive_state(
    optimizer: Any,
    rank: int,
    root_rank: int,
    name: str,
    object_of: Callable[[int, Any, str], Any],
    tensors_of: Callable[[int, list[torch.Tensor], str], list[torch.Tensor]],
    with_share: bool = False,
) -> dict[str, Any]:
    """Return the state of the wrapped optimizer on ``root_rank``. A collective.

    Args:
        optimizer: this rank's wrapped optimizer; it does not change.
        rank: this process's rank.
        root_rank: the rank whose state is returned.
        name: prefix of the collectives' names.
        object_of, tensors_of: collectives that return a rank's value, and its tensors.
        with_share: whether the share of that rank belongs to it.
    """
    own = own_state(optimizer) if with_share else {SHARE: None, **optimizer._async.replica.extra_state()}
    state = {**optimizer._wrapped_class.state_dict(optimizer), **own}
    tensors: list[torch.Tensor] = []

    def hollow(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return _Shape((tuple(value.shape), value.dtype))
        return _map(value, hollow)

    skeleton = object_of(root_rank, hollow(state), name)
    on_root = iter(list(tensors))
    received: list[torch.Tensor] = []

    def fill(value: Any) -> Any:
        if isinstance(value, _Shape):
            shape, dtype = value
            if rank == root_rank:  # (Horovod takes contiguous tensors only)
                sent = next(on_root).cpu().clone(memory_format=torch.contiguous_format)
            else:
                sent = torch.zeros(shape, dtype=dtype, device="cpu")
            received.extend(tensors_of(root_rank, [sent], f"{name}.{len(received)}"))
            return received[-1]
        return _map(value, fill)

    received_state: dict[str, Any] = fill(skeleton)
    return received_state


def _map(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: change(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [change(inner) for inner in value]
    return value


def join(device: int = -1) -> int:
    """Announce that this rank has no more batches: drain every wrapped optimizer of this process.

    Horovod's ``join`` would silence this rank's engine; it is called only in a job without wrapped optimizers.

    Returns:
        The last rank to join.
    """
    last = LIFECYCLE.join()
    return int(hvd.join(device)) if last is None else last


def init(*arguments: Any, **options: Any) -> None:
    """Decide which data plane it is, and call its ``init``. In an elastic job, repeat it if a rank dies meanwhile.

    Raises:
        ValueError: as Horovod's; a variable of the launcher is missing or wrong; or this process is the only rank while
            a variable, or the default process group, says that there are more.
    """
    with closed_in_children():
        elastic.meet(hvd.shutdown, lambda: hvd.init(*arguments, **options))
    LIFECYCLE.initialized()


def shutdown() -> None:
    """Drain wrapped optimizers, stop the engine, then shut Horovod down. All ranks call it."""
    LIFECYCLE.shutdown()
    hvd.shutdown()
    timeline.merge()  # now, since hvd.init() would start Horovod's timeline again


# -- Horovod's own modules ---------------------------------------------------------------------------------------------
# Scripts may use horovod.torch's own names together with a wrapped optimizer. Horovod numbers collectives without a
# name by the number that the process has submitted, including the engine's, which differs between ranks: the ranks
# would wait for each other forever. Its ``join`` would silence the engine, its ``shutdown`` would lose rounds. All of
# these calls, by whatever name a script has imported them, use one reference to Horovod's library, which ``_Library``
# replaces. ``broadcast_optimizer_state``, which steps an optimizer to create its state, and ``broadcast_parameters``,
# which supports few dtypes, are Python only: the functions above replace them in Horovod's modules. ``TorchState``
# drains first.


JOINED = -1
"""The handle of a join that was a drain; Horovod's own are from 0."""


class _Library:
    """Horovod's compiled library, as Horovod's Python code calls it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if "_async_" in name:
            function = self._naming(function)
        setattr(self, name, function)  # (looked up once)
        return function

    def _naming(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a collective, which numbers collectives without a name."""

        @functools.wraps(function)
        def named(*arguments: Any) -> Any:
            # (names are bytes; an empty string means no name)
            numbers = self._numbers
            return function(*(f"unnamed.{next(numbers)}" if isinstance(one, str) else one for one in arguments))

        return named

    def horovod_torch_join(self, output: torch.Tensor, device: int) -> int:
        """Drain wrapped optimizers if there are any, since this rank still takes part in rounds."""
        last = LIFECYCLE.join()
        if last is None:
            return int(self._library.horovod_torch_join(output, device))
        output.fill_(last)
        return JOINED

    def horovod_torch_wait_and_clear(self, handle: int) -> None:
        """Wait for a collective of the script's, or until a rank is known to be lost."""
        if handle == JOINED:
            return
        began = time.monotonic()
        while not self._library.horovod_torch_poll(handle):
            LIFECYCLE.check()
            time.sleep(min(2e-4 + (time.monotonic() - began) / 10, 0.005))
        try:
            self._library.horovod_torch_wait_and_clear(handle)
        except RuntimeError:
            LIFECYCLE.check(within=1.0)  # (the coordinator knows who has ended, Horovod does not)
            raise

    def horovod_torch_reset(self) -> None:
        """Drain wrapped optimizers and stop the engine before Horovod shuts down."""
        LIFECYCLE.shutdown()
        self._numbers = itertools.count()  # (a rank that an elastic job has gained begins with 0)
        self._library.horovod_torch_reset()


def _settled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of ``TorchState`` that drains first: it saves the model's weights before the optimizer's state,
    and the two must match. A collective once training has begun, as TorchState's own are."""

    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        LIFECYCLE.settle()
        return method(*arguments, **options)

    return call


def _reset() -> None:
    """Restart Horovod and this library's optimizers after a membership change, for ``hvd.elastic.run``."""
    elastic.reset(LIFECYCLE, hvd.shutdown, hvd.init)


def _rolling_back(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``TorchState.restore``, draining first; where ranks were lost, rounds in flight are rolled back too."""

    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        with contextlib.suppress(HorovodInternalError):
            LIFECYCLE.settle()
        LIFECYCLE.roll_back()
        return method(*arguments, **options)

    return call


def install() -> None:
    """Put these functions into Horovod's modules, once Horovod is the data plane; once per process."""
    import horovod.torch
    from horovod.torch import elastic as horovods_elastic
    from horovod.torch import functions, mpi_ops
    from horovod.torch.elastic import state as elastic_state

    mpi_ops.mpi_lib = _Library(mpi_ops.mpi_lib)
    for module in (horovod.torch, functions, elastic_state):
        module.broadcast_optimizer_state = broadcast_optimizer_state
        module.broadcast_parameters = broadcast_parameters
    state = elastic_state.TorchState
    for name in ("__init__", "save", "sync"):
        setattr(state, name, _settled(getattr(state, name)))
    state.restore = _rolling_back(state.restore)
    horovods_elastic._reset = _reset
    time_limits.limit_gloo()


# -- observers ---------------------------------------------------------------------------------------------------------


class AttachedMonitor(Monitor):
    """A ``Monitor`` that is called by the step hook of its optimizer, until it is closed.

    The hook runs once for each update of the weights: once a step, and more often where a late rank applies several
    rounds in one.

    Args:
        optimizer: a wrapped torch optimizer.
        options: of ``Monitor``.
    """

    def __init__(self, optimizer: Any, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self._handle = optimizer.register_step_post_hook(lambda *_: self.step())

    def close(self) -> None:
        """Take a last sample, close the files, and stop watching the optimizer."""
        self._handle.remove()
        super().close()


def attach_monitor(optimizer: Any, **options: Any) -> AttachedMonitor:
    """Watch a wrapped torch optimizer without a call in the loop, and return the monitor, to close it.

    Args:
        optimizer: of ``EagerOptimizer``, ``GossipOptimizer`` or ``LeaderOptimizer``. It keeps the monitor alive.
        options: of ``hvd_async.monitor.Monitor``.

    Raises:
        ValueError, OSError: as ``Monitor``.
    """
    return AttachedMonitor(optimizer, **options)


def record(optimizer: Any, folder: str | os.PathLike[str], synchronize: bool = False) -> Recorder:
    """Record when this rank computes and when it waits, into a file of a trace that ``hvd_async advise`` reads.

    Call it once on every rank, after the optimizer is wrapped, by Horovod or by this library; training is not changed.
    DDP's waits in the backward pass cannot be distinguished from computation.

    Args:
        optimizer: the one that the training loop steps.
        folder: of the trace, the same for all ranks; on several hosts a shared one, or collect the files afterwards.
        synchronize: whether to wait for the GPU before each mark. Without it times on CUDA are those at which kernels
            were submitted, which say little; with it the host and the GPU overlap less, which may be slower.

    Returns:
        The recorder: ``skip()`` leaves out time that belongs to no step, such as an evaluation; ``close()`` ends it, as
        does the end of the process.

    Raises:
        ValueError: the optimizer is recorded already, or only some ranks share it (a process set).
        OSError: the folder cannot be written.
    """
    wait = torch.cuda.synchronize if synchronize and torch.cuda.is_available() else None
    return recorded(optimizer, folder, hvd.rank(), hvd.size(), wait)


# -- torchvision whose compiled operators were built for another torch -------------------------------------------------


_declared: list[torch.library.Library] = []
"""Holds the declarations, which end with the object."""


def declare_torchvision_operators() -> bool:
    """Let torchvision be imported where its compiled operators cannot be loaded.

    PyPI's torchvision is built for CUDA's torch. With a torch for CPUs its import, and that of packages that import it
    (Lightning, Transformers, timm), ends in "operator torchvision::nms does not exist". After this call the import
    succeeds: models, transforms and data sets work, and functions with a compiled operator (``torchvision.ops.nms``)
    raise an error when they are called. Call it before the first import of any of these packages. If a torchvision of
    the same build as torch is available, install that instead.

    Returns:
        Whether the operators had to be declared; False if torchvision is not installed, is imported already, or loads
        its own.
    """
    spec = importlib.util.find_spec("torchvision")
    if _declared or "torchvision" in sys.modules or spec is None or spec.origin is None:
        return False
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            ctypes.CDLL(str(library))
    except OSError:
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):  # (torchvision registers implementations of these even if they do not exist)
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(declared)
        return True
    return False
