"""Elastic training: in each case a rank dies at a named point, the others continue, and a new one joins.

``--framework torch|tensorflow --cases KIND:POINT:VICTIM,...``: what is wrapped around SGD, where and which rank dies. A
case begins and ends with three ranks. Ranks leave what they have seen in ``keep.HOST``. Every host is this machine, by
another name of 127.0.0.1: Horovod lets no host in again on which a process has died.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import common  # noqa: F401  (it prints stacks when a job runs out of time)
from elastic_task import ALONE, COMMIT, DEATH, EAGER, LEADERS, LR, MOMENTUM, RANKS, SIZE, TOGETHER, gradient

OUT, HOST = Path(os.environ["HVD_ASYNC_TEST_OUT"]), os.environ["HOROVOD_HOSTNAME"]


class TorchRank:
    """One parameter, trained by torch."""

    def __init__(self) -> None:
        import torch

        import hvd_async.torch as hvd

        self.torch, self.hvd = torch, hvd
        hvd.init()

    def state(self, kind: str, **attributes: Any) -> Any:
        """A new model and optimizer, and their elastic state."""
        torch, hvd = self.torch, self.hvd
        self.model = torch.nn.Linear(1, SIZE, bias=False)
        with torch.no_grad():
            self.model.weight.zero_()
        plain = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM)
        self.optimizer = wrapped(hvd, plain, kind)
        return hvd.elastic.TorchState(model=self.model, optimizer=self.optimizer, **attributes)

    def weights(self) -> Any:
        return self.model.weight.detach().numpy().reshape(-1).copy()

    def step(self, batch: int, dies_in: str | None) -> None:
        torch = self.torch
        self.optimizer.zero_grad()
        target = torch.from_numpy(self.weights() - gradient(self.weights(), batch, HOST))
        loss = ((self.model.weight.reshape(-1) - target) ** 2).sum() / 2
        if dies_in == "backward":
            self.model.weight.register_hook(lambda _: die())
        loss.backward()
        if dies_in == "before step":
            die()
        if dies_in == "step":
            threading.Timer(0.002, die).start()
        if hasattr(self.optimizer, "record_loss"):
            self.optimizer.record_loss(loss.detach())
        self.optimizer.step()
        if dies_in == "step":
            threading.Event().wait()


class KerasRank:
    """One variable, trained by a Keras optimizer, eagerly."""

    def __init__(self) -> None:
        import keras
        import tensorflow as tf

        import hvd_async.tensorflow.keras as hvd

        self.keras, self.tf, self.hvd = keras, tf, hvd
        hvd.init()

    def state(self, kind: str, **attributes: Any) -> Any:
        keras = self.keras
        # (named: Keras numbers layers by how many a process has made, and a new one has made fewer)
        layer = keras.layers.Dense(SIZE, use_bias=False, kernel_initializer="zeros", name="layer")
        self.model = keras.Sequential([keras.Input((1,)), layer], name="model")
        self.optimizer = wrapped(self.hvd, keras.optimizers.SGD(LR, momentum=MOMENTUM), kind)
        return self.hvd.elastic.KerasState(self.model, self.optimizer, **attributes)

    def weights(self) -> Any:
        return self.model.trainable_variables[0].numpy().reshape(-1).copy()

    def step(self, batch: int, dies_in: str | None) -> None:
        own = gradient(self.weights(), batch, HOST)
        if dies_in in ("backward", "before step"):
            die()
        if dies_in == "step":
            threading.Timer(0.002, die).start()
        if hasattr(self.optimizer, "record_loss"):
            self.optimizer.record_loss(float(own @ own) / 2)
        self.optimizer.apply([self.tf.constant(own.reshape(1, SIZE))], self.model.trainable_variables)
        if dies_in == "step":
            threading.Event().wait()


def wrapped(hvd: Any, plain: Any, kind: str) -> Any:
    """The optimizer of a kind."""
    if kind in EAGER:
        return hvd.EagerOptimizer(plain, quorum=kind)
    if kind in LEADERS:
        return hvd.LeaderOptimizer(plain, algorithm=kind)
    return hvd.GossipOptimizer(plain, algorithm=kind)


def die() -> NoReturn:
    """Die at once, as by the kernel when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class Hosts:
    """The hosts that Horovod finds."""

    FILE = OUT / "hosts"

    @classmethod
    def now(cls) -> list[str]:
        return [line.partition(":")[0] for line in cls.FILE.read_text().split()]

    @classmethod
    def replace(cls, gone: str, new: str) -> None:
        hosts = [host for host in cls.now() if host != gone] + [new]
        unfinished = cls.FILE.with_suffix(f".{os.getpid()}")
        unfinished.write_text("".join(f"{host}:1\n" for host in hosts))
        unfinished.replace(cls.FILE)


