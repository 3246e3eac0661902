"""Horovod scripts in which nothing but ``hvd.DistributedOptimizer`` became ours: every ``hvd.`` here is Horovod's."""

from __future__ import annotations

import functools
import io
import time
import warnings
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from common import Baton, Report, Straggler, raised
from horovod.torch import broadcast_optimizer_state as by_name
from horovod.torch import join as join_by_name
from torch_common import crc, state_tensors

import hvd_async

FAMILIES: dict[str, Callable[..., Any]] = {
    "eager": hvd_async.EagerOptimizer,
    "gossip": hvd_async.GossipOptimizer,
    "leader": hvd_async.LeaderOptimizer,
    "centre": functools.partial(hvd_async.LeaderOptimizer, algorithm="easgd", global_period=2),
}
KINDS = {"eager": ("momentum", "adam"), "gossip": ("adam",), "leader": ("momentum",), "centre": ("momentum",)}
"""Optimizers that are wrapped."""


def classifier(seed: int) -> torch.nn.Sequential:
    """8 -> 16 -> 4, with batch norm."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
    )


def plain(kind: str, model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    """Two parameter groups."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    if kind == "adam":
        return torch.optim.Adam([{"params": weights}, {"params": others, "weight_decay": 0.0}], lr=rate)
    groups = [{"params": weights}, {"params": others, "momentum": 0.5}]
    return torch.optim.SGD(groups, lr=rate, momentum=0.9, weight_decay=0.01)


class Feed:
    """A rank's own batches."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(100 * seed + hvd.rank())

    def loss(self, model: torch.nn.Module) -> torch.Tensor:
        """Of the next batch."""
        x = torch.randn(16, 8, generator=self._generator)
        y = torch.randint(0, 4, (16,), generator=self._generator)
        return torch.nn.functional.cross_entropy(model(x), y)

    def step(self, optimizer: Any, model: torch.nn.Module, chooses: bool = False) -> torch.Tensor:
        """A step on the next batch; its loss."""
        optimizer.zero_grad()
        loss = self.loss(model)
        loss.backward()
        if chooses:
            optimizer.record_loss(loss)  # the one line that a leader needs besides
        optimizer.step()
        return loss.detach()


def made(family: str, kind: str, seed: int, rate: float = 0.01) -> tuple[torch.nn.Module, Any]:
    """A model, and its optimizer."""
    model = classifier(seed)
    return model, FAMILIES[family](plain(kind, model, rate), named_parameters=model.named_parameters())


def held(model: torch.nn.Module, optimizer: Any) -> dict[str, int]:
    """Return checksums of the weights and of the optimizer's state, and the number of rounds."""
    return {"weights": crc(model.parameters()), "state": crc(state_tensors(optimizer)), "rounds": optimizer.rounds}


def train(
    family: str, optimizer: Any, model: torch.nn.Module, epochs: int, straggler: Straggler, extra: int
) -> list[list[float]]:
    """Epochs of three batches with a schedule, metrics averaged after each; then ``extra`` batches more."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    feed, averages = Feed(epochs), []

    def batch() -> torch.Tensor:
        straggler.compute()
        return feed.step(optimizer, model, family == "leader")

    for _ in range(epochs):
        loss = batch()
        for _ in range(2):
            batch()
        scheduler.step()
        own = torch.tensor([float(hvd.rank()), float(loss)])
        named, unnamed = hvd.allreduce(own, name="metrics"), hvd.allreduce(own)
        averages.append([*named.tolist(), *unnamed.tolist()])
    for _ in range(extra):
        batch()
    return averages


def script(report: Report, family: str, kind: str) -> None:
    """Broadcasts, trains, joins, saves on rank 0, resumes from there with a fresh optimizer, and continues."""
    rank = hvd.rank()
    straggler = Straggler("random:1:0.02", rank, hvd.size(), seed=3)
    model, optimizer = made(family, kind, rank, 0.01 * (1 + rank))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    fresh = {"weights": crc(model.state_dict().values()), "rates": [g["lr"] for g in optimizer.param_groups]}
    averages = train(family, optimizer, model, 2, straggler, extra=rank)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # in the middle of it, at unequal steps
    middle = {"weights": crc(model.parameters()), "state": crc(state_tensors(optimizer))}
    last = hvd.join()
    file = io.BytesIO()
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
    saved = held(model, optimizer)

    model, optimizer = made(family, kind, 10 + rank, 0.5 * (1 + rank))
    if rank == 0:
        loaded = torch.load(file, weights_only=False)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    resumed = held(model, optimizer)
    more = train(family, optimizer, model, 1, straggler, extra=2 - rank)
    hvd.join()
    report.put(
        f"{family} {kind}",
        fresh=fresh,
        averages=averages + more,
        middle=middle,
        last=last,
        saved=saved,
        resumed=resumed,
        end=crc(model.parameters()),
    )


def unnamed(report: Report) -> None:
    """Ranks at different steps: the engine has submitted more on one than on the other when they come to a metric."""
    model = torch.nn.Linear(8, 4)
    optimizer = hvd_async.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    feed, waiting = Feed(7), Baton("unnamed")
    feed.step(optimizer, model)
    if hvd.rank():
        waiting.lay()
    else:
        waiting.wait()
        time.sleep(0.5)  # (so that the others most likely have asked by then; it passes whether they have or not)
        feed.step(optimizer, model)
    value = torch.full((2,), float(hvd.rank()), requires_grad=True)
    mean = hvd.allreduce(value)
    (mean * torch.ones(2)).sum().backward()  # a collective without a name of Horovod's own
    rows = hvd.allgather(torch.full((hvd.rank() + 1,), hvd.rank()))
    tensors = [torch.full((3,), float(hvd.rank())), torch.full((1,), float(hvd.rank()))]
    hvd.broadcast_parameters(tensors, root_rank=1)
    hvd.barrier()
    hvd.join()
    report.put(
        "unnamed",
        mean=mean.tolist(),
        gradient=value.grad.tolist() if value.grad is not None else None,
        rows=rows.tolist(),
        broadcast=[t.tolist() for t in tensors],
        weights=crc(model.parameters()),
    )


def elastic_state(report: Report, family: str) -> None:
    """``hvd.elastic.TorchState``: made, synced, committed in mid-training, restored."""
    rank = hvd.rank()
    model = classifier(seed=20 + rank)
    optimizer = FAMILIES[family](
        plain("momentum", model, 0.01 * (1 + rank)),
        named_parameters=model.named_parameters(),
        named_buffers=model.named_buffers(),
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=rank)
    straggler = Straggler("random:1:0.02", rank, hvd.size(), seed=4)

    def now() -> list[int]:
        return [crc(model.state_dict().values()), crc(state_tensors(optimizer)), state.epoch]

    state.sync()
    synced = now()
    train(family, optimizer, model, 1, straggler, extra=rank)
    state.epoch = 5
    state.commit()
    committed = now()
    train(family, optimizer, model, 1, straggler, extra=rank)
    state.epoch = 6
    state.restore()
    restored = now()
    train(family, optimizer, model, 1, straggler, extra=0)
    state.sync()
    again = now()
    train(family, optimizer, model, 1, straggler, extra=rank)
    hvd.join()
    report.put(
        f"elastic {family}",
        synced=synced,
        committed=committed,
        restored=restored,
        again=again,
        end=crc(model.parameters()),
    )


def imported_by_name(report: Report) -> None:
    """What a script imported from Horovod before it imported ours."""
    model, optimizer = made("eager", "momentum", 30)
    error = raised(lambda: by_name(optimizer, 0))
    feed = Feed(8)
    for _ in range(1 + hvd.rank()):
        feed.step(optimizer, model)
    report.put("by name", **error, last=join_by_name(), weights=crc(model.parameters()))


SPARSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sparse-adam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1),
}


def sparse(report: Report, kind: str) -> None:
    """The same sparse gradients by Horovod's own optimizer and by ours."""
    ends = []
    for wrapper, options in ((hvd.DistributedOptimizer, {}), (hvd_async.EagerOptimizer, {"quorum": "all"})):
        torch.manual_seed(40)
        model = torch.nn.Embedding(9, 4, sparse=True)
        optimizer = wrapper(SPARSE[kind](model.parameters()), named_parameters=model.named_parameters(), **options)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randint(0, 9, (3,), generator=generator)).square().sum().backward()
            optimizer.step()
        if wrapper is hvd_async.EagerOptimizer:
            optimizer.drain()
        ends.append(model.weight.detach().reshape(-1).tolist())
    report.put(f"sparse {kind}", theirs=ends[0], ours=ends[1])


