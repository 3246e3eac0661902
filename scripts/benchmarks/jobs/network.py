"""The job of ``network``: trainings on virtual hosts whose links are slow; seconds and bytes of a step."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch

from hvd_async.simulation.names import read_name
from hvd_async.simulation.network import widths

from ..support.arms import WARM_UP
from ..support.digits import TEST_FOLD, fold
from .shared.arm import Arm
from .shared.digit_models import accuracy, batches, digits
from .shared.rank import Block, Job, traffic


def network(megabytes: float) -> torch.nn.Module:
    """A classifier of digits whose weights, float32, have so many MB."""
    nn = torch.nn
    inputs, first, second, classes = widths(megabytes)
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(inputs, first), nn.ReLU()),
        *(nn.Linear(first, second), nn.ReLU(), nn.Linear(second, classes)),
    )


def work_seconds(job: Job, block: Block) -> float:
    """Measure the seconds of a step's real work when all ranks are at it; they are part of its computation."""
    model = network(block["megabytes"])
    optimizer = torch.optim.SGD(model.parameters(), lr=block["lr"], momentum=0.9)
    x, y = digits()[0][: block["batch"]], torch.from_numpy(digits()[1])[: block["batch"]]
    seconds = []
    for _ in range(2 * WARM_UP):
        job.barrier()
        started = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    return statistics.fmean(job.gather(statistics.median(seconds)))


def run_block(job: Job, block: Block) -> None:
    """One training."""
    slept = max(0.0, block["compute"] - work_seconds(job, block))
    torch.manual_seed(block["repetition"])
    model = network(block["megabytes"])
    images, labels = digits()[0], torch.from_numpy(digits()[1])
    train, test = fold(TEST_FOLD)
    block_of_data = {**block, "seed": block["repetition"], "split": "even"}
    epochs = (batches(block_of_data, digits()[1], train, job.rank, job.size, epoch) for epoch in itertools.count())
    hosts = {"hierarchical": block["per_host"]} if read_name(block["arm"]).hosts else {}
    arm = Arm(block["arm"], model, job, torch.optim.SGD(model.parameters(), lr=block["lr"], momentum=0.9), **hosts)
    steps = itertools.islice(itertools.chain.from_iterable(epochs), WARM_UP + block["steps"])
    ends, sent, waited, cpu = [], [], [], []
    job.barrier()
    for indices in steps:
        x, y = images[indices], labels[indices]

        def loss(trained: torch.nn.Module, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(trained(x), y)

        time.sleep(slept)
        arm.train(loss)
        ends.append(time.perf_counter())
        sent.append(traffic()[1])
        waited.append(arm.waited)
        cpu.append(time.process_time())
    own: dict[str, Any] = {
        "seconds": [b - a for a, b in itertools.pairwise(ends[WARM_UP - 1 :])],
        "sent": sent[-1] - sent[WARM_UP - 1],
        "waited": waited[-1] - waited[WARM_UP - 1],
        "cpu": cpu[-1] - cpu[WARM_UP - 1],
    }
    arm.drain()
    own["accuracy"] = accuracy(model, test) if job.rank == 0 else None
    job.conclude(arm, block, own)
