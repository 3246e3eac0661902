"""The wrappers for torch: ``EagerOptimizer``, ``GossipOptimizer`` and ``LeaderOptimizer``.

Before them is what they share: which optimizers cannot be wrapped, and how the others are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from hvd_async.algorithms.option import option, takes
from hvd_async.optimizers import factories
from hvd_async.optimizers.driver import derived, made_by
from hvd_async.optimizers.factories import Binding, HorovodArguments
from hvd_async.optimizers.methods import OptimizerMethods
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.torch import shared_models
from hvd_async.torch.collectives import LIFECYCLE
from hvd_async.torch.eager_methods import EagerMethods, TorchEagerDriver
from hvd_async.torch.gradient_format import Compression, differentiable
from hvd_async.torch.gradient_replica import GradientReplica, RoundTransform
from hvd_async.torch.horovod_api import hvd
from hvd_async.torch.methods import GossipMethods, LeaderMethods
from hvd_async.torch.tensors import NamedBuffers, Pairs
from hvd_async.torch.weight_replica import WeightReplica

# -- Horovod's arguments -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TorchArguments(HorovodArguments):
    """Arguments of ``horovod.torch.DistributedOptimizer``, and the option of all wrappers for torch."""

    optimizer: torch.optim.Optimizer
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None
    compression: Any = Compression.none
    backward_passes_per_step: int = 1
    op: Any = hvd.Average
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: Any = None
    sparse_as_dense: bool = False
    process_set: Any = hvd.global_process_set
    _: KW_ONLY
    named_buffers: Pairs | Callable[[], Pairs] | None = option(
        None,
        "the model, ``model.named_buffers`` or ``model.named_buffers()``, so that batch-norm statistics and other "
        "buffers agree, looked up again each time; or pairs (name, tensor), taken as they are",
        before="buffers",
    )


# -- what can be wrapped, and how --------------------------------------------------------------------------------------


BINDING = Binding(hvd, LIFECYCLE, Compression)


def check_optimizer(optimizer: Any, wrapper: str) -> None:
    """Check that an optimizer can be wrapped.

    Args:
        optimizer: as the user gave it.
        wrapper: name of the factory, for hints.

    Raises:
        ValueError: it cannot be wrapped.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer must be a torch optimizer, got {type(optimizer).__name__}. Pass one, as in "
            f"{wrapper}(torch.optim.SGD(model.parameters(), lr=0.1))"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates its closure several times a step, and ranks meet once a step: use another optimizer"
        )
    if callable(getattr(optimizer, "first_step", None)) and callable(getattr(optimizer, "second_step", None)):
        kind = type(optimizer).__name__
        raise ValueError(
            f"{kind} steps in two halves, first_step() and second_step(), and ranks meet in step(): wrap its base "
            f"optimizer, as in {kind}(model.parameters(), lambda groups, **options: "
            f"{wrapper}(torch.optim.SGD(groups, **options)), lr=0.1), and drain that"
        )
    if isinstance(optimizer, OptimizerMethods) or hasattr(optimizer, "_allreduce_grad_async"):
        raise ValueError("this optimizer averages over ranks already: wrap the plain one")
    for kind in (one.__name__ for one in type(optimizer).__mro__):
        if kind in shared_models.OPTIMIZERS:
            raise ValueError(
                f"{kind} {shared_models.OPTIMIZERS[kind]}, and {wrapper} needs all of a step on each rank: wrap the "
                f"optimizer that it was made of, as in {wrapper}(torch.optim.AdamW(model.parameters()))"
            )


def wrap(optimizer: torch.optim.Optimizer, methods: type[OptimizerMethods], model: Iterable[torch.Tensor]) -> Any:
    """Return an optimizer with the same content, of a class that has these methods too; ``model`` is its parameters."""
    wrapped = derived(optimizer, methods)
    shared_models.watch(wrapped, model)
    vars(wrapped).pop("step", None)  # (an earlier scheduler's wrapper, which would bypass ours)
    vars(optimizer)["_opt_called"] = True  # (the scheduler looks here, and would warn that no step was taken)
    return wrapped


