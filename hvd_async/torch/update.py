"""An update by the wrapped torch optimizer: torch's step hooks around it, and its extrapolation."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from hvd_async.algorithms.eager.extrapolation import factor, momentum_of

# -- step hooks --------------------------------------------------------------------------------------------------------


_HOOK_RUNNER = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""The code of the function that torch puts around each optimizer's ``step`` to run its hooks."""


class StepHooks:
    """The hooks of one ``step()``, run in torch's order but around the entire step, the mixing included.

    Args:
        optimizer: the wrapped optimizer.
        closure: the argument of ``step()``.

    Attributes:
        closure: the closure to evaluate; a pre hook may have replaced it.
        has_post_hooks: whether any post-step hook is registered, as of the construction.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> None:
        self._optimizer, self.closure = optimizer, closure
        self._args: tuple[Any, ...] = (optimizer,) if closure is None else (optimizer, closure)
        self._kwargs: dict[str, Any] = {}
        self.has_post_hooks = bool(self._post_hooks())

    def run_pre_hooks(self) -> None:
        """Run global hooks, then the optimizer's; each may return other ``(args, kwargs)`` of ``step()``.

        Raises:
            RuntimeError: a hook returned something else.
        """
        own = getattr(self._optimizer, "_optimizer_step_pre_hooks", {})
        for hook in chain(torch_optimizer._global_optimizer_pre_hooks.values(), own.values()):
            changed = hook(self._optimizer, self._args, self._kwargs)
            if changed is None:
                continue
            if not isinstance(changed, tuple) or len(changed) != 2:
                raise RuntimeError(
                    f"a step pre hook must return None or a tuple (args, kwargs) of step(), got {changed!r}"
                )
            self._args, self._kwargs = changed
            self.closure = self._kwargs.get("closure", self._args[1] if len(self._args) > 1 else None)
        self.has_post_hooks = bool(self._post_hooks())

    def run_update(self, wrapped_class: type[torch.optim.Optimizer]) -> None:
        """Run the wrapped class's own ``step``, without hooks."""
        drop_made_state(self._optimizer)
        step: Any = wrapped_class.step
        update = step.__wrapped__ if getattr(step, "__code__", None) is _HOOK_RUNNER else step
        own = vars(self._optimizer)
        # (a class whose step() calls its base's, which torch has hooked too, would run them inside)
        names = ["_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"]
        inner: dict[str, Any] = {name: own[name] for name in names if name in own}
        own.update({name: OrderedDict() for name in inner})
        try:
            with torch.autograd.profiler.record_function(f"Optimizer.step#{wrapped_class.__name__}.step"):
                update(self._optimizer)
        finally:
            own.update(inner)

    def run_post_hooks(self) -> None:
        """Run the optimizer's hooks, then global ones."""
        for hook in self._post_hooks():
            hook(self._optimizer, self._args, self._kwargs)

    def _post_hooks(self) -> list[Callable[..., Any]]:
        own = getattr(self._optimizer, "_optimizer_step_post_hooks", {})
        return [*own.values(), *torch_optimizer._global_optimizer_post_hooks.values()]


# -- state that is made without a step ---------------------------------------------------------------------------------


_made = weakref.WeakKeyDictionary[torch.optim.Optimizer, list[tuple[torch.Tensor, int]]]()
"""The tensors of optimizers whose state was made, and their version counters then."""


def make_state(optimizer: Any) -> None:
    """Make the state of a wrapped optimizer that has none, for a library that saves it or loads into it: the wrapped
    class takes a step at learning rates of 0, in which nothing else changes. Gradients are zeros.

    The next update drops this state if nothing was loaded into it, so that a rank which has saved continues as others.
    """
    groups = optimizer.param_groups
    before = [{key: _copied(value) for key, value in group.items() if key != "params"} for group in groups]
    for group in groups:
        if group.get("lr") is not None:
            group["lr"] = group["lr"] * 0.0
    try:
        with torch.no_grad():
            StepHooks(optimizer, None).run_update(optimizer._wrapped_class)
    finally:
        for group, entries in zip(groups, before, strict=True):
            group.update(entries)
    for own in optimizer.state.values():
        if "step" in own:
            own["step"] = own["step"] * 0
    _made[optimizer] = [(tensor, tensor._version) for tensor in _tensors_of(optimizer)]


def drop_made_state(optimizer: torch.optim.Optimizer) -> None:
    """Drop the state that ``make_state`` has made, unless something was loaded into it."""
    made = _made.pop(optimizer, None)
    if made and [(id(t), t._version) for t in _tensors_of(optimizer)] == [(id(t), version) for t, version in made]:
        optimizer.state.clear()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for own in optimizer.state.values() for value in own.values() if isinstance(value, torch.Tensor)]


# -- extrapolation -----------------------------------------------------------------------------------------------------


