"""Train ResNet-50 in torch, by any of the algorithms: `torchrun --nproc-per-node 2 torch_models/resnet50.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from hvd_async.runner.options import Options, parse

if __name__ == "__main__":
    parse("torch")  # before the imports below, which take seconds: for --help, and for flags that are wrong

import torch
import vision
from lars import LARS

import hvd_async.torch as hvd
from hvd_async.runner.course import Position
from hvd_async.runner.data import Batch
from hvd_async.runner.loop import UNFINISHED, Trainer, World, errors_reported, start
from hvd_async.runner.report import OptimizerCounts, Replicas

LOWER = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtype of mixed precision."""


class TorchTrainer(Trainer):
    """The model, its optimizer and the device of one rank."""

    checkpoint_suffix = ".pt"

    def __init__(self, options: Options, classes: int) -> None:
        super().__init__(options)
        torch.manual_seed(options.seed)
        self._classes = classes
        self._device = device()
        self._model = vision.build(options.model, classes, options.bn_momentum).to(self._device)
        self._loss = torch.nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
        self._scaler = torch.amp.GradScaler(self._device.type) if options.precision == "fp16" else None
        self.optimizer = wrapped(options, self._model, self._scaler)
        self._steps, self._wait_s = 0, 0.0
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)

    @property
    def rounds(self) -> int:
        """Rounds that this rank's weights have seen."""
        return self._steps if self.options.lockstep else super().rounds

    def train_step(self, batch: Batch, rate: float) -> float:
        """Take one optimizer step at this learning rate; return the batch's mean loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._model.train()
        self.optimizer.zero_grad()
        losses = []
        for share, part in batch.parts(self.options.backward_passes_per_step):
            if self.options.weighted:
                self.optimizer.record_samples(round(share * len(batch)))
            loss = self._forward(part) * share
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
            losses.append(loss.detach())
        loss = sum(losses)
        if self.options.follows:
            self.optimizer.record_loss(loss)
        self._step()
        self._steps += 1
        return float(loss)

    def _forward(self, batch: Batch) -> torch.Tensor:
        """The mean loss."""
        images, labels = self._to_device(batch)
        if len(batch) == 1:
            # Batch norm refuses one value per channel, which a last batch of one image may come down to. Its double
            # has the same mean loss.
            images, labels = images.repeat(2, 1, 1, 1), labels.repeat(2)
        dtype = LOWER[self.options.precision]
        with torch.autocast(self._device.type, dtype=dtype, enabled=dtype is not None):
            loss: torch.Tensor = self._loss(self._model(images), labels)
        return loss

    def _step(self) -> None:
        if not self.options.lockstep:
            self._update()
            return
        begin = time.perf_counter()  # Horovod does not say how long it waits; so wait and update apart
        self.optimizer.synchronize()
        self._wait_s += time.perf_counter() - begin
        with self.optimizer.skip_synchronize():
            self._update()

    def _update(self) -> None:
        """The optimizer's step. Of allreduce an overflow on any rank is skipped on all, as their sum overflows too."""
        if self._scaler is None:
            self.optimizer.step()
            return
        before = self._scaler.get_scale()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.skipped += self._scaler.get_scale() < before

    def drain(self) -> None:
        """Apply every gradient on every rank and make batch-norm statistics agree. A collective."""
        if not self.options.lockstep:
            super().drain()
            return
        # Horovod leaves every rank its own batch-norm statistics. Average them, as `drain()` does, so that the test
        # is one of the model that the checkpoint keeps.
        buffers = [buffer for buffer in self._model.buffers() if buffer.is_floating_point()]
        average = hvd.allreduce(flat(buffers), op=hvd.Average, name="runner.buffers")
        torch.nn.utils.vector_to_parameters(average, buffers)

    def consensus(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model is the consensus; drains ranks with the same weights. A collective."""
        if self.options.has_own_weights:
            return super().consensus()
        self.drain()
        return contextlib.nullcontext()

    @torch.inference_mode()
    def correct(self, batch: Batch) -> int:
        """Return the number of images that are classified correctly."""
        images, labels = self._to_device(batch)
        self._model.eval()
        return int((self._model(images).argmax(1) == labels).sum())

    def save(self, path: Path, position: Position) -> None:
        """Write a complete checkpoint."""
        content = {
            "model": self._model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "made_by": self.fingerprint(),
            "position": dataclasses.asdict(position),
        }
        torch.save(content, path)

    def read(self, path: Path) -> dict[str, Any]:
        """Return a checkpoint's content, by name."""
        return torch.load(path, map_location="cpu", weights_only=True)

    def load(self, content: dict[str, Any]) -> Position:
        """Load the content of a checkpoint; return its position."""
        self._model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        if self._scaler is not None and content["scaler"] is not None:
            self._scaler.load_state_dict(content["scaler"])
        return Position(**content["position"])

    def counts(self) -> OptimizerCounts:
        """Return the counts of this rank's optimizer."""
        if not self.options.lockstep:
            return super().counts()
        return OptimizerCounts.synchronous(self._steps - self.skipped, hvd.size(), self._wait_s, self.skipped)

    @torch.no_grad()
    def replicas(self) -> Replicas:
        """Compare the ranks' weights. A collective."""
        weights = flat(list(self._model.parameters()))
        highest = hvd.allreduce(weights, op=hvd.Max, name="runner.highest")
        lowest = hvd.allreduce(weights, op=hvd.Min, name="runner.lowest")
        # In double the sum of equal weights, and so their mean, is exact: identical replicas have distance 0, not 1e-7.
        mean = hvd.allreduce(weights.double(), op=hvd.Sum, name="runner.mean") / hvd.size()
        square = hvd.allreduce(((weights - mean) ** 2).sum(), op=hvd.Average, name="runner.distance")
        own = hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()
        digests = hvd.allgather_object(own, name="runner.digest")
        return Replicas(len(set(digests)) == 1, float((highest - lowest).max()), float(square) ** 0.5)

    def _to_device(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.from_numpy(batch.images).to(self._device).permute(0, 3, 1, 2)
        return images.contiguous(), torch.from_numpy(batch.labels).to(self._device)

    def fingerprint(self) -> dict[str, str | int]:
        """Return what a checkpoint and the run that resumes it must have in common."""
        own = {"model": self.options.model, "classes": self._classes, "optimizer": self.options.optimizer}
        return {**own, "format": 2}


def device() -> torch.device:
    """This rank's GPU where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda", hvd.local_rank())


def plain(options: Options, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The torch optimizer of the options."""
    # Kernels only: decay would pull batch norm's scales and the biases, which have one dimension, to nothing.
    kernels: dict[str, Any] = {"params": [p for p in model.parameters() if p.ndim > 1]}
    others: dict[str, Any] = {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}
    kernels["weight_decay"] = options.weight_decay
    groups = [kernels, others]
    if options.optimizer == "lars":
        others["adapt"] = False
        return LARS(groups, lr=options.lr, momentum=options.momentum)
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, nesterov=options.nesterov)
    if options.optimizer == "adam":
        return torch.optim.Adam(groups, lr=options.lr)
    return torch.optim.AdamW(groups, lr=options.lr)


def wrapped(options: Options, model: torch.nn.Module, scaler: torch.amp.GradScaler | None) -> Any:
    """The optimizer of the options, wrapped by the algorithm's."""
    optimizer = plain(options, model)
    shared: dict[str, Any] = {
        "named_parameters": model.named_parameters(),
        "compression": getattr(hvd.Compression, options.compression),
        "backward_passes_per_step": options.backward_passes_per_step,
    }
    if options.lockstep:
        return hvd.DistributedOptimizer(optimizer, **shared)
    shared |= {"named_buffers": model.named_buffers(), **options.settings}
    if options.gossips:
        return hvd.GossipOptimizer(optimizer, **shared)
    if options.follows:
        return hvd.LeaderOptimizer(optimizer, **shared)
    return hvd.EagerOptimizer(optimizer, **shared, scaler=scaler)


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The tensors' values one after the other in one vector."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def main() -> None:
    """Train as the command line says."""
    options = parse("torch")
    hvd.init(**options.init_settings)
    torch.set_num_threads(options.threads or max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    world = World(hvd.rank(), hvd.size(), lambda value, name: hvd.allgather_object(value, name=name))
    run = start(options, world)
    with errors_reported(world):
        trainer = TorchTrainer(run.options, run.source.classes)
    finished = run.fit(trainer) is not None
    hvd.shutdown()
    sys.exit(0 if finished else UNFINISHED)


if __name__ == "__main__":
    main()
