"""Methods that a wrapped torch optimizer's class gains, which call the driver; no state."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ClassVar

import torch

from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers import methods
from hvd_async.optimizers.local import LocalDriver
from hvd_async.runtime.log import users_line
from hvd_async.runtime.nested_calls import unfinished_until_it_returns
from hvd_async.torch import shared_models, streams
from hvd_async.torch.collectives import EnteredOutside, outside_inference_mode
from hvd_async.torch.horovod_api import hvd
from hvd_async.torch.hyperparameters import PLAIN, noting_counters
from hvd_async.torch.tensors import is_plain
from hvd_async.torch.update import LEADS, StepHooks, make_state
from hvd_async.torch.weight_replica import WeightReplica

SHARE = "hvd_async"
"""Key of this library's share in ``state_dict()`` (None: it comes otherwise), and in its first parameter group for
torch.distributed.checkpoint, which keeps nothing but ``state`` and ``param_groups``."""


def own_state(optimizer: Any) -> dict[str, Any]:
    """Return this library's entries of a wrapped optimizer's ``state_dict()``."""
    replica = optimizer._async.replica
    return {SHARE: replica.described(optimizer._async.share()), **replica.extra_state()}


CHECKPOINT = "torch.distributed.checkpoint.state_dict"
STATE_MAKERS = {"_init_optim_state": CHECKPOINT, "init_state": "torch.distributed.optim.named_optimizer"}
"""Functions of torch that call ``step()`` to make an optimizer's state, with their modules."""


def _module_of(frame: FrameType) -> str | None:
    """Return the name of the module whose function a frame is of."""
    return frame.f_globals.get("__name__")


