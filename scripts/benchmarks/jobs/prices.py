"""Prices of the virtual GPU, measured on this machine, in about 30 s:
``python -m scripts.benchmarks.jobs.prices --json FILE``.

Needs torch and pyzmq, nothing of hvd_async. Without a GPU the prices that need one are left out. Times are medians, in
microseconds. The file has ``prices``, by the names that ``python -m tests.conformance.virtual_gpu --price NAME=VALUE``
takes, and ``measured``, all figures by what was measured. Prices that the virtual GPU has by a fit (a Python call, the
lock, a round trip) are measured too, but are not among ``prices``: they cover more than the bare call.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
PARAMETERS = 161
"""ResNet-50's."""
LIMIT_MS = 20_000
"""Time limit of another process's answer."""
BUSY_S, PERIOD_S = 150e-6, 0.002
"""CPU time of the thread in the role of the engine, each time that it wakes up, and the time in between."""


class Prices:
    """Figures so far; each is printed as it comes.

    Attributes:
        measured: median and 90th percentile, microseconds, by what was measured.
        prices: medians by the virtual GPU's name.
    """

    def __init__(self) -> None:
        self.measured: dict[str, tuple[float, float]] = {}
        self.prices: dict[str, float] = {}

    def add(self, what: str, seconds: Iterable[float], price: str = "") -> float:
        """Add a figure, print and return its median.

        Args:
            what: was measured.
            seconds: of each repetition.
            price: its name; empty if the virtual GPU has none, or has it by a fit.
        """
        micros = sorted(1e6 * value for value in seconds)
        median, high = statistics.median(micros), micros[int(0.9 * (len(micros) - 1))]
        self.measured[what] = (median, high)
        if price:
            self.prices[price] = round(median, 3)
        print(f"{what:46} {median:9.2f}  (p90 {high:9.2f})  {price}", flush=True)
        return median

    def each(self, what: str, call: Callable[[], Any], price: str = "", *, rounds: int = 30, calls: int = 100) -> float:
        """Add the host's time of a call, ``calls`` of them at a time, so that the device's queue never fills."""
        times = []
        for number in range(rounds + 1):  # (the first is to warm up)
            synchronize()
            begun = time.perf_counter()
            for _ in range(calls):
                call()
            if number:
                times.append((time.perf_counter() - begun) / calls)
        synchronize()
        return self.add(what, times, price)


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if GPU:
        torch.cuda.synchronize()


def python_calls(found: Prices) -> None:
    """A call of a Python function and of a C function."""

    def nothing() -> None: ...

    values: list[int] = []
    found.each("Python call", nothing, calls=10_000)
    found.each("C call", values.__len__, calls=10_000)


def operators(found: Prices) -> None:
    """A small operator, one on a list of tensors, events, and a copy to the host."""
    x, many = torch.ones(64, device=DEVICE), [torch.ones(64, device=DEVICE) for _ in range(32)]
    one = found.each("operator: add_", lambda: x.add_(1.0), "aten")
    listed = found.each("operator: _foreach_add_ of 32", lambda: torch._foreach_add_(many, 1.0))
    found.add("each tensor of a _foreach_", [max(0.0, listed - one) / 32e6], "tensor")
    if not GPU:
        return
    stream, event, pinned = torch.cuda.Stream(), torch.cuda.Event(), torch.empty(64, pin_memory=True)
    event.record()
    found.each("event: record", event.record, "record")
    found.each("event: stream waits", lambda: stream.wait_event(event), "follow")
    found.each("event: query", event.query)
    found.each("copy to pinned memory", lambda: pinned.copy_(x, non_blocking=True), "copy")


def wake_ups(found: Prices, rounds: int = 200) -> None:
    """A thread is woken by a queue's condition, and by an event of the device."""
    condition, asleep, notified = threading.Condition(), threading.Event(), [0.0]
    seen: list[float] = []

    def sleeper() -> None:
        for _ in range(rounds):
            with condition:
                asleep.set()
                condition.wait(10.0)
                seen.append(time.perf_counter() - notified[0])

    thread = threading.Thread(target=sleeper)
    thread.start()
    for _ in range(rounds):
        asleep.wait(10.0)
        asleep.clear()
        time.sleep(0.002)  # the thread sleeps for a while, as between two steps
        with condition:
            notified[0] = time.perf_counter()
            condition.notify()
    thread.join(10.0)
    found.add("wake-up by a condition", seen, "wake")
    if not GPU:
        return
    for blocking in (False, True):
        delays = [delay_of_event(blocking) for _ in range(60)]
        found.add(f"wake-up by an event, blocking={blocking}", delays, "" if blocking else "sync")


