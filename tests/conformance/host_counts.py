"""Counts of what a step of each mode costs the host, with ranks as threads in lockstep. On the command line,

``python -m tests.conformance.host_counts all solo --ranks 1 2`` prints a table, with ``--names`` also what is called.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.benchmarks.jobs.arm import Arm
from scripts.benchmarks.support.arms import PLAIN, is_eager
from tests.conformance.lockstep import LockstepCluster

MODES = ("all", "solo", "majority", "sgp", "dpsgd", "adpsgd", "local", "lsgd", "easgd")
PARAMETERS, ELEMENTS = 161, 8
"""Parameters of ``SmallTensors``, as many as ResNet-50 has, and elements of each."""
INPUTS = torch.ones(ELEMENTS)
BUCKET_MB = PARAMETERS * ELEMENTS * 4 / 5 / 2**20
"""``bucket_cap_mb`` for five or six buckets."""
STEPS = 16
"""Number of counted steps: a multiple of every period (averages, pulls). They follow as many steps that are not
counted, since the first ones check more."""
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


# -- what each mode costs ----------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Average cost of a step for a rank, over ``STEPS`` steps.

    Attributes:
        host: the training thread's counts.
        messages: number of messages from its engine to the coordinator.
        wakes: number of times its engine wakes up.
        operators, calls: totals over all steps, by name.
    """

    host: HostCounts
    messages: float
    wakes: float
    operators: Counter[str]
    calls: Counter[str]


def loss(model: torch.nn.Module) -> torch.Tensor:
    """The loss of every step."""
    value: torch.Tensor = model(INPUTS)
    return value


def made(mode: str, rank: int, ranks: int) -> Arm:
    """Return a model with the optimizer of a mode, without a grace, so that rounds do not depend on time."""
    own: dict[str, Any] = {"bucket_cap_mb": BUCKET_MB, "grace": 0.0} if is_eager(mode) else {}
    own |= {"group": [list(range(ranks))]} if mode == "lsgd" else {}
    model = SmallTensors()
    return Arm(mode, model, SimpleNamespace(rank=rank, size=ranks), momentum_sgd(model), **own)  # type: ignore[arg-type]


def plain() -> Cost:
    """Return what a step of the plain optimizer costs."""
    torch.set_num_threads(1)
    arm = made(PLAIN, 0, 1)
    for _ in range(STEPS):
        arm.train(loss)
    return _cost(count_steps(lambda: arm.train(loss)), 0, 0)


def measure(mode: str, ranks: int) -> list[Cost]:
    """Return what a step of a mode costs each rank."""
    torch.set_num_threads(1)
    cluster = LockstepCluster(ranks)

    def work(rank: int) -> Cost:
        arm = made(mode, rank, ranks)
        arm.optimizer._async.worker_now()  # (registration is not part of a step)
        channel = cluster.channels[rank]
        cluster.begin(rank)

        def step() -> None:
            arm.train(loss)
            cluster.pass_on(rank)

        for _ in range(STEPS):
            step()
        sent, wakes = channel.sent, channel.wakes
        found = count_steps(step, lambda: Calls(cluster.hidden, cluster.wrappers))
        cost = _cost(found, channel.sent - sent, channel.wakes - wakes)
        cluster.end(rank)
        arm.drain()
        return cost

    return cluster.run(work)


def _cost(steps: list[tuple[Operators, Calls]], messages: int, wakes: int) -> Cost:
    operators = sum((counter.calls for counter, _ in steps), Counter[str]())
    calls = sum((counted.c for _, counted in steps), Counter[str]())
    for _, counted in steps:
        for code, count in counted.python.items():
            calls[getattr(code, "co_qualname", code.co_name)] += count
    return Cost(mean_counts(steps), messages / (2 * STEPS), wakes / (2 * STEPS), operators, calls)


def highest(costs: list[Cost]) -> tuple[HostCounts, float, float]:
    """Return the highest of each count over the ranks, messages and wakes included."""
    most = HostCounts(*(max(values) for values in zip(*(cost.host for cost in costs), strict=True)))
    return most, max(cost.messages for cost in costs), max(cost.wakes for cost in costs)


def main() -> None:
    """Print the counts of some modes."""
    parser = argparse.ArgumentParser(description="What a step costs the host, minus the plain optimizer's part.")
    parser.add_argument("modes", nargs="*", default=MODES, help=f"of {', '.join(MODES)}; not given: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--names", type=int, metavar="N", default=0, help="also the N most frequent names, by rank")
    args = parser.parse_args()
    base = plain()
    print("mode      ranks   aten  python      c  waits  copies  messages  wakes")
    for mode in args.modes:
        for ranks in args.ranks:
            if mode == "majority" and ranks == 1:
                continue
            costs = measure(mode, ranks)
            (aten, python, c, waits, copies), messages, wakes = highest(costs)
            over = (aten - base.host.aten_calls, python - base.host.python_calls, c - base.host.c_calls)
            shown = " ".join(f"{value:7.1f}" for value in (*over, waits, copies, messages, wakes))
            print(f"{mode:10} {ranks:4} {shown}", flush=True)
            for rank, cost in enumerate(costs if args.names else []):
                for what, more in (("operators", cost.operators - base.operators), ("calls", cost.calls - base.calls)):
                    print(f"  rank {rank}, {what}:")
                    for name, count in more.most_common(args.names):
                        print(f"    {count / STEPS:8.1f} {name}")


if __name__ == "__main__":
    main()
