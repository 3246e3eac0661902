"""``EagerOptimizer`` for torch: partial allreduce in place of Horovod's ``DistributedOptimizer``."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import horovod.torch as hvd
import torch

from hvd_async import activation
from hvd_async.eager import EagerWorker, Round
from hvd_async.engine import Engine
from hvd_async.errors import ReplicaStateError
from hvd_async.events import EagerConfig, Hyper
from hvd_async.options import check_eager_options, refuse
from hvd_async.rounds import STATE
from hvd_async.torch import hyper as hyperparameters
from hvd_async.torch.buffers import Layout, checksum, consensus_distance, signature, unify_buffers
from hvd_async.torch.collectives import LIFECYCLE
from hvd_async.wrapping import Wrapped, WrapperState

RoundTransform = Callable[[Sequence[torch.Tensor]], object]


class _Settings(WrapperState):
    """What the wrapper was given, and what it keeps between calls."""

    def __init__(self, named: dict[int, str] | None, **options: Any) -> None:
        super().__init__(LIFECYCLE)
        self.named = named
        """Parameters' names by id; None if none were given."""
        self.layout = Layout([])
        self.trainable: list[bool] = []
        """Which parameters had requires_grad when the ranks last agreed; rounds are applied to these."""
        self.options: dict[str, Any] = options["config"]
        self.sparse_as_dense: bool = options["sparse_as_dense"]
        self.round_transform: RoundTransform | None = options["round_transform"]
        self.named_buffers: list[tuple[str, torch.Tensor]] = options["named_buffers"]
        self.buffer_policy: str = options["buffers"]
        self.shown: Round | None = None
        """The round that ``synchronize()`` has put into p.grad, until step() applies it or the next one replaces it."""
        self.skip = self.one_by_one = False


