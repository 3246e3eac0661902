"""How a job ends: one rank dies in some manner while the others train, or is slow, or all end without a drain.

``--framework torch|tensorflow --manner MANNER --point POINT --victim RANK --quorum QUORUM``, and ``--on-gpu`` where the
control plane is to assume that tensors are on GPUs.
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import Baton, Report, integers

from hvd_async.errors import EngineError

STEPS = 4
LONGER = 12
"""Steps of the ranks that continue when one has left: more than the staleness bound."""
HOLDS = 20.0
"""Seconds at most that a forked child holds what it has inherited, and that a rank stands still."""
DEADLY = (
    "sigkill",
    "sigterm",
    "interrupt",
    "exit1",
    "builtin exit",
    "exit0",
    "exception",
    "forked, sigkill",
    "stands still",
)
AT_ENDS = ("drain", "checkpoint", "end")
"""Points at which the victim is killed after its last step. The others are "init", "registration", "step" (before one),
"backward" and "waiting" (in one), "call" and "call before" (while the others wait in a collective of the script's, in
training and before the first step)."""
HEAD_START = 0.5
"""Seconds that the victim lives on where the others begin to wait for it in a call that does not show that they do."""
SHAPE = (6,)


class TorchRank:
    """One parameter of whole numbers, trained by torch."""

    def __init__(self) -> None:
        import torch

        import hvd_async.torch as hvd
        from hvd_async.torch.collectives import plane_collectives

        self.torch, self.hvd, self.ones = torch, hvd, torch.ones
        hvd.init()
        self.collectives: Any = plane_collectives()

    def wrap(self, quorum: str) -> Any:
        """The optimizer: SGD with learning rate 1."""
        self.parameter = self.torch.nn.Parameter(self.torch.zeros(SHAPE))
        buffers = [("mean", self.torch.zeros(3))]
        return self.hvd.EagerOptimizer(
            self.torch.optim.SGD([self.parameter], lr=1.0), quorum=quorum, max_staleness=2, named_buffers=buffers
        )

    def step(self, optimizer: Any, gradient: np.ndarray[Any, Any]) -> None:
        optimizer.zero_grad()
        (self.parameter * self.torch.tensor(gradient, dtype=self.torch.float32)).sum().backward()
        optimizer.step()

    def weights(self) -> list[float]:
        return [float(x) for x in self.parameter.detach()]


class TensorflowRank:
    """One variable of whole numbers, trained by Keras."""

    def __init__(self) -> None:
        import keras
        import tensorflow as tf

        import hvd_async.tensorflow as hvd
        from hvd_async.tensorflow.collectives import HorovodCollectives

        self.keras, self.tf, self.hvd, self.collectives, self.ones = keras, tf, hvd, HorovodCollectives, tf.ones
        hvd.init()

    def wrap(self, quorum: str) -> Any:
        """The optimizer: SGD with learning rate 1."""
        self._variable = self.keras.Variable(np.zeros(SHAPE, np.float32))
        optimizer = self.hvd.EagerOptimizer(self.keras.optimizers.SGD(1.0), quorum=quorum, max_staleness=2)
        optimizer.build([self._variable])
        return optimizer

    def step(self, optimizer: Any, gradient: np.ndarray[Any, Any]) -> None:
        optimizer.apply([self.tf.constant(gradient, self.tf.float32)])

    def weights(self) -> list[float]:
        return [float(x) for x in self._variable.numpy()]


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds, for ``HOLDS`` seconds at most."""
    deadline = time.monotonic() + HOLDS
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)


def await_errors(ranks: Collection[int]) -> None:
    """Wait until these ranks have reported an error."""
    wait_until(lambda: all("error" in Report.of(rank) for rank in ranks))


def die_waiting(manner: str, engine: Any, waits: Baton) -> None:
    """End this process in a manner when its training thread waits for other ranks, which ``waits`` tells them."""
    wait_until(lambda: bool(engine._waits))
    waits.lay()
    die(manner)


def stand_still(others: Collection[int]) -> None:
    """Stop this process, as a debugger does, or a machine that is suspended, until the other ranks have noticed."""
    own = os.getpid()
    if os.fork() == 0:
        await_errors(others)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    os.kill(own, signal.SIGSTOP)


def die(manner: str, others: Collection[int] = ()) -> None:
    """End this process in a manner; only "stands still" returns."""
    if manner == "stands still":
        return stand_still(others)
    if manner == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif manner == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60.0)  # (it is on its way)
    elif manner == "interrupt":
        raise KeyboardInterrupt
    elif manner == "exit1":
        sys.exit(1)
    elif manner == "builtin exit":
        exit(1)
    elif manner == "forked, sigkill":
        if os.fork() == 0:  # a child that has this rank's connections
            await_errors(others)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    elif manner == "exit0":
        os._exit(0)
    raise RuntimeError("boom")