def delay_of_event(blocking: bool) -> float:
    """Return how much later a thread in ``synchronize()`` returns than a busy loop sees the event, s."""
    event, back = torch.cuda.Event(blocking=blocking), [0.0]
    torch.cuda._sleep(3_000_000)
    event.record()

    def wait() -> None:
        event.synchronize()
        back[0] = time.perf_counter()

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not event.query():
        time.sleep(0)  # (the other thread needs the interpreter's lock)
    done = time.perf_counter()
    waiter.join(10.0)
    return max(0.0, back[0] - done)


def backward_of(hooked: bool) -> Callable[[], float]:
    """Return a function that runs a backward pass of 161 parameters, and returns its seconds on the host."""
    parameters = [torch.nn.Parameter(torch.ones(8, device=DEVICE)) for _ in range(PARAMETERS)]
    counts, x = [0] * PARAMETERS, torch.ones(8, device=DEVICE)

    def count(number: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            counts[number] += 1

        return hook

    for number, parameter in enumerate(parameters if hooked else ()):
        parameter.register_post_accumulate_grad_hook(count(number))

    def run() -> float:
        value = x
        for parameter in parameters:
            parameter.grad = None
            value = value * parameter
        loss = value.sum()
        synchronize()
        begun = time.perf_counter()
        loss.backward()
        return time.perf_counter() - begun

    return run


def hooks(found: Prices) -> None:
    """Measure the cost of a Python hook per parameter in a backward pass, alone and with a busy thread."""
    plain, hooked = backward_of(False), backward_of(True)
    for _ in range(10):
        plain()
        hooked()
    found.add("a hook, alone", [(hooked() - plain()) / PARAMETERS for _ in range(60)], "hook")
    alone = statistics.median(hooked() for _ in range(60))
    stop, used, begun = threading.Event(), [0.0], time.perf_counter()

    def engine() -> None:
        while not stop.wait(PERIOD_S):
            until = time.thread_time() + BUSY_S
            while time.thread_time() < until:
                pass
            used[0] += BUSY_S

    thread = threading.Thread(target=engine)
    thread.start()
    busy = [hooked() for _ in range(120)]
    share = used[0] / (time.perf_counter() - begun)
    stop.set()
    thread.join(10.0)
    median = statistics.median(busy)
    found.add("backward with hooks, alone", [alone])
    found.add("backward with hooks, another thread at work", [median])
    factor = (median - alone) / (share * median) if share else 0.0
    found.measured["the lock's factor (no time)"] = (factor, factor)
    print(f"{'the lock: time lost per time of the other thread':46} {factor:9.2f}", flush=True)


def answer(port: int) -> None:
    """Send back what comes, until "end" or silence."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        while socket.poll(LIMIT_MS) and (data := socket.recv()) != b"end":
            socket.send(data)


def round_trip(found: Prices) -> None:
    """A message to another process and back: the way to the coordinator's, without its work."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        process = multiprocessing.get_context("spawn").Process(target=answer, args=(port,))
        process.start()
        times = []
        for number in range(300):
            time.sleep(0.003)  # both processes sleep, as between two steps
            begun = time.perf_counter()
            socket.send(b"x" * 100)
            if not socket.poll(LIMIT_MS):
                raise TimeoutError(f"the other process has not answered within {LIMIT_MS / 1e3:.0f} s")
            socket.recv()
            if number:  # (the first has the process's start in it)
                times.append(time.perf_counter() - begun)
        socket.send(b"end")
        process.join(10.0)
    found.add("round trip by ZeroMQ, without work", times)


def submits(found: Prices) -> None:
    """A collective of a process group of one rank: to start it, and to let a stream wait for it."""
    vector, works = torch.ones(6_000_000, device=DEVICE), list[Any]()
    if GPU:
        group: Any = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, dist.ProcessGroupNCCL.Options())
    else:
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(minutes=1))
    few = {"rounds": 10, "calls": 20}
    found.each(
        "process group: allreduce", lambda: works.append(group.allreduce([vector])), "submit" if GPU else "", **few
    )
    found.each("work: wait", lambda: works[-1].wait(), "take" if GPU else "", **few)
    found.each("work: is_completed", lambda: works[-1].is_completed(), **few)


PARTS = (python_calls, operators, wake_ups, hooks, round_trip, submits)


def main() -> int:
    """Measure everything; return 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.cuda.get_device_name() if GPU else "no GPU"
    print(f"torch {torch.__version__}, {device}; median, us", flush=True)
    found, failed = Prices(), dict[str, str]()
    for part in PARTS:
        try:
            part(found)
        except Exception as error:  # noqa: BLE001  the other parts are to be measured whatever fails
            failed[part.__name__] = f"{type(error).__name__}: {error}"
            print(f"{part.__name__} failed: {failed[part.__name__]}", flush=True)
        if args.json is not None:
            content = {"device": device, "prices": found.prices, "measured": found.measured, "failed": failed}
            args.json.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
