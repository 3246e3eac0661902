"""Recording of the steps of a given torch optimizer, or of the first optimizer that an unchanged script makes.

The module imports no framework; it refers to frameworks by the names of their modules.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from hvd_async.runtime.log import warn
from hvd_async.traces.format import HOROVOD, PLAIN
from hvd_async.traces.recorder import Recorder, unless_it_cannot_be_recorded
from hvd_async.traces.torch_distributed import TorchJob

Instrument = Callable[[ModuleType], None]

# -- a torch optimizer, wrapped by any library -------------------------------------------------------------------------


def recorded(
    optimizer: Any, folder: Any, rank: int, ranks: int, synchronize: Callable[[], None] | None = None
) -> Recorder:
    """Record the steps of a torch optimizer from now on; return the recorder.

    A Horovod optimizer waits in ``synchronize()``; this library's optimizers count their waits. Waits of other
    optimizers are unknown, and recorded as 0.

    Args:
        optimizer: the one that the training loop steps.
        folder: of the trace.
        rank, ranks: number of this rank, and of all ranks.
        synchronize: function that waits for the device, called before each mark.

    Raises:
        ValueError: the optimizer is recorded already, or only some ranks share it.
        OSError: the folder cannot be written.
    """
    if "_recorder" in vars(optimizer):
        raise ValueError("this optimizer is recorded already: call record() once, with the optimizer that you step")
    algorithm, options = _described(optimizer)
    check_all_ranks(vars(optimizer).get("_async"), ranks)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    recorder = Recorder(
        folder,
        rank,
        ranks,
        framework="torch",
        algorithm=algorithm,
        options=options,
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        synchronized=synchronize is not None or all(p.device.type == "cpu" for p in parameters),
    )
    vars(optimizer)["_recorder"] = recorder
    ours = "_async" in vars(optimizer)
    seen = waited_s(optimizer) if ours else 0.0
    before_mark: Callable[[], object] = synchronize or (lambda: None)
    step = optimizer.step

    @functools.wraps(step)
    def recorded_step(_: Any, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        before_mark()
        earlier = seen
        # (It may have waited since its last step: in synchronize(), or a drain().)
        recorder.arrived(max(waited_s(optimizer) - earlier, 0.0) if ours else 0.0)
        found = step(*args, **kwargs)
        before_mark()
        if ours:
            seen = waited_s(optimizer)
            recorder.released(max(seen - earlier, 0.0))
        recorder.done()
        return found

    methods = {"step": recorded_step}
    if algorithm == HOROVOD:
        wait_for_gradients = optimizer.synchronize

        @functools.wraps(wait_for_gradients)
        def recorded_synchronize(_: Any, /, *args: Any, **kwargs: Any) -> Any:
            before_mark()
            recorder.arrived()
            found = wait_for_gradients(*args, **kwargs)
            before_mark()
            recorder.released()
            return found

        methods["synchronize"] = recorded_synchronize
    for name, method in methods.items():  # (bound, since torch's schedulers inspect them)
        setattr(optimizer, name, types.MethodType(method, optimizer))
    atexit.register(recorder.close)
    return recorder


def check_all_ranks(driver: Any, ranks: int) -> None:
    """Check that all ranks share an optimizer.

    Args:
        driver: of an optimizer of this library; None for others.
        ranks: of the job.

    Raises:
        ValueError: only a process set does.
    """
    if driver is not None and driver.size != ranks:
        raise ValueError(
            f"this optimizer is shared by {driver.size} ranks of {ranks}: a trace is of a job in which all ranks train "
            "together, not of a process set"
        )


def _described(optimizer: Any) -> tuple[str, dict[str, Any]]:
    """Return the optimizer's algorithm and its options."""
    driver = vars(optimizer).get("_async")
    if driver is not None:
        settings = dict(driver.settings)
        return settings.pop("algorithm"), settings
    if hasattr(optimizer, "synchronize") and hasattr(optimizer, "skip_synchronize"):
        return HOROVOD, {}
    return PLAIN, {}


def waited_s(optimizer: Any) -> float:
    """Return the seconds that an optimizer of this library has waited since the last membership change."""
    worker = optimizer._async.worker
    return 0.0 if worker is None else float(worker.wait_s)


# -- the first optimizer of a script -----------------------------------------------------------------------------------
# Factories record the optimizer that they return. They are replaced when the script imports their module, so that
# nothing else is imported.


FACTORIES: Mapping[str, Sequence[str]] = {
    "horovod.torch": ("DistributedOptimizer",),
    "hvd_async.torch": ("DistributedOptimizer", "EagerOptimizer", "GossipOptimizer", "LeaderOptimizer"),
}
"""Factories of optimizers by module. This library's ``DistributedOptimizer`` is Horovod's if that is installed."""


def record_what_is_made(folder: Path, synchronize: bool = False) -> list[str]:
    """Record the first optimizer of this process: the first that a factory makes, or that steps in a job of
    ``torch.distributed``. Call this before the modules are imported.

    Args:
        folder: of the trace.
        synchronize: wait for the GPU before each mark.

    Returns:
        The name of the recorded optimizer, then of factories that make further optimizers; the list grows.

    Raises:
        ValueError: a module to instrument is already imported.
    """
    made: list[str] = []
    recordings: list[Callable[..., Any]] = []

    def recording(module: ModuleType, name: str) -> Callable[..., Any]:
        make = getattr(module, name)
        if make in recordings:
            return cast("Callable[..., Any]", make)

        @functools.wraps(make)
        def factory(*args: Any, **kwargs: Any) -> Any:
            optimizer = make(*args, **kwargs)
            if made:
                warn(f"record: a second optimizer was made, by {name}; only the first is recorded, by {made[0]}")
            else:
                on_gpu = any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
                wait = sys.modules["torch"].cuda.synchronize if synchronize and on_gpu else None
                with unless_it_cannot_be_recorded():
                    recorded(optimizer, folder, module.rank(), module.size(), wait)
            made.append(name)
            return optimizer

        recordings.append(factory)
        return factory

    def replace(module: ModuleType) -> None:
        for name in FACTORIES[module.__name__]:
            setattr(module, name, recording(module, name))

    job = TorchJob(folder, synchronize, made)
    instruments: dict[str, Instrument] = {
        **dict.fromkeys(FACTORIES, replace),
        "torch": job.watch,
        "torch.distributed._functional_collectives": job.watch_functional,
    }
    early = [name for name in instruments if name in sys.modules]
    if early:
        raise ValueError(f"{early[0]} is imported already: call record_what_is_made() before")
    sys.meta_path.insert(0, _Finder(instruments))
    return made


class _Finder(importlib.abc.MetaPathFinder):
    """Import finder that instruments modules after their execution; it delegates the search to the other finders.

    Args:
        instruments: function to call with the module, by module name.
    """

    def __init__(self, instruments: Mapping[str, Instrument]) -> None:
        self._instruments = dict(instruments)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        instrument = self._instruments.pop(fullname, None)
        spec = None if instrument is None else importlib.util.find_spec(fullname)
        if instrument is None or spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            instrument(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
