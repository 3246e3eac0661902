"""Models that more than a wrapped optimizer trains, and models of which it trains only a part.

This library's optimizers average whole models, each on one rank. A model that torch itself shares between ranks (under
DDP, sharded by FSDP, split by tensor parallelism) is refused; one that a plain optimizer steps is worth a warning, and
so is one whose buffers each rank trains for itself.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_async.errors import NotInitializedError, ReplicaStateError
from hvd_async.runtime.lifecycle import live
from hvd_async.runtime.log import users_line
from hvd_async.torch.collectives import LIFECYCLE
from hvd_async.torch.tensors import checksum, is_plain, signature

# -- models that torch shares ------------------------------------------------------------------------------------------

AVERAGING = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Classes of modules around a model whose backward pass averages gradients over ranks, in torch and in other
packages."""
OPTIMIZERS: Mapping[str, str] = {
    "ZeroRedundancyOptimizer": "steps a part of the parameters on each rank and sends them to the others",
    "PostLocalSGDOptimizer": "averages the weights over ranks",
}
"""Optimizers of ``torch.distributed.optim`` that communicate, and what they do."""


def _kind(module: Any) -> str | None:
    """Return the name of ``AVERAGING`` that a module's class has, or inherits."""
    return next((one.__name__ for one in type(module).__mro__ if one.__name__ in AVERAGING), None)


class _Found:
    """The modules of ``AVERAGING`` in this process.

    Attributes:
        modules: the ones that are alive, by id.
        made: how many there have been, so that a step can see cheaply whether there is a new one.
    """

    def __init__(self) -> None:
        self.modules = weakref.WeakValueDictionary[int, torch.nn.Module]()
        self.made = 0

    def add(self, module: Any, name: str = "", submodule: Any = None) -> None:
        """Note a module, if it is one; torch calls this for each submodule that a module gets."""
        if _kind(module) is not None and self.modules.get(id(module)) is not module:
            self.modules[id(module)] = module
            self.made += 1


found = _Found()
register_module_module_registration_hook(found.add)
if torch.distributed.is_available() and torch.distributed.is_initialized():  # (else there is none yet)
    for each in gc.get_objects():
        if issubclass(type(each), torch.nn.Module):
            found.add(each)


def cause(parameters: Sequence[torch.Tensor], wrapper: str) -> str | None:
    """Return why the optimizer of these parameters cannot be wrapped, and what to write instead; None if it can.

    Args:
        parameters: of the optimizer.
        wrapper: name of the wrapped optimizer, for the text.
    """
    own = {id(parameter) for parameter in parameters}
    if _around(own) is not None:
        gc.collect()  # (one that was deleted may still be in a cycle)
    if (kind := _around(own)) is not None:
        return (
            f"{kind} is around this model and averages its gradients over ranks in each backward pass, which "
            f"{wrapper} is to replace: train the bare model, without `model = {kind}(model)`. Instead of no_sync() "
            f"pass backward_passes_per_step=. A {kind} that is not used any more must be deleted first"
        )
    if any(_is_distributed(parameter) for parameter in parameters):
        return (
            f"parameters are DTensors, so FSDP2 or tensor parallelism has given each rank a part of the model, and "
            f"{wrapper} needs the whole model on each rank: leave out fully_shard(), parallelize_module() or "
            f"distribute_module(), or train with torch's own optimizer"
        )
    return None


def _around(parameters: set[int]) -> str | None:
    """Return the name of ``AVERAGING`` of a module around some of these parameters, given by their ids."""
    around = (each for each in live(found.modules) if not parameters.isdisjoint(map(id, each.parameters())))
    return next((_kind(each) for each in around), None)


def check(optimizer: torch.optim.Optimizer) -> int:
    """Check a wrapped optimizer's parameters, before the first step and whenever ``found.made`` has changed since.

    Returns:
        ``found.made`` of this check.

    Raises:
        ReplicaStateError: torch itself shares the model between ranks; or has replaced its parameters.
    """
    made, parameters = found.made, [p for group in optimizer.param_groups for p in group["params"]]
    if (why := cause(parameters, "this optimizer") or _sharded(optimizer)) is not None:
        raise ReplicaStateError(why)
    return made


