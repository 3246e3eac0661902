"""Methods that ``EagerOptimizer`` adds to the class of the torch optimizer it wraps; no state."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers import methods
from hvd_async.optimizers.eager import EagerDriver
from hvd_async.runtime.log import users_line
from hvd_async.runtime.nested_calls import unfinished_until_it_returns
from hvd_async.torch import shared_models
from hvd_async.torch.gradient_replica import CLIPPING, GradientReplica
from hvd_async.torch.methods import OptimizerMethods, is_for_state
from hvd_async.torch.update import make_state

SCALING = ("grad_scale", "found_inf")
"""Attributes by which a GradScaler passes its scale and overflows to ``step()``."""


class TorchEagerDriver(EagerDriver):
    """The driver of a torch ``EagerOptimizer``."""

    replica: GradientReplica


class EagerMethods(OptimizerMethods, methods.EagerMethods):
    """Methods of a wrapped torch optimizer whose ranks exchange gradients."""

    _async: TorchEagerDriver
    _step_supports_amp_scaling = True
    """Makes a GradScaler always call ``step()``, with overflows in attributes: an overflow is a step too."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None or zero. Until ``step()`` they are handed over while backward computes the others.

        Raises:
            ReplicaStateError: between backward() and step(), when gradients are in flight.
        """
        replica = self._async.replica
        replica.recorded.clear()
        replica.overlap.disarm()
        if (met := self._async.met) is not None:
            replica.bind(met.engine)
            replica.begin_step(met)
            replica.watch.clear()
        super().zero_grad(set_to_none)

    @unfinished_until_it_returns
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand over the gradients, wait for this step's round, apply every round that is waiting.

        Args:
            closure: evaluated once, before the gradients are handed over.

        Returns:
            The closure's value, None without one.

        Raises:
            ReplicaMismatchError: at the first step, if the ranks' weights or settings differ.
            ReplicaStateError: a gradient was changed after it had been handed over; or ``weighting="samples"`` and the
                samples of a backward pass were not recorded.
            FloatingPointError: a gradient is not finite, and ``nonfinite="raise"``.
            HorovodInternalError: a collective failed, or a rank is lost (the message names it).
        """
        if not self._async.replica.overlap.passed and is_for_state(self, closure):
            make_state(self)
            return None
        shared_models.stepping(self, closure is not None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        driver, replica = self._async, self._async.replica
        with _scaling_hidden(self, replica.scaler) as (grad_scale, overflow):
            if replica.skip:
                _step_shown(driver)
                return loss
            if replica.shown is not None:
                raise ReplicaStateError(
                    "step() after synchronize() would hand over the round that is in p.grad once more: write "
                    "`with optimizer.skip_synchronize(): optimizer.step()`"
                )
            worker = driver.worker_to_step()
            vectors = replica.left(worker, grad_scale, overflow)
            worker.step(vectors, replica.hyperparameters(), replica.apply)
            replica.handed_over()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch's step hooks run in the wrapped class's step, once a round

    @unfinished_until_it_returns
    def synchronize(self) -> None:
        """Hand over the gradients and put one round's average into every ``p.grad``, for user code to change.

        Follow it by ``with optimizer.skip_synchronize(): optimizer.step()``. The rank then takes one round per step;
        ``round_transform=`` does the same without this limit.

        A round that is shown and not followed by a step is dropped: do so on all ranks alike. A rank that drains before
        others have shown all of their rounds copies the weights of one that has.
        """
        driver, replica = self._async, self._async.replica
        if replica.scaler is not None and replica.scaler.is_enabled():
            raise ReplicaStateError(
                "synchronize() cannot know how a GradScaler has scaled the gradients: move the code that follows it "
                "into round_transform=, and call scaler.step(optimizer)"
            )
        worker = driver.worker_to_step()
        rounds = worker.finish_step(replica.left(worker), replica.hyperparameters(), 1)
        replica.handed_over()
        replica.one_by_one, replica.unshown, replica.shown = True, 0, None
        super().zero_grad(set_to_none=True)
        for round_ in rounds:
            with worker.applying(round_):
                replica.shown = round_
                if round_.gradients:
                    replica.show(round_)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which ``step()`` applies the round that ``synchronize()`` has put into p.grad."""
        replica = self._async.replica
        replica.skip = True
        try:
            yield
        finally:
            replica.skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per later step. Call it on all ranks, as in Horovod."""
        self._async.replica.set_passes(passes)


@contextlib.contextmanager
def _scaling_hidden(optimizer: Any, scaler: Any) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Yield the scale of the gradients and, as a number other than 0, whether they overflowed: tensors of shape (),
    which nothing reads here, since that would wait for a GPU. None without a GradScaler.

    Inside the context the wrapped optimizer does not see them: fused optimizers would unscale rounds a second time, or
    skip them.

    Raises:
        ReplicaStateError: the scaler and ``scaler=`` do not match.
    """
    mine: dict[str, Any] = {name: vars(optimizer).pop(name) for name in SCALING if name in vars(optimizer)}
    try:
        if mine and scaler is None:
            raise ReplicaStateError(
                "a GradScaler steps this optimizer, which does not know it: pass scaler=scaler to EagerOptimizer, "
                "so that gradients are unscaled before other ranks see them"
            )
        if not mine and scaler is not None and scaler.is_enabled():
            raise ReplicaStateError(
                "this optimizer was wrapped with scaler=, so its gradients are scaled: call scaler.step(optimizer) "
                "and scaler.update() instead of optimizer.step()"
            )
        if mine and mine["grad_scale"] is None:
            warnings.warn(
                f"scaler.unscale_() before step(): clipping there clips this rank's gradients, not the average of a "
                f"round. Pass {CLIPPING}, which gets unscaled averages, and leave out unscale_()",
                stacklevel=users_line(),
            )
        yield mine.get("grad_scale"), mine.get("found_inf")
    finally:
        vars(optimizer).update(mine)


def _step_shown(driver: TorchEagerDriver) -> None:
    """Take the step with the round that ``synchronize()`` has put into p.grad."""
    replica = driver.replica
    if replica.shown is None:
        raise ReplicaStateError("skip_synchronize() without synchronize(): there is no round to apply")
    worker = driver.worker_to_step()
    with worker.whole(f"round {replica.shown.index} could not be applied"):
        shown, replica.shown = replica.shown, None
        if shown.gradients:
            replica.update(shown.hyper)
        replica.stepped += 1
        worker.shown = replica.stepped