def control_processes() -> list[str]:
    """The processes that this rank runs for others: "coordinator", "relay"."""
    lines = [child.cmdline() for child in psutil.Process().children()]
    return [line[-2] for line in lines if any("hvd_async.runtime.relays" in word for word in line)]


def fork_and_end(framework: Any, optimizer: Any, report: Report) -> None:
    """A forked child ends as any process, and is not this job's; what it may not do is said."""
    framework.step(optimizer, np.zeros(SHAPE))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            framework.step(optimizer, np.zeros(SHAPE))
        except EngineError as error:
            os.write(writing, str(error).encode())
        sys.exit(7)
    deadline = time.monotonic() + 15.0
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)  # a look, until it has ended or the time is over
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
    os.close(writing)
    text = os.read(reading, 10_000).decode()
    report.put("forked", text=text, status=os.waitstatus_to_exitcode(ended[1]) if ended[0] else None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--framework", default="torch")
    parser.add_argument("--manner", required=True)
    parser.add_argument("--point", default="step")
    parser.add_argument("--victim", type=int, default=1)
    parser.add_argument("--quorum", default="solo")
    parser.add_argument("--on-gpu", action="store_true")
    options = parser.parse_args()
    manner, point = options.manner, options.point
    if point == "init" and os.environ["RANK"] == str(options.victim):
        die(manner)
    framework = TorchRank() if options.framework == "torch" else TensorflowRank()
    rank, size = framework.hvd.rank(), framework.hvd.size()
    report = Report(rank)
    if options.on_gpu:
        framework.collectives.on_gpu = True
    optimizer = framework.wrap(options.quorum)
    held = [optimizer]  # by the exit hook too: a script's optimizer that is local to main() would be gone by then
    endless = manner in DEADLY
    steps = {r: LONGER if manner == "early" and r != options.victim else STEPS for r in range(size)}

    def at_the_very_end() -> None:
        assert held or manner in ("drop", "unequal")
        all_steps = [integers(SHAPE, r, s, 0) for r in range(size) for s in range(1, steps[r] + 1)]
        report.put("exit", weights=framework.weights(), expected=(-sum(all_steps, np.zeros(SHAPE)) / size).tolist())

    if not endless:
        # Registered before the engine's own hook, so that it runs after it. (hvd.init() and the engine come first.)
        atexit.register(at_the_very_end)

    if manner == "fork":
        fork_and_end(framework, optimizer, report)
    is_victim, others = rank == options.victim, set(range(size)) - {rank}

    def wait_with_the_victim() -> None:
        """Let the victim, which is about to wait for the others, wait first, and die meanwhile."""
        waits = Baton("victim")
        if is_victim:
            threading.Thread(
                target=die_waiting, args=(manner, optimizer._async.worker.engine, waits), daemon=True
            ).start()
        else:
            waits.wait()

    def step_or_call(step: int) -> None:
        if point.startswith("call") and step == (1 if point == "call before" else STEPS):
            framework.hvd.allreduce(framework.ones(2), name="metric")
        framework.step(optimizer, integers(SHAPE, rank, step, 0))

    output = Path(os.environ["HVD_ASYNC_TEST_OUT"]) / "output.0"
    for step in range(1, 10_000 if endless and point not in AT_ENDS else steps[rank] + 1):
        if step == (1 if point in ("registration", "call before") else STEPS):
            if is_victim and endless and point in ("registration", "step", "call before", "call"):
                report.put("death")
                die(manner, others)
            if is_victim and point == "backward":
                framework.parameter.register_hook(lambda _: die(manner))
            elif point == "waiting":
                wait_with_the_victim()
            if is_victim and manner == "slow":
                wait_until(lambda: output.read_text().count(" for rank(s) ") >= 2)  # (warned twice)
        try:
            step_or_call(step)
        except Exception as error:
            report.put("error", kind=type(error).__name__, text=str(error))
            raise
        if step == 1:
            report.put("first step", serves=control_processes())
        if endless:
            time.sleep(0.005)  # (stands for computation: no order depends on it)
        if manner == "early" and step == STEPS:
            optimizer.drain()
    if point == "drain":
        wait_with_the_victim()
        optimizer.drain()
    if point == "checkpoint":
        optimizer.cut()
    if point in ("checkpoint", "end"):
        if is_victim:
            time.sleep(HEAD_START)  # (as if it wrote a file, meanwhile the others wait)
            die(manner)
        framework.hvd.barrier() if point == "checkpoint" else framework.hvd.shutdown()
    report.put("last step")
    if manner == "unequal" and rank == 0:
        optimizer.drain()
    if manner == "unequal" and rank == options.victim:
        held.clear()
        del optimizer
    if manner == "drop" and rank == options.victim:
        held.clear()
        del optimizer  # one rank's optimizer is gone before the end, the others' not: Python collects as it likes
    elif manner == "sysexit0":
        sys.exit(0)


if __name__ == "__main__":
    main()
