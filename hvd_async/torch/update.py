"""An update by the wrapped torch optimizer: torch's step hooks around it, and its extrapolation."""

from __future__ import annotations

import contextlib
import operator
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


# -- extrapolation -----------------------------------------------------------------------------------------------------


LEADS = "hvd_async_leads"
"""Key of ``state_dict()`` for the leads, by parameter in the order of the groups; None for a parameter without one."""


class _Alike:
    """Parameters with the same device, dtype and factor that are updated together.

    Attributes:
        factor: of their updates.
        parameters: in any order.
        leads: lead of each; None before its first.
        before: buffer of the shape of each: during a step, its weights before the update.
        have_state: whether the optimizer is known to have state for all of them.
    """

    def __init__(self, factor: float) -> None:
        self.factor, self.have_state = factor, False
        self.parameters: list[torch.Tensor] = []
        self.leads: list[torch.Tensor | None] = []
        self.before: list[torch.Tensor] = []

    def add(self, parameter: torch.Tensor, lead: torch.Tensor | None) -> None:
        """Add a parameter."""
        self.parameters.append(parameter)
        self.leads.append(lead)
        self.before.append(torch.empty_like(parameter))

    def extend(self, state: Mapping[torch.Tensor, Any]) -> None:
        """Extend the updates that have been made since ``before`` was filled.

        Args:
            state: of the wrapped optimizer. (A parameter without state has no momentum, and is not extended.)
        """
        if self.have_state:
            places = list(range(len(self.parameters)))
        else:
            places = [place for place, p in enumerate(self.parameters) if state.get(p)]
            self.have_state = len(places) == len(self.parameters)
        if not places:
            return
        parameters, before = [self.parameters[i] for i in places], [self.before[i] for i in places]
        leads = [torch.zeros_like(self.parameters[i]) if (own := self.leads[i]) is None else own for i in places]
        torch._foreach_sub_(before, parameters)
        torch._foreach_mul_(before, -self.factor)  # now the new leads
        torch._foreach_sub_(leads, before)  # now the old ones less these
        torch._foreach_sub_(parameters, leads)
        for place, lead, spare in zip(places, before, leads, strict=True):
            self.leads[place], self.before[place] = lead, spare


class Extrapolation:
    """The extrapolated updates of one optimizer.

    A parameter that a step does not move keeps its lead.

    Args:
        rounds: rounds to look ahead; 0: updates stay as they are, and the next one forgets the leads. May be set at any
            time.
    """

    def __init__(self, rounds: float = 0.0) -> None:
        self.rounds = rounds
        self._alike: list[_Alike] = []
        self._resting: dict[torch.Tensor, torch.Tensor] = {}
        """Leads of parameters that the last step did not move."""
        self._moved: list[torch.Tensor] = []
        """Parameters that the last step moved."""
        self._factors: list[float] = []
        """The factor of each group in the last step."""

    @property
    def leads(self) -> dict[torch.Tensor, torch.Tensor]:
        """By how much each parameter is ahead of its updates. Leads are state of the optimizer, but not in its
        ``state``, where wrapped optimizers and tools expect only their own entries."""
        pairs = (pair for alike in self._alike for pair in zip(alike.parameters, alike.leads, strict=True))
        return {**self._resting, **{p: lead for p, lead in pairs if lead is not None}}

    @leads.setter
    def leads(self, leads: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._resting, self._alike, self._moved = dict(leads), [], []

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
        if not self.rounds and (self._alike or self._resting):
            self.leads = {}
        if self.rounds:
            self._find_moved(optimizer)
            with torch.no_grad():
                for alike in self._alike:
                    torch._foreach_copy_(alike.before, alike.parameters)
        yield
        if self._alike:
            with torch.no_grad():
                for alike in self._alike:
                    alike.extend(optimizer.state)

    def _find_moved(self, optimizer: torch.optim.Optimizer) -> None:
        """Group the parameters that the step is about to move, unless they are those of the last step."""
        groups = optimizer.param_groups
        factors = [factor(momentum_of(group), self.rounds) for group in groups]
        moved = [p for group in groups for p in group["params"] if p.grad is not None]
        known = len(moved) == len(self._moved) and all(map(operator.is_, moved, self._moved))
        if known and factors == self._factors:
            return
        leads, alike = self.leads, dict[tuple[Any, ...], _Alike]()
        for group, ahead in zip(groups, factors, strict=True):
            for p in group["params"]:
                if p.grad is not None and (ahead or p in leads):
                    key = ahead, p.device, p.dtype
                    alike.setdefault(key, _Alike(ahead)).add(p, leads.pop(p, None))
        self._alike, self._resting, self._moved, self._factors = list(alike.values()), leads, moved, factors
