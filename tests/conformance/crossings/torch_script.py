"""The training script of a torch cell, run by our optimizers and by the plain one.

A level of a factor is a part of the script, with methods that the script calls at fixed places (``torch_parts``). What
a part does, it does to both runs; so the plain run says what is due.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

import hvd_async.torch as hvd
from tests.conformance.crossings.script import Script
from tests.conformance.crossings.table import Cell, options_of
from tests.conformance.crossings.torch_parts import (
    BUFFERS,
    BUFFERS_OF,
    LEVELS,
    OPTIMIZERS,
    allowed,
    equivalent,
)
from tests.conformance.reference import Array
from tests.conformance.torch_ranks import ProcessSet

__all__ = ["LEVELS", "Run", "allowed", "equivalent"]
torch.set_num_threads(1)


class Norm(torch.nn.BatchNorm1d):
    """Batch norm that replaces its statistics by new tensors, as functional code does."""

    reassigns = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize."""
        if self.reassigns:
            for name, buffer in list(self.named_buffers()):
                setattr(self, name, buffer.clone())
        return super().forward(x)


class Net(torch.nn.Module):
    """Two layers; ``gain`` is a parameter that a script may leave out of a step."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.first: torch.nn.Linear | torch.nn.Conv2d = torch.nn.Linear(3, 4)
        if cell["memory"] != "none":
            self.first = torch.nn.Conv2d(3, 4, 2)
        if cell["memory"] == "channels-last":
            self.first.to(memory_format=torch.channels_last)
        self.second = torch.nn.Linear(4, 2)
        self.gain = torch.nn.Parameter(torch.ones(4))
        kind = cell["buffers"]
        self.norm = torch.nn.Identity() if kind == "none" else Norm(4)
        self.norm.reassigns = kind == "reassigned"
        for extra in BUFFERS_OF.get(kind, ()):
            self.register_buffer(f"extra-{extra}", BUFFERS[extra](), persistent=extra != "not-persistent")
        draw = np.random.default_rng(7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.as_tensor(draw.uniform(-0.39, 0.39, parameter.shape)))
            self.gain.add_(1.0)
        dtype = getattr(torch, "float32" if cell["dtype"] == "none" else cell["dtype"])
        for module in (self.first, self.second, self.norm):
            module.to(dtype)  # (memory formats stay)
        self.gain.data = self.gain.data.to(dtype)

    def forward(self, x: torch.Tensor, with_gain: bool = True) -> torch.Tensor:
        """Map (n, 3) to (n, 2)."""
        if isinstance(self.first, torch.nn.Conv2d):
            x = x[:, :, None, None] * torch.tensor([[1.0, 0.5], [-0.5, 0.25]], dtype=x.dtype)
        hidden = self.norm(torch.tanh(self.first(x).flatten(1)))  # (behind the first bias, which norms would cancel)
        return self.second(hidden * self.gain if with_gain else hidden)


class Run(Script):
    """One run of the script in torch.

    Attributes:
        seen: the weights that the last loss was computed with.
    """

    def __init__(self, cell: Cell, rank: int | None) -> None:
        super().__init__(cell, rank)
        self.net = Net(cell)
        self.parts = [LEVELS[factor][level]() for factor, level in cell.levels.items() if level in LEVELS[factor]]
        self.seen = np.zeros(0)
        self.schedule: Any = None

    # -- what the script does ---------------------------------------------------------------------------------

    def begin(self) -> None:
        for part in self.parts:
            part.prepare(self)
        super().begin()

    def elastic_state(self) -> Any:
        """Return an elastic job's."""
        return hvd.elastic.TorchState(model=self.net, optimizer=self.opt)

    def middle(self) -> None:
        """Do what the script does in its middle."""
        for part in self.parts:
            part.middle(self)

    def note_averages(self) -> None:
        """Note the parts' moving averages."""
        for part in self.parts:
            self.averages += getattr(part, "final", list)()

    def take_step(self) -> None:
        """Take a step."""
        self.look()
        self.opt.zero_grad()
        for part in self.parts:
            part.before(self)
        self.look()
        self.seen = self.weights()
        loss = self.loss()
        loss.backward()
        if self.arm.wrapper == "LeaderOptimizer" and self.ours:
            self.opt.record_loss(loss)
        if not self.ours and self.arm.eager:
            for parameter in self.net.parameters():  # (where gradients travel none is a gradient of 0, as in Horovod)
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        if not any(part.step(self) for part in self.parts):
            self.opt.step()
        for part in self.parts:
            part.after(self)
        self.look()
        self.path.append(self.weights())
        group = self.opt.param_groups[0]
        self.rates.append((float(group["lr"]), float(group.get("momentum", group.get("betas", (0.0,))[0]))))

    def loss(self) -> torch.Tensor:
        """Return the loss of this rank's batch; of the plain run the mean of the ranks' losses."""
        losses = list[torch.Tensor]()
        for voice in self.voices():
            dtype = self.net.first.weight.dtype
            inputs, targets = (torch.as_tensor(values, dtype=dtype) for values in self.draw(voice))
            losses.append((self.net(inputs, self.with_gain(voice)) - targets).square().mean())
            if self.cell["training"] == "unused-on-a-rank" and voice == 0:  # (gains keep growing)
                losses[-1] = losses[-1] - 0.3 * self.net.gain.sum()
        return sum(losses[1:], losses[0]) / len(losses)

    # -- what parts use ---------------------------------------------------------------------------------------

    def make_optimizer(self) -> None:
        """Make an optimizer for the model as it is, and have all parts begin."""
        kind = self.cell["optimizer"]
        parameters = [p for name, p in self.net.named_parameters() if not self.elsewhere(name)]
        plain = OPTIMIZERS["momentum" if kind == "none" else kind](parameters)
        self.opt = self.wrapped(plain) if self.ours else plain
        for part in self.parts:
            part.begin(self)

    def elsewhere(self, name: str) -> bool:
        """Return whether a parameter is another optimizer's."""
        return self.cell["training"] == "another-part" and name.startswith("second")

    def wrapped(self, plain: torch.optim.Optimizer) -> Any:
        """Return this library's optimizer."""
        options = options_of(self.cell, hvd, ProcessSet)
        for part in self.parts:
            options.update(part.options(self))
        named = [(name, p) for name, p in self.net.named_parameters() if not self.elsewhere(name)]
        return getattr(hvd, self.arm.wrapper)(
            plain, named_parameters=named, named_buffers=self.net.named_buffers(), **options
        )

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the optimizer's."""
        return [parameter for group in self.opt.param_groups for parameter in group["params"]]

    def weights(self) -> Array:
        """Return all weights, flat, float64."""
        return np.concatenate([p.detach().double().numpy().reshape(-1) for p in self.net.parameters()])

    @property
    def gain(self) -> slice:
        """Where the gains lie in the weights."""
        return slice(0, 4)

    def bias(self) -> Array:
        """Return the weights of the parameter that may be frozen."""
        return self.net.first.bias.detach().double().numpy().copy()

    def look(self) -> None:
        """Look at the weights, as a script may at any time between steps."""
        for part in self.parts:
            part.check(self)

    def constant_values(self) -> list[torch.Tensor]:
        """Return copies of buffers that no training changes."""
        return [buffer.clone() for buffer in self.constant_buffers()]

    def constant_buffers(self) -> list[torch.Tensor]:
        """Return buffers that no training changes."""
        return [buffer for name, buffer in self.net.named_buffers() if name.startswith("extra")]

    def average_of_ranks(self) -> tuple[Array, ...]:
        """Return the batch-norm statistics."""
        norm = self.net.norm
        if not isinstance(norm, Norm):
            return ()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        return (np.concatenate([norm.running_mean.double().numpy(), norm.running_var.double().numpy()]),)

    def drain(self, around: Callable[[], Any] = contextlib.nullcontext) -> None:
        """Drain, and look at what a drain leaves."""
        if not self.ours:
            return
        before = self.average_of_ranks()
        with around():
            self.opt.drain()
        group = self.opt.param_groups[0]
        if "k" in group and self.cell["middle"] == "none" and self.cell["looks"] in ("none", "drain"):
            applied = self.opt.stats().rounds_applied if self.arm.eager else len(self.rates)
            if group["k"] != applied:
                self.report(f"an optimizer counts its updates: {group['k']} of {applied}")
        self.statistics += [(own, self.average_of_ranks()[0]) for own in before]
        tensors = [*self.net.parameters(), *self.net.buffers()]
        self.drained.append(
            b"".join(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
        )
        for before_, now in zip(self.constants, self.constant_buffers(), strict=True):
            if before_.dtype != now.dtype or before_.tolist() != now.tolist():
                self.report(f"a buffer that is no statistic: changed ({now.dtype})")
        states = [value for state in self.opt.state.values() for value in state.values() if torch.is_tensor(value)]
        if any(t.is_inference() for t in [*tensors, *states]):
            self.report("tensors: of inference mode are left in the model or the optimizer")

    def resumed_from(self, state: Mapping[str, Any], schedule: Any) -> None:
        """Make everything again, from a state."""
        self.net = Net(self.cell)
        self.net.load_state_dict(state["model"], strict=not self.constant_buffers())
        self.make_optimizer()
        self.opt.load_state_dict(state["opt"])
        if self.schedule is not None:
            self.schedule.load_state_dict(schedule)

    def saved(self) -> Mapping[str, Any]:
        """Return a checkpoint, through a file."""
        file = io.BytesIO()
        torch.save({"model": self.net.state_dict(), "opt": self.opt.state_dict()}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    @property
    def stepping_transform(self) -> bool:
        """Whether gradients may be changed only in a round, where they travel."""
        return self.ours and self.arm.eager
