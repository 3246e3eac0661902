"""Recording of a ``torch.distributed`` job without Horovod: DDP, FSDP2, or a loop that calls collectives itself.

Steps are those of the first optimizer that steps after the default process group is initialized. A rank waits

- between the end of DDP's own computation in the backward pass and the end of its last allreduce,
- in ``Work.wait()``, for collectives that Python has started: those of FSDP2, SyncBatchNorm and the script,
- where DDP broadcasts buffers before the forward pass, and where results of functional collectives are waited for.

The module imports no framework: it receives torch's modules once the script has imported them.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvd_async.runtime.log import warn
from hvd_async.traces.format import DDP, FSDP, PLAIN
from hvd_async.traces.recorder import Recorder, unless_it_cannot_be_recorded


class TorchJob:
    """Timer of the steps and waits of this process, from ``watch`` on.

    Args:
        folder: of the trace.
        synchronize: wait for the GPU before each mark.
        made: list of names of recorded optimizers, to which this job appends; see ``record_what_is_made``.
    """

    def __init__(self, folder: Path, synchronize: bool, made: list[str]) -> None:
        self._folder, self._synchronize, self._made = folder, synchronize, made
        self._torch: Any = None
        self._recorder: Recorder | None = None
        self._optimizer: Callable[[], Any] = lambda: None
        self._replicas: weakref.WeakSet[Any] = weakref.WeakSet()
        self._thread = 0
        self._device = False
        self._backward_ended = 0.0
        self._in_backward = False
        self._has_warned = False

    def watch(self, torch: Any) -> None:
        """Follow the optimizers and the collectives of a process from now on.

        Args:
            torch: the module, completely imported.
        """
        self._torch, distributed = torch, torch.distributed
        if not distributed.is_available():
            return
        optimizers: Any = sys.modules[torch.optim.Optimizer.__module__]
        optimizers.register_optimizer_step_pre_hook(self._before_step)
        optimizers.register_optimizer_step_post_hook(self._after_step)
        distributed.Work.wait = self._timed(distributed.Work.wait)
        distributed._broadcast_coalesced = self._timed(distributed._broadcast_coalesced)
        replica = torch.nn.parallel.DistributedDataParallel
        replica.__init__ = self._following(replica.__init__)

    def watch_functional(self, collectives: Any) -> None:
        """Time the waits for functional collectives, such as those of a DTensor's norm.

        Args:
            collectives: ``torch.distributed._functional_collectives``.
        """
        collectives.wait_tensor = self._timed(collectives.wait_tensor)

    # -- waits --------------------------------------------------------------------------------------------------

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of ``wait`` that records its duration, in the training thread only."""

        @functools.wraps(wait)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._recorder is None or threading.get_ident() != self._thread:
                return wait(*args, **kwargs)
            started = time.perf_counter()
            found = wait(*args, **kwargs)
            self._recorder.waited(time.perf_counter() - started)
            return found

        return timed

    def _following(self, initialize: Callable[..., None]) -> Callable[..., None]:
        """Return DDP's ``__init__`` with hooks that see the backward pass of the new module."""

        @functools.wraps(initialize)
        def following(module: Any, /, *args: Any, **kwargs: Any) -> None:  # (DDP has a parameter ``module``)
            initialize(module, *args, **kwargs)
            self._replicas.add(module)
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._gradient_ready)

        return following

    def _gradient_ready(self, _: Any) -> None:
        """Have the engine call back at the end of this backward pass.

        Callbacks run in the order in which they were queued, after all computation. DDP queues its own, which waits for
        the allreduces, when its last bucket is ready. A gradient's hook comes before that, so this callback runs first.
        """
        if self._recorder is not None and not self._in_backward:
            self._in_backward = True
            self._torch.autograd.Variable._execution_engine.queue_callback(self._computed)

    def _computed(self) -> None:
        """Note when this rank's gradients were ready, and queue a callback for when DDP has averaged all ranks'."""
        self._wait_for_device()
        self._backward_ended = time.perf_counter()
        self._torch.autograd.Variable._execution_engine.queue_callback(self._averaged)

    def _averaged(self) -> None:
        """Record the wait of DDP."""
        self._in_backward = False
        self._wait_for_device()
        if self._recorder is not None:
            self._recorder.waited(time.perf_counter() - self._backward_ended)

    def _wait_for_device(self) -> None:
        """Wait for the submitted computation, but not for collectives, which have streams of their own."""
        if self._device:
            self._torch.cuda.current_stream().synchronize()

    # -- steps --------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """Record the optimizer's step from here on, if it is the first one of a distributed job."""
        if self._recorder is None and not self._made and self._torch.distributed.is_initialized():
            self._made.append(type(optimizer).__name__)
            with unless_it_cannot_be_recorded():
                self._start(optimizer)
        if self._recorder is None:
            return
        if optimizer is self._optimizer():
            self._in_backward = False  # (a backward pass that raised did not run its callbacks)
            self._wait_for_device()
            self._recorder.arrived()
        elif not self._has_warned:
            self._has_warned = True
            warn(f"record: a second optimizer steps, {type(optimizer).__name__}; only the first one is recorded")

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._recorder is not None and optimizer is self._optimizer():
            self._wait_for_device()
            self._recorder.done()

    def _start(self, optimizer: Any) -> None:
        """Open this rank's file.

        Raises:
            ValueError: only some ranks share the optimizer's parameters.
            OSError: the folder cannot be written.
        """
        distributed = self._torch.distributed
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        algorithm, sharing = self._described(parameters)
        if sharing not in (None, ranks):
            raise ValueError(
                f"the model is shared by {sharing} ranks of {ranks}: a trace is of a job in which all ranks train "
                "together, not of a process group"
            )
        on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
        # (FSDP2 waits on streams of its own, which the host does not see.)
        self._device = self._synchronize and not on_cpu and algorithm == DDP
        self._recorder = Recorder(
            self._folder,
            rank,
            ranks,
            framework="torch",
            algorithm=algorithm,
            parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
            synchronized=on_cpu or self._device,
        )
        atexit.register(self._recorder.close)
        self._optimizer, self._thread = weakref.ref(optimizer), threading.get_ident()

    def _described(self, parameters: list[Any]) -> tuple[str, int | None]:
        """Return the algorithm by which ranks share these parameters, and the number of ranks that do, if known."""
        meshes = [parameter.device_mesh for parameter in parameters if hasattr(parameter, "device_mesh")]
        if meshes:
            return FSDP, meshes[0].size()
        own = {id(parameter) for parameter in parameters}
        for module in self._replicas:
            if any(id(parameter) in own for parameter in module.parameters()):
                return DDP, module.process_group.size()
        return PLAIN, None
