"""The levels of a torch cell's factors: parts of its script."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.conformance.crossings.table import (
    ARMS,
    CONNECTED,
    FROZEN,
    MIDDLE,
    STEPS,
    Arm,
    Cell,
    connects,
    drop_of,
    switched,
)
from tests.conformance.reference import Array

if TYPE_CHECKING:
    from tests.conformance.crossings.torch_script import Run

LIMIT = 0.4
"""Bound on weights that a script clamps; some begin near it."""
MASK = torch.triu(torch.full((4, 4), float("-inf")), 1)


class Counting(torch.optim.Optimizer):
    """Gradient descent that counts its steps in a parameter group, as schedule-free optimizers do, and slows down."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step at a rate that falls with the count."""
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / (1.0 + 0.1 * group["k"]))


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.02, betas=(0.8, 0.9)),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.02, betas=(0.8, 0.9), weight_decay=0.1),
    "counting": lambda ps: Counting(ps, lr=0.1),
}


BUFFERS: Mapping[str, Callable[[], torch.Tensor]] = {
    "mask": MASK.clone,
    "bool": lambda: torch.tensor([True, False, True]),
    "complex64": lambda: torch.polar(torch.ones(5), torch.arange(5.0)),
    "bfloat16": lambda: torch.linspace(0, 1, 7, dtype=torch.bfloat16),
    "uint16": lambda: torch.arange(4, dtype=torch.int32).to(torch.uint16),
    "float8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "integer": lambda: torch.arange(5),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "not-persistent": lambda: torch.linspace(-1, 1, 5),
    "empty": lambda: torch.zeros(0),
}
"""Buffers that are no statistics, by kind."""
BUFFERS_OF = {"many": [kind for kind in BUFFERS if kind != "expanded"], "expanded": ["expanded"]}
"""Kinds of buffers by level of ``buffers``, used together with batch norm."""


class Part:
    """A level of a factor; does nothing."""

    def prepare(self, run: Run) -> None:
        """Called once, before the optimizer is wrapped."""

    def options(self, run: Run) -> dict[str, Any]:
        """Return arguments of the factory."""
        return {}

    def begin(self, run: Run) -> None:
        """Called whenever the script has a new optimizer."""

    def before(self, run: Run) -> None:
        """Called before a step's forward pass."""

    def step(self, run: Run) -> bool:
        """Take the step after backward, and return True; False: another part does."""
        return False

    def after(self, run: Run) -> None:
        """Called after a step."""

    def middle(self, run: Run) -> None:
        """Called in the middle of the script, a few times."""

    def check(self, run: Run) -> None:
        """Called whenever a script may look at weights: report what must not be by ``run.report``."""


# -- weights: what else writes them -----------------------------------------------------------------------------------


class Clamp(Part):
    """A clamp in a step post hook."""

    def begin(self, run: Run) -> None:
        run.opt.register_step_post_hook(lambda *_: self.apply(run))

    def apply(self, run: Run) -> None:
        """Clamp."""
        with torch.no_grad():
            run.net.first.weight.clamp_(-LIMIT, LIMIT)

    def verify(self, run: Run, slack: float = 0.005) -> None:
        """Report weights that are not what ``apply`` makes them, ``slack`` being a share of the bound."""
        most = float(run.net.first.weight.detach().abs().max())
        if most > LIMIT * (1 + slack):
            run.report(f"weights are clamped to {LIMIT}: they are {most:.3g}")

    def after(self, run: Run) -> None:
        self.verify(run)

    def check(self, run: Run) -> None:
        if run.cell.moved_by_ends:
            return
        if run.arm.mixes and run.cell["travel"] != "none":  # (an end adds what rounding has left out of messages)
            Clamp.verify(self, run, 0.2 if run.cell["travel"] == "int8" else 0.03)
        else:
            self.verify(run)


class ClampBetween(Clamp):
    """A clamp after ``step()``."""

    def begin(self, run: Run) -> None:
        return

    def after(self, run: Run) -> None:
        self.apply(run)


class UnitNorm(Clamp):
    """Rows of unit norm, made so in a step post hook. (Averages of such rows are shorter.)"""

    def apply(self, run: Run) -> None:
        with torch.no_grad():
            run.net.first.weight.div_(run.net.first.weight.norm(dim=1, keepdim=True))

    def verify(self, run: Run) -> None:
        if run.t == 0 or run.arm.mixes or len(run.path) < 2:
            return
        far = float((run.net.first.weight.detach().double().norm(dim=1) - 1.0).abs().max())
        if far > (0.02 if run.cell["dtype"] == "bfloat16" else 1e-5):
            run.report(f"rows have unit norm: {far:.3g} off")


