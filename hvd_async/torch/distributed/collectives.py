"""Horovod's collectives on torch.distributed: signatures, defaults and results as in ``horovod.torch.mpi_ops``.

Tensors on a GPU travel by way of the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

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
        warnings.warn("average= is deprecated: pass op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3)
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
    prepare: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> Handle:
    """Begin a collective of tensors.

    Args:
        kind, tensors, name, process_set, options, splits: see ``Call``.
        run: returns its steps; gets the tensors or copies on the CPU, once ``prepare`` has had them, and all calls.
        prepare: works in this thread, which may be in ``torch.inference_mode()``.
    """
    for tensor in tensors:
        if tensor.is_sparse:
            raise ValueError(f"{kind} takes dense tensors. Use hvd.sparse_allreduce_async, or tensor.to_dense().")
        if kind in ("allgather", "alltoall", "reducescatter") and not tensor.dim():
            raise ValueError(f"{kind} takes tensors of one dimension or more, got a scalar. Use tensor.reshape(1).")
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        raise ValueError(f"{kind} takes tensors of one dtype and device.")
    chosen = calls_of(process_set)
    here = [prepare(tensor.detach().cpu()) for tensor in tensors]
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    call = Call(kind, name or "", dtype, [list(one.shape) for one in tensors], dict(options), list(splits))
    return chosen.begin(call, lambda everyones: run(chosen, here, everyones))


def _one(handle: Handle, result: Callable[[list[torch.Tensor]], Any]) -> Handle:
    """Let ``synchronize`` return ``result`` of what it would return; return the handle."""
    inner = handle.then
    handle.then = lambda found: result(inner(found))
    return handle


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


class _Differentiable(torch.autograd.Function):
    """A collective of tensors, whose gradients another collective returns.

    ``apply(run, backward, *tensors)``: two functions of a list of tensors, and the tensors.
    """

    @staticmethod
    def forward(ctx: Any, run: Any, backward: Any, *tensors: torch.Tensor) -> Any:
        ctx.backward_of = backward
        outputs = run([tensor.detach() for tensor in tensors])
        ctx.mark_non_differentiable(*(one for one in outputs if not one.is_floating_point() and not one.is_complex()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None, None, *ctx.backward_of(list(gradients)))


# -- allreduce --------------------------------------------------------------------------------------------------


def _reduce(
    kind: str, tensors: Tensors, name: Any, op: int, pre: float, post: float, process_set: ProcessSet, copy: bool = True
) -> Handle:
    """Begin a reduction; its result are tensors on the CPU.

    Args:
        copy: whether they are new ones.
    """
    factor = post / calls_of(process_set).size if op == Average else post
    handle = _begin(
        kind,
        tensors,
        name,
        process_set,
        lambda calls, here, _: calls.reduced(here, op),
        {"op": OPERATIONS[op], "prescale_factor": pre, "postscale_factor": post},
        prepare=lambda tensor: _scale(_contiguous(tensor, copy), pre),
    )
    return _one(
        handle, lambda sums: [_scale(one.to(own.dtype), factor) for one, own in zip(sums, tensors, strict=True)]
    )


def _contiguous(tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format) if copy else tensor.contiguous()


def _scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply a tensor in place, integers with rounding towards zero; return it."""
    tensor = tensor.detach()  # (an alias, which may be changed though the tensor is of an inference mode that was left)
    if factor != 1.0:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.mul_(factor)
        else:
            tensor.copy_((tensor.double() * factor).trunc_())
    return tensor


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce tensors over the ranks; the result are new tensors."""
    chosen = _operation(op, average)
    handle = _reduce(ALLREDUCE, tensors, name, chosen, prescale_factor, postscale_factor, process_set)
    return _one(handle, _to_device_of(tensors))


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
    handle = _reduce(ALLREDUCE, tensors, name, chosen, prescale_factor, postscale_factor, process_set, copy=False)
    return _one(handle, _in_place(tensors))


def grouped_allreduce_(tensors: Tensors, *arguments: Any, **options: Any) -> list[torch.Tensor]:
    """Reduce tensors in place over the ranks. Arguments as of ``grouped_allreduce_async_``."""
    reduced: list[torch.Tensor] = synchronize(grouped_allreduce_async_(tensors, *arguments, **options))
    return reduced


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
    chosen = _operation(op, average)
    compressed, contexts = zip(*(compression.compress(one) for one in tensors), strict=True) if tensors else ((), ())

    def run(of: list[torch.Tensor], of_name: str | None = None) -> list[torch.Tensor]:
        handle = grouped_allreduce_async(of, None, of_name, chosen, prescale_factor, postscale_factor, process_set)
        reduced: list[torch.Tensor] = synchronize(handle)
        return reduced

    outputs = _Differentiable.apply(lambda own: run(own, name), run, *compressed)
    return [compression.decompress(one, context) for one, context in zip(outputs, contexts, strict=True)]


def allreduce_async(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Handle:
    """Begin to reduce a tensor over the ranks. Arguments as of ``grouped_allreduce_async_``."""
    return _one(grouped_allreduce_async([tensor], *arguments, **options), _first)


def allreduce_async_(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Handle:
    """Begin to reduce a tensor in place over the ranks. Arguments as of ``grouped_allreduce_async_``."""
    return _one(grouped_allreduce_async_([tensor], *arguments, **options), _first)


def allreduce_(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Reduce a tensor in place over the ranks. Arguments as of ``grouped_allreduce_async_``."""
    return _first(grouped_allreduce_([tensor], *arguments, **options))


def allreduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Reduce a tensor over the ranks; differentiable. Arguments as of ``grouped_allreduce``."""
    return _first(grouped_allreduce([tensor], *arguments, **options))


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
        return torch.sparse_coo_tensor(synchronize(indices).t(), total, tensor.size())

    return result


# -- allgather --------------------------------------------------------------------------------------------------


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, shape (rows, bytes per row)."""
    row = tensor[:1].numel() * tensor.element_size() if tensor.shape[0] else 0
    return tensor.contiguous().reshape(-1).view(torch.uint8).reshape(tensor.shape[0], row)


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

    return _one(_begin("allgather", tensors, name, process_set, run), _to_device_of(tensors))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Concatenate all ranks' tensors along their first dimension, which may differ; differentiable."""

    def run(own: list[torch.Tensor]) -> list[torch.Tensor]:
        gathered: list[torch.Tensor] = synchronize(grouped_allgather_async(own, name, process_set))
        return gathered

    def backward(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        averages = grouped_allreduce(gradients, op=Average, process_set=process_set)
        dims = allgather(torch.tensor([[one.shape[0] for one in tensors]]), process_set=process_set)
        starts = dims[: calls_of(process_set).place].sum(0).tolist()
        return [one.narrow(0, at, own.shape[0]) for one, at, own in zip(averages, starts, tensors, strict=True)]

    return list(_Differentiable.apply(run, backward, *tensors))


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to concatenate all ranks' tensors along their first dimension, which may differ."""
    return _one(grouped_allgather_async([tensor], name, process_set), _first)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate all ranks' tensors along their first dimension, which may differ; differentiable."""
    return _first(grouped_allgather([tensor], name, process_set))


# -- broadcast --------------------------------------------------------------------------------------------------


def _broadcast(tensor: torch.Tensor, root_rank: int, name: Any, process_set: ProcessSet, copy: bool) -> Handle:
    place = calls_of(process_set).place_of(root_rank)

    def run(calls: Calls, here: list[torch.Tensor], everyones: list[Call]) -> Steps:
        options = dist.BroadcastOptions()
        options.rootRank = place
        if here[0].numel():
            yield from until_done(calls.group.broadcast([here[0].reshape(-1).view(torch.uint8)], options))
        return here

    options, prepare = {"root_rank": root_rank}, lambda one: _contiguous(one, copy)
    return _begin("broadcast", [tensor], name, process_set, run, options, prepare=prepare)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to send the tensor of ``root_rank``, a rank of the job, to all ranks."""
    handle = _broadcast(tensor, root_rank, name, process_set, copy=True)
    return _one(_one(handle, _to_device_of([tensor])), _first)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to write the tensor of ``root_rank``, a rank of the job, over those of all ranks."""
    handle = _broadcast(tensor, root_rank, name, process_set, copy=False)
    return _one(_one(handle, _in_place([tensor])), _first)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Write the tensor of ``root_rank``, a rank of the job, over those of all ranks."""
    received: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return received


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Send the tensor of ``root_rank``, a rank of the job, to all ranks; differentiable."""

    def backward(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        average = allreduce(gradients[0], op=Average, process_set=process_set)
        return [average if world.current().rank == root_rank else average * 0]

    def run(own: list[torch.Tensor]) -> list[torch.Tensor]:
        return [synchronize(broadcast_async(own[0], root_rank, name, process_set))]

    return _first(_Differentiable.apply(run, backward, tensor))


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
            own = here[0].contiguous().reshape(-1).view(torch.uint8).view(-1, width)[: sum(sent)]
            yield from until_done(calls.group.alltoall_base(out, own, counts, sent, dist.AllToAllOptions()))
        return [received, torch.tensor(counts, dtype=torch.int32)]

    return _one(
        _begin("alltoall", [tensor], name, process_set, run, splits=sent),
        lambda results: (results[0].to(tensor.device), results[1]),
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
    counts: list[torch.Tensor] = []

    def run(own: list[torch.Tensor]) -> list[torch.Tensor]:
        received, rows = synchronize(alltoall_async(own[0], splits, name, process_set))
        counts.append(rows)
        return [received, rows]

    def backward(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        back, _ = synchronize(alltoall_async(gradients[0], counts[0], None, process_set))
        missing = tensor.shape[0] - back.shape[0]
        return [torch.cat([back, back.new_zeros((missing, *back.shape[1:]))]) if missing else back]

    received, rows = _Differentiable.apply(run, backward, tensor)
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

    handle = _reduce("reducescatter", tensors, name, chosen, prescale_factor, postscale_factor, process_set)
    return _one(_one(handle, shares), _to_device_of(tensors))


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
    compressed, contexts = zip(*(compression.compress(one) for one in tensors), strict=True) if tensors else ((), ())
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}

    def run(own: list[torch.Tensor]) -> list[torch.Tensor]:
        reduced: list[torch.Tensor] = synchronize(grouped_reducescatter_async(own, name, op, process_set, **factors))
        return reduced

    def backward(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        factor = prescale_factor * postscale_factor * (calls_of(process_set).size if op == Sum else 1)
        return grouped_allgather([one * factor for one in gradients], process_set=process_set)

    outputs = _Differentiable.apply(run, backward, *compressed)
    return [compression.decompress(one, context) for one, context in zip(outputs, contexts, strict=True)]


def reducescatter_async(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Handle:
    """Begin to reduce and scatter a tensor. Arguments as of ``grouped_reducescatter_async``."""
    return _one(grouped_reducescatter_async([tensor], *arguments, **options), _first)


def reducescatter(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Reduce and scatter a tensor; differentiable. Arguments as of ``grouped_reducescatter``."""
    return _first(grouped_reducescatter([tensor], *arguments, **options))


# -- others -----------------------------------------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks have called it."""
    synchronize(_begin("barrier", [], None, process_set, lambda calls, here, everyones: ()))


def join(device: int = -1) -> int:
    """Take part in the other ranks' allreduces with zeros until all ranks have joined; return the last to join."""
    return calls_of(global_process_set).join()