def _sharded(optimizer: torch.optim.Optimizer) -> str | None:
    """Return that the model was sharded after its optimizer had been made, and what to write instead; None if it was
    not."""
    lost = [place for place in _watched[optimizer].places if not place.holds()]
    modules = [module for place in lost if (module := place.module()) is not None]
    sharded = any(_is_distributed(own) for module in modules for own in module._parameters.values())
    if not sharded and not (modules and any(_kind(each) == AVERAGING[1] for each in live(found.modules))):
        return None
    return (
        "the model was sharded by FSDP or tensor parallelism after its optimizer had been made, whose parameters are "
        "no longer the model's. This optimizer needs the whole model on each rank: leave out fully_shard(), "
        "FullyShardedDataParallel(), parallelize_module() or distribute_module()"
    )


def _is_distributed(parameter: Any) -> bool:
    """Return whether a parameter is a DTensor, without an import of their modules, which takes long."""
    return any(one.__name__ == "DTensor" for one in type(parameter).__mro__)


def check_groups(optimizer: torch.optim.Optimizer, met: Sequence[torch.Tensor]) -> None:
    """Check that an optimizer's groups have the parameters with which the ranks met.

    Args:
        optimizer: the wrapped one.
        met: these parameters, in order.

    Raises:
        ReplicaStateError: they have others.
    """
    now = [p for group in optimizer.param_groups for p in group["params"]]
    if len(now) != len(met) or any(map(operator.is_not, now, met)):
        raise ReplicaStateError(
            f"the parameters in this optimizer's groups ({len(now)}) are not those with which the ranks met "
            f"({len(met)}): they were replaced, added or removed after the first step or drain(). Give the optimizer "
            f"all parameters before training and freeze some by requires_grad_(False), or call discard() on every rank "
            f"and wrap an optimizer of the new ones"
        )


# -- plain optimizers of a wrapped one's parameters --------------------------------------------------------------------

STEPS = 10
"""Steps without any gradient after which a wrapped optimizer warns; a plain one's of its own parameters."""


class _Watched:
    """Observations of one wrapped optimizer, also after it was deleted.

    Attributes:
        empty: number of its last steps without any gradient; None after the warning.
        once: plain optimizers that have stepped its parameters, once; a second step is worth a warning.
        around: plain optimizers whose step has one of the wrapped optimizer inside, such as SAM's.
        warns: whether a plain optimizer's step is still worth a warning.
        looks_at_buffers: whether its model's buffers are still to be looked at, see ``_look_at_buffers``.
        buffers: those of its model at its first step, until they were looked at.
        outside: frozen parameters of its model that it does not train.
        places: of its parameters, as far as they are known.
        known: ``_known.count`` when its parameters were looked at; None after a warning.
    """

    def __init__(self) -> None:
        self.empty: int | None = 0
        self.outside: list[torch.Tensor] = []
        self.places: list[_Place] = []
        self.known: int | None = _known.count
        self.looks_at_buffers = True
        self.buffers: list[_Buffer] = []
        self.once: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.around: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.warns = True


_watched = weakref.WeakKeyDictionary[torch.optim.Optimizer, _Watched]()
_owners: dict[int, tuple[weakref.ref[torch.Tensor], _Watched]] = {}
"""By id of a parameter; of several wrapped optimizers the last."""