class Prune(Clamp):
    """A pruning mask in a step post hook."""

    def prepare(self, run: Run) -> None:
        self.apply(run)

    def apply(self, run: Run) -> None:
        with torch.no_grad():
            run.net.first.weight[::2, 0] = 0.0

    def verify(self, run: Run) -> None:
        most = float(run.net.first.weight[::2, 0].detach().abs().max())
        if most > 1e-6:
            run.report(f"pruned weights are 0: they are {most:.3g}")


class DecayBefore(Part):
    """Weight decay in a step pre hook."""

    def begin(self, run: Run) -> None:
        def decay(*_: Any) -> None:
            shrink(run)

        run.opt.register_step_pre_hook(decay)


class Reading(Part):
    """Hooks that read weights: before the update the weights are what a script has seen last."""

    def begin(self, run: Run) -> None:
        self.seen: Array | None = None
        run.opt.register_step_pre_hook(lambda *_: self.read(run))

    def step(self, run: Run) -> bool:
        self.seen = run.weights()
        return False

    def read(self, run: Run) -> None:
        """Compare; of several rounds in a step the first."""
        if self.seen is not None and not np.allclose(run.weights(), self.seen, rtol=1e-5, atol=1e-6):
            run.report("a step pre hook reads the weights: others")
        self.seen = None


# -- averages: what is made of weights --------------------------------------------------------------------------------


class AverageInHook(Part):
    """A moving average of the weights, in a step post hook."""

    def prepare(self, run: Run) -> None:
        self.model = torch.optim.swa_utils.AveragedModel(
            copy.deepcopy(run.net), avg_fn=lambda average, own, _: 0.6 * average + 0.4 * own
        )
        self.model.update_parameters(run.net)

    def begin(self, run: Run) -> None:
        run.opt.register_step_post_hook(lambda *_: self.model.update_parameters(run.net))

    def final(self) -> list[Array]:
        """Return the average."""
        return [np.concatenate([p.detach().double().numpy().reshape(-1) for p in self.model.parameters()])]


class AverageInLoop(AverageInHook):
    """A moving average of the weights, after each step."""

    def begin(self, run: Run) -> None:
        return

    def after(self, run: Run) -> None:
        self.model.update_parameters(run.net)


class Swapped(AverageInLoop):
    """A moving average that is put in the model's place for an evaluation, after a drain."""

    def middle(self, run: Run) -> None:
        run.drain()
        own = copy.deepcopy(run.net.state_dict())
        run.net.load_state_dict(self.model.module.state_dict())
        with torch.no_grad():
            run.net(torch.zeros(2, 3, dtype=run.net.first.weight.dtype))
        run.net.load_state_dict(own)


class Lookahead(Part):
    """Slow weights that the fast ones are set to every third round, in a step post hook."""

    def prepare(self, run: Run) -> None:
        self.slow = run.net.first.weight.detach().clone()
        self.rounds = 0

    def begin(self, run: Run) -> None:
        run.opt.register_step_post_hook(lambda *_: self.reset(run))

    @torch.no_grad()
    def reset(self, run: Run) -> None:
        """Reset the fast weights."""
        self.rounds += 1
        if self.rounds % 3 == 0:
            self.slow.lerp_(run.net.first.weight, 0.5)
            run.net.first.weight.copy_(self.slow)


# -- gradients --------------------------------------------------------------------------------------------------------


class ClipNorm(Part):
    """Clipping, of a round's gradient where gradients travel."""

    def options(self, run: Run) -> dict[str, Any]:
        return {"round_transform": clip} if run.arm.eager else {}

    def step(self, run: Run) -> bool:
        if not run.stepping_transform:
            clip(run.parameters())
        return False


class Shown(Part):
    """``synchronize()`` before ``step()``, with clipping between."""

    def step(self, run: Run) -> bool:
        if run.stepping_transform:
            run.opt.synchronize()
        self.between(run)
        with run.opt.skip_synchronize() if run.stepping_transform else contextlib.nullcontext():
            run.opt.step()
        return True

    def between(self, run: Run) -> None:
        """Do what the script does between the two."""
        run.look()
        clip(run.parameters())


class ShownAndWritten(Shown):
    """The same, with weights read and written between."""

    def between(self, run: Run) -> None:
        if not run.arm.mixes and not np.allclose(run.weights(), run.seen, rtol=1e-5, atol=1e-6):
            run.report("weights between synchronize() and step() are the weights: others")
        shrink(run)


class ShownAndTouched(Shown):
    """``synchronize()``, and weights written in place between, with what they are."""

    def between(self, run: Run) -> None:
        touch(run)