LEADS = "hvd_async_leads"
"""Key of ``state_dict()`` for the leads, by parameter in the order of the groups; None for a parameter without one."""


class Extrapolation:
    """The extrapolated updates of one optimizer.

    A parameter that a step does not move keeps its lead.

    Args:
        rounds: rounds to look ahead; 0: updates stay as they are, and the next one forgets the leads. May be set at any
            time.
    """

    def __init__(self, rounds: float = 0.0) -> None:
        self.rounds = rounds
        self._resting: dict[torch.Tensor, torch.Tensor] = {}
        """Leads of parameters that the last step did not move."""
        self._moved: list[torch.Tensor] = []
        """Parameters that the last step moved."""
        self._factors: list[float] = []
        """The factor of each group in the last step."""
        self._extended: list[torch.Tensor] = []
        """Parameters whose updates the last step extended; the next three lists are in their order."""
        self._scales: list[float] = []
        """Factor of the update of each, negative."""
        self._leads: list[torch.Tensor | None] = []
        """Lead of each; None before its first."""
        self._before: list[torch.Tensor] = []
        """Buffer of the shape of each: during a step, its weights before the update."""
        self._have_state = False
        """Whether the optimizer is known to have state for all of them."""

    @property
    def leads(self) -> dict[torch.Tensor, torch.Tensor]:
        """By how much each parameter is ahead of its updates. Leads are state of the optimizer, but not in its
        ``state``, where wrapped optimizers and tools expect only their own entries."""
        pairs = zip(self._extended, self._leads, strict=True)
        return {**self._resting, **{p: lead for p, lead in pairs if lead is not None}}

    @leads.setter
    def leads(self, leads: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._resting, self._moved = dict(leads), []
        self._extended, self._scales, self._leads, self._before = [], [], [], []

    def saved(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the entry of ``state_dict()`` that ``load`` takes: copies of the leads; empty if there are none."""
        leads = self.leads
        if not leads:
            return {}
        found = (leads.get(p) for group in optimizer.param_groups for p in group["params"])
        return {LEADS: [None if lead is None else lead.clone() for lead in found]}

    def load(self, optimizer: torch.optim.Optimizer, saved: Sequence[torch.Tensor | None] | None) -> None:
        """Restore the leads that ``saved`` returned; None: a state without leads."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        pairs = zip(parameters, saved or [None] * len(parameters), strict=True)
        self.leads = {p: lead.to(p, copy=True) for p, lead in pairs if lead is not None}

    @contextlib.contextmanager
    def around_update(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Extend the update that is made inside, by a step without hooks, with the hyperparameters in force."""
        if self.rounds:
            self._find_moved(optimizer)
            if self._extended:
                with torch.no_grad():
                    torch._foreach_copy_(self._before, self._extended)
        elif self._extended or self._resting:
            self.leads = {}
        yield
        if self._extended:
            with torch.no_grad():
                self._extend(optimizer.state)

    def _find_moved(self, optimizer: torch.optim.Optimizer) -> None:
        """List the parameters that the step is about to move, unless they are those of the last step."""
        groups = optimizer.param_groups
        factors = [factor(momentum_of(group), self.rounds) for group in groups]
        moved = [p for group in groups for p in group["params"] if p.grad is not None]
        known = len(moved) == len(self._moved) and all(map(operator.is_, moved, self._moved))
        if known and factors == self._factors:
            return
        self.leads = leads = self.leads
        for group, ahead in zip(groups, factors, strict=True):
            for p in group["params"]:
                if p.grad is not None and (ahead or p in leads):
                    self._extended.append(p)
                    self._scales.append(-ahead)
                    self._leads.append(self._resting.pop(p, None))
                    self._before.append(torch.empty_like(p))
        self._moved, self._factors, self._have_state = moved, factors, False

    def _extend(self, state: Mapping[torch.Tensor, Any]) -> None:
        """Extend the updates that have been made since ``_before`` was filled.

        Args:
            state: of the wrapped optimizer. (A parameter without state has no momentum, and is not extended.)
        """
        places = [i for i, p in enumerate(self._extended) if self._have_state or state.get(p)]
        self._have_state = len(places) == len(self._extended)
        if not places:
            return
        parameters, before = [self._extended[i] for i in places], [self._before[i] for i in places]
        leads = [torch.zeros_like(self._extended[i]) if (own := self._leads[i]) is None else own for i in places]
        torch._foreach_sub_(before, parameters)
        torch._foreach_mul_(before, [self._scales[i] for i in places])  # now the new leads
        torch._foreach_sub_(leads, before)  # now the old ones less these
        torch._foreach_sub_(parameters, leads)
        for place, lead, spare in zip(places, before, leads, strict=True):
            self._leads[place], self._before[place] = lead, spare