class EagerMixin(Wrapped, torch.optim.Optimizer):
    """What ``EagerOptimizer`` adds to the class of the optimizer it wraps."""

    _eager: _Settings
    _wrapped_class: ClassVar[type[torch.optim.Optimizer]]

    # -- stepping ---------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand over the gradients, wait for this step's round, apply every round that is waiting.

        Args:
            closure: evaluated once, before the gradients are handed over.

        Returns:
            The closure's value, None without one.

        Raises:
            ReplicaMismatchError: at the first step, if the ranks' weights or settings differ.
            HorovodInternalError: Horovod failed, or a rank is lost (the message names it).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state = self._eager
        if state.skip:
            self._step_shown()
            return loss
        if state.shown is not None:
            raise ReplicaStateError(
                "step() after synchronize() would hand over the round that is in p.grad once more: write "
                "`with optimizer.skip_synchronize(): optimizer.step()`"
            )
        for round_ in self._hand_over(most=None):
            self._apply(round_)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch's step hooks run in the wrapped class's step, once a round

    def synchronize(self) -> None:
        """Hand over the gradients and put one round's average into every ``p.grad``, for user code to change.

        Follow it by ``with optimizer.skip_synchronize(): optimizer.step()``. The rank then takes one round a step;
        ``round_transform=`` does the same without holding it back.

        A round that is shown and not followed by a step is left out: do so on all ranks alike.
        """
        state = self._eager
        rounds = self._hand_over(most=1)
        state.one_by_one = True
        state.shown = rounds[0] if rounds else None
        if state.shown is not None and state.shown.gradients:
            state.layout.set_gradients(state.shown.sums, 1.0 / state.size, state.trainable)
        else:
            super().zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make ``step()`` apply what ``synchronize()`` has put into p.grad."""
        self._eager.skip = True
        try:
            yield
        finally:
            self._eager.skip = False

    def _step_shown(self) -> None:
        state = self._eager
        if state.shown is None:
            raise ReplicaStateError("skip_synchronize() without synchronize(): there is no round to apply")
        shown, state.shown = state.shown, None
        if shown.gradients:
            with state.applying(shown.index):
                self._update(shown.hyper)

    def _hand_over(self, most: int | None) -> list[Round]:
        """Give this step's gradients to the worker; returns the rounds that are waiting."""
        state = self._eager
        worker = self._worker()
        if [p.requires_grad for p in self._parameters()] != state.trainable:
            raise ReplicaStateError(
                "requires_grad of a parameter has changed while rounds are on their way: call optimizer.drain() on "
                "every rank before you freeze or unfreeze parameters, and once more after it"
            )
        return worker.step(
            state.layout.gradients(state.sparse_as_dense), hyperparameters.read(self.param_groups), most=most
        )

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _apply(self, round_: Round) -> None:
        """Apply one round: its average gradient, its hyperparameters. Leaves p.grad as it was."""
        if round_.gradients == 0:
            return  # nothing in it; momentum and decay must not move the weights
        state = self._eager
        parameters = self._parameters()
        own = [p.grad for p in parameters]
        try:
            with state.applying(round_.index):
                state.layout.set_gradients(round_.sums, 1.0 / state.size, state.trainable)
                if state.round_transform is not None:
                    state.round_transform([p for p in parameters if p.grad is not None])
                self._update(round_.hyper)
        finally:
            for parameter, gradient in zip(parameters, own, strict=True):
                parameter.grad = gradient

    def _update(self, hyper: Hyper) -> None:
        own = hyperparameters.read(self.param_groups)
        if own == hyper:
            self._wrapped_class.step(self)
            return
        hyperparameters.write(self.param_groups, hyper)
        try:
            self._wrapped_class.step(self)
        finally:
            hyperparameters.write(self.param_groups, own)

    # -- the rest of the interface ----------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; before the first step only (torch itself calls it while an optimizer is made)."""
        state = self.__dict__.get("_eager")
        if state is not None and state.worker is not None:
            raise ReplicaStateError(
                "add_param_group() after the first step: other ranks may be applying rounds without it. Add all groups "
                "before training and freeze what is not to move yet, or call shutdown() and wrap a new optimizer."
            )
        super().add_param_group(param_group)

    def consensus_distance(self) -> float:
        """Root mean square distance of the ranks' weights from their mean (0: identical). A collective."""
        return consensus_distance(self._worker().engine, self._parameters())

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ReplicaStateError(
            "an EagerOptimizer cannot be copied or pickled, it belongs to this process's engine: save its state_dict()"
        )

    def _new_worker(self, engine: Engine, finish: Callable[[], None]) -> EagerWorker:
        self._lay_out()  # groups may have been added, parameters frozen, since the wrapper was made
        state = self._eager
        config = EagerConfig(**state.options, buckets=len(state.layout))
        return EagerWorker(engine, config, state.layout.zeros, finish)

    def _lay_out(self) -> None:
        parameters = self._parameters()
        self._eager.layout = Layout(parameters)
        self._eager.trainable = [p.requires_grad for p in parameters]

    def _fingerprint(self) -> tuple[list[str], list[int]]:
        parameters, named = self._parameters(), self._eager.named
        names = [
            signature(f"parameter {index}" if named is None else named.get(id(p), f"parameter {index}"), p)
            for index, p in enumerate(parameters)
        ]
        sizes = [len(group["params"]) for group in self.param_groups]
        kind = f"optimizer {self._wrapped_class.__name__} with groups of {sizes}"
        held = [
            (f"{STATE}{key} of {name}", checksum(value))
            for p, name in zip(parameters, names, strict=True)
            for key, value in self.state.get(p, {}).items()
            if isinstance(value, torch.Tensor)
        ]
        return (
            [kind, *names, *(name for name, _ in held)],
            [0, *(checksum(p) for p in parameters), *(value for _, value in held)],
        )

    def _finish(self, worker: EagerWorker) -> None:
        state, left = self._eager, 0

        def apply(round_: Round) -> None:
            nonlocal left
            left += 1
            self._apply(round_)

        state.shown = None
        worker.drain(apply)
        if left and state.one_by_one and state.round_transform is None:
            warnings.warn(
                f"drain() applied {left} round(s) that synchronize() never showed: pass what you do between "
                f"synchronize() and step() as round_transform=, so that it runs on every round",
                stacklevel=4,
            )
        state.trainable = [p.requires_grad for p in self._parameters()]
        if state.buffer_policy != "local" and state.named_buffers:
            unify_buffers(worker.engine, state.named_buffers, state.buffer_policy)


