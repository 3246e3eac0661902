"""Trainings on the real digits in which ranks die, and new ones take their place; and the same without a death."""

from __future__ import annotations

import faulthandler
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hvd_async.torch as hvd

from ..support.digits import FOLDER, fold
from .shared.digit_models import accuracy, digits, resnet
from .shared.elastic_hosts import Hosts, claim, die
from .shared.elastic_ranks import wrapped
from .shared.rank import counted, rate

LIMIT = 180.0
"""Seconds after which a training that has not ended ends the process, with its stacks."""


class Training:
    """One training, as far as this process has it.

    Args:
        block: ``arm``, ``deaths`` (how many), ``ranks`` (at the beginning), ``seed``, ``fold``, ``lr``, ``batch``,
            ``steps`` and ``pause`` (s, of each step).
        number: of the training, in the job.
        folder: the job's.
    """

    def __init__(self, block: dict[str, Any], number: int, folder: Path) -> None:
        self._block, self._number, self._folder = block, number, folder
        self._hosts, self._train = Hosts(folder), fold(block["fold"])[0]
        self._images, self._labels = digits()[0], torch.from_numpy(digits()[1])
        torch.manual_seed(block["seed"])
        self._model = resnet()
        plain = torch.optim.SGD(self._model.parameters(), lr=block["lr"], momentum=0.9, weight_decay=5e-4)
        self._optimizer = wrapped(hvd, plain, block["arm"])
        self._state = hvd.elastic.TorchState(model=self._model, optimizer=self._optimizer, batch=0)
        self._sizes: list[int] = []

    def run(self) -> None:
        """Train to the end; rank 0 writes down how well."""
        hvd.elastic.run(self._steps)(self._state)
        if hvd.rank() == 0:
            score = accuracy(self._model, fold(self._block["fold"])[1])
            stats = counted(self._optimizer.stats())
            died = len([*self._folder.glob(f"died.{self._number}.*")])
            own = {"accuracy": score, "deaths_seen": died, "ranks": float(np.mean(self._sizes)), "stats": stats}
            with (self._folder / "blocks.jsonl").open("a") as blocks:
                blocks.write(json.dumps({**self._block, "by_rank": [own]}) + "\n")

    def _steps(self, state: Any) -> None:
        steps, deaths = self._block["steps"], self._block["deaths"]
        self._model.train()
        while state.batch < steps:
            self._sizes.append(hvd.size())
            due = deaths and state.batch >= (self._died() + 1) * steps // (deaths + 1)
            if hvd.rank() == 0 and deaths and state.batch >= (self._died() + 0.5) * steps / (deaths + 1):
                missing = self._block["ranks"] - len(self._hosts.alive())  # half-way to the next death
                self._hosts.change(more=missing)
            if due and self._died() < deaths and hvd.size() > 1 and self._died() % hvd.size() == hvd.rank():
                self._die()
            for group in self._optimizer.param_groups:
                group["lr"] = rate(self._block["lr"], state.batch, steps)
            self._step(state.batch)
            state.batch += 1
            time.sleep(self._block["pause"])
            state.commit()
        self._optimizer.drain()

    def _died(self) -> int:
        return len([*self._folder.glob(f"died.{self._number}.*")])

    def _die(self) -> None:
        """Die within the next milliseconds, wherever this rank is then."""
        claim(self._folder, f"died.{self._number}")
        (self._folder / f"dead.{os.environ['HOROVOD_HOSTNAME']}").touch()
        self._hosts.change(gone=os.environ["HOROVOD_HOSTNAME"])
        threading.Timer(0.01, die).start()

    def _step(self, batch: int) -> None:
        random = np.random.default_rng([self._block["seed"], batch, hvd.rank()])
        own = random.choice(self._train, self._block["batch"], replace=False)
        self._optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self._model(self._images[own]), self._labels[own])
        loss.backward()
        if hasattr(self._optimizer, "record_loss"):
            self._optimizer.record_loss(loss.detach())
        self._optimizer.step()


def main() -> None:
    """Go through all trainings that are left when this process begins."""
    folder = Path(os.environ[FOLDER])
    blocks, turn = json.loads((folder / "plan.json").read_text())["blocks"], folder / "turn"
    torch.set_num_threads(1)
    hvd.init()
    for number in range(int(turn.read_text()) if turn.exists() else 0, len(blocks)):
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        if hvd.rank() == 0:
            turn.write_text(str(number))
            (folder / "unfinished").touch()
        Training(blocks[number], number, folder).run()
    faulthandler.cancel_dump_traceback_later()
    if hvd.rank() == 0:
        (folder / "unfinished").unlink()
