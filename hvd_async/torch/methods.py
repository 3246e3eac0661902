"""Methods that a wrapped torch optimizer's class gains, which call the driver; no state."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers import methods
from hvd_async.optimizers.local import LocalDriver
from hvd_async.runtime.nested_calls import unfinished_until_it_returns
from hvd_async.torch.collectives import EnteredOutside, outside_inference_mode
from hvd_async.torch.horovod_api import horovods_broadcast
from hvd_async.torch.hyperparameters import noting_counters
from hvd_async.torch.update import LEADS, StepHooks
from hvd_async.torch.weight_replica import WeightReplica


def refuse_a_step_for_state() -> None:
    """Refuse a ``step()`` by Horovod's own ``broadcast_optimizer_state``, which a script may have imported by name
    before this library replaced it.

    Raises:
        ReplicaStateError: it is such a step.
    """
    frame = sys._getframe(2)
    for _ in range(3):  # (a scheduler may have put a function of its own in between)
        if frame.f_code is horovods_broadcast.__code__:
            raise ReplicaStateError(
                "horovod.torch's broadcast_optimizer_state makes an optimizer's state by a step, and a step of this "
                "one is a round of all ranks. It was imported by its name before hvd_async.torch: write `from "
                "hvd_async.torch import broadcast_optimizer_state`, or call hvd.broadcast_optimizer_state"
            )
        if frame.f_back is None:
            return
        frame = frame.f_back


class OptimizerMethods(methods.OptimizerMethods, torch.optim.Optimizer):
    """Methods of every wrapped torch optimizer that differ from the plain one's."""

    _wrapped_class: ClassVar[type[torch.optim.Optimizer]]

    drain = outside_inference_mode(methods.OptimizerMethods.drain)
    cut = outside_inference_mode(methods.OptimizerMethods.cut)
    discard = outside_inference_mode(methods.OptimizerMethods.discard)
    consensus_distance = outside_inference_mode(methods.OptimizerMethods.consensus_distance)

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also a plain optimizer's; on every rank, before the first step or after a ``drain()``.

        Raises:
            ValueError: the state is another rank's, of a job of another size, or of another memory format; or has
                pending gradients that this rank cannot load (the message gives their number).
            ReplicaStateError: gradients or messages of this run are in flight.
        """
        state_dict, driver, groups = dict(state_dict), self._async, self.param_groups
        share, extra = state_dict.pop("hvd_async", None), {LEADS: state_dict.pop(LEADS, None)}
        if share is not None:
            if driver.worker is None:
                driver.replica.prepare()  # groups may have been added since the wrapper was made
            driver.take_share(driver.replica.placed(share))
        super().load_state_dict(state_dict)
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
        refuse_a_step_for_state()
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
                end = driver.end_step(before, replica.read(), replica.statistics())
                if end.statistics is not None:
                    replica.write_statistics(end.statistics)
                if end.correction is not None:
                    replica.add_to_momentum(end.correction)
                replica.write(end.weights)
            if hooks.has_post_hooks:
                hooks.run_post_hooks()
            driver.publish(replica.read() if hooks.has_post_hooks else end.weights)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # step() runs torch's step hooks itself

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing, as gradients add up in ``p.grad`` until ``step()``; for scripts written for Horovod."""

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and under "hvd_async" what this rank needs to resume.

        After ``drain()`` the state of rank 0 is complete and resumes at any number of ranks; after ``cut()`` each
        rank's state is its own share, for the same number of ranks, to be saved with the model's weights on that rank.

        Raises:
            ReplicaStateError: a step was taken since the last drain or cut.
        """
        replica: WeightReplica = self._async.replica  # type: ignore[assignment]
        return {**super().state_dict(), "hvd_async": replica.described(self._async.share())}


class GossipMethods(WeightMethods, methods.GossipMethods):
    """Methods that ``GossipOptimizer`` adds to the class of the torch optimizer it wraps."""

    switch = outside_inference_mode(methods.GossipMethods.switch)
    set_epoch = outside_inference_mode(methods.GossipMethods.set_epoch)


class LeaderMethods(WeightMethods, methods.LeaderMethods):
    """Methods that ``LeaderOptimizer`` adds to the class of the torch optimizer it wraps."""