def names_of(given: TorchArguments, wrapper: str) -> tuple[dict[int, str] | None, list[torch.Tensor]]:
    """Return names by the parameters' id, of an optimizer that can be wrapped, None if the user gave none; and all
    parameters of the optimizer and of the names.

    Args:
        given: a factory's arguments.
        wrapper: its name.

    Raises:
        ValueError: as ``check_optimizer``; torch itself shares the model between ranks; or ``named_parameters`` has
            something else than pairs, repeats a name, or leaves a parameter out.
    """
    check_optimizer(given.optimizer, wrapper)
    parameters = [p for group in given.optimizer.param_groups for p in group["params"]]
    if (cause := shared_models.cause(parameters, wrapper)) is not None:
        raise ValueError(cause)
    named = given.named_parameters
    if named is None:
        return None, parameters
    pairs = list(named) if isinstance(named, Iterable) else [named]  # (a model is not)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("named_parameters must be pairs (name, parameter): pass model.named_parameters()")
    names = {id(parameter): name for name, parameter in pairs}
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("named_parameters repeats a name: names must be unique")
    missing = sum(id(parameter) not in names for parameter in parameters if differentiable(parameter))
    if missing:
        raise ValueError(f"named_parameters leaves out {missing} of the optimizer's {len(parameters)} parameters")
    return names, [*parameters, *(p for _, p in pairs if isinstance(p, torch.Tensor))]


OWN_GRADIENTS = {
    "round_transform": "a rank steps by its own gradients, so clip gradients before step(), as with a plain optimizer",
    "scaler": "a rank steps by its own gradients, so use the GradScaler as with a plain optimizer",
}
"""Advice for keywords that only ``EagerOptimizer`` takes."""


# -- partial allreduce -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EagerArguments(factories.EagerArguments, TorchArguments):
    """Arguments of ``EagerOptimizer``."""

    scaler: Any = option(
        None,
        "the ``torch.amp.GradScaler`` that scales the loss; then ``scaler.step(optimizer)`` steps, gradients are "
        "unscaled before others see them, and an overflow counts as a step without gradient",
        before="nonfinite",
    )
    round_transform: RoundTransform | None = option(
        None,
        "called with the parameters whose ``p.grad`` holds a round's average, before it is applied; for gradient "
        "clipping and the like: ``lambda ps: torch.nn.utils.clip_grad_norm_(ps, 1.0)``",
        before="named_buffers",
    )