def average(value: torch.Tensor, name: str) -> float:
    """A metric's mean over the ranks."""
    return float(hvd.allreduce(value.detach().cpu(), name=name))


def imagenet(report: Report, quorum: str) -> None:
    """The calls of Horovod's ImageNet example, in their order; two jobs, the second of which resumes the first."""
    file = io.BytesIO()

    def save(epoch: int, model: torch.nn.Module, optimizer: Any) -> None:
        if quorum != "all":
            optimizer.drain()  # the one line that has to be added
        if hvd.rank() == 0:
            file.seek(0)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, file)

    def job(until: int) -> list[Any]:
        resume = torch.load(io.BytesIO(file.getvalue()), weights_only=False)["epoch"] + 1 if file.getvalue() else 0
        resume = int(hvd.broadcast(torch.tensor(resume), root_rank=0, name="resume_from_epoch").item())
        model = classifier(seed=60 + hvd.rank())
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5)
        optimizer = hvd_async.EagerOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=hvd.Compression.none,
            backward_passes_per_step=2,
            op=hvd.Average,
            gradient_predivide_factor=1.0,
            quorum=quorum,
        )
        if resume > 0 and hvd.rank() == 0:
            checkpoint = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        feed = Feed(9)
        for epoch in range(resume, until):
            model.train()
            losses = []
            for _ in range(3):
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 * (1 + epoch)
                optimizer.zero_grad()
                for _ in range(2):
                    part = feed.loss(model)
                    average(part, "train_accuracy")
                    losses.append(average(part, "train_loss"))
                    (part / 2).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                tests = [average(feed.loss(model), "val_loss") for _ in range(2)]
            save(epoch, model, optimizer)
        if quorum == "all":
            optimizer.drain()
        return [resume, losses, tests, crc(model.parameters()), len(state_tensors(optimizer))]

    report.put(f"imagenet {quorum}", first=job(2), second=job(3))


def main() -> None:
    hvd.init()
    warnings.simplefilter("error", UserWarning)
    warnings.filterwarnings("ignore", "training changes buffers")  # (as Horovod's scripts, these give none)
    report = Report(hvd.rank())
    imported_by_name(report)
    unnamed(report)
    for family in FAMILIES:
        for kind in KINDS[family]:
            script(report, family, kind)
        elastic_state(report, family)
    for kind in SPARSE:
        sparse(report, kind)
    for quorum in ("all", "solo"):
        imagenet(report, quorum)
    # Rounds are on their way when Horovod's own shutdown() comes: it has to drain.
    model, optimizer = made("eager", "momentum", 70)
    feed = Feed(10)
    for _ in range(3 + hvd.rank()):
        feed.step(optimizer, model)
    hvd.shutdown()
    report.put("end", weights=crc(model.parameters()))


if __name__ == "__main__":
    main()
