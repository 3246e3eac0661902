"""``EagerOptimizer`` for torch: partial allreduce in place of Horovod's ``DistributedOptimizer``."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import horovod.torch as hvd
import torch

from hvd_async import activation
from hvd_async.eager import EagerWorker, Round, Stats
from hvd_async.events import EagerConfig, Hyper
from hvd_async.lifecycle import local_engine
from hvd_async.options import check_eager_options, refuse
from hvd_async.torch import hyper as hyperparameters
from hvd_async.torch.buffers import BufferPolicy, Layout, checksum, consensus_distance, signature, unify_buffers
from hvd_async.torch.collectives import LIFECYCLE, world_size

RoundTransform = Callable[[Sequence[torch.Tensor]], object]


class _Settings:
    """What the wrapper was given, and what it keeps between calls; one object, so that it cannot clash with torch's."""

    def __init__(self, config: EagerConfig, names: list[str], layout: Layout, **options: Any) -> None:
        self.config, self.names, self.layout = config, names, layout
        self.sparse_as_dense: bool = options["sparse_as_dense"]
        self.round_transform: RoundTransform | None = options["round_transform"]
        self.named_buffers: list[tuple[str, torch.Tensor]] = options["named_buffers"]
        self.buffer_policy: str = options["buffers"]
        self.engine = local_engine()
        self.worker: EagerWorker | None = None
        self.shown: Round | None = None
        """The round that ``synchronize()`` has put into p.grad and no step has applied yet."""
        self.skip = self.one_by_one = False