def clip(parameters: Any) -> None:
    """Clip gradients."""
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)


@torch.no_grad()
def shrink(run: Run) -> None:
    """Shrink some weights."""
    run.net.first.weight.mul_(0.97)


@torch.no_grad()
def touch(run: Run) -> None:
    """Write all weights, with what they are."""
    for parameter in run.net.parameters():
        parameter.copy_(parameter.clone())


class TransformThatWrites(Part):
    """A ``round_transform`` that reads and writes weights (elsewhere code before ``step()``)."""

    def options(self, run: Run) -> dict[str, Any]:
        return {"round_transform": lambda _: shrink(run)} if run.arm.eager else {}

    def step(self, run: Run) -> bool:
        if not run.stepping_transform:
            shrink(run)
        return False


# -- what is trained --------------------------------------------------------------------------------------------------


class Freeze(Part):
    """A parameter frozen for some steps, which keeps its weights meanwhile, also in the drain at their end."""

    drains = False

    def prepare(self, run: Run) -> None:
        self.kept: Array | None = None

    def after(self, run: Run) -> None:
        if self.kept is not None:
            run.resting.append(run.bias())

    def before(self, run: Run) -> None:
        if run.t == FROZEN[0]:
            if self.drains:
                run.drain()
            run.net.first.bias.requires_grad_(False)
            run.net.first.bias.grad = None
            self.kept = run.bias()
        elif run.t == FROZEN[-1] + 1:
            run.drain()
            run.look()
            run.frozen = [self.kept, run.bias()]
            run.net.first.bias.requires_grad_(True)
            self.kept = None

    def begin(self, run: Run) -> None:
        run.net.first.bias.requires_grad_(self.kept is None)

    def check(self, run: Run) -> None:
        if self.kept is None or (run.cell.moves_frozen and not self.drains):
            return  # (ranks whose weights differ are mixed; a late round has what its leader has frozen)
        if not np.allclose(run.bias(), self.kept, rtol=1e-5, atol=1e-6):
            run.report("a frozen parameter keeps its weights: it has moved")


class FreezeAtDrain(Freeze):
    """The same, from a drain on."""

    drains = True


# -- rates ------------------------------------------------------------------------------------------------------------


class Schedule(Part):
    """A learning rate schedule of torch's, which is made for an optimizer and the step at which a rate falls."""

    def __init__(self, make: Callable[[Any, int], Any]) -> None:
        self.make = make

    def begin(self, run: Run) -> None:
        before, run.schedule = run.schedule, self.make(run.opt, drop_of(run.cell))
        if before is not None:
            run.schedule.load_state_dict(before.state_dict())
            for group, own in zip(run.opt.param_groups, self.groups, strict=True):
                group.update(own)

    def after(self, run: Run) -> None:
        run.schedule.step()
        names = ("lr", "momentum", "betas")
        self.groups = [{name: group[name] for name in names if name in group} for group in run.opt.param_groups]


schedulers = torch.optim.lr_scheduler
SCHEDULES: Mapping[str, Callable[[Any, int], Any]] = {
    "drop": lambda opt, drop: schedulers.MultiStepLR(opt, [drop], 0.1),
    "warm-up": lambda opt, _: schedulers.LambdaLR(opt, lambda step: min(1.0, step / 4)),
    "one-cycle": lambda opt, _: schedulers.OneCycleLR(opt, max_lr=0.1, pct_start=0.1, total_steps=STEPS + 60),
}


class ByHand(Part):
    """The script writes another rate into the parameter groups."""

    def before(self, run: Run) -> None:
        if run.t == drop_of(run.cell):
            for group in run.opt.param_groups:
                group["lr"] *= 0.1

    def begin(self, run: Run) -> None:
        if run.t > drop_of(run.cell):
            for group in run.opt.param_groups:
                group["lr"] *= 0.1 if group["lr"] > 0.011 else 1.0


# -- the middle of the script -----------------------------------------------------------------------------------------


class Drain(Part):
    """A drain."""

    def middle(self, run: Run) -> None:
        run.drain()


class DrainInInference(Part):
    """A drain and an evaluation in inference mode, and at the next time in ``no_grad``."""

    def middle(self, run: Run) -> None:
        mode = torch.inference_mode if run.t == MIDDLE[0] else torch.no_grad
        run.drain(mode)


class EndsInInference(Part):
    """A cut and the distance to the consensus in inference mode."""

    def middle(self, run: Run) -> None:
        if run.ours:
            with torch.inference_mode():
                run.opt.cut() if run.t == MIDDLE[0] else run.opt.consensus_distance()