def watch(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Watch a new wrapped optimizer.

    Args:
        optimizer: the wrapped one.
        parameters: its own, and others of the same model.
    """
    _watched[optimizer] = own = _Watched()
    trained = set(map(id, _parameters(optimizer)))
    own.places = [
        _Place(weakref.ref(module), name, id(held))
        for module in live(_known.modules)
        for name, held in dict(module._parameters).items()
        if id(held) in trained
    ]
    for parameter in parameters:
        if id(parameter) not in trained and not parameter.requires_grad:
            own.outside.append(parameter)
        _owners[id(parameter)] = weakref.ref(parameter, functools.partial(_forget, _owners, id(parameter))), own


def outside(optimizer: Any) -> list[tuple[str, int]]:
    """Return names and checksums of frozen parameters that were named to an optimizer and are not its own."""
    named = optimizer._async.replica.named
    plain = (p for p in _watched[optimizer].outside if not is_lazy(p) and is_plain(p))
    return [(signature(named[id(p)], p), checksum(p)) for p in plain]


def _forget(owners: dict[int, tuple[weakref.ref[torch.Tensor], _Watched]], key: int, gone: Any) -> None:
    """Forget a parameter. (Also when Python ends, and the names of modules are gone.)"""
    if key in owners and owners[key][0] is gone:
        del owners[key]


def end(optimizer: torch.optim.Optimizer) -> None:
    """Stop watching: this rank no longer trains the optimizer, and may train its parameters in another way."""
    _watched[optimizer].warns = False


def stepping(optimizer: Any, has_closure: bool) -> None:
    """Look at the begin of a wrapped optimizer's ``step()``; raises as ``check_groups``.

    Args:
        optimizer: the wrapped one.
        has_closure: whether its gradients are yet to be made.
    """
    own, driver = _watched[optimizer], optimizer._async
    if driver.worker is not None:
        check_groups(optimizer, driver.replica.met)
    if own.looks_at_buffers:
        _look_at_buffers(optimizer, own)
    if own.known is not None and own.known != _known.count:
        own.known = _known.count
        _look_for_replaced(optimizer, own)
    if own.empty is not None and not has_closure:
        known = driver.replica.met  # (nearly always its first parameter has a gradient)
        has_gradient = known and known[0].grad is not None
        own.empty = 0 if has_gradient or any(p.grad is not None for p in _parameters(optimizer)) else own.empty + 1
        if own.empty == STEPS:
            own.empty = None
            warnings.warn(
                f"{STEPS} steps, and no parameter of this optimizer has had a gradient on this rank. If the model was "
                f"made again, copied, or loaded with assign=True, make and wrap its optimizer after that",
                stacklevel=users_line(),
            )
    frame: FrameType | None = sys._getframe(1) if own.once else None
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.optim.Optimizer) and caller in own.once:
            own.around.add(caller)
        frame = frame.f_back


class _Place(NamedTuple):
    """The place of a parameter in a module when its optimizer was wrapped.

    Attributes:
        module: held weakly.
        name: of the parameter in the module.
        key: the parameter's id. (A tensor with weak references could not be swapped, as conversions do.)
    """

    module: weakref.ref[torch.nn.Module]
    name: str
    key: int

    def holds(self) -> bool:
        """Return whether the parameter is still there."""
        module = self.module()
        return module is not None and id(module._parameters.get(self.name)) == self.key


class _Known:
    """Modules of this process, by torch's registrations, without modules that were copied or unpickled. (To search
    all objects is no way: one that another thread is just making must have no further reference.)

    Attributes:
        modules: all with a registered parameter, by id: modules may compare as they like.
        count: how many parameters modules have got, so that a step can see cheaply whether there is a new one.
    """

    def __init__(self) -> None:
        self.count = 0
        self.modules = weakref.WeakValueDictionary[int, torch.nn.Module]()
        self._wholes = weakref.WeakValueDictionary[int, torch.nn.Module]()
        """The module that each module is a part of, by id; of several the last."""

    def add_parameter(self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        """Note a module that gets a parameter; torch calls this."""
        if parameter is not None:
            self.modules[id(module)] = module
            self.count += 1

    def add_part(self, module: torch.nn.Module, name: str, part: torch.nn.Module | None) -> None:
        """Note a part that a module gets; torch calls this."""
        if part is not None:
            self._wholes[id(part)] = module

    def whole(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the model that a module is a part of."""
        while (larger := self._wholes.get(id(module))) is not None and any(p is module for p in larger.children()):
            module = larger
        return module


_known = _Known()
register_module_module_registration_hook(_known.add_part)
register_module_parameter_registration_hook(_known.add_parameter)


def _look_for_replaced(optimizer: Any, own: _Watched) -> None:
    """Warn if parameters of a wrapped optimizer were replaced in the model, such as those of a layer."""
    named, every = optimizer._async.replica.named or {}, _parameters(optimizer)
    gone = {place.key for place in own.places} - {place.key for place in own.places if place.holds()}
    lost = [named.get(id(p), f"parameter {i}") for i, p in enumerate(every) if id(p) in gone]
    if lost:
        own.known = None
        warnings.warn(
            f"the model has other parameters by now instead of this optimizer's ({', '.join(lost[:5])}), and nothing "
            f"trains them. Replace layers, or load with assign=True, on every rank before the optimizer is made and "
            f"wrapped",
            stacklevel=users_line(),
        )


