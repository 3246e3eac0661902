"""``GossipOptimizer`` in torch under ``horovodrun``: every algorithm, ends, switches, checkpoints, errors."""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from common import Report
from gossip_common import held, stuck, train
from gossip_table import COMPRESSED, EXACT, FEW, HOSTS, UNEVEN
from torch_common import DEVICE

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaMismatchError
from tests.conformance.cases import CASES
from tests.conformance.gossip_reference import batch, least_squares

CASE = next(case for case in CASES if case.name == "nesterov")


class TorchTrainer:
    """One rank's."""

    wrapper = staticmethod(hvd.GossipOptimizer)

    def __init__(self, **options: Any) -> None:
        start = least_squares(1, CASE).start[0]
        self.parameter = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32, device=DEVICE))
        plain = torch.optim.SGD(
            [self.parameter], lr=CASE.lr, momentum=CASE.momentum, nesterov=CASE.nesterov, weight_decay=CASE.weight_decay
        )
        self.optimizer = self.wrapper(plain, [("w", self.parameter)], **options)

    def step(self, rank: int, step: int) -> None:
        inputs, targets = (torch.tensor(part, dtype=torch.float32, device=DEVICE) for part in batch(rank, step))
        self.optimizer.zero_grad()
        (0.5 * torch.mean((inputs @ self.parameter - targets) ** 2)).backward()
        self.optimizer.step()

    def weights(self) -> list[float]:
        values: list[float] = self.parameter.detach().double().tolist()
        return values


def switches(report: Report, rank: int) -> None:
    """All-reduce for an epoch, then gossip with another graph each epoch; the weights are the same before and after."""
    trainer = TorchTrainer(schedule={0: "allreduce", 1: "sgp"}, peers={0: 1, 2: 2})
    seen, step = [], 0
    for epoch in range(4):
        trainer.optimizer.set_epoch(epoch)
        seen.append(trainer.weights())
        for _ in range(5):
            step += 1
            trainer.step(rank, step)
        with trainer.optimizer.consensus():
            seen.append(trainer.weights())
    before_last = trainer.optimizer.stats()
    trainer.optimizer.switch(algorithm="adpsgd", topology="ring")
    report.put("switches", seen=seen, steps=before_last.steps, sent=before_last.messages_sent)
    trainer.step(rank, step + 1)
    trainer.optimizer.drain()


def resumed(report: Report, rank: int) -> None:
    """Cut, save, go on; then from what was saved once more."""
    trainer = TorchTrainer(topology="star")
    for step in range(1, 6):
        trainer.step(rank, step)
    trainer.optimizer.cut()
    saved = copy.deepcopy({"model": trainer.parameter.detach(), "optimizer": trainer.optimizer.state_dict()})
    for step in range(6, 11):
        trainer.step(rank, step)
    trainer.optimizer.drain()
    again = TorchTrainer(topology="star")
    with torch.no_grad():
        again.parameter.copy_(saved["model"])
    again.optimizer.load_state_dict(saved["optimizer"])
    for step in range(6, 11):
        again.step(rank, step)
    again.optimizer.drain()
    weight = saved["optimizer"]["hvd_async"]["weight"]
    report.put("resumed", straight=trainer.weights(), again=again.weights(), weight=weight)


def refused(report: Report, rank: int) -> None:
    """Arguments that cannot be, and settings that differ: an error on every rank, and the job goes on."""
    import networkx

    apart = networkx.Graph([(0, 1)])
    apart.add_nodes_from(range(hvd.size()))
    errors = {}
    for name, options in {
        "disconnected": {"topology": apart},
        "not stochastic": {"mixing": [[0.5] * hvd.size()] * hvd.size()},
        "peers": {"peers": hvd.size()},
        "size": {"topology": networkx.complete_graph(hvd.size() + 1)},
        "directed": {"algorithm": "adpsgd", "topology": "exponential"},
    }.items():
        try:
            TorchTrainer(**options)
        except ValueError as error:
            errors[name] = str(error)
    different = TorchTrainer(topology="ring" if rank else "star")
    try:
        different.step(rank, 1)
    except ReplicaMismatchError as error:
        errors["different"] = str(error)
    report.put("refused", errors=errors)


def main() -> None:
    """All cases, or a few."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", choices=("all", "few"), default="all")
    few = parser.parse_args().cases == "few"
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    report = Report(rank)
    for case in FEW if few else (*EXACT, *(HOSTS if size == 4 else ()), *COMPRESSED, *UNEVEN):
        train(report, rank, case, TorchTrainer)
    if not few:
        stuck(report, rank, size, TorchTrainer)
        held(report, rank, size, TorchTrainer)
        switches(report, rank)
        resumed(report, rank)
        refused(report, rank)
    report.put("end")


if __name__ == "__main__":
    main()