class Switch(Part):
    """Another algorithm for a few steps, which is switched to in inference mode."""

    def middle(self, run: Run) -> None:
        if run.ours:
            with torch.inference_mode():
                run.opt.switch(**switched(run.cell, back=run.t != MIDDLE[0]))


class Early(Part):
    """A drain in inference mode before the first step, as of a sanity check."""

    def begin(self, run: Run) -> None:
        if run.ours and run.t == 0:
            with torch.inference_mode():
                run.opt.drain()


class Consensus(Part):
    """An evaluation of the consensus, with the distance of the ranks from it."""

    mode: Callable[[], Any] = contextlib.nullcontext

    def middle(self, run: Run) -> None:
        if not run.ours:
            return
        with type(self).mode():
            own = run.weights()
            with run.opt.consensus():
                run.look()
                run.drained.append(run.weights().tobytes())
            if not (run.arm.late or np.array_equal(own, run.weights())):  # (late rounds are applied, messages received)
                run.report("after consensus() weights are the rank's own: others")
            run.opt.consensus_distance()


class ConsensusInInference(Consensus):
    """The same in inference mode."""

    mode = torch.inference_mode


class Resume(Part):
    """A checkpoint of rank 0 after a drain, taken up by new objects."""

    def middle(self, run: Run) -> None:
        run.drain()
        state = run.saved()
        schedule = None if run.schedule is None else run.schedule.state_dict()
        self.retire(run)
        run.resumed_from(state, schedule)

    def retire(self, run: Run) -> None:
        """Discard the previous optimizer."""
        if run.ours:
            run.rounds = 0  # (a resumed optimizer continues from the rounds it had)
            run.opt.discard()


class Cut(Resume):
    """A checkpoint of each rank after a cut, taken up by new objects."""

    def middle(self, run: Run) -> None:
        if run.ours and not run.cut(run.saved):
            return
        state = run.saved()
        schedule = None if run.schedule is None else run.schedule.state_dict()
        if run.ours:
            run.opt.discard()
        run.resumed_from(state, schedule)


class Remade(Part):
    """After a drain the optimizer is discarded and a new one made for the same model."""

    def middle(self, run: Run) -> None:
        run.drain()
        if run.ours:
            run.rounds += run.opt.rounds
            run.opt.discard()
        run.make_optimizer()


class Zeroed(Part):
    """``zero_grad()`` and a drain, then a backward pass and a step of another, plain optimizer of the same model."""

    discards = False

    def middle(self, run: Run) -> None:
        run.opt.zero_grad()
        run.drain()
        if run.ours and self.discards:
            run.rounds += run.opt.rounds
            run.opt.discard()
        other = torch.optim.SGD(run.net.second.parameters(), lr=0.05)
        other.zero_grad()
        inputs = torch.ones(2, 3, dtype=run.net.first.weight.dtype)
        run.net.eval()  # (the same on all ranks)
        run.net(inputs).square().mean().backward()
        run.net.train()
        if not run.arm.mixes:  # (there ranks' statistics, and so their steps, would differ)
            other.step()
        for parameter in run.net.parameters():
            parameter.grad = None
        if self.discards:
            run.make_optimizer()


class ZeroedAndDiscarded(Zeroed):
    """The same after ``discard()``."""

    discards = True


class AnotherPart(Part):
    """The second layer is another, plain optimizer's, as in adversarial training: on rank 0's data, the same on all."""

    def before(self, run: Run) -> None:
        other = torch.optim.SGD(run.net.second.parameters(), lr=0.05)
        hidden = torch.full((2, 4), 0.3, dtype=run.net.first.weight.dtype)
        other.zero_grad()
        (run.net.second(hidden) - 1.0).square().mean().backward()
        other.step()
        for parameter in run.net.second.parameters():
            parameter.grad = None


class ChannelsLast(Part):
    """Weights in another memory format, which they keep, as gradients do that hooks see."""

    def begin(self, run: Run) -> None:
        run.opt.register_step_pre_hook(lambda *_: self.compare(run))

    def compare(self, run: Run) -> None:
        """Report another format."""
        weight = run.net.first.weight
        tensors = [weight] if weight.grad is None else [weight, weight.grad]
        if not all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors):
            run.report("weights and gradients keep their memory format: they do not")


