"""The wrappers for torch: ``EagerOptimizer``, ``GossipOptimizer`` and ``LeaderOptimizer``.

Before them is what they share: which optimizers cannot be wrapped, and how the others are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hvd_async.algorithms.eager.config import EagerOptions
from hvd_async.algorithms.eager.quorum import Quorum
from hvd_async.algorithms.gossip.config import GossipOptions
from hvd_async.algorithms.leader.config import LeaderOptions
from hvd_async.algorithms.leader.selection import Strength
from hvd_async.algorithms.option import documented
from hvd_async.optimizers.driver import derived, made_by
from hvd_async.optimizers.factories import Binding, eager_driver, gossip_driver, leader_driver
from hvd_async.optimizers.methods import OptimizerMethods
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.torch.collectives import LIFECYCLE
from hvd_async.torch.eager_methods import EagerMethods, TorchEagerDriver
from hvd_async.torch.gradient_format import Compression, differentiable
from hvd_async.torch.gradient_replica import GradientReplica, RoundTransform
from hvd_async.torch.horovod_api import hvd
from hvd_async.torch.methods import GossipMethods, LeaderMethods
from hvd_async.torch.tensors import NamedBuffers, Pairs
from hvd_async.torch.weight_replica import WeightReplica

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


def wrap(optimizer: torch.optim.Optimizer, methods: type[OptimizerMethods]) -> Any:
    """Return an optimizer with the same content, of a class that has these methods too."""
    wrapped = derived(optimizer, methods)
    vars(wrapped).pop("step", None)  # (an earlier scheduler's wrapper, which would bypass ours)
    vars(optimizer)["_opt_called"] = True  # (the scheduler looks here, and would warn that no step was taken)
    return wrapped


def listed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a factory's arguments, with iterators read into lists.

    Raises:
        ValueError: as ``NamedBuffers``.
    """
    named, buffers = given["named_parameters"], given["named_buffers"]
    own = {"named_parameters": None if named is None else list(named), "named_buffers": NamedBuffers(buffers)}
    return {**given, **own}


def names_of(given: Mapping[str, Any], wrapper: str) -> dict[int, str] | None:
    """Return names by the parameters' id, of an optimizer that can be wrapped; None if the user gave none.

    Args:
        given: a factory's arguments.
        wrapper: its name.

    Raises:
        ValueError: as ``check_optimizer`` and ``parameter_names``.
    """
    optimizer = given["optimizer"]
    check_optimizer(optimizer, wrapper)
    return parameter_names([p for group in optimizer.param_groups for p in group["params"]], given["named_parameters"])


def weight_replica(given: Mapping[str, Any], wrapper: str, averages_statistics: bool = False) -> WeightReplica:
    """Return the replica of an optimizer whose ranks have weights of their own; raises as ``names_of``."""
    return WeightReplica(names_of(given, wrapper), given["named_buffers"], averages_statistics)


