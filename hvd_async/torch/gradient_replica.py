"""The torch replica of a rank whose gradients travel: gradients out by bucket, rounds in, what ranks have in common."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_async.algorithms.eager.config import EagerConfig
from hvd_async.algorithms.eager.gradient_format import ReducedRound, Tail
from hvd_async.algorithms.eager.rank import EagerWorker
from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers import eager
from hvd_async.optimizers.agreement import Buffers
from hvd_async.runtime.interfaces import RankRuntime
from hvd_async.runtime.log import users_line
from hvd_async.runtime.machine import STATE
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.runtime.protocol import Hyper
from hvd_async.torch import hyperparameters, streams
from hvd_async.torch.bucket_layout import MIB, Layout, differentiable, memory_order
from hvd_async.torch.buffers import NamedBuffers
from hvd_async.torch.compression import make_wire, slots
from hvd_async.torch.extrapolation import Extrapolation
from hvd_async.torch.gradient_watch import Watch
from hvd_async.torch.nonfinite import Checks
from hvd_async.torch.overlap import Overlap
from hvd_async.torch.step_hooks import StepHooks
from hvd_async.torch.streams import record_ready
from hvd_async.torch.tensors import checksum, flat_double, signature, take_over

RoundTransform = Callable[[Sequence[torch.Tensor]], object]
INSTEAD = "pass what you do between synchronize() and step() as round_transform=, so that it runs on every round"


class GradientReplica(eager.GradientReplica):
    """Parameters, their buckets and the wrapped torch optimizer that applies rounds.

    Args:
        rank_group: the ranks that share the optimizer.
        named: parameters' names by id; None if none were given.
        config: as of ``EagerDriver``.
        options: as the user gave them.

    Attributes:
        before, after: by what a gradient is multiplied before it is handed over, and a round's sum when it is applied.
        shown: the round that ``synchronize()`` has put into p.grad, until step() applies it or the next one replaces
            it.
        unshown: rounds applied since ``synchronize()`` last showed one.
        stepped: rounds since the last drain or cut that it showed and ``step()`` applied.
        skip: whether ``step()`` is to apply what is shown.
        recorded: the samples of this step's backward passes so far.
        counters: names of entries of parameter groups that the wrapped optimizer's ``step()`` itself changes.
    """

    def __init__(
        self, rank_group: RankGroup, named: dict[int, str] | None, config: dict[str, Any], options: dict[str, Any]
    ) -> None:
        self.named, self._rank_group, self._config = named, rank_group, config
        self.layout = Layout([])
        self.tail = Tail()
        self.recorded: list[int] = []
        self.overlap: Overlap | None = None
        self.watch = Watch(self.layout)
        self.checks = Checks(len(self.layout))
        self.passes: int = options["backward_passes_per_step"]
        self._bucket_cap_mb: float = options["bucket_cap_mb"]
        self._groups: Any = options["groups"]
        self._compression: Any = options["compression"]
        self.before, self.after = options["scales"]
        self.round_transform: RoundTransform | None = options["round_transform"]
        self.scaler: Any = options["scaler"]
        self._nonfinite: str = options["nonfinite"]
        self.named_buffers: NamedBuffers = options["named_buffers"]
        self.shown: ReducedRound | None = None
        self.skip = self.one_by_one = False
        self.unshown = self.stepped = 0
        self.counters: set[str] = set()
        self.extrapolation = Extrapolation()

    def attach(self, optimizer: Any) -> None:
        """Belong to a wrapped optimizer from now on."""
        super().attach(optimizer)
        self.lay_out()

    def detach(self) -> None:
        super().detach()
        if self.overlap is not None:
            self.overlap.remove()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those that can have a gradient: the others, of whole numbers, are left alone."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if differentiable(p)]

    def bind(self, engine: RankRuntime) -> None:
        """Both threads change what the ranks exchange, so both use this one's stream."""
        if streams.bind_training_stream(engine, [bucket.parameters[0] for bucket in self.layout.buckets]):
            hyperparameters.begin_to_read(self.optimizer.param_groups)

    def continue_from(self, before: GradientReplica) -> None:
        self.take_settings(before.settings_in_force())
        self.extrapolation.leads = before.extrapolation.leads
        for parameter in self.parameters:  # (a step that was broken off has left half of its gradient there)
            parameter.grad = None

    def extra_state(self) -> dict[str, Any]:
        return self.extrapolation.saved(self.optimizer)

    def settings_in_force(self) -> dict[str, Any]:
        return {"backward_passes_per_step": self.passes, "counters": sorted(self.counters)}

    def take_settings(self, settings: dict[str, Any]) -> None:
        self.set_passes(settings["backward_passes_per_step"])
        self.counters = set(settings["counters"])

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes per step."""
        self.passes = passes
        if self.overlap is not None:
            self.overlap.passes = passes

    @property
    def open_passes(self) -> int:
        return 0 if self.overlap is None else self.overlap.passed

    # -- buckets ----------------------------------------------------------------------------------------------

    def lay_out(self) -> None:
        """Part the parameters into buckets, and hook them."""
        parameters = self.parameters
        count = slots(self._compression, parameters, self._rank_group.size, self._config["max_staleness"])
        self.tail = Tail(count, self._rank_group.index % count, self._config["weighting"] == "samples")
        self.layout = Layout(parameters, self._bucket_cap_mb * MIB, self._groups, self.tail)
        if self.overlap is not None:
            self.overlap.remove()
        # A scaled step's overflow is known at its end only; nor can what is gone be raised about.
        scaled = self.scaler is not None and self.scaler.is_enabled()
        early = not scaled and self._nonfinite == "skip"
        self.overlap = Overlap(self.layout, self.passes, early, self._bucket_ready)
        self.watch = Watch(self.layout)
        self.checks = Checks(len(self.layout))

    def new_worker(
        self,
        engine: Any,
        config: Callable[[Sequence[int]], EagerConfig],
        finish: Callable[[bool], None],
        apply: Callable[[ReducedRound], None],
    ) -> EagerWorker:
        self.lay_out()  # groups may have been added since the wrapper was made
        wire = make_wire(self.layout, self._compression, self.tail, self._rank_group)
        made = config(self.layout.nbytes)
        self.extrapolation.rounds = made.weight_prediction
        return EagerWorker(engine, made, wire, finish, apply, self.checks.emptied)

    # -- gradients out ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def left(
        self, worker: EagerWorker, grad_scale: torch.Tensor | None, overflow: bool
    ) -> dict[int, torch.Tensor | None]:
        """Return what is left of this step's gradients, by bucket, for the worker.

        Raises:
            ReplicaStateError: a gradient was changed after it had been handed over, or its samples were not recorded.
        """
        passed = 1 if self.overlap is None else max(1, self.overlap.passed)
        # (a step that ends a broken one brings no gradient)
        samples = self._samples(passed if worker.ready else 0) if self.tail.weighted else None
        if self.overlap is not None:
            self.overlap.disarm()
        try:
            self.watch.check(worker.gone, lambda index: self.layout.vector(index, self.before, samples))
        except ReplicaStateError as error:
            worker.whole.broken = str(error)  # half of the step is on its way
            raise
        scale = self.before if grad_scale is None else self.before / grad_scale
        gone = worker.gone
        left = [index for index in range(len(self.layout)) if index not in gone]
        spoilt = overflow and samples != 0  # (a scaler takes the mean of nothing, NaN, for an overflow)
        vectors = {i: None if spoilt else self._finite(i, self.layout.vector(i, scale, samples)) for i in left}
        self.checks.send()
        return vectors

    def handed_over(self) -> None:
        """All gradients of the step have been handed over."""
        self.watch.clear()
        self.recorded.clear()

    def record_samples(self, samples: int) -> None:
        """Note the samples of a backward pass that follows.

        Raises:
            ReplicaStateError: gradients of the step have left without them.
        """
        worker = self.optimizer._async.met
        if worker is not None and worker.gone:
            raise ReplicaStateError(
                "record_samples() after backward(): gradients of this step are on their way already. Call it before "
                "each backward()"
            )
        self.recorded.append(samples)

    def _samples(self, passes: int) -> int:
        """Return the samples of this step's gradient.

        Raises:
            ReplicaStateError: they were not recorded for so many backward passes.
        """
        if len(self.recorded) < passes:
            raise ReplicaStateError(
                f"weighting='samples', and the samples of {len(self.recorded)} of {passes} backward pass(es) are "
                f"recorded: call optimizer.record_samples(len(batch)) after zero_grad() and before each backward()"
            )
        return sum(self.recorded)

    def _bucket_ready(self, index: int) -> None:
        """A backward hook: all gradients of a bucket are there."""
        if torch.is_grad_enabled():  # (a backward pass with create_graph=True)
            with torch.no_grad():
                self._bucket_ready(index)
            return
        samples = self._samples(self.passes) if self.tail.weighted else None
        vector = self.layout.vector(index, self.before, samples)
        self.watch.handed(index, vector)
        self.optimizer._async.worker.hand_over(index, self._finite(index, vector))

    def _finite(self, index: int, vector: torch.Tensor) -> torch.Tensor | None:
        """Return a bucket's vector, or None if other ranks must not see it: NaN, an infinity.

        Raises:
            FloatingPointError: as None, if the user asked for it.
        """
        if streams.gpu.holds(vector) and self._nonfinite == "skip" and self._config["quorum"] == "all":
            self.checks.empty_unless_finite(index, vector)
            return record_ready(vector)
        # (elsewhere a rank has arrived when its gradients are computed, and not when they are queued)
        # One pass; the sum of very large finite numbers may be infinite too, so then look closer.
        if math.isfinite(vector.sum()) or torch.isfinite(vector).all():
            return record_ready(vector)
        if self._nonfinite == "raise":
            every = self._names(self.layout.parameters)
            names = [every[id(p)] for p in self.layout.buckets[index].parameters if not _is_finite(p.grad)]
            raise FloatingPointError(f"not finite: the gradients of {', '.join(names[:5])}")
        return None

    # -- rounds in --------------------------------------------------------------------------------------------

    def show(self, round_: ReducedRound) -> None:
        """Put a round's average into every ``p.grad``."""
        optimizer = self.optimizer
        frozen = hyperparameters.frozen(optimizer.param_groups, round_.hyper)
        sparse = issubclass(optimizer._wrapped_class, torch.optim.SparseAdam)
        with torch.no_grad():
            self.layout.set_gradients(round_, self.after, frozen, sparse)

    def apply(self, round_: ReducedRound) -> None:
        """Apply one round: its average gradient, its hyperparameters. Leaves p.grad as it was."""
        self.unshown += 1
        if round_.gradients == 0:
            return  # nothing in it; momentum and decay must not move the weights
        parameters = self.layout.parameters
        own = [p.grad for p in parameters]
        try:
            self.show(round_)
            if self.round_transform is not None:
                self.round_transform([p for p in parameters if p.grad is not None])
            self.update(round_.hyper)
        finally:
            for parameter, gradient in zip(parameters, own, strict=True):
                parameter.grad = gradient

    def update(self, hyper: Hyper) -> None:
        """Take a step of the wrapped optimizer with a round's hyperparameters."""
        optimizer = self.optimizer
        groups = optimizer.param_groups
        own, hyper = hyperparameters.read(groups, self.counters), hyperparameters.without(hyper, self.counters)
        if own == hyper:
            self._step()
            return
        hyperparameters.write(groups, hyper)
        written = hyperparameters.read(groups)  # (a tensor may have rounded it)
        try:
            self._step()
        finally:
            hyperparameters.put_back(groups, own, written)

    def _step(self) -> None:
        optimizer = self.optimizer
        hooks = StepHooks(optimizer, None)
        hooks.run_pre_hooks()
        with (
            hyperparameters.noting_counters(optimizer.param_groups, self.counters),
            self.extrapolation.around_update(optimizer),
        ):
            hooks.run_update(optimizer._wrapped_class)
        hooks.run_post_hooks()

    # -- what the ranks have in common --------------------------------------------------------------------------

    def hyperparameters(self) -> Hyper:
        return hyperparameters.read(self.optimizer.param_groups, self.counters)

    def _names(self, parameters: Sequence[torch.Tensor]) -> dict[int, str]:
        """Names by the parameters' id."""
        named = self.named or {}
        return {id(p): named.get(id(p), f"parameter {index}") for index, p in enumerate(parameters)}

    def fingerprint(self) -> tuple[list[str], list[int]]:
        optimizer, parameters = self.optimizer, self.parameters
        every = self._names(parameters)
        names = [f"{signature(every[id(p)], p)} {memory_order(p)}".rstrip() for p in parameters]
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        place = {id(p): index for index, p in enumerate(parameters)}
        members = [[place[id(p)] for p in bucket.parameters] for bucket in self.layout.buckets]
        buckets = f"{len(members)} buckets ({zlib.crc32(str(members).encode()):08x})"
        kind = (
            f"optimizer {optimizer._wrapped_class.__name__} with groups of {sizes}, {buckets}, "
            f"factors {self.before} and {self.after}"
        )
        leads = self.extrapolation.leads
        held = [
            (f"{STATE}{key} of {name}", checksum(value))
            for p, name in zip(parameters, names, strict=True)
            for key, value in [*optimizer.state.get(p, {}).items(), ("the lead", leads.get(p))]
            if isinstance(value, torch.Tensor)
        ]
        return (
            [kind, *names, *(name for name, _ in held)],
            [0, *(checksum(p) for p in parameters), *(value for _, value in held)],
        )

    def read_double(self) -> torch.Tensor:
        return flat_double(self.parameters)

    def buffers(self) -> Buffers | None:
        return self.named_buffers.buffers()

    def finish(self, worker: EagerWorker, flush: bool) -> None:
        left, self.unshown, self.shown, self.stepped = self.unshown, 0, None, 0
        if worker.mend is not None:
            self._take_over(worker, worker.mend)
            warnings.warn(
                f"ranks had different numbers of steps with synchronize(), so all take over the weights of rank "
                f"{worker.mend}, which had most: {INSTEAD} of every rank",
                stacklevel=users_line(),
            )
        elif left and self.one_by_one and self.round_transform is None:
            told = f"drain() applied {left} round(s) that synchronize() never showed: {INSTEAD}"
            warnings.warn(told, stacklevel=users_line())
        passed = 0 if self.overlap is None else self.overlap.passed
        if flush and passed:
            warnings.warn(
                f"drain(): {passed} backward pass(es) short of a step of {self.passes} (backward_passes_per_step) "
                f"stay in p.grad: they go with the next step, unless zero_grad() comes first",
                stacklevel=users_line(),
            )
        if self.overlap is not None and not passed:
            self.overlap.disarm()  # the next backward pass may be anyone's, until zero_grad() is called again

    def stop_hooks(self) -> None:
        if self.overlap is not None:
            self.overlap.remove()
            self.overlap.disarm()

    def _take_over(self, worker: EagerWorker, rank: int) -> None:
        """Take over a rank's weights and optimizer state. A collective."""
        parameters, state = self.parameters, self.optimizer.state
        held = [v for p in parameters for v in state.get(p, {}).values() if isinstance(v, torch.Tensor)]
        known = self.extrapolation.leads
        take_over(worker, [*parameters, *held, *(known[p] for p in parameters if p in known)], rank)


def _is_finite(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return True
    return bool(torch.isfinite(gradient.coalesce().values() if gradient.is_sparse else gradient).all())