class EagerMixin(torch.optim.Optimizer):
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
        if state.shown is not None or state.skip:
            if not state.skip:
                warnings.warn(
                    "step() after synchronize(): wrap it in `with optimizer.skip_synchronize():`", stacklevel=2
                )
            self._apply_shown()
            return loss
        vectors = state.layout.gradients(state.sparse_as_dense)
        for round_ in self._worker().step(vectors, hyperparameters.read(self.param_groups)):
            self._apply(round_)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch's step hooks run in the wrapped class's step, once a round

    def synchronize(self) -> None:
        """Hand over the gradients and put one round's average into every ``p.grad``, for user code to change.

        Follow it by ``with optimizer.skip_synchronize(): optimizer.step()``. The rank then takes one round a step;
        ``round_transform=`` does the same without holding it back.
        """
        state = self._eager
        vectors = state.layout.gradients(state.sparse_as_dense)
        self._apply_shown()  # shown before, but no step() followed: a round must not be lost
        rounds = self._worker().step(vectors, hyperparameters.read(self.param_groups), most=1)
        state.one_by_one = True
        state.shown = rounds[0] if rounds else None
        if state.shown is not None and state.shown.gradients:
            state.layout.set_gradients(state.shown.sums, 1.0 / self._worker().engine.size)
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

    def _apply_shown(self) -> None:
        """Apply the round that ``synchronize()`` has put into p.grad, if no step has done so yet."""
        shown, self._eager.shown = self._eager.shown, None
        if shown is not None and shown.gradients:
            self._update(shown.hyper)

    def _apply(self, round_: Round) -> None:
        """Apply one round: its average gradient, its hyperparameters. Leaves p.grad as it was."""
        if round_.gradients == 0:
            return  # nothing in it; momentum and decay must not move the weights
        state = self._eager
        parameters = [p for group in self.param_groups for p in group["params"]]
        own = [p.grad for p in parameters]
        state.layout.set_gradients(round_.sums, 1.0 / self._worker().engine.size)
        if state.round_transform is not None:
            state.round_transform([p for p in parameters if p.grad is not None])
        self._update(round_.hyper)
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

    def drain(self) -> int:
        """Say "I am done", apply what comes until every rank is done, and check that no gradient was lost.

        Afterwards every gradient is applied everywhere, the replicas are identical, and buffers agree by the
        ``buffers=`` policy. A collective: every rank calls it equally often, also a rank that had no batch.

        Returns:
            The rank that was last to be done.

        Raises:
            GradientLossError: gradients produced and applied differ.
        """
        state, left = self._eager, 0

        def apply(round_: Round) -> None:
            nonlocal left
            left += 1
            self._apply(round_)

        worker = self._worker()
        self._apply_shown()
        worker.drain(apply)
        if left and state.one_by_one and state.round_transform is None:
            warnings.warn(
                f"drain() applied {left} round(s) that synchronize() never showed: pass what you do between "
                f"synchronize() and step() as round_transform=, so that it runs on every round",
                stacklevel=2,
            )
        if state.buffer_policy != "local" and state.named_buffers:
            unify_buffers(worker.engine, state.named_buffers, state.buffer_policy)
        return worker.last_done

    def stats(self) -> Stats:
        """What this rank's optimizer has done so far."""
        worker = self._eager.worker
        return Stats() if worker is None else worker.stats()

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """In it the model holds the network's average (here: all are equal after a ``drain()``). A collective."""
        self.drain()
        yield

    def consensus_distance(self) -> float:
        """Root mean square distance of the ranks' weights from their mean (0: identical). A collective."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return consensus_distance(self._worker().engine, parameters)

    def _worker(self) -> EagerWorker:
        """This optimizer's worker; the first call, and the first after a shutdown(), meets the other ranks."""
        state = self._eager
        if state.worker is None or state.worker.engine.stopped:
            engine = state.engine or LIFECYCLE.engine()
            reference = weakref.ref(self)

            def finish() -> None:
                optimizer = reference()
                if optimizer is not None:
                    optimizer.drain()
                elif state.worker is not None:
                    state.worker.drain(lambda _: None)  # nobody holds its weights any more; the others still wait

            state.worker = EagerWorker(engine, state.config, state.layout.zeros, finish)
            parameters = [p for group in self.param_groups for p in group["params"]]
            names = [signature(name, p) for name, p in zip(state.names, parameters, strict=True)]
            state.worker.open(names, [checksum(p) for p in parameters])
        return state.worker


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
    size = world_size()
    check_eager_options(quorum, max_staleness, grace, size)
    refuse(
        compression=(compression, hvd.Compression.none),
        backward_passes_per_step=(backward_passes_per_step, 1),
        op=(op, hvd.Average),
        gradient_predivide_factor=(gradient_predivide_factor, 1.0),
        num_groups=(num_groups, 0),
        groups=(groups, None),
        process_set=(process_set, hvd.global_process_set),
    )
    if buffers not in BufferPolicy:
        raise ValueError(f"buffers={buffers!r} is not known: take one of {', '.join(map(repr, BufferPolicy))}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates its closure several times a step, which a round cannot average: take another")
    if isinstance(optimizer, EagerMixin):
        raise ValueError("this optimizer is an EagerOptimizer already: wrap the plain one")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    layout = Layout(parameters)
    wrapped_class = type(optimizer)
    made: Any = type(wrapped_class.__name__, (EagerMixin, wrapped_class), {"_wrapped_class": wrapped_class})
    wrapped = made.__new__(made)
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__.pop("step", None)  # a scheduler made before has put its own wrapper there; it would bypass ours
    vars(optimizer)["_opt_called"] = True  # and it looks there for steps: it would warn that none was taken
    wrapped._eager = _Settings(
        EagerConfig(quorum, max_staleness, float(grace), seed, len(layout)),
        parameter_names(parameters, named_parameters),
        layout,
        sparse_as_dense=sparse_as_dense,
        round_transform=round_transform,
        named_buffers=list(named_buffers or []),
        buffers=buffers,
    )
    LIFECYCLE.add(wrapped)
    return wrapped


def parameter_names(parameters: Sequence[torch.Tensor], named: Iterable[tuple[str, torch.Tensor]] | None) -> list[str]:
    """Each parameter's name, in order.

    Raises:
        ValueError: ``named`` is no sequence of pairs, repeats a name, or leaves a parameter out.
    """
    if named is None:
        return [f"parameter {index}" for index in range(len(parameters))]
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("named_parameters wants pairs (name, parameter): pass model.named_parameters()")
    names = {id(parameter): name for name, parameter in pairs}
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("named_parameters repeats a name: names must be unique")
    missing = sum(id(parameter) not in names for parameter in parameters)
    if missing:
        raise ValueError(f"named_parameters leaves out {missing} of the optimizer's {len(parameters)} parameters")
    return [names[id(parameter)] for parameter in parameters]
