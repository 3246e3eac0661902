"""What ``EagerOptimizer`` adds to the class of the torch optimizer it wraps: stepping, rounds, the ends."""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvd_async.algorithms.eager.gradient_format import ReducedRound
from hvd_async.algorithms.eager.worker import EagerWorker
from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers.eager import EagerWrapped
from hvd_async.runtime.compatibility import STATE
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.messages import Hyper
from hvd_async.torch import hyperparameters
from hvd_async.torch.base import TorchWrapped, refuse_a_step_for_state
from hvd_async.torch.bucket_layout import memory_order
from hvd_async.torch.compression import make_wire
from hvd_async.torch.settings import Settings
from hvd_async.torch.streams import bind_training_stream
from hvd_async.torch.tensors import checksum, consensus_distance, signature, take_over, unify_buffers

SCALING = ("grad_scale", "found_inf")
"""The attributes in which a GradScaler tells ``step()`` what it knows."""


class EagerMixin(EagerWrapped, TorchWrapped):
    """Methods of a wrapped torch optimizer."""

    _async: Settings
    _step_supports_amp_scaling = True
    """So that a GradScaler always calls ``step()``: an overflow is a step too, and says so in attributes."""

    # -- stepping ---------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. From here to ``step()`` gradients are handed over while backward still computes others.

        Raises:
            ReplicaStateError: between backward() and step(), when gradients are on their way.
        """
        state = self._async
        if state.overlap is not None:
            state.overlap.disarm()
            if (met := state.met) is not None:
                bind_training_stream(met.engine, state.layout.parameters)
                state.overlap.arm(met.gone)
                state.watch.clear()
        super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand over the gradients, wait for this step's round, apply every round that is waiting.

        Args:
            closure: evaluated once, before the gradients are handed over.

        Returns:
            The closure's value, None without one.

        Raises:
            ReplicaMismatchError: at the first step, if the ranks' weights or settings differ.
            ReplicaStateError: a gradient was changed after it had been handed over.
            FloatingPointError: a gradient is not finite, and ``nonfinite="raise"``.
            HorovodInternalError: Horovod failed, or a rank is lost (the message names it).
        """
        refuse_a_step_for_state()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state = self._async
        with self._async_scaling_hidden() as (grad_scale, overflow):
            if state.skip:
                self._async_step_shown()
                return loss
            if state.shown is not None:
                raise ReplicaStateError(
                    "step() after synchronize() would hand over the round that is in p.grad once more: write "
                    "`with optimizer.skip_synchronize(): optimizer.step()`"
                )
            worker, vectors = self._async_left(grad_scale, overflow)
            worker.step(vectors, self._async_hyper(), self._async_apply)
            state.watch.clear()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch's step hooks run in the wrapped class's step, once a round

    @contextlib.contextmanager
    def _async_scaling_hidden(self) -> Iterator[tuple[torch.Tensor | None, bool]]:
        """What a GradScaler has put into attributes: (scale of the gradients or None, overflow?). Meanwhile the wrapped
        optimizer must not see it: fused ones would unscale rounds, which are unscaled, and skip them.

        Raises:
            ReplicaStateError: the scaler and ``scaler=`` do not fit together.
        """
        scaler = self._async.scaler
        mine: dict[str, Any] = {name: vars(self).pop(name) for name in SCALING if name in vars(self)}
        try:
            if mine and scaler is None:
                raise ReplicaStateError(
                    "a GradScaler steps this optimizer, which does not know it: pass scaler=scaler to EagerOptimizer, "
                    "so that gradients are unscaled before other ranks see them"
                )
            if not mine and scaler is not None and scaler.is_enabled():
                raise ReplicaStateError(
                    "this optimizer was wrapped with scaler=, so its gradients are scaled: call scaler.step(optimizer) "
                    "and scaler.update() in place of optimizer.step()"
                )
            yield mine.get("grad_scale"), bool(mine.get("found_inf", False))
        finally:
            vars(self).update(mine)

    def synchronize(self) -> None:
        """Hand over the gradients and put one round's average into every ``p.grad``, for user code to change.

        Follow it by ``with optimizer.skip_synchronize(): optimizer.step()``. The rank then takes one round a step;
        ``round_transform=`` does the same without holding it back.

        A round that is shown and not followed by a step is left out: do so on all ranks alike. A rank that drains
        before others have shown all of their rounds takes over the weights of one that has.
        """
        state = self._async
        if state.scaler is not None and state.scaler.is_enabled():
            raise ReplicaStateError(
                "synchronize() cannot know how a GradScaler has scaled the gradients: do what you do after it in "
                "round_transform=, and call scaler.step(optimizer)"
            )
        worker, vectors = self._async_left(None, False)
        rounds = worker.finish_step(vectors, self._async_hyper(), 1)
        state.watch.clear()
        state.one_by_one, state.unshown, state.shown = True, 0, None
        super().zero_grad(set_to_none=True)
        for round_ in rounds:
            with worker.applying(round_):
                state.shown = round_
                if round_.gradients:
                    self._async_show(round_)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make ``step()`` apply what ``synchronize()`` has put into p.grad."""
        self._async.skip = True
        try:
            yield
        finally:
            self._async.skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes a step has from now on, as in Horovod."""
        self._async.passes = passes
        if self._async.overlap is not None:
            self._async.overlap.passes = passes

    def _async_step_shown(self) -> None:
        state = self._async
        if state.shown is None:
            raise ReplicaStateError("skip_synchronize() without synchronize(): there is no round to apply")
        worker = self._async_worker()
        with worker.whole(f"round {state.shown.index} could not be applied"):
            shown, state.shown = state.shown, None
            if shown.gradients:
                self._async_update(shown.hyper)
            state.stepped += 1
            worker.shown = state.stepped

    # -- gradients out ----------------------------------------------------------------------------------------

    def _async_left(
        self, grad_scale: torch.Tensor | None, overflow: bool
    ) -> tuple[EagerWorker, dict[int, torch.Tensor | None]]:
        """What is left of this step's gradients, by bucket, for the worker; that too."""
        state = self._async
        worker = self._async_worker()
        if state.overlap is not None:
            state.overlap.disarm()
        try:
            state.watch.check(worker.gone, lambda index: state.vector(index, state.before))
        except ReplicaStateError as error:
            worker.whole.broken = str(error)  # half of the step is on its way
            raise
        scale = state.before if grad_scale is None else state.before / grad_scale
        left = [index for index in range(len(state.layout)) if index not in worker.gone]
        return worker, {i: None if overflow else state.finite(i, state.vector(i, scale)) for i in left}

    def _async_bucket_ready(self, index: int) -> None:
        """A backward hook: all gradients of a bucket are there."""
        state = self._async
        assert state.worker is not None
        vector = state.vector(index, state.before)
        state.watch.handed(index, vector)
        state.worker.hand_over(index, state.finite(index, vector))

    # -- rounds in --------------------------------------------------------------------------------------------

    def _async_show(self, round_: ReducedRound) -> None:
        """Put a round's average into every ``p.grad``."""
        frozen = hyperparameters.frozen(self.param_groups, round_.hyper)
        sparse = issubclass(self._wrapped_class, torch.optim.SparseAdam)
        self._async.layout.set_gradients(round_, self._async.after, frozen, sparse)

    def _async_apply(self, round_: ReducedRound) -> None:
        """Apply one round: its average gradient, its hyperparameters. Leaves p.grad as it was."""
        state = self._async
        state.unshown += 1
        if round_.gradients == 0:
            return  # nothing in it; momentum and decay must not move the weights
        parameters = self._async_parameters()
        own = [p.grad for p in parameters]
        try:
            self._async_show(round_)
            if state.round_transform is not None:
                state.round_transform([p for p in parameters if p.grad is not None])
            self._async_update(round_.hyper)
        finally:
            for parameter, gradient in zip(parameters, own, strict=True):
                parameter.grad = gradient

    def _async_update(self, hyper: Hyper) -> None:
        own = hyperparameters.read(self.param_groups)
        if own == hyper:
            self._wrapped_class.step(self)
            return
        hyperparameters.write(self.param_groups, hyper)
        written = hyperparameters.read(self.param_groups)  # (a tensor may have rounded it)
        try:
            self._wrapped_class.step(self)
        finally:
            hyperparameters.put_back(self.param_groups, own, written)

    # -- the rest of the interface ----------------------------------------------------------------------------

    def consensus_distance(self) -> float:
        """Root mean square distance of the ranks' weights from their mean (0: identical). A collective."""
        return consensus_distance(self._async_worker(), self._async_parameters())

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under "hvd_async" what this rank has pending.

        After ``drain()`` rank 0's is complete and resumes at any number of ranks; after ``cut()`` each rank's is its
        own share, for as many ranks.

        Raises:
            ReplicaStateError: gradients are on their way.
        """
        layout = self._async.layout
        return {**super().state_dict(), "hvd_async": {**self._async_share(layout.nbytes), "orders": layout.orders}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back a state, also a plain optimizer's; on every rank, before the first step or after a ``drain()``.

        Raises:
            ValueError: the state has gradients pending that this rank cannot take back; the message says how many.
            ReplicaStateError: gradients of this run are on their way.
        """
        state_dict = dict(state_dict)
        share = state_dict.pop("hvd_async", None)
        if share is not None:
            self._async_lay_out_if_new()
            layout = self._async.layout
            self._async_take_share(layout.placed(share), layout.nbytes)
        super().load_state_dict(state_dict)

    def _async_worker(self) -> EagerWorker:
        worker: EagerWorker = super()._async_worker()
        bind_training_stream(worker.engine, self._async_parameters())
        return worker

    def _async_new_worker(
        self, engine: Engine, finish: Callable[[bool], None], apply: Callable[[ReducedRound], None]
    ) -> EagerWorker:
        self._async_lay_out()  # groups may have been added since the wrapper was made
        state = self._async
        config = state.config_for(state.layout.nbytes)
        wire = make_wire(state.layout, state.compression, state.slots, state.sharers)
        bind_training_stream(engine, state.layout.parameters)
        return EagerWorker(engine, config, wire, finish, apply, state.checks.emptied)

    def _async_lay_out_if_new(self) -> None:
        if self._async.worker is None:
            self._async_lay_out()

    def _async_lay_out(self) -> None:
        self._async.lay_out(self._async_parameters(), self._async_bucket_ready)

    def _async_fingerprint(self) -> tuple[list[str], list[int]]:
        parameters = self._async_parameters()
        every = self._async.names(parameters)
        names = [f"{signature(every[id(p)], p)} {memory_order(p)}".rstrip() for p in parameters]
        sizes = [len(group["params"]) for group in self.param_groups]
        place = {id(p): index for index, p in enumerate(parameters)}
        members = [[place[id(p)] for p in bucket.parameters] for bucket in self._async.layout.buckets]
        buckets = f"{len(members)} buckets ({zlib.crc32(str(members).encode()):08x})"
        kind = (
            f"optimizer {self._wrapped_class.__name__} with groups of {sizes}, {buckets}, "
            f"factors {self._async.before} and {self._async.after}"
        )
        held = [
            (f"{STATE}{key} of {name}", checksum(value))
            for p, name in zip(parameters, names, strict=True)
            for key, value in self.state.get(p, {}).items()
            if isinstance(value, torch.Tensor)
        ]
        return (
            [kind, *names, *(name for name, _ in held)],
            [0, *(checksum(p) for p in parameters), *(value for _, value in held)],
        )

    def _async_hyper(self) -> Hyper:
        return hyperparameters.read(self.param_groups)

    def _async_finish(self, worker: EagerWorker, flush: bool) -> None:
        state = self._async
        left, state.unshown, state.shown, state.stepped = state.unshown, 0, None, 0
        instead = (
            "pass what you do between synchronize() and step() as round_transform=, so that it runs on every round"
        )
        if worker.mend is not None:
            self._async_take_over(worker, worker.mend)
            warnings.warn(
                f"ranks had different numbers of steps with synchronize(), so all take over the weights of rank "
                f"{worker.mend}, which had most: {instead} of every rank",
                stacklevel=6,
            )
        elif left and state.one_by_one and state.round_transform is None:
            warnings.warn(f"drain() applied {left} round(s) that synchronize() never showed: {instead}", stacklevel=6)
        passed = 0 if state.overlap is None else state.overlap.passed
        if flush and passed:
            warnings.warn(
                f"drain(): {passed} backward pass(es) short of a step of {state.passes} (backward_passes_per_step) "
                f"stay in p.grad: they go with the next step, unless zero_grad() comes first",
                stacklevel=6,
            )
        if flush and state.buffer_policy != "local" and state.named_buffers:
            policy, root = state.buffer_policy, state.sharers.ranks[0]
            unify_buffers(worker, state.named_buffers, policy, root)
        if flush:
            self._async_check_replicas(worker)

    def _async_take_over(self, worker: EagerWorker, rank: int) -> None:
        """Take over a rank's weights and optimizer state. A collective."""
        parameters = self._async_parameters()
        held = [v for p in parameters for v in self.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
        take_over(worker, [*parameters, *held], rank)
