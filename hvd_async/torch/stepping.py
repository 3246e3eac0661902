"""What ``EagerOptimizer`` adds to the class of the torch optimizer it wraps: stepping, rounds, the ends."""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvd_async.agreement import STATE
from hvd_async.eager import EagerWorker
from hvd_async.eager_wrapping import EagerWrapped
from hvd_async.engine import Engine
from hvd_async.errors import ReplicaStateError
from hvd_async.events import EagerConfig, Hyper
from hvd_async.torch import hyper as hyperparameters
from hvd_async.torch.base import TorchWrapped
from hvd_async.torch.buffers import checksum, consensus_distance, signature, unify_buffers
from hvd_async.torch.compression import make_wire
from hvd_async.torch.layout import memory_order
from hvd_async.torch.settings import Settings
from hvd_async.torch.streams import follow
from hvd_async.wire import Round

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
        if state.overlap is not None and (met := state.met) is not None:
            follow(met.engine, state.layout.parameters)
            state.overlap.arm()
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
            rounds = deque(self._async_hand_over(None, grad_scale, overflow))
            while rounds:
                self._async_apply(rounds.popleft())
            self._async_worker().release()
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

        A round that is shown and not followed by a step is left out: do so on all ranks alike.
        """
        state = self._async
        if state.scaler is not None and state.scaler.is_enabled():
            raise ReplicaStateError(
                "synchronize() cannot know how a GradScaler has scaled the gradients: do what you do after it in "
                "round_transform=, and call scaler.step(optimizer)"
            )
        rounds = self._async_hand_over(1, None, False)
        state.one_by_one, state.unshown = True, 0
        state.shown = rounds[0] if rounds else None
        if state.shown is not None and state.shown.gradients:
            self._async_show(state.shown)
        else:
            super().zero_grad(set_to_none=True)

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
        shown, state.shown = state.shown, None
        if shown.gradients:
            with state.applying(shown.index):
                self._async_update(shown.hyper)

    # -- gradients out ----------------------------------------------------------------------------------------

    def _async_hand_over(self, most: int | None, grad_scale: torch.Tensor | None, overflow: bool) -> list[Round]:
        """Give what is left of this step's gradients to the worker; returns the rounds that are waiting."""
        state = self._async
        worker = self._async_worker()
        gone: set[int] = set() if state.overlap is None else state.overlap.handed
        left = [index for index in range(len(state.layout)) if index not in gone]
        if state.overlap is not None:
            try:
                state.overlap.disarm()
            except ReplicaStateError as error:
                state.broken = str(error)  # half of the step is on its way
                raise
        scale = state.before if grad_scale is None else state.before / grad_scale
        vectors = {index: None if overflow else state.vector(index, scale) for index in left}
        return worker.step(vectors, self._async_hyper(), most)

    def _async_bucket_ready(self, index: int) -> None:
        """A backward hook: all gradients of a bucket are there."""
        state = self._async
        assert state.worker is not None
        state.worker.hand_over(index, state.vector(index, state.before))

    # -- rounds in --------------------------------------------------------------------------------------------

    def _async_show(self, round_: Round) -> None:
        """Put a round's average into every ``p.grad``."""
        frozen = hyperparameters.frozen(self.param_groups, round_.hyper)
        sparse = issubclass(self._wrapped_class, torch.optim.SparseAdam)
        self._async.layout.set_gradients(round_.sums, self._async.after, frozen, sparse)

    def _async_apply(self, round_: Round) -> None:
        """Apply one round: its average gradient, its hyperparameters. Leaves p.grad as it was."""
        state = self._async
        state.unshown += 1
        if round_.gradients == 0:
            return  # nothing in it; momentum and decay must not move the weights
        parameters = self._async_parameters()
        own = [p.grad for p in parameters]
        try:
            with state.applying(round_.index):
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
        return consensus_distance(self._async_worker().engine, self._async_parameters(), self._async.sharers)

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
        follow(worker.engine, self._async_parameters())
        return worker

    def _async_new_worker(
        self, engine: Engine, finish: Callable[[bool], None], apply: Callable[[Round], None]
    ) -> EagerWorker:
        self._async_lay_out()  # groups may have been added since the wrapper was made
        state = self._async
        config = EagerConfig(**state.config, buckets=len(state.layout))
        wire = make_wire(state.layout, state.compression, state.slots, state.sharers)
        follow(engine, state.layout.parameters)
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
        left, state.unshown, state.shown = state.unshown, 0, None
        if left and state.one_by_one and state.round_transform is None:
            warnings.warn(
                f"drain() applied {left} round(s) that synchronize() never showed: pass what you do between "
                f"synchronize() and step() as round_transform=, so that it runs on every round",
                stacklevel=6,
            )
        if flush and state.buffer_policy != "local" and state.named_buffers:
            policy, root = state.buffer_policy, state.sharers.ranks[0]
            unify_buffers(worker.engine, state.named_buffers, policy, state.sharers, root)
