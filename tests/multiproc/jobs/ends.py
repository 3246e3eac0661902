"""How a job ends: one rank dies in some manner while the others train, or is slow, or all end without a drain.

``--framework torch|tensorflow --manner MANNER --point POINT --victim RANK --quorum QUORUM``, and ``--on-gpu`` where the
control plane is to assume that tensors are on GPUs.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psutil
from common import BINDINGS, Baton, Report, whole_expected

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


def collectives(in_torch: bool) -> Any:
    """The framework's class of collectives."""
    if in_torch:
        return importlib.import_module("hvd_async.torch.collectives").plane_collectives()
    return importlib.import_module("hvd_async.tensorflow.collectives").HorovodCollectives


def fork_and_end(take_step: Callable[[], None], report: Report) -> None:
    """A forked child ends as any process, and is not this job's; what it may not do is said."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            take_step()
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
    binding = importlib.import_module(BINDINGS[options.framework][0])
    if point == "init" and os.environ["RANK"] == str(options.victim):
        die(manner)
    hvd, in_torch = binding.hvd, options.framework == "torch"
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    report = Report(rank)
    if options.on_gpu:
        collectives(in_torch).on_gpu = True
    buffers = {"named_buffers": [("mean", binding.torch.zeros(3))]} if in_torch else {}
    whole = binding.WholeTraining(quorum=options.quorum, max_staleness=2, **buffers)
    endless = manner in DEADLY
    steps = {r: LONGER if manner == "early" and r != options.victim else STEPS for r in range(size)}

    def at_the_very_end() -> None:
        # (It holds the optimizer: a script's that is local to main() would be gone by now.)
        assert hasattr(whole, "optimizer") or manner in ("drop", "unequal")
        report.put("exit", weights=whole.weights(), expected=whole_expected([steps[each] for each in range(size)]))

    if not endless:
        # Registered before the engine's own hook, so that it runs after it. (hvd.init() and the engine come first.)
        atexit.register(at_the_very_end)

    is_victim, others = rank == options.victim, set(range(size)) - {rank}

    def wait_with_the_victim() -> None:
        """Let the victim, which is about to wait for the others, wait first, and die meanwhile."""
        waits = Baton("victim")
        if is_victim:
            threading.Thread(
                target=die_waiting, args=(manner, whole.optimizer._async.worker.engine, waits), daemon=True
            ).start()
        else:
            waits.wait()

    def step_or_call(step: int) -> None:
        if point.startswith("call") and step == (1 if point == "call before" else STEPS):
            hvd.allreduce((binding.torch if in_torch else binding.tf).ones(2), name="metric")
        whole.step(rank, step)

    output = Path(os.environ["HVD_ASYNC_TEST_OUT"]) / "output.0"
    for step in range(1, 10_000 if endless and point not in AT_ENDS else steps[rank] + 1):
        if step == (1 if point in ("registration", "call before") else STEPS):
            if is_victim and endless and point in ("registration", "step", "call before", "call"):
                report.put("death")
                die(manner, others)
            if is_victim and point == "backward":
                whole.parameters[0].register_hook(lambda _: die(manner))
            elif point == "waiting":
                wait_with_the_victim()
            if is_victim and manner == "slow":
                wait_until(lambda: output.read_text().count(" for rank(s) ") >= 2)  # (warned twice)
        if manner == "fork" and step == 2:  # (the ranks have met)
            fork_and_end(lambda: whole.step(rank, 2), report)
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
            whole.optimizer.drain()
    if point == "drain":
        wait_with_the_victim()
        whole.optimizer.drain()
    if point == "checkpoint":
        whole.optimizer.cut()
    if point in ("checkpoint", "end"):
        if is_victim:
            time.sleep(HEAD_START)  # (as if it wrote a file, meanwhile the others wait)
            die(manner)
        hvd.barrier() if point == "checkpoint" else hvd.shutdown()
    report.put("last step")
    if manner == "unequal" and rank == 0:
        whole.optimizer.drain()
    if manner in ("drop", "unequal") and rank == options.victim:
        del whole.optimizer  # one rank's is gone before the end, the others' not: Python collects as it likes
    elif manner == "sysexit0":
        sys.exit(0)


if __name__ == "__main__":
    main()
