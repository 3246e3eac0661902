"""Counters of the host cost of a training step: operators, calls, waits for a device, copies.

Counts depend on the versions of Python and torch, and on no machine: ``tests/conformance/test_host_budgets.py`` limits
them, and the case ``host`` shows them with times.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PARAMETERS, ELEMENTS = 161, 8
"""Parameters of ``SmallTensors``, as many as ResNet-50 has, and elements of each."""
BUCKET_MB = PARAMETERS * ELEMENTS * 4 / 5 / 2**20
"""``bucket_cap_mb`` for five or six buckets."""
STEPS = 16
"""Number of counted steps: a multiple of every period (averages, pulls, checks of one bucket in turn). They follow as
many steps that are not counted, since the first ones check more."""
VIEWS = ("aten::_unsafe_view", "aten::_reshape_alias", "aten::empty", "aten::new_empty")
"""Prefixes of the names of operators that launch no kernel, in addition to torch's views."""
WAITS = frozenset(f"aten::{name}" for name in ("_local_scalar_dense", "equal", "nonzero", "masked_select"))
"""Operators whose result the host needs: on a GPU the host waits for it."""
WAITING_CALLS = frozenset({"tolist", "synchronize"})
"""Methods of tensors, streams and events that wait without an operator."""
COPIES = frozenset(f"aten::{name}" for name in ("copy_", "_foreach_copy_", "cat", "stack", "clone", "_to_copy"))
"""Operators that copy."""


class SmallTensors(torch.nn.Module):
    """A model of many parameters that computes next to nothing, so that a step is the host's work."""

    def __init__(self) -> None:
        super().__init__()
        self._factors = tuple(torch.nn.Parameter(torch.ones(ELEMENTS)) for _ in range(PARAMETERS))
        for number, factor in enumerate(self._factors):
            self.register_parameter(f"factor{number}", factor)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the sum of the inputs, shape (8,), times all parameters."""
        for factor in self._factors:
            inputs = inputs * factor
        return inputs.sum()


def momentum_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer whose step is measured."""
    return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, foreach=True)


class Operators(TorchDispatchMode):
    """Counter of the ATen operators that the calling thread runs in its context, autograd's for CPU tensors included.

    Attributes:
        calls: operators by name, without views and fresh memory.
        copied: number of elements written by copying operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if not func.is_view and not name.startswith(VIEWS):
            self.calls[name] += 1
        if name in COPIES:
            written = args[0] if name.endswith("copy_") else result
            self.copied += sum(t.numel() for t in (written if isinstance(written, list | tuple) else [written]))
        return result

    @property
    def waits(self) -> int:
        """Operators that wait for a device."""
        return sum(self.calls[name] for name in WAITS)


class Calls:
    """Counter of the Python and C functions that the calling thread calls in ``measure``.

    Args:
        hidden: code of functions that are not counted, and whose calls are not counted.
        wrappers: code of functions that are not counted, but whose calls are.

    Attributes:
        python: calls by code.
        c: calls by name.
    """

    def __init__(self, hidden: Collection[CodeType] = (), wrappers: Collection[CodeType] = ()) -> None:
        self.python: Counter[CodeType] = Counter()
        self.c: Counter[str] = Counter()
        self._hidden, self._wrappers = frozenset(hidden), frozenset(wrappers)
        self._inside: FrameType | None = None

    def measure(self, step: Callable[[], object]) -> None:
        """Call ``step``."""
        collects = gc.isenabled()
        gc.disable()  # (finalizers are not the step's)
        sys.setprofile(self._on_event)
        try:
            step()
        finally:
            sys.setprofile(None)
            if collects:
                gc.enable()
        self.c["setprofile"] -= 1  # (the end of counting)

    def _on_event(self, frame: FrameType, event: str, called: Any) -> None:
        if self._inside is not None:
            if event == "return" and frame is self._inside:
                self._inside = None
        elif event == "call":
            if frame.f_code in self._hidden:
                self._inside = frame
            elif frame.f_code not in self._wrappers:
                self.python[frame.f_code] += 1
        elif event == "c_call":
            self.c[called.__name__] += 1

    @property
    def waits(self) -> int:
        """Calls that wait for a device without an operator."""
        return sum(self.c[name] for name in WAITING_CALLS)


class HostCounts(NamedTuple):
    """Average cost of a step for the training thread.

    Attributes:
        aten_calls: operators without views.
        python_calls, c_calls: functions called.
        host_waits: number of waits for a device, if the tensors were on one.
        copies: copied elements, divided by the model's number of elements.
    """

    aten_calls: float
    python_calls: float
    c_calls: float
    host_waits: float
    copies: float


def count_steps(step: Callable[[], object], make_calls: Callable[[], Calls] = Calls) -> list[tuple[Operators, Calls]]:
    """Return what each of ``STEPS`` steps costs. It takes twice as many: calls are counted after all operators."""
    operators, calls = [Operators() for _ in range(STEPS)], [make_calls() for _ in range(STEPS)]
    for counter in operators:
        with counter:
            step()
    for counted in calls:
        counted.measure(step)
    return list(zip(operators, calls, strict=True))


def mean_counts(steps: Sequence[tuple[Operators, Calls]]) -> HostCounts:
    """Return what a step costs on average."""
    operators, calls = ([one[which] for one in steps] for which in (0, 1))
    return HostCounts(
        statistics.fmean(counter.calls.total() for counter in operators),
        statistics.fmean(counted.python.total() for counted in calls),
        statistics.fmean(counted.c.total() for counted in calls),
        statistics.fmean(counter.waits + counted.waits for counter, counted in steps),
        statistics.fmean(counter.copied for counter in operators) / (PARAMETERS * ELEMENTS),
    )
