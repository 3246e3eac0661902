"""The training script of a torch cell, run by our optimizers and by the plain one.

A level of a factor is a part of the script, with methods that the script calls at fixed places (``torch_parts``). What
a part does, it does to both runs; so the plain run says what is due.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

import hvd_async.torch as hvd
from tests.conformance.crossings.table import ARMS, HELD, MIDDLE, PATIENCE, Cell, options_of, steps_of
from tests.conformance.crossings.torch_parts import BUFFERS, LEVELS, OPTIMIZERS, REFUSED, allowed, equivalent
from tests.conformance.reference import Array
from tests.conformance.torch_ranks import ProcessSet

__all__ = ["LEVELS", "Run", "allowed", "equivalent"]
torch.set_num_threads(1)
BATCH = 6


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
        made = BUFFERS.get(kind)
        if made is not None:
            self.register_buffer("extra", made(), persistent=kind != "not-persistent")
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
        result: torch.Tensor = self.second(hidden * self.gain if with_gain else hidden)
        return result


class Run:
    """One run of the script on one rank.

    Args:
        cell: what crosses.
        rank: which; None: the plain run.

    Attributes:
        t: the step's index.
        seen: the weights that the last loss was computed with.
        path: the weights before the first step and after each.
        averages: a part's moving averages at the end.
        drained: bytes of weights, statistics and buffers after each drain.
        frozen: the bias before it was frozen, and after the drain at the end.
        resting: the bias after each step in which it is frozen.
        problems: what must not be, as a part or the script has found.
    """

    def __init__(self, cell: Cell, rank: int | None) -> None:
        self.cell, self.rank, self.arm = cell, rank, ARMS[cell.arm]
        self.net = Net(cell)
        self.parts = [
            kinds[level]() for factor, level in cell.levels.items() if level in (kinds := {**LEVELS[factor], **REFUSED})
        ]
        self.path: list[Array] = []
        self.seen = np.zeros(0)
        self.averages: list[Array] = []
        self.drained: list[bytes] = []
        self.rates: list[tuple[float, ...]] = []
        self.frozen: list[Array] = []
        self.resting: list[Array] = []
        self.problems: list[str] = []
        self.statistics: list[tuple[Array, Array]] = []
        self.stats: Any = None
        self.t, self.rounds, self.steps = 0, 0, steps_of(cell)
        self.schedule: Any = None
        self.done: list[threading.Event] = []
        self.opt: Any = None

    # -- what the script does ---------------------------------------------------------------------------------

    def train(self) -> Run:
        """Run the whole script."""
        self.begin()
        self.take_steps(range(self.steps))
        return self.end()

    def begin(self) -> None:
        """Make the optimizer, and meet the other ranks."""
        for part in self.parts:
            part.prepare(self)
        self.make_optimizer()
        if self.ours and self.arm.holdable:
            self.opt._async.worker_now()  # (ranks meet; from here on they may be late)
        self.path.append(self.weights())
        self.constants = [buffer.clone() for buffer in self.constant_buffers()]
        if self.ours and self.cell["middle"] == "elastic":
            self.state = hvd.elastic.TorchState(model=self.net, optimizer=self.opt)

    def take_steps(self, steps: range) -> None:
        """Take steps, with what the script does in its middle."""
        for step in steps:
            self.t = step
            self.hold()
            self.take_step()
            if self.rank == 0:
                self.done[self.t].set()
            if self.t in MIDDLE:
                for part in self.parts:
                    part.middle(self)

    def end(self) -> Run:
        """Drain, and note what is left."""
        rounds = self.opt.rounds if self.ours else 0
        self.drain()
        self.look()
        if self.ours:
            self.stats = self.opt.stats()
            self.rounds += rounds
        for part in self.parts:
            self.averages += getattr(part, "final", list)()
        return self

    def hold(self) -> None:
        """Wait, on the last rank of an arm that allows it, for a later step of rank 0."""
        if self.ours and self.arm.holdable and self.rank == self.cell.ranks - 1:
            for own, other in HELD:
                if self.t == own % self.steps and not self.done[other % self.steps].wait(PATIENCE):
                    self.report("others go on while a rank has not begun its step: they do not")

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
        voices = range(self.cell.ranks) if self.rank is None else [self.rank]
        losses = list[torch.Tensor]()
        for voice in voices if self.arm.own else [0]:
            draw = np.random.default_rng([self.t, voice])
            inputs = torch.as_tensor(draw.normal(size=(BATCH, 3)), dtype=self.net.first.weight.dtype)
            targets = torch.as_tensor(draw.normal(size=(BATCH, 2)) + self.shift(voice), dtype=inputs.dtype)
            losses.append((self.net(inputs, self.with_gain(voice)) - targets).square().mean())
            if self.cell["training"] == "unused-on-a-rank" and voice == 0:  # (gains go on growing)
                losses[-1] = losses[-1] - 0.3 * self.net.gain.sum()
        return sum(losses[1:], losses[0]) / len(losses)

    def shift(self, voice: int) -> float:
        """Return by what a rank's targets are larger than rank 0's; with hosts no larger than without."""
        return voice * self.arm.ranks / self.cell.ranks

    def with_gain(self, voice: int) -> bool:
        """Return whether a rank uses ``gain`` in this step."""
        some = voice == 0 or self.t == 0 or self.t >= self.steps - 8
        return {"unused": self.t % 3 == 0, "unused-on-a-rank": some}.get(self.cell["training"], True)

    # -- what parts use ---------------------------------------------------------------------------------------

    @property
    def ours(self) -> bool:
        """Whether an optimizer of ours is run."""
        return self.rank is not None

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
        return self.cell["middle"] == "another-part" and name.startswith("second")

    def wrapped(self, plain: torch.optim.Optimizer) -> Any:
        """Return an optimizer of ours."""
        options = options_of(self.cell, hvd, ProcessSet)
        for part in self.parts:
            options.update(part.options(self))
        named = [(name, p) for name, p in self.net.named_parameters() if not self.elsewhere(name)]
        return getattr(hvd, self.arm.wrapper)(
            plain, named_parameters=named, named_buffers=self.net.named_buffers(), **options
        )

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

    def report(self, problem: str) -> None:
        """Add to the problems, once."""
        if self.ours and not any(problem.split(":")[0] in one for one in self.problems):
            self.problems.append(f"{problem} (step {self.t})")

    def constant_buffers(self) -> list[torch.Tensor]:
        """Return buffers that no training changes."""
        return [buffer for name, buffer in self.net.named_buffers() if name == "extra"]

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
        if "k" in group and self.cell["middle"] in ("none", "drain"):
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
                self.report("a buffer that is no statistic: changed")
        states = [value for state in self.opt.state.values() for value in state.values() if torch.is_tensor(value)]
        if any(t.is_inference() for t in [*tensors, *states]):
            self.report("tensors: of inference mode are left in the model or the optimizer")

    def resumed_from(self, state: Mapping[str, Any], schedule: Any) -> None:
        """Make everything anew, from a state."""
        self.net = Net(self.cell)
        extra = [(name, buffer) for name, buffer in self.net.named_buffers() if name == "extra"]
        self.net.load_state_dict(state["model"], strict=not extra)
        self.make_optimizer()
        self.opt.load_state_dict(state["opt"])
        if self.schedule is not None:
            self.schedule.load_state_dict(schedule)

    def saved(self) -> Mapping[str, Any]:
        """Return a checkpoint, through a file."""
        file = io.BytesIO()
        torch.save({"model": self.net.state_dict(), "opt": self.opt.state_dict()}, file)
        file.seek(0)
        state: Mapping[str, Any] = torch.load(file, weights_only=True)
        return state

    @property
    def stepping_transform(self) -> bool:
        """Whether gradients may be changed only in a round, where they travel."""
        return self.ours and self.arm.eager