def alias(number: int) -> str:
    """One of many names of this machine. (A label has 63 letters at most.)"""
    return f"0x{'0' * (number // 50)}7f.0x{'0' * (number % 50)}1"


class Process:
    """This process, through all cases."""

    def __init__(self, rank: Any, cases: list[list[str]]) -> None:
        self.own, self.cases = rank, cases
        self.seen: list[dict[str, Any]] = []

    def case(self, number: int) -> None:
        """One case, as far as this process has it."""
        kind, point, victim = self.cases[number]
        hvd, own = self.own.hvd, self.own
        state = own.state(kind, batch=0, alone=0, together=0)
        seen: dict[str, Any] = {"case": number, "generations": [], "steps": [], "early": [], "interrupts": []}
        self.seen.append(seen)
        dead = OUT / f"keep.dead.{number}"

        def dies() -> bool:
            """Whether this rank is to die in this batch."""
            whom = 0 if victim == "first" else hvd.size() - 1
            return not dead.exists() and hvd.size() == RANKS and state.batch == DEATH and hvd.rank() == whom

        def train(state: Any) -> None:
            seen["generations"].append([hvd.size(), hvd.rank(), state.batch, own.optimizer.rounds])
            while state.together < TOGETHER:
                deadly = dies()
                if deadly:
                    dead.write_text(HOST)
                    if point == "between":
                        die()
                own.step(state.batch, point if deadly else None)
                seen["steps"].append([state.batch, hvd.size(), hvd.rank()])
                if state.batch <= DEATH + ALONE:
                    seen["early"].append([state.batch, own.weights().tolist()])
                state.batch += 1
                state.together += dead.exists() and hvd.size() == RANKS and state.alone > 0
                if dead.exists() and hvd.size() < RANKS:
                    state.alone += 1
                    if state.alone == ALONE + 1 and hvd.rank() == 0:
                        Hosts.replace(dead.read_text(), alias(number + 1))
                time.sleep(0.01)  # (stands for computation: no order depends on it)
                if state.batch % COMMIT == 0:
                    state.commit()
            own.optimizer.drain()

        @hvd.elastic.run  # type: ignore[untyped-decorator]
        def noted(state: Any) -> None:
            try:
                train(state)
            except Exception as error:
                seen["interrupts"].append(f"{type(error).__name__}: {error}")
                raise

        noted(state)
        stats = own.optimizer.stats()
        seen |= {"weights": own.weights().tolist(), "batch": state.batch, "steps_counted": stats.steps}
        if kind in EAGER:
            seen |= {"produced": stats.gradients_produced, "applied": stats.gradients_applied}
        (OUT / f"keep.{HOST}").write_text(json.dumps(self.seen))

    def run(self) -> None:
        """All cases that are left when this process begins."""
        turn = OUT / "case"
        first = int(turn.read_text()) if turn.exists() else 0
        for number in range(first, len(self.cases)):
            if self.own.hvd.rank() == 0:
                written = OUT / "case.new"
                written.write_text(str(number))
                written.replace(turn)  # (whole, for a rank that begins just now)
            self.case(number)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--framework", default="torch")
    parser.add_argument("--cases", default="solo:between:last")
    args = parser.parse_args()
    cases = [case.split(":") for case in args.cases.split(",")]
    Process(TorchRank() if args.framework == "torch" else KerasRank(), cases).run()


if __name__ == "__main__":
    main()