def parameter_names(
    parameters: Sequence[torch.Tensor], named: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[int, str] | None:
    """Return names by the parameters' id; None if ``named`` is.

    Raises:
        ValueError: ``named`` has something else than pairs, repeats a name, or leaves a parameter out.
    """
    if named is None:
        return None
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("named_parameters must be pairs (name, parameter): pass model.named_parameters()")
    names = {id(parameter): name for name, parameter in pairs}
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("named_parameters repeats a name: names must be unique")
    missing = sum(id(parameter) not in names for parameter in parameters if differentiable(parameter))
    if missing:
        raise ValueError(f"named_parameters leaves out {missing} of the optimizer's {len(parameters)} parameters")
    return names


# -- partial allreduce -------------------------------------------------------------------------------------------------


@documented(EagerOptions)
def EagerOptimizer(  # noqa: N802  a factory named like a class, as Horovod's
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    *,
    quorum: Quorum = "solo",
    max_staleness: int = 16,
    grace: float | str = "auto",
    weight_prediction: float | str = "auto",
    seed: int = 0,
    bucket_cap_mb: float = 25.0,
    late_cap_mb: float = 4096.0,
    pace: str = "steps",
    hierarchical: bool | int = False,
    weighting: str = "ranks",
    scaler: Any = None,
    nonfinite: str = "skip",
    round_transform: RoundTransform | None = None,
    named_buffers: Pairs | Callable[[], Pairs] | None = None,
    buffers: str = "average",
) -> Any:
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
        Own options: see ``EagerOptions``.
        scaler: the ``torch.amp.GradScaler`` that scales the loss; then ``scaler.step(optimizer)`` steps, gradients are
            unscaled before others see them, and an overflow counts as a step without gradient.
        round_transform: called with the parameters whose ``p.grad`` holds a round's average, before it is applied; for
            gradient clipping and the like: ``lambda ps: torch.nn.utils.clip_grad_norm_(ps, 1.0)``.
        named_buffers: ``model.named_buffers()``, so that ``drain()`` makes batch-norm statistics and other buffers
            agree; or the function ``model.named_buffers``, for a model that adds buffers later.

    Returns:
        An instance of the wrapped optimizer's class (schedulers, ``state_dict`` and so on work) with the methods of
        ``EagerMethods``.

    Raises:
        ValueError: an argument is invalid; the message gives the valid ones.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    given = listed(locals())  # before any other name: all arguments, and nothing else

    def replica(
        options: EagerOptions, rank_group: RankGroup, factors: tuple[float, float], groups: Any
    ) -> GradientReplica:
        if scaler is not None and not callable(getattr(scaler, "is_enabled", None)):
            raise ValueError(f"scaler must be the torch.amp.GradScaler that scales the loss, got {scaler!r}")
        own = {"scales": factors, "groups": 0 if groups is None else groups}
        return GradientReplica(rank_group, names_of(given, "EagerOptimizer"), options.config(), given | own)

    driver = made_by(lambda: eager_driver(BINDING, given, replica, TorchEagerDriver))
    return driver.attach(wrap(optimizer, EagerMethods))


# -- gossip ------------------------------------------------------------------------------------------------------------


@documented(GossipOptions)
def GossipOptimizer(  # noqa: N802  a factory named like a class, as Horovod's
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    *,
    algorithm: str = "sgp",
    topology: Any = None,
    peers: int | Mapping[int, int] = 1,
    mixing: Any = "uniform",
    max_staleness: int | None = None,
    gossip_every: int | None = None,
    hierarchical: bool | int = False,
    max_local_steps: int = 4,
    average_every: int | Mapping[int, int] = 0,
    fragments: int = 1,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    schedule: Mapping[int, str] | None = None,
    quasi_global: bool = False,
    named_buffers: Pairs | Callable[[], Pairs] | None = None,
    buffers: str = "average",
) -> Any:
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
        Own options: see ``GossipOptions``.
        named_buffers: ``model.named_buffers()``, so that ``drain()`` and ``consensus()`` make batch-norm statistics
            and other buffers agree; or the function ``model.named_buffers``, for a model that adds buffers later.

    Returns:
        An instance of the wrapped optimizer's class (schedulers, ``state_dict`` and so on work) with the methods of
        ``GossipMethods``.

    Raises:
        ValueError: an argument is invalid; the message gives the valid ones.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    given = listed(locals())  # before any other name: all arguments, and nothing else
    driver = made_by(lambda: gossip_driver(BINDING, given, lambda _: weight_replica(given, "GossipOptimizer")))
    return driver.attach(wrap(optimizer, GossipMethods))


# -- leaders -----------------------------------------------------------------------------------------------------------


@documented(LeaderOptions)
def LeaderOptimizer(  # noqa: N802  a factory named like a class, as Horovod's
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    *,
    algorithm: str = "lsgd",
    local_period: int | None = None,
    global_period: int | None = None,
    local_pull: Strength | None = None,
    global_pull: Strength | None = None,
    local_prox: Strength | None = None,
    global_prox: Strength | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    group: str | int | Sequence[Any] | None = None,
    loss_window: int | None = None,
    lr_spread: str = "none",
    named_buffers: Pairs | Callable[[], Pairs] | None = None,
    buffers: str = "average",
) -> Any:
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
        Own options: see ``LeaderOptions``.
        named_buffers: ``model.named_buffers()``, so that batch-norm statistics and other buffers agree; or the function
            ``model.named_buffers``, for a model that adds buffers later.

    Returns:
        An instance of the wrapped optimizer's class with the methods of ``LeaderMethods``.

    Raises:
        ValueError: an argument is invalid; the message gives the valid ones.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    given = listed(locals())  # before any other name: all arguments, and nothing else
    averages = buffers == "average"
    driver = made_by(
        lambda: leader_driver(BINDING, given, lambda _: weight_replica(given, "LeaderOptimizer", averages))
    )
    return driver.attach(wrap(optimizer, LeaderMethods))