class _Buffer(NamedTuple):
    """A buffer of a model, as it was at one time.

    Attributes:
        model: held weakly.
        name: its name there.
        checksum: of its bytes.
    """

    model: weakref.ref[torch.nn.Module]
    name: str
    checksum: int

    def has_changed(self) -> bool:
        """Return whether the model's buffer of this name holds other bytes by now."""
        model = self.model()
        now = None if model is None else dict(model.named_buffers()).get(self.name)
        return now is not None and checksum(now) != self.checksum


def _look_at_buffers(optimizer: Any, own: _Watched) -> None:
    """Warn, on one rank, if training changes floating-point buffers of the model and no ``named_buffers`` were given.

    They are compared at the begin of the first two steps. A forward pass in training mode is between these, and hardly
    anything else: buffers that only ``load_state_dict()`` or a broadcast changes are no reason to warn.
    """
    driver = optimizer._async
    if driver.size == 1 or driver.index or driver.buffers == "local" or driver.replica.named_buffers:
        own.looks_at_buffers = False
    elif not own.buffers:
        own.buffers = _buffers_of(optimizer)
        own.looks_at_buffers = bool(own.buffers)
    else:
        changed = [one.name for one in own.buffers if one.has_changed()]
        own.buffers, own.looks_at_buffers = [], False
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            warnings.warn(
                f"training changes buffers of this model, {', '.join(changed[:3])}{more}, and each rank keeps its own: "
                f"pass named_buffers=model.named_buffers(), so that batch-norm statistics and other buffers agree "
                f"after drain(), or buffers='local' if they are to differ",
                stacklevel=users_line(),
            )


def _buffers_of(optimizer: torch.optim.Optimizer) -> list[_Buffer]:
    """Return the floating-point buffers of models that have parameters of an optimizer, as far as they are known."""
    modules = [module for place in _watched[optimizer].places if (module := place.module()) is not None]
    models = {id(model): model for model in map(_known.whole, modules)}
    return [
        _Buffer(weakref.ref(model), name, checksum(buffer))
        for model in models.values()
        for name, buffer in model.named_buffers()
        if not is_lazy(buffer) and buffer.is_floating_point() and is_plain(buffer)
    ]


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Look at a step of any optimizer, and warn if it is plain and ranks train apart."""
    if optimizer in _watched or hasattr(optimizer, "_allreduce_grad_async") or not _several():
        return  # (Horovod's own averages)
    known = (_owners[id(p)] for p in _parameters(optimizer) if id(p) in _owners)
    found = [own for reference, own in known if reference() is not None]
    if not found:
        _count_alone(optimizer)
    own = next((own for own in found if own.warns), None)
    if own is None or optimizer in own.around:
        return
    if optimizer not in own.once:
        own.once.add(optimizer)
        return
    own.warns = False
    warnings.warn(
        f"{type(optimizer).__name__}.step() of an optimizer that is not wrapped trains parameters of a model whose "
        f"optimizer is wrapped, so ranks train apart. Call step() of what EagerOptimizer(), GossipOptimizer() or "
        f"LeaderOptimizer() returned, and wrap each optimizer of the model. If this rank is to train alone, call "
        f"discard() of the wrapped one first",
        stacklevel=users_line(),
    )


_alone = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
"""Steps so far of plain optimizers whose parameters are no wrapped one's."""


def _count_alone(optimizer: torch.optim.Optimizer) -> None:
    """Count a step, and warn of the last one that is counted, if torch does not average gradients of the model."""
    count = _alone[optimizer] = _alone.get(optimizer, 0) + 1
    if count == STEPS and cause(list(_parameters(optimizer)), "") is None:
        warnings.warn(
            f"{type(optimizer).__name__} has stepped {STEPS} times and is not wrapped: unless this script averages its "
            f"gradients in another way, ranks train apart. Call step() of what EagerOptimizer(), GossipOptimizer() or "
            f"LeaderOptimizer() returns",
            stacklevel=users_line(),
        )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _several() -> bool:
    try:
        return LIFECYCLE.size() > 1
    except NotInitializedError:  # after shutdown()
        return False


register_optimizer_step_pre_hook(_before_step)
