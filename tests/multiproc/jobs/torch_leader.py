"""``LeaderOptimizer`` in torch under ``horovodrun``: both algorithms, ranks that sleep, checkpoints, errors."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch_gossip
from common import Report
from leader_common import asleep, refused, resumed, train
from leader_table import cases

import hvd_async.torch as hvd


class TorchTrainer(torch_gossip.TorchTrainer):
    """One rank's, which tells its losses."""

    wrapper = staticmethod(hvd.LeaderOptimizer)

    def __init__(self, told: Callable[..., float | None], **options: Any) -> None:
        super().__init__(**options)
        self._told = told

    def step(self, rank: int, step: int) -> None:
        loss = self._told(np.array(self.weights()), rank, step)
        if loss is not None:
            self.optimizer.record_loss(torch.tensor(loss, dtype=torch.float64))
        super().step(rank, step)


def state(trainer: Any) -> Any:
    """What a script would save."""
    return copy.deepcopy({"model": trainer.parameter.detach(), "optimizer": trainer.optimizer.state_dict()})


def load(trainer: TorchTrainer, saved: Any) -> None:
    """Take it up again."""
    with torch.no_grad():
        trainer.parameter.copy_(saved["model"])
    trainer.optimizer.load_state_dict(saved["optimizer"])


def no_process_sets(report: Report, rank: int) -> None:
    """Horovod was started without them: a group of its own is refused with a hint, on every rank of the job."""
    trainer = TorchTrainer(told=lambda x, rank, step: 1.0, group=[[0, 1], [2]])
    try:
        trainer.step(rank, 1)
    except ValueError as error:
        report.put("no process sets", error=str(error))


def main() -> None:
    """All cases, or a few."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", choices=("dynamic", "none"), default="dynamic")
    parser.add_argument("--cases", choices=("all", "few"), default="all")
    arguments = parser.parse_args()
    hvd.init(process_sets="dynamic" if arguments.sets == "dynamic" else None)
    rank, size = hvd.rank(), hvd.size()
    report = Report(rank)
    for name, following in cases(size).items():
        train(report, rank, name, following, TorchTrainer)
    if arguments.sets == "none":
        no_process_sets(report, rank)
    if arguments.cases == "all":
        asleep(report, rank, size, TorchTrainer)
        resumed(report, rank, TorchTrainer, state, load)
        refused(report, rank, size, TorchTrainer)
    report.put("end")


if __name__ == "__main__":
    main()
