"""What the job scripts share: results as JSON, stragglers, integer gradients, comparing ranks. No framework here."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from table import Share

from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.runner.course import Injector
from hvd_async.runtime.protocol import Command, Finished, OptimizerEvent

BINDINGS = {"torch": ("torch_common", "torch_names"), "tensorflow": ("tf_common", "tf_names")}
"""Modules of each framework: what the jobs for both need of it; its own part of ``names.py``."""
faulthandler.register(signal.SIGUSR1, all_threads=True)  # launch.py asks for stacks when a job runs out of time


class Part(NamedTuple):
    """Which of a topic's cases a job of ``library.py`` has: how many; with these process sets."""

    share: Share
    sets: str


class Report:
    """This rank's results, written after every case, so that those before a failure are not lost with it."""

    def __init__(self, rank: int) -> None:
        self._file = self._file_of(rank)
        self._cases: dict[str, dict[str, Any]] = {}

    @staticmethod
    def _file_of(rank: int) -> Path:
        return Path(os.environ["HVD_ASYNC_TEST_OUT"]) / f"rank.{rank}.json"

    @classmethod
    def of(cls, rank: int) -> dict[str, dict[str, Any]]:
        """The cases that a rank has reported so far."""
        file = cls._file_of(rank)
        return dict(json.loads(file.read_text())) if file.exists() else {}

    def put(self, case: str, **result: Any) -> None:
        """Set the result of a case. Everything in it must be JSON."""
        assert case not in self._cases, f"two cases are called {case!r}"
        self._cases[case] = {"at": time.time(), **result}
        unfinished = self._file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self._cases))
        unfinished.replace(self._file)


class Straggler:
    """Sleeps as ``--inject SPEC`` says, standing for computation."""

    def __init__(self, spec: str, rank: int, size: int, seed: int = 0) -> None:
        self._injector, self._rank, self._size = Injector.parse(spec, seed), rank, size
        self._step = 0

    def compute(self) -> None:
        """This rank's next step of fake computation."""
        seconds = self._injector.seconds(self._step, self._size)[self._rank]
        self._step += 1
        if seconds:
            time.sleep(seconds)


class Baton:
    """A file that one rank lays down and others wait for, where they must not use a collective for it."""

    def __init__(self, name: str) -> None:
        self._file = Path(os.environ["HVD_ASYNC_TEST_OUT"]) / f"baton.{name}"

    @property
    def laid(self) -> bool:
        """Whether it is laid."""
        return self._file.exists()

    def lay(self) -> None:
        """Let those continue that wait."""
        self._file.touch()

    def lay_when_done(self, rank: int) -> None:
        """Lay it when the coordinator, which is in this process, has heard that ``rank`` is done."""
        handle = EagerStateMachine.handle

        def watched(rounds: EagerStateMachine, sender: int, event: OptimizerEvent, now: float) -> list[Command]:
            commands = handle(rounds, sender, event, now)
            if sender == rank and isinstance(event, Finished):
                EagerStateMachine.handle = handle  # type: ignore[method-assign]
                self.lay()
            return commands

        EagerStateMachine.handle = watched  # type: ignore[method-assign]

    def wait(self, timeout: float = 60.0) -> None:
        """Until it is laid.

        Raises:
            TimeoutError: it was not.
        """
        deadline = time.monotonic() + timeout
        while not self._file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no rank laid {self._file.name}")
            time.sleep(0.01)


def meet(name: str, rank: int, size: int) -> None:
    """Wait for all ranks, where they must not use a collective for it."""
    batons = [Baton(f"{name}.{each}") for each in range(size)]
    batons[rank].lay()
    for each in batons:
        each.wait()


def begin_last(step: str, rank: int, size: int, slow: int, seconds: float) -> None:
    """Begin a step; rank ``slow`` computes for some seconds longer once the others have begun theirs."""
    ready = [Baton(f"{step}.{each}") for each in range(size)]
    ready[rank].lay()
    if rank == slow:
        for other in ready:
            other.wait()
        time.sleep(seconds)


def integers(shape: tuple[int, ...], rank: int, step: int, index: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A gradient of whole numbers in [-8, 8], different for every rank, step (from 1) and parameter."""
    generator = np.random.default_rng([rank, step, index])
    return generator.integers(-8, 9, shape).astype(np.float64)


WHOLE_SHAPES = ((5, 3), (7,), (4,))
"""Of the whole-number parameters: two float32 and a float64, which make two buckets."""
WHOLE_DTYPES = ("float32", "float32", "float64")


def whole_start() -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    """Where whole-number training begins."""
    return [100.0 * (index + 1) * np.ones(shape) for index, shape in enumerate(WHOLE_SHAPES)]


def whole_expected(steps: Sequence[int], ranks: Sequence[int] | None = None) -> list[list[float]]:
    """Where it ends after each rank's steps of SGD with learning rate 1; of these ranks, or of all."""
    ends = []
    for index, start in enumerate(whole_start()):
        total = np.zeros(start.shape)
        for rank, own in zip(range(len(steps)) if ranks is None else ranks, steps, strict=True):
            for step in range(1, own + 1):
                total += integers(start.shape, rank, step, index)
        ends.append((start - total / len(steps)).ravel().tolist())
    return ends


def whole_weighted(samples: list[list[int]]) -> list[list[float]]:
    """Where it ends after steps of all ranks whose gradients are weighted by samples, by step and rank."""
    ends = []
    for index, start in enumerate(whole_start()):
        end = start
        for step, own in enumerate(samples, 1):
            shares = np.array(own) / max(1, sum(own))
            end = end - sum(s * integers(start.shape, rank, step, index) for rank, s in enumerate(shares))
        ends.append(end.ravel().tolist())
    return ends


def after_cut(trainer: Any) -> dict[str, Any]:
    """Return a model's weights after a cut, in the consensus, after it and after a drain; and the ranks' distance."""
    own, distance = trainer.weights(), trainer.optimizer.consensus_distance()
    with trainer.optimizer.consensus():
        consensus = trainer.weights()
    back = trainer.weights()
    trainer.optimizer.drain()
    return {"own": own, "distance": distance, "consensus": consensus, "back": back, "drained": trainer.weights()}


def raised(call: Callable[[], object]) -> dict[str, str]:
    """What a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  it is the result
        return {"kind": type(error).__name__, "text": str(error)}
    return {"kind": "", "text": ""}


def arguments(*names: str) -> argparse.Namespace:
    """One string option for each name."""
    parser = argparse.ArgumentParser()
    for name in names:
        parser.add_argument(f"--{name}", default="")
    return parser.parse_args()


def staleness(stats: Any) -> dict[str, int]:
    """A stats() histogram with JSON's keys."""
    return {str(k): v for k, v in stats.staleness.items()}
