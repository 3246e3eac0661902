"""What the wrapped torch optimizers of all algorithms have in common, and how one is wrapped."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from horovod.torch.functions import broadcast_optimizer_state as horovods_broadcast

from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers.driver import derived
from hvd_async.torch.bucket_layout import differentiable


class TorchWrapped(torch.optim.Optimizer):
    """What every wrapped torch optimizer does otherwise than the plain one."""

    _wrapped_class: ClassVar[type[torch.optim.Optimizer]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; before the first step only (torch itself calls it while an optimizer is made)."""
        state = self.__dict__.get("_async")
        if state is not None and state.worker is not None:
            raise ReplicaStateError(
                "add_param_group() after the first step: other ranks may be applying rounds without it. Add all groups "
                "before training and freeze what is not to move yet, or call shutdown() and wrap a new optimizer."
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's."""
        groups = self.param_groups
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = groups  # a scheduler that was made before the wrapper holds these very objects

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ReplicaStateError(
            "a wrapped optimizer cannot be copied or pickled, it belongs to this process's engine: save its "
            "state_dict()"
        )

    def _async_parameters(self) -> list[torch.Tensor]:
        """Those that can have a gradient: the others, of whole numbers, are left alone."""
        return [p for group in self.param_groups for p in group["params"] if differentiable(p)]


def refuse_a_step_for_state() -> None:
    """To be called in ``step()``: Horovod's own function may call it, where a script has it by name from before ours
    took its place.

    Raises:
        ReplicaStateError: it does.
    """
    frame = sys._getframe(2)
    for _ in range(3):  # (a scheduler has put a function of its own between)
        if frame.f_code is horovods_broadcast.__code__:
            raise ReplicaStateError(
                "horovod.torch's broadcast_optimizer_state makes an optimizer's state by a step, and a step of this "
                "one is a round of all ranks. It was imported by its name before hvd_async.torch: write `from "
                "hvd_async.torch import broadcast_optimizer_state`, or call hvd.broadcast_optimizer_state"
            )
        if frame.f_back is None:
            return
        frame = frame.f_back


def check_optimizer(optimizer: Any, wrapper: str) -> None:
    """Refuse what cannot be wrapped.

    Args:
        optimizer: as the user gave it.
        wrapper: what is to wrap it.

    Raises:
        ValueError: with a hint.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} is no torch optimizer: pass one, as in "
            f"{wrapper}(torch.optim.SGD(model.parameters(), lr=0.1))"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates its closure several times a step, and ranks meet once a step: take another")
    if isinstance(optimizer, TorchWrapped) or hasattr(optimizer, "_allreduce_grad_async"):
        raise ValueError("this optimizer averages over ranks already: wrap the plain one")


def wrap(optimizer: torch.optim.Optimizer, mixin: type[TorchWrapped]) -> Any:
    """An optimizer with the same content and ``mixin``'s methods."""
    wrapped = derived(optimizer, mixin)
    vars(wrapped).pop("step", None)  # a scheduler made before has put its own wrapper there; it would bypass ours
    vars(optimizer)["_opt_called"] = True  # and it looks there for steps: it would warn that none was taken
    return wrapped


def parameter_names(
    parameters: Sequence[torch.Tensor], named: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[int, str] | None:
    """Names by the parameters' id; None if ``named`` is.

    Raises:
        ValueError: ``named`` is no sequence of pairs, repeats a name, or leaves a parameter out.
    """
    if named is None:
        return None
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("named_parameters wants pairs (name, parameter): pass model.named_parameters()")
    names = {id(parameter): name for name, parameter in pairs}
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("named_parameters repeats a name: names must be unique")
    missing = sum(id(parameter) not in names for parameter in parameters if differentiable(parameter))
    if missing:
        raise ValueError(f"named_parameters leaves out {missing} of the optimizer's {len(parameters)} parameters")
    return names
