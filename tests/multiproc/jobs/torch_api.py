"""Horovod's API for torch, from Horovod or without it: each case's results, which must be the same from both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import Report, raised

import hvd_async.torch as hvd

OPERATIONS = ("Average", "Sum", "Min", "Max", "Product")
DTYPES = (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
CARRIED = (torch.uint8, torch.int8, torch.int16, *DTYPES)
"""Dtypes that are sent and not added."""


def shown(value: Any) -> Any:
    """Tensors as JSON: dtype, shape, values."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), value.detach().double().flatten().tolist()]
    if isinstance(value, dict):
        return {name: shown(one) for name, one in value.items()}
    return [shown(one) for one in value] if isinstance(value, list | tuple) else value


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers that differ by rank."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + 3 * hvd.rank()) % 7 + 1).reshape(shape).to(dtype)


def reductions() -> dict[str, Any]:
    return {
        **{f"{op} {t}": hvd.allreduce(ramp(4, 3, dtype=t), op=getattr(hvd, op)) for op in OPERATIONS for t in DTYPES},
        "default": hvd.allreduce(ramp(5), name="default"),
        "scaled": hvd.allreduce(ramp(5), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
        "scaled integers": hvd.allreduce(2 * ramp(5, dtype=torch.int32), op=hvd.Sum, prescale_factor=0.5),
        "scaled average": hvd.allreduce(ramp(5), prescale_factor=2.0, postscale_factor=0.25),
        "fp16": hvd.allreduce(ramp(5), compression=hvd.Compression.fp16),
        "scalar": hvd.allreduce(torch.tensor(float(hvd.rank()))),
        "empty": hvd.allreduce(torch.zeros(0)),
    }


def forms_of_reductions() -> dict[str, Any]:
    own = ramp(6)
    returned = hvd.allreduce_(own, op=hvd.Sum)
    handles = [hvd.allreduce_async(ramp(3) * (i + 1), name=f"async.{i}") for i in range(5)]
    results = [hvd.synchronize(handle) for handle in reversed(handles)]
    later = ramp(2)
    handle = hvd.allreduce_async_(later, name="in place", op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    hvd.synchronize(handle)
    grouped = [ramp(2), ramp(3, 2)]
    with torch.inference_mode():  # (nothing outside of it may change its tensors in place)
        scored = ramp(4, 3)
        hvd.allreduce_(scored, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
        evaluated = [*hvd.grouped_allreduce_([ramp(3), ramp(2)]), hvd.broadcast_(ramp(2), 1)]
        left = hvd.allreduce_async_(ramp(3), name="left")
    evaluated.append(hvd.synchronize(left))
    return {
        "of inference mode": [scored, evaluated],
        "in place": [own, returned],
        "asynchronous": results,
        "polled": later,
        "grouped": hvd.grouped_allreduce(grouped, op=hvd.Sum),
        "grouped in place": [hvd.grouped_allreduce_(grouped), grouped],
        "grouped later": hvd.synchronize(hvd.grouped_allreduce_async(grouped, name="grouped")),
        "unchanged": hvd.synchronize(hvd.allreduce_async(later, name="unchanged")) * 0 + later,
    }


def gathers() -> dict[str, Any]:
    rank = hvd.rank()
    return {
        **{f"{dtype}": hvd.allgather(ramp(2, 3, dtype=dtype)) for dtype in CARRIED},
        "ragged": hvd.allgather(ramp(rank + 1, 2)),
        "nothing of rank 0": hvd.allgather(ramp(2 * rank, 2)),
        "grouped": hvd.grouped_allgather([ramp(rank + 1), ramp(3, 1)]),
        "asynchronous": hvd.synchronize(hvd.allgather_async(ramp(2), name="later")),
    }


def broadcasts() -> dict[str, Any]:
    last = hvd.size() - 1
    own, returned = ramp(3), hvd.broadcast(ramp(3), 0)
    hvd.broadcast_(own, last)
    kept = ramp(2)
    handle = hvd.broadcast_async(kept, last, name="later")
    return {
        **{f"{dtype}": hvd.broadcast(ramp(2, 2, dtype=dtype), last) for dtype in CARRIED},
        "new": returned,
        "in place": own,
        "asynchronous": [hvd.synchronize(handle), kept],
        "scalar": hvd.broadcast(torch.tensor(float(hvd.rank())), last),
    }


def exchanges() -> dict[str, Any]:
    rank, size = hvd.rank(), hvd.size()
    splits = torch.tensor([(rank + to) % 3 for to in range(size)], dtype=torch.int32)
    return {
        **{f"{dtype}": hvd.alltoall(ramp(2 * size, 2, dtype=dtype)) for dtype in CARRIED},
        "splits": hvd.alltoall(ramp(int(splits.sum()), 2), splits=splits),
        "list": hvd.alltoall(ramp(size), splits=[1] * size),
        "nothing": hvd.alltoall(ramp(0, 2), splits=[0] * size),
    }


def scatters() -> dict[str, Any]:
    size = hvd.size()
    kept = ramp(size)
    return {
        "unchanged": [hvd.reducescatter(kept, op=hvd.Sum), kept],
        "even": hvd.reducescatter(ramp(2 * size, 2)),
        "uneven": hvd.reducescatter(ramp(2 * size + 1, 2), op=hvd.Sum),
        "scaled": hvd.reducescatter(ramp(size), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
        "grouped": hvd.grouped_reducescatter([ramp(size), ramp(2 * size, 1)], op=hvd.Sum),
    }


def gradient(call: Callable[[torch.Tensor], Any], *shape: int) -> Any:
    """The gradient of a weighted sum of what a collective returns."""
    tensor = ramp(*shape, dtype=torch.float64).requires_grad_()
    result = call(tensor)
    result = result[0] if isinstance(result, tuple | list) else result
    (result * (torch.arange(result.numel()) + 1.0 + hvd.rank()).reshape(result.shape)).sum().backward()
    return tensor.grad


def gradients() -> dict[str, Any]:
    rank, size = hvd.rank(), hvd.size()
    return {
        "allreduce": gradient(hvd.allreduce, 3),
        "sum": gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0), 3),
        "grouped": gradient(lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum), 3),
        "allgather": gradient(hvd.allgather, rank + 1, 2),
        "broadcast": gradient(lambda x: hvd.broadcast(x, 0), 3),
        "alltoall": gradient(lambda x: hvd.alltoall(x, splits=[1] * size), size, 2),
        "reducescatter": gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), size, 2),
        "average of reducescatter": gradient(hvd.reducescatter, size, 2),
    }


