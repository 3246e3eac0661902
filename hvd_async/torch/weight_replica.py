"""The torch replica of a rank with weights of its own: reads and writes them as one vector on their device."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from hvd_async.algorithms.gossip.message_format import MessageFormat
from hvd_async.optimizers import replica
from hvd_async.optimizers.agreement import Buffers
from hvd_async.runtime.interfaces import RankRuntime
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.torch import streams
from hvd_async.torch.bucket_layout import differentiable
from hvd_async.torch.buffers import NamedBuffers, write
from hvd_async.torch.memory import ReusedMemory
from hvd_async.torch.message_format import make_message_format
from hvd_async.torch.tensors import checksum, flat_double, signature
from hvd_async.torch.weight_vectors import WeightVectors, orders_of

MESSAGES_KEPT = 4
"""Encoded messages whose memory is kept for the next step."""
Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]
MIXED = {torch.float32, torch.float64}
"""Dtypes of weights whose mixing loses nothing."""


class WeightReplica(replica.WeightReplica):
    """Weights, batch-norm statistics and learning rates of a wrapped torch optimizer.

    Args:
        named: parameters' names by id; None if none were given.
        named_buffers: buffers that are to agree after a drain.
        averages_statistics: whether pulls average them.

    Attributes:
        counters: names of entries of parameter groups that the wrapped optimizer's ``step()`` itself changes.
    """

    def __init__(
        self, named: dict[int, str] | None, named_buffers: NamedBuffers, averages_statistics: bool = False
    ) -> None:
        self.named, self.named_buffers = named, named_buffers
        self._averages_statistics = averages_statistics
        self._averaged: dict[str, int] = {}
        """Elements of the statistics that pulls average, by key: known when a worker is made, the same until the next
        is, since all ranks' vectors must have one length."""
        self._read_statistics: Callable[[], list[torch.Tensor | None]] = list
        self._statistic_kinds: list[Kind] = []
        """Shapes, dtypes and devices of the statistics that pulls average, if all have one dtype and device."""
        self._memory = ReusedMemory(most=MESSAGES_KEPT)
        self._orders: dict[int, str] = {}
        """``memory_order`` of each parameter by its id when the optimizer was wrapped. It never changes, even if the
        parameter's does: checkpoints and averages hold vectors in this order."""
        self._vectors = WeightVectors([], torch.float32, [])
        self._elements: list[int] = []
        """Elements of each parameter group that are mixed."""
        self.counters: set[str] = set()

    def continue_from(self, before: WeightReplica) -> None:
        self.counters, self._orders = before.counters, before._orders
        self.prepare()

    def attach(self, optimizer: Any) -> None:
        """Belong to a wrapped optimizer from now on.

        Raises:
            ValueError: its weights cannot be mixed.
        """
        super().attach(optimizer)
        self.prepare()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that are mixed; ranks keep their own values of other, frozen ones. (Steps read this several
        times, so it makes no call for parameters of a mixed dtype.)"""
        return [
            p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.dtype in MIXED or (p.requires_grad and differentiable(p))
        ]

    def bind(self, engine: RankRuntime) -> None:
        """Both threads change what the ranks exchange, so both use this one's stream."""
        mixed = (p for group in self.optimizer.param_groups for p in group["params"] if p.dtype in MIXED)
        streams.bind_training_stream(engine, itertools.islice(mixed, 1))  # (all are on one device)

    # -- weights ----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        kind, parameters = self._dtype(), self.parameters
        if self._averages_statistics:
            held = self.named_buffers.statistics()
            self._averaged = {key: tensor.numel() for key, tensor in held.items()}
            self._read_statistics = self.named_buffers.reader([*held])
            kinds = _kinds([*held.values()])
            self._statistic_kinds = kinds if len({kind[1:] for kind in kinds}) == 1 else []
        devices = {str(p.device) for p in parameters}
        if len(devices) > 1:
            raise ValueError(
                f"parameters on {', '.join(sorted(devices))}: ranks' weights travel as one vector: keep them on one"
            )
        self._orders = orders_of(parameters, self._orders)
        self._vectors = WeightVectors(parameters, kind, [self._orders[id(p)] for p in parameters])
        mixed = set(self._orders)
        groups = self.optimizer.param_groups
        self._elements = [sum(p.numel() for p in group["params"] if id(p) in mixed) for group in groups]

    def check(self) -> None:
        """Refuse parameters whose mixing would lose what they learn: one may have been unfrozen.

        Raises:
            ValueError: mixing would lose what they learn, or their dtypes have changed since the ranks met.
        """
        if [p.dtype for p in self.parameters] == self._vectors.dtypes:
            return
        kind, before = self._dtype(), self._vectors.dtype
        if kind != before:
            raise ValueError(
                f"weights travel as {before}, and parameters have become {kind} since the ranks met: convert the model "
                f"before it trains"
            )

    def _dtype(self) -> torch.dtype:
        """Return that of the vector of weights.

        Raises:
            ValueError: mixing would lose what a parameter learns.
        """
        kinds = {p.dtype for p in self.parameters}
        if kinds <= MIXED:
            return torch.float64 if torch.float64 in kinds else torch.float32
        other = ", ".join(sorted(str(kind) for kind in kinds - MIXED))
        raise ValueError(
            f"a parameter of dtype {other} cannot be mixed without losing what it learns: keep weights in float32 and "
            f"compute in half precision by torch.autocast; compression= makes messages small"
        )

    def read(self) -> torch.Tensor:
        return self._vectors.read(self.parameters)

    def write(self, weights: torch.Tensor) -> None:
        self._vectors.write(self.parameters, weights)

    @contextlib.contextmanager
    def scaled(self, factor: float) -> Iterator[None]:
        """Multiply the weights by ``factor`` inside the context, and divide them by it at the end, also after an
        error."""
        if factor == 1.0:
            yield
            return
        torch._foreach_mul_(self.parameters, factor)
        try:
            yield
        finally:
            torch._foreach_mul_(self.parameters, 1.0 / factor)

    def fingerprint(self, resumed: bool) -> tuple[list[str], list[int]]:
        parameters, named = self.parameters, self.named or {}
        signatures = [signature(named.get(id(p), f"parameter {i}"), p) for i, p in enumerate(parameters)]
        names = [f"{own} {order}".rstrip() for own, order in zip(signatures, self._vectors.orders, strict=True)]
        kind = f"optimizer {self.optimizer._wrapped_class.__name__}{', weights as after cut()' if resumed else ''}"
        kinds = [kind]
        if self._averages_statistics:
            kinds = [f"{sum(self._averaged.values())} batch-norm statistics of named_buffers", kind]
        return [*kinds, *names], [0] * len(kinds) + [0 if resumed else checksum(p) for p in parameters]

    def message_format(
        self, compression: str, rank_group: RankGroup, parts: int, messages: int, plain: int, received: int
    ) -> MessageFormat:
        return make_message_format(
            self.read(), compression, messages, rank_group, parts, self._memory, received, plain, self._vectors.empty
        )

    def is_finite(self, weights: torch.Tensor) -> bool:
        # (one pass; the sum of very large finite numbers may be infinite too, so then look closer)
        return math.isfinite(weights.sum()) or bool(torch.isfinite(weights).all())

    def describe_nonfinite(self) -> str:
        named = self.named or {}
        bad = [(i, p) for i, p in enumerate(self.parameters) if not torch.isfinite(p).all()]
        names = ", ".join(named.get(id(p), f"parameter {i}") for i, p in bad[:5])
        return (
            f"this rank's step has made weights NaN or infinite ({names}), which would spread to all ranks; nothing "
            f"was sent. Lower the learning rate, clip gradients, or step by a torch.amp.GradScaler"
        )

    def read_double(self) -> torch.Tensor:
        return flat_double(self.parameters)

    # -- beside the weights -----------------------------------------------------------------------------------

    def learning_rates(self) -> list[tuple[int, Any]]:
        rates = [group.get("lr") for group in self.optimizer.param_groups]
        return [(n, _number_of(rate)) for n, rate in zip(self._elements, rates, strict=True)]

    def sizes(self) -> list[int]:
        return self._vectors.sizes

    def described(self, share: dict[str, Any]) -> dict[str, Any]:
        """Return a rank's share of a checkpoint, with the memory orders of its vectors unless all are contiguous, as in
        older versions."""
        return {**share, "orders": self._vectors.orders} if any(self._vectors.orders) else share

    def placed(self, share: dict[str, Any]) -> dict[str, Any]:
        """Return a share made by ``described``, with its vectors on the device of the weights.

        Raises:
            ValueError: its vectors have another memory order than this model's.
        """
        copies, orders = share.get("copies", {}), self._vectors.orders
        if copies and share.get("orders", [""] * len(orders)) != orders:
            raise ValueError(
                "this state has vectors of parameters that lie in memory otherwise than this model's: bring the model "
                "into the memory format of then (without channels_last it is torch.contiguous_format), wrap the "
                "optimizer, and only then bring the model into the format that you like"
            )
        device = self.parameters[0].device
        return {**share, "copies": {name: copy.to(device) for name, copy in copies.items()}}

    def frozen(self) -> list[slice]:
        sizes = self._vectors.sizes
        pairs = zip(self.parameters, sizes, itertools.accumulate(sizes), strict=True)
        return [slice(end - n, end) for p, n, end in pairs if not p.requires_grad and n]

    def check_momentum(self) -> None:
        groups = self.optimizer.param_groups
        if not isinstance(self.optimizer, torch.optim.SGD) or not all(group["momentum"] > 0 for group in groups):
            raise ValueError(
                f"quasi_global corrects the momentum of torch.optim.SGD, and {self.optimizer._wrapped_class.__name__} "
                f"has none: pass an SGD with momentum=0.9 or the like, or leave quasi_global out"
            )

    def _momenta(self) -> list[torch.Tensor | None]:
        """Return each parameter's momentum; None where there was no gradient yet."""
        return [self.optimizer.state.get(p, {}).get("momentum_buffer") for p in self.parameters]

    @torch.no_grad()
    def momentum(self) -> torch.Tensor:
        pairs = zip(self.parameters, self._momenta(), strict=True)
        return self._vectors.read([torch.zeros_like(p) if own is None else own for p, own in pairs])

    @torch.no_grad()
    def write_momentum(self, momentum: torch.Tensor) -> None:
        for p, own, part in self._with_parts(momentum):
            if own is None:  # (SGD's next step makes the same of zeros as of none, but for its dampening)
                self.optimizer.state[p]["momentum_buffer"] = own = torch.zeros_like(p)
            own.copy_(part)

    @torch.no_grad()
    def add_to_momentum(self, correction: torch.Tensor) -> None:
        """Add a vector to the momentum of parameters that had a gradient in this step. (The momentum of others does not
        decay: what is added step by step would pile up.)"""
        pairs = [(own, part) for p, own, part in self._with_parts(correction) if own is not None and p.grad is not None]
        if pairs:
            torch._foreach_add_(*map(list, zip(*pairs, strict=True)))

    def _with_parts(self, vector: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """Return each parameter, its momentum, and its part of a vector."""
        return list(zip(self.parameters, self._momenta(), self._vectors.parts(vector), strict=True))

    def buffers(self) -> Buffers | None:
        return self.named_buffers.buffers()

    def keep_buffers(self) -> Callable[[], None]:
        return self.named_buffers.keep()

    @torch.no_grad()
    def statistics(self) -> Callable[[], torch.Tensor] | None:
        if not self._averaged:
            return None
        sizes, device = [*self._averaged.values()], self._vectors.device
        present = [tensor for tensor in self._read_statistics() if tensor is not None]
        if present and _kinds(present) == self._statistic_kinds:
            own = torch.cat([tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in present])
        else:  # (a statistic that is gone, or has another shape, counts as not finite)
            held = self.named_buffers.statistics()
            known = [
                t.reshape(-1) if t is not None and t.numel() == n else torch.full((n,), torch.nan)
                for t, n in zip(map(held.get, self._averaged), sizes, strict=True)
            ]
            own = torch.cat([t.to(device, torch.float64) for t in known])
        return functools.partial(_with_flags, own, sizes, device)

    @torch.no_grad()
    def write_statistics(self, averaged: torch.Tensor) -> None:
        """Write the batch-norm statistics that a pull has brought; those that it has not stay what they are.

        Args:
            averaged: as of ``statistics``, shape (2 m,).
        """
        held = self.named_buffers.statistics()
        values, known = (half.split(list(self._averaged.values())) for half in averaged.view(2, -1))
        for (key, n), part, known_part in zip(self._averaged.items(), values, known, strict=True):
            tensor = held.get(key)
            if tensor is not None and tensor.numel() == n:
                own = tensor.detach().reshape(-1).double()
                write(tensor, torch.where(known_part > 0, part, own.to(part.device)).view(tensor.shape))

    def clip(self, vector: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.clamp(vector, torch.minimum(one, other), torch.maximum(one, other))

    def number(self, loss: Any) -> Any:
        if not isinstance(loss, torch.Tensor):
            return loss
        if loss.numel() != 1:
            raise ValueError(f"record_loss() takes one number, and this is a tensor of shape {tuple(loss.shape)}")
        loss = loss.detach().reshape(())
        return streams.Later(loss) if streams.gpu.holds(loss) else loss

    @contextlib.contextmanager
    def learning_rates_times(self, factor: float) -> Iterator[None]:
        """In it the optimizer has this rank's learning rates; schedulers see those that all ranks have."""
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


def _kinds(tensors: Sequence[torch.Tensor]) -> list[Kind]:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


@torch.no_grad()
def _with_flags(values: torch.Tensor, sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return batch-norm statistics as of ``WeightReplica.statistics``; ``sizes`` of their buffers."""
    own, counts = values.to(device, torch.float64), torch.tensor(sizes, device=device)
    place = torch.repeat_interleave(torch.arange(len(counts), device=device), counts, output_size=len(own))
    spoilt = own.new_zeros(len(counts)).index_add_(0, place, (~torch.isfinite(own)).double())
    finite = (spoilt == 0)[place]  # (computed on the device, without a wait)
    return torch.cat([torch.where(finite, own, 0.0), finite.double()])


def _number_of(rate: Any) -> Any:
    """Return an object that ``float()`` turns into the learning rate later; one on a GPU is copied without a wait."""
    if rate is None:
        return 1.0
    return streams.Later(rate) if isinstance(rate, torch.Tensor) and streams.gpu.holds(rate) else float(rate)