LEVELS: Mapping[str, Mapping[str, Callable[[], Part]]] = {
    "optimizer": dict.fromkeys(OPTIMIZERS, Part),
    "weights": {
        "clamp-hook": Clamp,
        "clamp-between": ClampBetween,
        "unit-norm": UnitNorm,
        "prune": Prune,
        "decay-before": DecayBefore,
        "reading": Reading,
    },
    "averages": {"hook": AverageInHook, "loop": AverageInLoop, "swapped": Swapped, "lookahead": Lookahead},
    "gradients": {
        "clip": ClipNorm,
        "synchronize": Shown,
        "synchronize-write": ShownAndWritten,
        "transform-write": TransformThatWrites,
        "synchronize-touch": ShownAndTouched,
    },
    "training": {
        "freeze": Freeze,
        "freeze-at-drain": FreezeAtDrain,
        **dict.fromkeys(["unused", "unused-on-a-rank"], Part),  # (see ``Run.with_gain``)
        "another-part": AnotherPart,
    },
    "rate": {name: functools.partial(Schedule, make) for name, make in SCHEDULES.items()} | {"by-hand": ByHand},
    "buffers": dict.fromkeys(["norm", *BUFFERS_OF, "reassigned"], Part),
    "dtype": dict.fromkeys(["float64", "bfloat16"], Part),
    "memory": {"convolution": Part, "channels-last": ChannelsLast},
    **{factor: dict.fromkeys(levels, Part) for factor, levels in CONNECTED.items()},
    "looks": {
        "drain": Drain,
        "drain-inference": DrainInInference,
        "drain-first": Early,
        "consensus": Consensus,
        "consensus-inference": ConsensusInInference,
        "ends-inference": EndsInInference,
    },
    "middle": {
        "resume": Resume,
        "cut": Cut,
        "remade": Remade,
        "zeroed": Zeroed,
        "zeroed-discarded": ZeroedAndDiscarded,
        "switch": Switch,
        "elastic": Part,
    },
}
"""By factor and level."""


IDLE: Mapping[str, Mapping[str, str]] = {
    "weights": {"reading": "none"},
    "averages": {"hook": "none", "loop": "none"},
    "gradients": {"synchronize-touch": "none"},
    "buffers": dict.fromkeys([*BUFFERS_OF, "reassigned"], "norm"),
    "memory": {"channels-last": "convolution"},
    "set": {"set": "none"},
    "looks": {"drain-inference": "drain", "consensus-inference": "consensus"},
}
"""Levels that change no weights, and the level that does as much."""


def equivalent(cell: Cell) -> Cell:
    """Return a cell whose ranks' weights are the same: without what changes none, or with the same change elsewhere."""
    levels = {factor: IDLE.get(factor, {}).get(level, level) for factor, level in cell.levels.items()}
    if cell["travel"] != "none":  # (elements in another order are rounded with others)
        levels["memory"] = cell["memory"]
    writes = levels.get("gradients") in ("transform-write", "synchronize-write")
    if writes and cell["weights"] == "none" and ARMS[cell.arm].eager:
        levels |= {"gradients": "none", "weights": "decay-before"}
    return Cell(cell.binding, cell.arm, {factor: levels[factor] for factor in LEVELS if factor in levels})


def allowed(levels: Mapping[str, str]) -> bool:
    """Return whether levels may meet (those of "arm" among them) in a cell that runs to its end."""
    arm: Arm | None = ARMS.get(levels.get("arm", ""))
    optimizer, dtype = levels.get("optimizer"), levels.get("dtype")
    training, buffers = levels.get("training"), levels.get("buffers")
    if not connects(levels):
        return False
    if arm is not None:
        if arm.late and levels.get("weights") == "clamp-between":
            return False  # (of ranks that have seen other rounds: a limit, see docs/limits.md)
        if dtype == "bfloat16" and not arm.eager:
            return False  # (refused)
        if optimizer in ("sgd", "adam", "adamw", "counting") and arm.options.get("quasi_global"):
            return False  # (refused)
        if arm.own and arm.plain and buffers not in (None, "none"):
            return False  # (each rank's batch norm sees its own batch)
        if training == "unused-on-a-rank" and not (arm.own and arm.ranks > 1):
            return False
        if arm.late and levels.get("middle") == "elastic" and levels.get("averages") == "lookahead":
            return False  # (a rank that is behind takes over weights, but not what its hook has counted)
    if buffers == "expanded" and (
        levels.get("averages") in ("hook", "loop", "swapped") or levels.get("middle") in ("resume", "cut")
    ):
        return False  # (torch itself cannot write it)
    weights, gradients = levels.get("weights"), levels.get("gradients")
    if weights == "unit-norm" and levels.get("averages") == "lookahead":
        return False  # (whose averages have another norm)
    if weights == "reading" and gradients in ("synchronize-write", "transform-write"):
        return False  # (who writes weights before the hook)
    return not (optimizer == "counting" and levels.get("rate") == "one-cycle")  # (no momentum to cycle)