def EagerOptimizer(  # noqa: N802  a factory named like a class, as Horovod's
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = hvd.Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    *,
    quorum: activation.Quorum = "solo",
    max_staleness: int = 16,
    grace: float = 0.0,
    seed: int = 0,
    round_transform: RoundTransform | None = None,
    named_buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
    buffers: str = "average",
) -> Any:
    """Wrap a torch optimizer so that its gradients are averaged by partial allreduce (eager-SGD, PPoPP 2020).

    Round t: every rank contributes what it has pending, ``r = (1/P) sum_i pending_i``, and applies ``x <- U(x, r)``;
    a rank that is late contributes nothing now and its gradient goes with the next round. Constructing it does not
    communicate.

    Args:
        optimizer: any torch optimizer whose step needs one gradient (not LBFGS). It is not changed; what is returned
            shares its parameter groups and state and takes its place.
        named_parameters: ``model.named_parameters()``; names appear in error messages.
        compression, backward_passes_per_step, op, gradient_predivide_factor, num_groups, groups, process_set: as in
            ``hvd.DistributedOptimizer``. In this version only the defaults are accepted.
        sparse_as_dense: send sparse gradients as dense tensors.
        quorum: who must be there for a round to start: "solo" (the first rank), "majority" (a rank drawn anew each
            round), "all" (synchronous SGD), a number of ranks, or a fraction of them.
        max_staleness: rounds a gradient may be late; 0 is synchronous.
        grace: seconds to wait for more ranks once the quorum is there.
        seed: of majority's draw, the same on all ranks.
        round_transform: called with the parameters whose ``p.grad`` holds a round's average, before it is applied; for
            gradient clipping and the like: ``lambda ps: torch.nn.utils.clip_grad_norm_(ps, 1.0)``.
        named_buffers: ``model.named_buffers()``, so that ``drain()`` can make batch-norm statistics agree.
        buffers: how: "average" them, keep each rank's own ("local"), or take rank 0's ("root").

    Returns:
        An instance of the wrapped optimizer's class (schedulers, ``state_dict`` and so on work) with the methods of
        ``EagerMixin``.

    Raises:
        ValueError: an argument that cannot be; the message says what can.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    check_eager_options(quorum, max_staleness, grace, buffers, LIFECYCLE.size())
    refuse(
        compression=(compression, hvd.Compression.none),
        backward_passes_per_step=(backward_passes_per_step, 1),
        op=(op, hvd.Average),
        gradient_predivide_factor=(gradient_predivide_factor, 1.0),
        num_groups=(num_groups, 0),
        groups=(groups, None),
        process_set=(process_set, hvd.global_process_set),
    )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} is no torch optimizer: pass one, as in "
            f"EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates its closure several times a step, which a round cannot average: take another")
    if isinstance(optimizer, EagerMixin) or hasattr(optimizer, "_allreduce_grad_async"):
        raise ValueError("this optimizer averages gradients already: wrap the plain one")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    wrapped_class = type(optimizer)
    made: Any = type(wrapped_class.__name__, (EagerMixin, wrapped_class), {"_wrapped_class": wrapped_class})
    wrapped = made.__new__(made)
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__.pop("step", None)  # a scheduler made before has put its own wrapper there; it would bypass ours
    vars(optimizer)["_opt_called"] = True  # and it looks there for steps: it would warn that none was taken
    wrapped._eager = _Settings(
        parameter_names(parameters, named_parameters),
        config={"quorum": quorum, "max_staleness": max_staleness, "grace": float(grace), "seed": seed},
        sparse_as_dense=sparse_as_dense,
        round_transform=round_transform,
        named_buffers=list(named_buffers or []),
        buffers=buffers,
    )
    wrapped._lay_out()
    LIFECYCLE.add(wrapped)
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
    missing = sum(id(parameter) not in names for parameter in parameters)
    if missing:
        raise ValueError(f"named_parameters leaves out {missing} of the optimizer's {len(parameters)} parameters")
    return names
