"""Horovod's collectives on torch.distributed: signatures, defaults and results as in ``horovod.torch.mpi_ops``.

Functions of objects and optimizers, and ``SyncBatchNorm``, stand on them.
Tensors on a GPU travel by way of the CPU.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from hvd_async.runtime.log import users_line
from hvd_async.torch import objects
from hvd_async.torch.distributed import world
from hvd_async.torch.distributed.calls import (
    ALLREDUCE,
    OPERATIONS,
    REDUCTIONS,
    Adasum,
    Average,
    Call,
    Calls,
    Handle,
    Steps,
    Sum,
    until_done,
)  # fmt: skip
from hvd_async.torch.distributed.process_sets import ProcessSet, calls_of, global_process_set
from hvd_async.torch.distributed.world import no_counterpart

# -- compression -------------------------------------------------------------------------------------------------------


class NoneCompressor:
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return the tensor, and nothing to decompress it by."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return the tensor."""
        return tensor


class FP16Compressor:
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return the tensor as float16, and its own dtype."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """Return the tensor in its own dtype."""
        return tensor.to(ctx)


class Compression:
    """Horovod's compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor


# -- handles -----------------------------------------------------------------------------------------------------------


Tensors = Sequence[torch.Tensor]


def poll(handle: Any) -> bool:
    """Return whether ``synchronize(handle)`` would return at once."""
    return bool(handle.done())


def synchronize(handle: Any) -> Any:
    """Return the result of a collective when it is there.

    Raises:
        HorovodInternalError: it has failed.
    """
    return handle.wait() if isinstance(handle, Handle) else handle()


def _operation(op: int | None, average: bool | None) -> int:
    if op is not None and average is not None:
        raise ValueError("op supersedes average: pass one of them.")
    if average is not None:
        hint = "average= is deprecated: pass op=hvd.Average or op=hvd.Sum"
        warnings.warn(hint, DeprecationWarning, stacklevel=users_line())
        return Average if average else Sum
    chosen = Average if op is None else op
    if chosen == Adasum:
        no_counterpart("op=hvd.Adasum", "Pass op=hvd.Average or op=hvd.Sum.")
    if chosen not in REDUCTIONS:
        raise ValueError(f"op must be hvd.Average, Sum, Min, Max or Product, got {op!r}.")
    return chosen


def _begin(
    kind: str,
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    run: Callable[[Calls, list[torch.Tensor], list[Call]], Iterable[Any]],
    options: Mapping[str, str | int | float] = {},
    splits: Sequence[int] = (),
) -> Handle:
    """Begin a collective of tensors.

    Args:
        kind, tensors, name, process_set, options, splits: see ``Call``.
        run: returns its steps; gets the tensors, or copies that are contiguous and on the CPU, and all calls.
    """
    for tensor in tensors:
        if tensor.is_sparse:
            raise ValueError(f"{kind} takes dense tensors. Use hvd.sparse_allreduce_async, or tensor.to_dense().")
        if kind in ("allgather", "alltoall", "reducescatter") and not tensor.dim():
            raise ValueError(f"{kind} takes tensors of one dimension or more, got a scalar. Use tensor.reshape(1).")
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        raise ValueError(f"{kind} takes tensors of one dtype and device.")
    chosen = calls_of(process_set)
    here = [tensor.detach().cpu().contiguous() for tensor in tensors]
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    call = Call(kind, name or "", dtype, [list(one.shape) for one in tensors], dict(options), list(splits))
    return chosen.begin(call, lambda everyones: run(chosen, here, everyones))


def _copies(tensors: Tensors) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _in_place(targets: Tensors) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Return a function that writes results over tensors, and returns these."""

    def write(results: list[torch.Tensor]) -> list[torch.Tensor]:
        for target, result in zip(targets, results, strict=True):
            data = target.detach()
            if data.data_ptr() != result.data_ptr():
                data.copy_(result)
        return list(targets)

    return write


def _to_device_of(tensors: Tensors) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Return a function that moves results to the tensors' device."""
    return lambda results: [one.to(tensors[0].device) for one in results]


def _first(results: list[torch.Tensor]) -> torch.Tensor:
    return results[0]