def sets() -> dict[str, Any]:
    rank, size = hvd.rank(), hvd.size()
    rest, alone = hvd.add_process_set(list(range(1, size))), hvd.add_process_set(hvd.ProcessSet([0]))
    own = rest if rank else alone
    found = {
        "ids": [rest.process_set_id, alone.process_set_id, hvd.global_process_set.process_set_id],
        "ranks": [rest.ranks, alone.ranks, hvd.global_process_set.ranks],
        "of": [rest.included(), alone.included(), own.rank(), own.size(), rest.size()],
        "sum": hvd.allreduce(ramp(3), op=hvd.Sum, process_set=own),
        "average": hvd.allreduce(ramp(3), process_set=own),
        "gather": hvd.allgather(ramp(rank + 1), process_set=own),
        "broadcast": hvd.broadcast(ramp(3), own.ranks[-1], process_set=own),
        "scatter": hvd.reducescatter(ramp(4), op=hvd.Sum, process_set=own),
    }
    hvd.barrier(process_set=own)
    hvd.barrier()
    found["outside"] = raised(lambda: hvd.allreduce(ramp(3), process_set=alone if rank else rest))["kind"] != ""
    found["removed"] = [hvd.remove_process_set(rest), rest.process_set_id, hvd.remove_process_set(rest)]
    found["global"] = hvd.remove_process_set(hvd.global_process_set)
    found["twice"] = raised(lambda: hvd.add_process_set([0]))["kind"]
    return found


def objects() -> dict[str, Any]:
    rank = hvd.rank()
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float(rank + 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
    if rank == 0:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = optimizer.state_dict()

    class Local:
        value = rank

    return {
        "objects": hvd.allgather_object({"rank": rank, "text": "x" * rank}),
        "functions": [make() for make in hvd.allgather_object(lambda: rank + 1)],
        "class": hvd.broadcast_object(Local, root_rank=1).value,
        "object": hvd.broadcast_object(["of", rank], root_rank=hvd.size() - 1),
        "parameters": list(model.parameters()),
        "rates": [group["lr"] for group in state["param_groups"]],
        "momentum": [one["momentum_buffer"] for one in state["state"].values()],
    }


def joins() -> dict[str, Any]:
    """Rank r has r + 1 batches."""
    sums = [hvd.allreduce(ramp(2, 2), op=hvd.Sum, name=f"batch.{step}") for step in range(hvd.rank() + 1)]
    last = hvd.join()
    return {"sums": sums, "last": last, "after": hvd.allreduce(ramp(1), op=hvd.Sum, name="after")}


def errors() -> dict[str, Any]:
    rank = hvd.rank()
    calls = {
        "shape": lambda: hvd.allreduce(ramp(2 + rank), name="shape"),
        "dtype": lambda: hvd.allreduce(ramp(2, dtype=DTYPES[rank % 2]), name="dtype"),
        "columns": lambda: hvd.allgather(ramp(2, 2 + rank), name="columns"),
        "root": lambda: hvd.broadcast(ramp(2), rank, name="root"),
        "both": lambda: hvd.allreduce(ramp(2), average=True, op=hvd.Sum),
    }
    return {
        # (without Horovod the class of hvd.HorovodInternalError has another name)
        **{
            name: raised(call)["kind"].replace("CollectiveError", "HorovodInternalError")
            for name, call in calls.items()
        },
        "splits": raised(lambda: hvd.alltoall(ramp(2), splits=[9] * hvd.size(), name="splits"))["kind"] != "",
        "continues": hvd.allreduce(ramp(2), op=hvd.Sum, name="continues"),
    }


def places() -> dict[str, Any]:
    return {
        "places": [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()],
        "initialized": hvd.is_initialized(),
    }


CASES = (
    places, reductions, forms_of_reductions, gathers, broadcasts, exchanges, scatters, gradients, sets, objects, joins,
    errors,
)  # fmt: skip


def main() -> None:
    hvd.init(process_sets="dynamic")
    report = Report(hvd.rank())
    for case in CASES:
        report.put(case.__name__, found=shown(case()))
    hvd.shutdown()
    report.put("shut down", found=hvd.is_initialized())


if __name__ == "__main__":
    main()
