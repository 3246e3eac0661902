"""torch's step hooks around a step that is an update by the wrapped optimizer and a mixing of weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

_HOOK_RUNNER = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""The code of the function that torch puts around each optimizer's ``step`` to run its hooks."""


class StepHooks:
    """The hooks of one ``step()``, run in torch's order but around the whole step, the mixing included.

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