# -- other forms of a collective ---------------------------------------------------------------------------------------


def _waiting(function: Callable[..., Handle], doc: str) -> Callable[..., Any]:
    """Return a function that waits for the collective that another one begins."""

    def call(*arguments: Any, **options: Any) -> Any:
        return synchronize(function(*arguments, **options))

    return _described(call, function.__name__.replace("_async", ""), doc, _parameters(function))


def _single(function: Callable[..., Any], doc: str) -> Callable[..., Any]:
    """Return a function of one tensor that does what another one does with several."""

    def call(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        results = function([tensor], *arguments, **options)
        return results.mapped(_first) if isinstance(results, Handle) else results[0]

    parameters = [*_parameters(call)[:1], *_parameters(function)[1:]]
    return _described(call, function.__name__.removeprefix("grouped_"), doc, parameters)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [*inspect.signature(function).parameters.values()]


def _described(
    function: Callable[..., Any], name: str, doc: str, parameters: list[inspect.Parameter]
) -> Callable[..., Any]:
    """Let ``help()`` show a function under its own name and with these parameters; return it."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    vars(function)["__signature__"] = inspect.Signature(parameters)
    return function


class _Differentiable(torch.autograd.Function):
    """A collective of tensors, whose gradients another collective returns.

    ``apply(begin, backward, *tensors)``: a function that begins it, one of a list of gradients, and the tensors.
    """

    @staticmethod
    def forward(ctx: Any, begin: Any, backward: Any, *tensors: torch.Tensor) -> Any:
        ctx.backward_of = backward
        outputs = synchronize(begin([tensor.detach() for tensor in tensors]))
        ctx.mark_non_differentiable(*(one for one in outputs if not one.is_floating_point() and not one.is_complex()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None, None, *ctx.backward_of(list(gradients)))


def _compressed(
    tensors: Tensors,
    compression: Any,
    begin: Callable[[list[torch.Tensor]], Handle],
    backward: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Return the results of a collective of compressed tensors; arguments as of ``_Differentiable``."""
    compressed, contexts = zip(*(compression.compress(one) for one in tensors), strict=True) if tensors else ((), ())
    outputs = _Differentiable.apply(begin, backward, *compressed)
    return [compression.decompress(one, context) for one, context in zip(outputs, contexts, strict=True)]


# -- allreduce --------------------------------------------------------------------------------------------------


def _reduce(
    kind: str, tensors: Tensors, name: Any, op: int, pre: float, post: float, process_set: ProcessSet
) -> Handle:
    """Begin a reduction, by which tensors that are contiguous and on the CPU are overwritten; so are its results."""
    factor = post / calls_of(process_set).size if op == Average else post
    handle = _begin(
        kind,
        tensors,
        name,
        process_set,
        lambda calls, here, _: calls.reduced([_scale(one, pre) for one in here], op),
        {"op": OPERATIONS[op], "prescale_factor": pre, "postscale_factor": post},
    )
    return handle.mapped(
        lambda sums: [_scale(one.to(own.dtype), factor) for one, own in zip(sums, tensors, strict=True)]
    )


def _scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply a tensor in place, integers with rounding towards zero; return it."""
    tensor = tensor.detach()  # (an alias, which may be changed though the tensor is of an inference mode that was left)
    if factor != 1.0:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.mul_(factor)
        else:
            tensor.copy_((tensor.double() * factor).trunc_())
    return tensor


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce tensors in place over the ranks."""
    chosen = _operation(op, average)
    handle = _reduce(ALLREDUCE, tensors, name, chosen, prescale_factor, postscale_factor, process_set)
    return handle.mapped(_in_place(tensors))


def grouped_allreduce_async(tensors: Tensors, *arguments: Any, **options: Any) -> Handle:
    """Begin to reduce tensors over the ranks; the result are new ones. Arguments as of ``grouped_allreduce_async_``."""
    return grouped_allreduce_async_(_copies(tensors), *arguments, **options)


grouped_allreduce_ = _waiting(
    grouped_allreduce_async_, "Reduce tensors in place over the ranks. Arguments as of ``grouped_allreduce_async_``."
)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce tensors over the ranks; differentiable."""
    how = _operation(op, average), prescale_factor, postscale_factor, process_set

    def begin(of: list[torch.Tensor], of_name: str | None = None) -> Handle:
        return grouped_allreduce_async(of, None, of_name, *how)

    return _compressed(tensors, compression, lambda own: begin(own, name), lambda own: synchronize(begin(own)))


allreduce_async = _single(
    grouped_allreduce_async,
    "Begin to reduce a tensor over the ranks; the result is a new one. Arguments as of ``grouped_allreduce_async_``.",
)
allreduce_async_ = _single(
    grouped_allreduce_async_,
    "Begin to reduce a tensor in place over the ranks. Arguments as of ``grouped_allreduce_async_``.",
)
allreduce_ = _waiting(
    allreduce_async_, "Reduce a tensor in place over the ranks. Arguments as of ``grouped_allreduce_async_``."
)
allreduce = _single(
    grouped_allreduce, "Reduce a tensor over the ranks; differentiable. Arguments as of ``grouped_allreduce``."
)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin to sum or average a sparse tensor over the ranks; ``synchronize`` returns a new sparse tensor."""
    if op not in (Average, Sum):
        raise ValueError(f"op of a sparse allreduce must be hvd.Average or hvd.Sum, got {op!r}.")
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def result() -> torch.Tensor:
        total = synchronize(values) / (len(process_set.ranks) if op == Average else 1)
        return torch.sparse_coo_tensor(synchronize(indices).t(), total, tensor.size(), device=tensor.device)

    return result


# -- allgather --------------------------------------------------------------------------------------------------


def gathered(calls: Calls, tensor: torch.Tensor, rows: Sequence[int]) -> Steps:
    """Return all ranks' tensors, concatenated; ``rows`` of each rank. They are sent padded to the longest."""
    shape, most = tuple(tensor.shape[1:]), max(rows)
    padded = tensor.new_zeros((most, *shape))
    padded[: tensor.shape[0]] = tensor
    everyones = tensor.new_empty((calls.size * most, *shape))
    if everyones.numel():
        own, all_ = (one.reshape(-1).view(torch.uint8) for one in (padded, everyones))
        yield from until_done(calls.group._allgather_base(all_, own))
    return torch.cat([everyones[at * most : at * most + count] for at, count in enumerate(rows)])


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to concatenate all ranks' tensors along their first dimension, which may differ."""

    def run(calls: Calls, here: list[torch.Tensor], everyones: list[Call]) -> Steps:
        results = []
        for place, one in enumerate(here):
            results.append((yield from gathered(calls, one, [each.shapes[place][0] for each in everyones])))
        return results

    return _begin("allgather", tensors, name, process_set, run).mapped(_to_device_of(tensors))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Concatenate all ranks' tensors along their first dimension, which may differ; differentiable."""

    def backward(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        averages = grouped_allreduce(gradients, op=Average, process_set=process_set)
        dims = allgather(torch.tensor([[one.shape[0] for one in tensors]]), process_set=process_set)
        starts = dims[: calls_of(process_set).place].sum(0).tolist()
        return [one.narrow(0, at, own.shape[0]) for one, at, own in zip(averages, starts, tensors, strict=True)]

    return list(_Differentiable.apply(lambda own: grouped_allgather_async(own, name, process_set), backward, *tensors))


allgather_async = _single(
    grouped_allgather_async,
    "Begin to concatenate all ranks' tensors along their first dimension. Arguments as of ``grouped_allgather_async``.",
)
allgather = _single(
    grouped_allgather,
    "Concatenate all ranks' tensors by their first dimension; differentiable. Arguments as of ``grouped_allgather``.",
)


# -- broadcast --------------------------------------------------------------------------------------------------


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to write the tensor of ``root_rank``, a rank of the job, over those of all ranks."""
    place = calls_of(process_set).place_of(root_rank)

    def run(calls: Calls, here: list[torch.Tensor], everyones: list[Call]) -> Steps:
        if here[0].numel():
            yield from calls.broadcast(here[0].reshape(-1).view(torch.uint8), place)
        return here

    handle = _begin("broadcast", [tensor], name, process_set, run, {"root_rank": root_rank})
    return handle.mapped(_in_place([tensor])).mapped(_first)


def broadcast_async(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Handle:
    """Begin to send the tensor of ``root_rank`` to all ranks. Arguments as of ``broadcast_async_``."""
    return broadcast_async_(tensor.detach().clone(), *arguments, **options)


broadcast_ = _waiting(
    broadcast_async_,
    "Write the tensor of ``root_rank`` over those of all ranks. Arguments as of ``broadcast_async_``.",
)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Send the tensor of ``root_rank``, a rank of the job, to all ranks; differentiable."""

    def backward(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        average = allreduce(gradients[0], op=Average, process_set=process_set)
        return [average if world.current().rank == root_rank else average * 0]

    def begin(own: list[torch.Tensor]) -> Handle:
        return broadcast_async(own[0], root_rank, name, process_set).mapped(lambda received: [received])

    return _first(_Differentiable.apply(begin, backward, tensor))


# -- alltoall ---------------------------------------------------------------------------------------------------


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to send ``splits[i]`` rows of a tensor to the i-th rank; the result is what has come, and how many rows of
    each rank (int32)."""
    size = calls_of(process_set).size
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if rows % size:
            raise ValueError(f"a tensor of {rows} rows cannot be split evenly over {size} ranks. Pass splits.")
        sent = [rows // size] * size
    else:
        sent = splits.tolist() if isinstance(splits, torch.Tensor) else list(splits)
        if any(not isinstance(count, int) for count in sent):
            raise ValueError(f"splits must be whole numbers of rows, got {sent}.")
    if len(sent) != size or min(sent, default=0) < 0 or sum(sent) > rows:
        raise ValueError(f"splits must be {size} numbers of rows, at most {rows} in all, got {sent}.")

    def run(calls: Calls, here: list[torch.Tensor], everyones: list[Call]) -> Steps:
        counts = [each.splits[calls.place] for each in everyones]
        received = here[0].new_empty((sum(counts), *here[0].shape[1:]))
        width = received[0:1].new_empty((1, *received.shape[1:])).numel() * received.element_size()
        if width:
            out = received.reshape(-1).view(torch.uint8).view(-1, width)
            own = here[0].reshape(-1).view(torch.uint8).view(-1, width)[: sum(sent)]
            yield from until_done(calls.group.alltoall_base(out, own, counts, sent, dist.AllToAllOptions()))
        return [received, torch.tensor(counts, dtype=torch.int32, device="cpu")]

    return _begin("alltoall", [tensor], name, process_set, run, splits=sent).mapped(
        lambda results: (results[0].to(tensor.device), results[1])
    )


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send ``splits[i]`` rows of a tensor to the i-th rank; differentiable.

    Returns:
        What has come; with ``splits`` also how many rows of each rank (int32).
    """

    def backward(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        back, _ = synchronize(alltoall_async(gradients[0], rows, None, process_set))
        missing = tensor.shape[0] - back.shape[0]
        return [torch.cat([back, back.new_zeros((missing, *back.shape[1:]))]) if missing else back]

    received, rows = _Differentiable.apply(
        lambda own: alltoall_async(own[0], splits, name, process_set), backward, tensor
    )
    return received if splits is None else (received, rows)


# -- reducescatter ----------------------------------------------------------------------------------------------


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin to reduce tensors over the ranks, each of which gets its share of the rows; the first ranks get one more
    where they do not divide evenly."""
    chosen = _operation(op, None)
    if chosen not in (Average, Sum):
        raise ValueError("op of a reducescatter must be hvd.Average or hvd.Sum.")
    calls = calls_of(process_set)

    def shares(sums: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.tensor_split(total, calls.size)[calls.place].clone() for total in sums]

    handle = _reduce("reducescatter", _copies(tensors), name, chosen, prescale_factor, postscale_factor, process_set)
    return handle.mapped(shares).mapped(_to_device_of(tensors))


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce tensors over the ranks, each of which gets its share of the rows; differentiable."""

    def backward(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        factor = prescale_factor * postscale_factor * (calls_of(process_set).size if op == Sum else 1)
        return grouped_allgather([one * factor for one in gradients], process_set=process_set)

    def begin(own: list[torch.Tensor]) -> Handle:
        return grouped_reducescatter_async(own, name, op, process_set, prescale_factor, postscale_factor)

    return _compressed(tensors, compression, begin, backward)


reducescatter_async = _single(
    grouped_reducescatter_async,
    "Begin to reduce and scatter a tensor. Arguments as of ``grouped_reducescatter_async``.",
)
reducescatter = _single(
    grouped_reducescatter, "Reduce and scatter a tensor; differentiable. Arguments as of ``grouped_reducescatter``."
)


# -- others -----------------------------------------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks have called it."""
    synchronize(_begin("barrier", [], None, process_set, lambda calls, here, everyones: ()))


def join(device: int = -1) -> int:
    """Take part in the other ranks' allreduces with zeros until all ranks have joined; return the last to join."""
    return calls_of(global_process_set).join()


# -- objects and optimizers -------------------------------------------------------------------------------------


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of ``root_rank``.

    Raises:
        ValueError: it cannot be pickled; on all ranks.
    """
    calls = calls_of(process_set)
    place = calls.place_of(root_rank)
    own = objects.pack(obj) if calls.place == place else b""

    def run(everyones: list[Call]) -> Steps:
        data = torch.frombuffer(bytearray(own) or bytearray(everyones[place].splits[0]), dtype=torch.uint8)
        yield from calls.broadcast(data, place)
        return data.numpy().tobytes()

    call = Call("broadcast_object", name or "", options={"root_rank": root_rank}, splits=[len(own)])
    received = objects.unpack(calls.begin(call, run).wait(), root_rank)
    return obj if own else received


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks.

    Raises:
        ValueError: one of them cannot be pickled; on all ranks.
    """
    return gather_objects(calls_of(process_set), obj, name)


def gather_objects(calls: Calls, obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks of some collectives; see ``allgather_object``."""
    own = torch.frombuffer(bytearray(objects.pack(obj)), dtype=torch.uint8)

    def run(everyones: list[Call]) -> Steps:
        sizes = [one.splits[0] for one in everyones]
        rows = yield from gathered(calls, own, sizes)
        return [part.numpy().tobytes() for part in rows.split(sizes)]

    received = calls.begin(Call("allgather_object", name or "", splits=[len(own)]), run).wait()
    return [objects.unpack(data, rank) for rank, data in zip(calls.ranks, received, strict=True)]


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Send the state and the options of ``root_rank``'s optimizer to every rank.

    Args:
        optimizer: any torch optimizer; it need not have taken a step.
        root_rank: the rank whose state is sent.
        model: not needed.
    """
    on_root = world.current().rank == root_rank
    state = broadcast_object(optimizer.state_dict() if on_root else None, root_rank, "optimizer_state")
    if not on_root:
        optimizer.load_state_dict(state)


def DistributedOptimizer(*arguments: Any, **options: Any) -> Any:  # noqa: N802  Horovod's name
    """Return ``EagerOptimizer(..., quorum="all")``: synchronous averages of gradients, as Horovod's."""
    from hvd_async.torch.factories import EagerOptimizer  # (which stands on this module)

    return EagerOptimizer(*arguments, quorum="all", **options)


class SyncBatchNorm(_BatchNorm):
    """Batch normalization over the batches of all ranks, for tensors of shape (batch, channels, ...).

    Args: as of ``torch.nn.BatchNorm2d``. Gradients reach the other ranks' inputs too. Evaluation is that of ordinary
    batch normalization.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes tensors of at least two dimensions, got {input.dim()}.")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a tensor."""
        self._check_input_dim(input)
        if not self.training or world.current().size == 1:
            return super().forward(input)
        over = [0, *range(2, input.dim())]
        shape = [1, -1, *(1 for _ in range(2, input.dim()))]
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        own = wide.new_tensor([input.numel() / input.shape[1]])
        sums = allreduce(torch.cat([wide.sum(over), own]), op=Sum, name="sync_batch_norm.mean")
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centered = wide - mean.view(shape)
        variance = allreduce((centered * centered).sum(over), op=Sum, name="sync_batch_norm.variance") / count
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach() * (count / (count - 1)))
        output = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, now in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.lerp_(now.to(running.dtype), share)