@takes(EagerArguments)
def EagerOptimizer(given: EagerArguments) -> Any:  # noqa: N802  a factory named like a class, as Horovod's
    """Wrap a torch optimizer so that its gradients are averaged by partial allreduce (eager-SGD, PPoPP 2020).

    Round t: every rank contributes what it has pending, ``r = (1/P) sum_i pending_i``, and applies ``x <- U(x, r)``;
    a rank that is late contributes nothing now, and its gradient is in the next round. Constructing it does not
    communicate.

    Args:
        optimizer: any torch optimizer whose step needs one gradient (not LBFGS). It is not changed; the result shares
            its parameter groups and state and replaces it.
        named_parameters: ``model.named_parameters()``; names appear in error messages.
        compression: of gradients in flight: ``hvd.Compression.none``, ``fp16``, ``bf16`` (summed in float32), or a
            class with ``compress(tensor)`` and ``decompress(tensor, ctx)``, ``ctx`` depending on the dtype alone.
            Pending gradients stay float32.
        backward_passes_per_step: number of backward() calls before step(); gradients add up, as in Horovod.
        op: ``hvd.Average`` or ``hvd.Sum``, over the ranks.
        gradient_predivide_factor: divide by it before the sum and multiply by it afterwards (with Average).
        groups: lists of parameters that travel together, or the number of groups of all parameters; ``num_groups`` is
            Horovod's older name for the latter. Parameters in no list are split by ``bucket_cap_mb``.
        sparse_as_dense: no effect: sparse gradients always travel as dense tensors; SparseAdam gets them back sparse,
            without the rows that are zero.
        process_set: the ranks to average over. Every rank of the job wraps the optimizer with it: those outside step
            alone.
        Own options: see ``EagerArguments``.

    Returns:
        An instance of the wrapped optimizer's class (schedulers, ``state_dict`` and so on work) with the methods of
        ``EagerMethods``.

    Raises:
        ValueError: an argument is invalid; the message gives the valid ones.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    (names, model), buffers = names_of(given, "EagerOptimizer"), NamedBuffers(given.named_buffers)

    def replica(checked: EagerArguments, rank_group: RankGroup, factors: tuple[float, float]) -> GradientReplica:
        scaler = checked.scaler
        if scaler is not None and not callable(getattr(scaler, "is_enabled", None)):
            raise ValueError(f"scaler must be the torch.amp.GradScaler that scales the loss, got {scaler!r}")
        return GradientReplica(rank_group, checked, factors, names, buffers)

    driver = made_by(lambda: factories.eager_driver(BINDING, given, replica, TorchEagerDriver))
    return driver.attach(wrap(given.optimizer, EagerMethods, model))


# -- gossip ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GossipArguments(factories.GossipArguments, TorchArguments):
    """Arguments of ``GossipOptimizer``."""


@takes(GossipArguments, OWN_GRADIENTS)
def GossipOptimizer(given: GossipArguments) -> Any:  # noqa: N802  a factory named like a class, as Horovod's
    """Wrap a torch optimizer so that each rank steps alone and mixes its weights with its neighbours'.

    Gradients and the optimizer's state stay on their rank; after each local step weights travel, to a few ranks and not
    to all. Constructing it does not communicate.

    Args:
        optimizer: any torch optimizer (not LBFGS). It is not changed; the result shares its parameter groups and state
            and replaces it.
        named_parameters: ``model.named_parameters()``; names appear in error messages.
        compression: how messages travel: ``hvd.Compression.none``, ``fp16``, ``bf16``, or ``int8``: 8-bit differences
            to the neighbour's estimate (CHOCO-SGD, Koloskova et al., 2019), of local, slowmo and diloco to the anchor.
            The sender keeps the compression error and adds it to a later message.
        backward_passes_per_step: number of backward() calls before step(); gradients add up.
        op: ``hvd.Average``.
        gradient_predivide_factor: of gradients that travel; refused here.
        num_groups: likewise.
        groups: likewise.
        sparse_as_dense: no effect: gradients do not travel.
        process_set: the ranks that gossip. Every rank of the job wraps the optimizer with it: those outside step
            alone.
        Own options: see ``GossipArguments``.

    Returns:
        An instance of the wrapped optimizer's class (schedulers, ``state_dict`` and so on work) with the methods of
        ``GossipMethods``.

    Raises:
        ValueError: an argument is invalid; the message gives the valid ones.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    (names, model), buffers = names_of(given, "GossipOptimizer"), NamedBuffers(given.named_buffers)
    driver = made_by(lambda: factories.gossip_driver(BINDING, given, lambda _: WeightReplica(names, buffers)))
    return driver.attach(wrap(given.optimizer, GossipMethods, model))


# -- leaders -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LeaderArguments(factories.LeaderArguments, TorchArguments):
    """Arguments of ``LeaderOptimizer``."""


@takes(LeaderArguments, OWN_GRADIENTS)
def LeaderOptimizer(given: LeaderArguments) -> Any:  # noqa: N802  a factory named like a class, as Horovod's
    """Wrap a torch optimizer so that each rank trains alone and is pulled towards a leader, or a center.

    Gradients and the optimizer's state stay on their rank. Constructing it does not communicate.

    Args:
        optimizer: any torch optimizer (not LBFGS). It is not changed; the result shares its parameter groups and state
            and replaces it.
        named_parameters: ``model.named_parameters()``; names appear in error messages.
        compression: of gradients that travel; refused here, as are ``gradient_predivide_factor``, ``num_groups`` and
            ``groups``.
        backward_passes_per_step: number of backward() calls before step(); gradients add up.
        op: ``hvd.Average``.
        sparse_as_dense: no effect: gradients do not travel.
        process_set: the ranks that share it. Every rank of the job wraps the optimizer with it: those outside step
            alone.
        Own options: see ``LeaderArguments``.

    Returns:
        An instance of the wrapped optimizer's class with the methods of ``LeaderMethods``.

    Raises:
        ValueError: an argument is invalid; the message gives the valid ones.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    (names, model), buffers = names_of(given, "LeaderOptimizer"), NamedBuffers(given.named_buffers)
    driver = made_by(lambda: factories.leader_driver(BINDING, given, lambda _: WeightReplica(names, buffers)))
    return driver.attach(wrap(given.optimizer, LeaderMethods, model))
