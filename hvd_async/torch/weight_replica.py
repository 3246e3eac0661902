"""The torch replica of a rank with weights of its own: reads and writes them as one vector on their device.

``WeightVectors`` is the order of a vector's elements and its memory, ``Codec`` and ``RowFormat`` are its form in
messages, ``WeightReplica`` is the driver's interface.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hvd_async.algorithms.gossip.message_format import CHUNK, HEADER, LEVELS, MessageFormat, row_bytes
from hvd_async.optimizers import replica
from hvd_async.optimizers.agreement import Buffers
from hvd_async.runtime.interfaces import FiniteFlag, RankRuntime
from hvd_async.runtime.protocol import Hyper
from hvd_async.torch import hyperparameters, shared_models, streams
from hvd_async.torch.gradient_format import differentiable, memory_order
from hvd_async.torch.streams import ReusedMemory
from hvd_async.torch.tensors import NamedBuffers, checksum, flat_double, signature
from hvd_async.torch.update import drop_made_state

# -- flat vectors of weights -------------------------------------------------------------------------------------------


FREE_BLOCKS = 2
"""Free blocks that are kept for the next step, besides the one that was lent last: enough for every algorithm."""
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
"""Returns how many tensors share a storage; torch before 2.5 has it in builds for GPUs only."""


class _Block(NamedTuple):
    """The memory of one vector, and views of the parameters' parts.

    The views are made once, since making them costs the host three times as much as copying the weights.

    Attributes:
        vector: covers all of the memory.
        parts: the views.
        stream: the stream whose kernels use it; None on a CPU.
        address: of the memory.
        storage: of the vector.
        idle: number of tensors that share the storage while the block is free. (Horovod's references count too.)
    """

    vector: torch.Tensor
    parts: list[torch.Tensor]
    stream: Any
    address: int
    storage: torch.UntypedStorage
    idle: int


class WeightVectors:
    """Flat vectors of all weights that are mixed.

    A parameter's elements have the same order in a vector as in the parameter's memory (``torch.channels_last``), so
    copies between the two do not reorder elements. The order must be the same on all ranks: they compare ``orders``
    when they meet.

    Args:
        parameters: the parameters that are mixed, on one device.
        dtype: dtype of the vectors, float32 or float64.
        orders: ``memory_order`` of each parameter.

    Attributes:
        dtypes: dtypes of the parameters.
        sizes: number of elements of each parameter.
        elements: number of elements of all parameters.
        device: device of the parameters and of the vectors.
        on_gpu: whether it is a GPU.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], dtype: torch.dtype, orders: Sequence[str]) -> None:
        self.dtype, self.orders = dtype, list(orders)
        self.dtypes = [p.dtype for p in parameters]
        self.sizes = [p.numel() for p in parameters]
        self.elements = sum(self.sizes)
        self.device = parameters[0].device if parameters else torch.device("cpu")
        self.on_gpu = bool(parameters) and streams.gpu.holds(parameters[0])
        ends = itertools.accumulate(self.sizes, initial=0)
        self._places = [
            (p.shape, _strides(p.shape, order), start)
            for p, order, start in zip(parameters, self.orders, ends, strict=False)
        ]
        self._lock = threading.Lock()
        self._blocks: list[_Block] = []
        """Lent and free blocks; the list is replaced, never changed."""

    @torch.no_grad()
    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return new views of the parameters' parts of a vector, shape (n,)."""
        start = vector.storage_offset()
        return [vector.as_strided(shape, strides, start + place) for shape, strides, place in self._places]

    def parts(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' parts of a vector, shape (n,). Use them immediately: the memory may belong to another
        vector later."""
        address = vector.data_ptr()
        known = next((block for block in self._blocks if block.address == address), None)
        return self.views(vector) if known is None or vector.dtype != self.dtype else known.parts

    def empty(self) -> torch.Tensor:
        """Return an uninitialized vector, with room for a message's header behind it.

        Any thread may call it. The memory is reused when the last tensor on it is gone; on a GPU only for kernels of
        the same stream, which waits for the engine's own stream by then.
        """
        if _use_count is None:
            return self.new()
        stream = streams.gpu.current_stream(self.device) if self.on_gpu else None
        with self._lock:
            free: list[_Block] = []
            lent: list[_Block] = []
            for block in self._blocks:
                if _use_count(block.storage._cdata) != block.idle:  # (a reference to it, or to a view of it, is left)
                    lent.append(block)
                elif block.stream == stream:  # (torch frees a dropped block of another stream once that has used it)
                    free.append(block)
            if not free:
                with torch.inference_mode(False):  # (else they could not be written to outside of that mode)
                    vector = self.new()
                    parts, storage = self.views(vector), vector.untyped_storage()
                    idle = _use_count(storage._cdata)
                    free.append(_Block(vector, parts, stream, vector.data_ptr(), storage, idle))
            block = free.pop()
            self._blocks = [*lent, *free[-FREE_BLOCKS:], block]
            return block.vector.detach()

    def new(self) -> torch.Tensor:
        """Return an uninitialized vector like ``empty``, in memory of its own."""
        nbytes = self.elements * self.dtype.itemsize
        return torch.empty(row_bytes(nbytes), dtype=torch.uint8, device=self.device)[:nbytes].view(self.dtype)

    @torch.no_grad()
    def read(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a new vector of the parameters' elements."""
        vector = self.empty()
        torch._foreach_copy_(self.parts(vector), list(parameters))
        return vector

    @torch.no_grad()
    def write(self, parameters: Sequence[torch.Tensor], vector: torch.Tensor) -> None:
        """Copy a vector's elements into the parameters."""
        torch._foreach_copy_(list(parameters), self.parts(vector))


def _strides(shape: torch.Size, order: str) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose elements lie in this ``memory_order``."""
    kind: torch.memory_format = getattr(torch, order or "contiguous_format")
    return torch.empty(shape, device="meta", memory_format=kind).stride()


# -- vectors as bytes --------------------------------------------------------------------------------------------------


HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def quantize(vector: torch.Tensor, data: torch.Tensor) -> None:
    """Encode a vector in 8 bits per element, with a float32 scale per chunk, max |v| / 127. Scales come first.

    Args:
        vector: shape (n,).
        data: memory for the result, uint8, 4 and ``CHUNK`` bytes per chunk.
    """
    padded = torch.nn.functional.pad(vector.float(), (0, -vector.numel() % CHUNK)).view(-1, CHUNK)
    count = padded.shape[0]
    scales, levels = data[: 4 * count].view(torch.float32), data[4 * count :].view(torch.int8)
    torch.amax(padded.abs(), dim=1, out=scales)
    scales.div_(LEVELS)
    levels.view(-1, CHUNK).copy_((padded / torch.where(scales > 0, scales, 1.0).view(-1, 1)).round_())


def dequantize(data: torch.Tensor, elements: int) -> torch.Tensor:
    """Return the vector of ``elements`` elements that ``quantize`` has encoded, as float32."""
    count = -(-elements // CHUNK)
    scales = data[: 4 * count].view(torch.float32).view(count, 1)
    return (data[4 * count :].view(torch.int8).view(count, CHUNK) * scales).view(-1)[:elements]


class TorchMessageFormat(MessageFormat):
    """Messages and vectors in torch.

    Args:
        like: a vector of weights, shape (n,), float32 or float64.
        memory: of messages.
        received: rows that an exchange brings, at most; 0 if unknown.
        empty: returns an uninitialized vector of weights with room for a header behind it; None: there is no room.
        options: as in ``MessageFormat``.
    """

    def __init__(
        self,
        like: torch.Tensor,
        memory: ReusedMemory,
        received: int = 0,
        empty: Callable[[], torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(like.numel(), like.dtype, **options)
        self._device, self._memory, self._received, self._empty = like.device, memory, received, empty
        self._nothing = torch.zeros(self.rows, self._stride, dtype=torch.uint8, device=like.device)
        streams.record_ready(self._nothing)

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        if self._compression == "int8":
            return dequantize(data, self._part).to(self._kind)
        return data.view(HALVES.get(self._compression, self._kind)).to(self._kind)

    def as_bytes(self, vector: torch.Tensor) -> torch.Tensor:
        return vector.view(torch.uint8)

    def mark(self, vector: torch.Tensor) -> None:
        streams.record_ready(vector)

    def apart(self, *vectors: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        return streams.on_engine_stream_after(*vectors)

    def pack(self, messages: Sequence[tuple[torch.Tensor, bytes]]) -> torch.Tensor:
        data = [data for data, _ in messages if streams.gpu.holds(data)]
        if not data:
            return super().pack(messages)
        with self.apart(*data):
            return streams.record_ready(super().pack(messages))

    def unpack(self, row: torch.Tensor) -> tuple[torch.Tensor, bytes]:
        data, header = row[: self.nbytes], streams.copy_to_host(row[-HEADER.size :])
        return streams.record_received(data), header.numpy().tobytes()

    def room(self) -> torch.Tensor | None:
        if not self._received or streams.gpu.has_allocator(self._device):
            return None
        return self._bytes(self._received * self._stride).view(self._received, self._stride)

    def add(self, x: torch.Tensor, y: torch.Tensor, a: float) -> torch.Tensor:
        return x.add_(y, alpha=a)

    def times(self, x: torch.Tensor, a: float) -> torch.Tensor:
        if self._empty is None or x.numel() != self._elements:
            return x * a
        return torch.mul(x, a, out=self._empty())  # (its message is sent without a copy)

    def split(self, vector: torch.Tensor) -> list[torch.Tensor]:
        padded = torch.nn.functional.pad(vector, (0, self._part * self._parts - self._elements))
        return list(padded.view(self._parts, self._part))

    def concatenate(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(pieces))

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        kept = [piece[: max(0, self._elements - self._part * number)] for number, piece in enumerate(pieces)]
        return torch.cat(kept) if self._empty is None else torch.cat(kept, out=self._empty())

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self._elements, dtype=self._kind, device=self._device)

    def scalar(self, value: float) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.float64, device="cpu")

    def _bytes(self, nbytes: int) -> torch.Tensor:
        return self._memory.empty(nbytes, self._device)

    def _quantize(self, vector: torch.Tensor, data: torch.Tensor) -> None:
        quantize(vector, data)

    def _halve(self, vector: torch.Tensor, data: torch.Tensor) -> None:
        half = HALVES[self._compression]
        largest = torch.finfo(half).max
        data.view(half).copy_(vector).clamp_(-largest, largest)

    def _row_of(self, data: torch.Tensor) -> torch.Tensor | None:
        if data.storage_offset() or data.untyped_storage().nbytes() != self._stride:
            return None
        return data.as_strided((1, self._stride), (self._stride, 1))

    def _write_headers(self, ends: torch.Tensor, headers: bytes) -> None:
        written = torch.frombuffer(bytearray(headers), dtype=torch.uint8)
        if streams.gpu.holds(ends):  # (a copy from other memory would wait for all that the stream has to do)
            written = streams.gpu.pin(written)
        # (``data``: no version counter moves, since the vectors before the headers stay as they were marked)
        ends.data.copy_(written.view(-1, HEADER.size), non_blocking=True)


# -- the replica -------------------------------------------------------------------------------------------------------


class _Flag:
    """Flag of a vector on a GPU, which nothing waits for.

    Args:
        vector: shape (n,).
        empty: returns an uninitialized vector of this shape, of any stream.
    """

    apart = staticmethod(streams.on_engine_stream_after)

    def __init__(self, vector: torch.Tensor, empty: Callable[[], torch.Tensor]) -> None:
        self._elements = vector.numel()
        self._largest = torch.linalg.vector_norm(vector, math.inf)  # (one pass; NaN if an element is)
        self._later, self._empty = streams.Later(self._largest), empty

    def is_known(self) -> bool:
        return self._later.is_ready()

    def is_finite(self) -> bool:
        return math.isfinite(float(self._later))

    def choose(self, vector: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        room = self._empty() if vector.numel() == self._elements else torch.empty_like(vector)
        is_finite = torch.isfinite(streams.use_here(self._largest))
        return streams.record_ready(torch.where(is_finite, vector, other, out=room))


MESSAGES_KEPT = 4
"""Encoded messages whose memory is kept for the next step."""
MIXED = {torch.float32, torch.float64}
"""Dtypes of weights whose mixing loses nothing."""


class WeightReplica(replica.WeightReplica):
    """Weights, batch-norm statistics and learning rates of a wrapped torch optimizer.

    Args:
        named: parameters' names by id; None if none were given.
        named_buffers: buffers that agree after a drain.

    Attributes:
        counters: names of entries of parameter groups that the wrapped optimizer's ``step()`` itself changes.
    """

    def __init__(self, named: dict[int, str] | None, named_buffers: NamedBuffers) -> None:
        self.named, self.named_buffers = named, named_buffers
        self._memory = ReusedMemory(most=MESSAGES_KEPT)
        self._orders: dict[int, str] = {}
        """``memory_order`` of each parameter by its id when the optimizer was wrapped. It never changes, even if the
        parameter's does: checkpoints and averages hold vectors in this order."""
        self._vectors = WeightVectors([], torch.float32, [])
        self._elements: list[int] = []
        """Elements of each parameter group that are mixed."""
        self.counters: set[str] = set()
        self._checked: int | None = None
        self.met: list[torch.Tensor] = []
        """All parameters of the optimizer at the last ``prepare``."""

    def continue_from(self, before: WeightReplica) -> None:
        self.counters, self._orders = before.counters, before._orders
        self.prepare()

    def attach(self, optimizer: Any) -> None:
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

    def check_groups(self) -> None:
        shared_models.check_groups(self.optimizer, self.met)

    def bind(self, engine: RankRuntime) -> None:
        """Let the engine use this thread's stream: both threads change what the ranks exchange. Raises as
        ``shared_models.check``."""
        if self._checked != shared_models.found.made:
            self._checked = shared_models.check(self.optimizer)
        mixed = (p for group in self.optimizer.param_groups for p in group["params"] if p.dtype in MIXED)
        streams.bind_training_stream(engine, itertools.islice(mixed, 1))  # (all are on one device)

    # -- weights ----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        kind, parameters = self._dtype(), self.parameters
        devices = {str(p.device) for p in parameters}
        if len(devices) > 1:
            raise ValueError(
                f"parameters must be on one device, since weights are sent as one vector, got "
                f"{', '.join(sorted(devices))}"
            )
        known = self._orders
        self._orders = {id(p): known[id(p)] if id(p) in known else memory_order(p) for p in parameters}
        self._vectors = WeightVectors(parameters, kind, [self._orders[id(p)] for p in parameters])
        mixed = set(self._orders)
        groups = self.optimizer.param_groups
        self.met = [p for group in groups for p in group["params"]]
        self._elements = [sum(p.numel() for p in group["params"] if id(p) in mixed) for group in groups]

    def check(self) -> None:
        """Check the dtypes of the parameters again: one may have been unfrozen.

        Raises:
            ValueError: mixing would lose what a parameter learns, or dtypes have changed since the ranks met.
        """
        if [p.dtype for p in self.parameters] == self._vectors.dtypes:
            return
        kind, before = self._dtype(), self._vectors.dtype
        if kind != before:
            raise ValueError(
                f"weights are sent as {before}, and parameters have become {kind} since the ranks met: convert the "
                f"model before it trains"
            )

    def _dtype(self) -> torch.dtype:
        """Return the dtype of the vector of weights.

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
    def scaled(self, factor: float, lr_factor: float) -> Iterator[None]:
        """Return a context for the wrapped optimizer's update: weights, and what a schedule-free optimizer averages
        with them, are multiplied by ``factor``, and learning rates are this rank's own, ``lr_factor`` times those of
        all ranks, which schedulers see. At the end, also after an error, both are undone."""
        groups = self.optimizer.param_groups if lr_factor != 1.0 else []
        rates = [group["lr"] for group in groups]
        if factor != 1.0:
            torch._foreach_mul_([*self.parameters, *self._iterates()], factor)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * lr_factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            if factor != 1.0:
                torch._foreach_mul_([*self.parameters, *self._iterates()], 1.0 / factor)

    def fingerprint(self, resumed: bool) -> tuple[list[str], list[int]]:
        parameters, named = self.parameters, self.named or {}
        signatures = [signature(named.get(id(p), f"parameter {i}"), p) for i, p in enumerate(parameters)]
        names = [f"{own} {order}".rstrip() for own, order in zip(signatures, self._vectors.orders, strict=True)]
        after = f"{', named_buffers' if self.named_buffers else ''}{', weights as after cut()' if resumed else ''}"
        kind = f"optimizer {self.optimizer._wrapped_class.__name__}{after}"
        return [kind, *names], [0, *(0 if resumed else checksum(p) for p in parameters)]

    def has_state(self) -> bool:
        drop_made_state(self.optimizer)
        return any(self.optimizer.state.values())

    def message_format(self, received: int, **options: Any) -> MessageFormat:
        return TorchMessageFormat(
            self.read(), memory=self._memory, received=received, empty=self._vectors.empty, **options
        )

    def is_finite(self, weights: torch.Tensor) -> bool:
        # (one pass; the sum of very large finite numbers may be infinite too, so then look closer)
        return math.isfinite(weights.sum()) or bool(torch.isfinite(weights).all())

    @property
    def flags_late(self) -> bool:
        return self._vectors.on_gpu

    def finite_flag(self, weights: torch.Tensor) -> FiniteFlag:
        return _Flag(weights, self._vectors.new)

    def describe_nonfinite(self, step: str = "this rank's step has") -> str:
        named = self.named or {}
        bad = [(i, p) for i, p in enumerate(self.parameters) if not torch.isfinite(p).all()]
        names = ", ".join(named.get(id(p), f"parameter {i}") for i, p in bad[:5])
        return (
            f"{step} made weights NaN or infinite ({names}), which would spread to all ranks; nothing "
            f"was sent. Lower the learning rate, clip gradients, or step by a torch.amp.GradScaler"
        )

    def read_double(self) -> torch.Tensor:
        return flat_double(self.parameters)

    # -- state other than the weights -------------------------------------------------------------------------

    def learning_rates(self) -> list[tuple[int, Any]]:
        rates = [group.get("lr") for group in self.optimizer.param_groups]
        return [(n, _number_of(rate)) for n, rate in zip(self._elements, rates, strict=True)]

    def outside(self) -> list[tuple[str, int]]:
        return shared_models.outside(self.optimizer)

    def hyperparameters(self) -> Hyper:
        return hyperparameters.read(self.optimizer.param_groups, self.counters)

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
                "this state has vectors of parameters that lie in memory otherwise than this model's: convert the "
                "model to the memory format of the state (without channels_last it is torch.contiguous_format), wrap "
                "the optimizer, and only then convert the model to another format"
            )
        device = self.parameters[0].device
        return {**share, "copies": {name: copy.to(device) for name, copy in copies.items()}}

    def frozen(self) -> list[slice]:
        sizes = self._vectors.sizes
        pairs = zip(self.parameters, sizes, itertools.accumulate(sizes), strict=True)
        return [slice(end - n, end) for p, n, end in pairs if not p.requires_grad and n]

    def moving(self) -> list[bool]:
        return [p.requires_grad and p.grad is not None for p in self.parameters]

    def check_momentum(self) -> None:
        groups = self.optimizer.param_groups
        if not isinstance(self.optimizer, torch.optim.SGD) or not all(group["momentum"] > 0 for group in groups):
            raise ValueError(
                f"quasi_global corrects the momentum of torch.optim.SGD, and {self.optimizer._wrapped_class.__name__} "
                f"has none: pass an SGD with momentum=0.9 or the like, or leave quasi_global out"
            )

    def _momenta(self) -> list[torch.Tensor | None]:
        """Return each parameter's momentum; None if it had no gradient yet."""
        return [self.optimizer.state.get(p, {}).get("momentum_buffer") for p in self.parameters]

    @torch.no_grad()
    def momentum(self) -> torch.Tensor:
        pairs = zip(self.parameters, self._momenta(), strict=True)
        return self._vectors.read([torch.zeros_like(p) if own is None else own for p, own in pairs])

    @torch.no_grad()
    def write_momentum(self, momentum: torch.Tensor) -> None:
        for p, own, part in self._with_parts(momentum):
            if own is None:  # (SGD's next step treats zeros like a missing buffer, except for dampening)
                self.optimizer.state[p]["momentum_buffer"] = own = torch.zeros_like(p)
            own.copy_(part)

    @torch.no_grad()
    def add_to_momentum(self, correction: torch.Tensor) -> None:
        """Add a vector to the momentum of parameters that had a gradient in this step. (The momentum of the others does
        not decay, so corrections would accumulate.)"""
        pairs = [(own, part) for p, own, part in self._with_parts(correction) if own is not None and p.grad is not None]
        if pairs:
            torch._foreach_add_(*map(list, zip(*pairs, strict=True)))

    def _with_parts(self, vector: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """Return each parameter, its momentum, and its part of a vector."""
        return list(zip(self.parameters, self._momenta(), self._vectors.parts(vector), strict=True))

    @property
    def _is_schedule_free(self) -> bool:
        """Whether the optimizer is a schedule-free one, whose ``eval()`` computes averages from z and the weights."""
        optimizer = self.optimizer
        return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))

    def _iterates(self) -> list[torch.Tensor]:
        """Return the z of each parameter that has one, for a schedule-free optimizer."""
        state = self.optimizer.state
        return [state[p]["z"] for p in self.parameters if "z" in state.get(p, ())] if self._is_schedule_free else []

    @torch.no_grad()
    def moving_averages(self) -> torch.Tensor | None:
        if not self._is_schedule_free:
            return None
        state = self.optimizer.state  # (a rank that has not stepped has no z, and would begin with the weights)
        return self._vectors.read([state.get(p, {}).get("z", p) for p in self.parameters])

    @torch.no_grad()
    def write_moving_averages(self, averages: torch.Tensor) -> None:
        for p, part in zip(self.parameters, self._vectors.parts(averages), strict=True):
            if "z" in self.optimizer.state.get(p, ()):
                self.optimizer.state[p]["z"].copy_(part)

    def buffers(self) -> Buffers | None:
        return self.named_buffers.buffers()

    def number(self, loss: Any) -> Any:
        if not isinstance(loss, torch.Tensor):
            return loss
        if loss.numel() != 1:
            raise ValueError(f"record_loss() takes one number, and this is a tensor of shape {tuple(loss.shape)}")
        if not streams.gpu.holds(loss):
            return float(loss.detach())  # (now: the script may change the tensor before the loss counts)
        return streams.Later(loss.detach().reshape(()))


def _number_of(rate: Any) -> Any:
    """Return an object that ``float()`` turns into the learning rate later; one on a GPU is copied without a wait."""
    if rate is None:
        return 1.0
    return streams.Later(rate) if isinstance(rate, torch.Tensor) and streams.gpu.holds(rate) else float(rate)