def is_for_state(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> bool:
    """Return whether a ``step()`` trains nothing: another library makes an optimizer's state by it.

    torch's ``STATE_MAKERS`` do. Any other step is one if the optimizer has no state, gradients are zeros, and so are
    the learning rates.

    Raises:
        ReplicaStateError: the caller is Horovod's own ``broadcast_optimizer_state``, which a script may have imported
            by name before this library replaced it.
    """
    frame = sys._getframe(2)
    for _ in range(4):  # (a scheduler, and torch itself, may have put a function in between)
        if frame.f_code is hvd.horovods_broadcast.__code__:
            raise ReplicaStateError(
                "horovod.torch's broadcast_optimizer_state makes an optimizer's state by a step, and a step of this "
                "one is a round of all ranks. It was imported by its name before hvd_async.torch: write `from "
                "hvd_async.torch import broadcast_optimizer_state`, or call hvd.broadcast_optimizer_state"
            )
        if frame.f_code.co_name in STATE_MAKERS and _module_of(frame) == STATE_MAKERS[frame.f_code.co_name]:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    groups = optimizer.param_groups
    rates = [group.get("lr") for group in groups]
    if closure is not None or optimizer.state or any(type(rate) not in PLAIN or rate for rate in rates):
        return False
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    return bool(gradients) and not any(gradient.is_sparse or gradient.any() for gradient in gradients)


class OptimizerMethods(methods.OptimizerMethods, torch.optim.Optimizer):
    """Methods of every wrapped torch optimizer that differ from the plain one's."""

    _wrapped_class: ClassVar[type[torch.optim.Optimizer]]

    drain = outside_inference_mode(methods.OptimizerMethods.drain)
    cut = outside_inference_mode(methods.OptimizerMethods.cut)
    consensus_distance = outside_inference_mode(methods.OptimizerMethods.consensus_distance)

    @outside_inference_mode
    def discard(self) -> None:
        """Forget the optimizer on this rank immediately: see ``OptimizerMethods``."""
        super().discard()
        shared_models.end(self)

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Return a context in which the model holds the consensus of all ranks: see ``OptimizerMethods``."""
        with EnteredOutside(super().consensus()):
            yield

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, before the first step only (torch itself calls it while an optimizer is made)."""
        driver = self.__dict__.get("_async")
        if driver is not None and driver.worker is not None:
            raise ReplicaStateError(
                "add_param_group() after the first step: other ranks may be applying rounds without it. Add all groups "
                "before training and freeze parameters that must not move yet, or call shutdown() and wrap a new one."
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and under "hvd_async" what this rank needs to resume.

        After ``drain()`` the state of rank 0 is complete and resumes at any number of ranks; after ``cut()`` each
        rank's state is its own share, for the same number of ranks, to be saved with the model's weights on that rank.

        Raises:
            ReplicaStateError: a step was taken since the last drain or cut.
        """
        state, own = super().state_dict(), own_state(self)
        caller = sys._getframe(1)
        if caller.f_code.co_name != "_get_optim_state_dict" or _module_of(caller) != CHECKPOINT:
            return {**state, **own}
        if own[SHARE].get("cut") or any(own[SHARE].get("versions", ())):
            warnings.warn(
                "after cut() each rank's state is its own, and torch.distributed.checkpoint.save() keeps one rank's: "
                "call drain() before, or save each rank's state_dict() by torch.save()",
                stacklevel=users_line(),
            )
        file = io.BytesIO()
        torch.save(own, file)
        state["param_groups"][0][SHARE] = file.getvalue()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also a plain optimizer's; on every rank, before the first step or after a ``drain()``.

        Raises:
            ValueError: the state is another rank's, of a job of another size, or of another memory format; or has
                pending gradients that this rank cannot load (the message gives their number).
            ReplicaStateError: gradients or messages of this run are in flight.
        """
        state_dict, driver, groups = _with_own_state(state_dict), self._async, self.param_groups
        if SHARE not in state_dict:
            driver.warn_of_no_share()
        share, extra = state_dict.pop(SHARE, None), {LEADS: state_dict.pop(LEADS, None)}
        if share is not None:
            if driver.worker is None:
                driver.replica.prepare()  # groups may have been added since the wrapper was made
            driver.take_share(driver.replica.placed(share))
        super().load_state_dict(state_dict)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if own := self.state.get(parameter):
                own.update([(key, _lying_as(parameter, value)) for key, value in own.items()])
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = groups  # a scheduler that was made before the wrapper holds these very objects
        driver.replica.take_extra_state(extra)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ReplicaStateError(
            "a wrapped optimizer cannot be copied or pickled, it belongs to this process's engine: save its "
            "state_dict()"
        )


def _lying_as(parameter: torch.Tensor, value: Any) -> Any:
    """Return an entry of a parameter's state, with the parameter's strides if it has its shape: fused kernels on a CPU
    do not compare these."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or not is_plain(value):
        return value
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _with_own_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state as ``state_dict()`` returns it, given that or the form for torch.distributed.checkpoint."""
    state_dict, packed = dict(state_dict), None
    groups = state_dict["param_groups"] = [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        packed = group.pop(SHARE, packed)
    own = {} if packed is None else torch.load(io.BytesIO(packed), weights_only=True, map_location="cpu")
    return {**own, **state_dict}


class WeightMethods(OptimizerMethods):
    """Methods of a wrapped torch optimizer whose ranks have weights of their own."""

    _async: LocalDriver

    @unfinished_until_it_returns
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with this rank's gradients, and let other ranks' weights move this one's.

        Gossip sends the weights to neighbours and mixes in theirs. sgp and dpsgd wait for the neighbours' messages of
        this step; osgp for messages that are ``max_staleness`` steps old; adpsgd only after ``max_local_steps`` without
        an averaging; local, slowmo and diloco for an average that is more than ``max_staleness`` steps late. Ranks that
        follow a leader do not wait.

        ``register_step_pre_hook`` hooks run first and see this rank's weights. ``register_step_post_hook`` hooks run
        last, once a step: they see, and may change, the weights that the step leaves, with other ranks' mixed in.

        Args:
            closure: evaluated once, before the step.

        Returns:
            The closure's value, None without one.

        Raises:
            ReplicaMismatchError: at the first step, if the ranks' weights or settings differ.
            ReplicaStateError: an earlier step was interrupted on this rank, or a drain, which must be called again.
            FloatingPointError: the step has made a weight NaN or infinite; it was not sent.
            HorovodInternalError: a collective failed, or a rank is lost (the message names it).
        """
        if is_for_state(self, closure):
            make_state(self)
            return None
        shared_models.stepping(self, closure is not None)
        hooks = StepHooks(self, closure)
        hooks.run_pre_hooks()
        loss = None
        if hooks.closure is not None:
            with torch.enable_grad():
                loss = hooks.closure()
        driver: LocalDriver = self._async
        replica: WeightReplica = driver.replica  # type: ignore[assignment]
        start = driver.begin_step(loss, changes_weights=hooks.has_post_hooks)
        with driver.updating():
            with torch.no_grad():
                before = replica.read() if start.needs_pre_update else None
                if start.updates:
                    with (
                        replica.scaled(start.scale, driver.lr_factor),
                        noting_counters(self.param_groups, replica.counters),
                    ):
                        hooks.run_update(self._wrapped_class)
                end = driver.end_step(before, replica.read())
                if end.correction is not None:
                    replica.add_to_momentum(end.correction)
                replica.write(end.weights)
            if hooks.has_post_hooks:
                hooks.run_post_hooks()
            driver.publish(streams.record_ready(replica.read() if hooks.has_post_hooks else end.weights))
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # step() runs torch's step hooks itself

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing, as gradients add up in ``p.grad`` until ``step()``; for scripts written for Horovod."""


class GossipMethods(WeightMethods, methods.GossipMethods):
    """Methods that ``GossipOptimizer`` adds to the class of the torch optimizer it wraps."""

    switch = outside_inference_mode(methods.GossipMethods.switch)
    set_epoch = outside_inference_mode(methods.GossipMethods.set_epoch)


class LeaderMethods(WeightMethods, methods.LeaderMethods):
    """Methods that ``LeaderOptimizer`` adds to the class of the torch optimizer it wraps."""
