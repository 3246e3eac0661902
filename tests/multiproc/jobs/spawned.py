"""Two ranks that a script makes itself, in each way of ``WAYS``; ``keep.WAY`` has what each rank found.

``spawned.py START WAY...``: "fork" or "spawn". The parent has imported the library, and knows of no ranks.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hvd_async.torch as hvd

OUT = Path(os.environ["HVD_ASYNC_TEST_OUT"])
LIMIT = 60.0
"""Seconds in which both ranks of a way must have answered."""


def variables(rank: int, port: int) -> None:
    """Set what torchrun would set, apart from what only it sets."""
    found = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in found.items()})


def by_tcp(rank: int, port: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def by_file(rank: int, port: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)


def by_variables(rank: int, port: int, file: str) -> None:
    variables(rank, port)


def with_sets(rank: int, port: int, file: str) -> None:
    """The sets are made before it is known which data plane it is."""
    variables(rank, port)
    sets = [hvd.ProcessSet([one]) for one in range(2)]
    hvd.init(process_sets=sets)
    assert hvd.allreduce(torch.tensor(2.0), process_set=sets[rank]).item() == 2.0


def group_before(rank: int, port: int, file: str) -> None:
    variables(rank, port)
    dist.init_process_group("gloo")


def end_group() -> None:
    """End torch's group once both ranks have it: Gloo fails on a rank whose peer leaves while it connects."""
    dist.barrier()
    dist.destroy_process_group()


def group_ended(rank: int, port: int, file: str) -> None:
    group_before(rank, port, file)
    end_group()


def file_ended(rank: int, port: int, file: str) -> None:
    by_file(rank, port, file)
    end_group()


def group_after(rank: int, port: int, file: str) -> None:
    variables(rank, port)
    hvd.init()
    dist.init_process_group("gloo")


def init_before_ranks(rank: int, port: int, file: str) -> None:
    hvd.init()
    by_tcp(rank, port, file)


def init_in_the_parent(rank: int, port: int, file: str) -> None:
    assert hvd.size() == 1, "the parent's"
    variables(rank, port)


WAYS = {
    way.__name__: way
    for way in (
        by_variables, with_sets, by_tcp, by_file, group_before, group_ended, file_ended, group_after, init_before_ranks,
        init_in_the_parent,
    )
}  # fmt: skip


def train(way: str, rank: int, port: int, file: str, answers: Any) -> None:
    """Find the job, and train one step: each rank's gradient is its number and 1, so that the mean is 1.5."""
    try:
        WAYS[way](rank, port, file)
        hvd.init()
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.EagerOptimizer(torch.optim.SGD([weight], lr=1.0), quorum="all")
        weight.grad = torch.tensor([rank + 1.0])
        optimizer.step()
        optimizer.drain()
        total = hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item()
        found = [rank, hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), total, weight.item()]
        hvd.shutdown()
    except ValueError as error:
        found = [rank, str(error)]
    answers.put(found)


def main() -> None:
    """Start the ranks of each way after those of the last."""
    start, *ways = sys.argv[1:]
    context: Any = mp.get_context(start)
    for way in ways:
        if way == init_in_the_parent.__name__:
            hvd.init()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            answers = context.Queue()
            rank_of = (os.path.join(folder, "store"), answers)
            ranks = [context.Process(target=train, args=(way, rank, port, *rank_of)) for rank in range(2)]
            for one in ranks:
                one.start()
            try:
                (OUT / f"keep.{way}").write_text(json.dumps(sorted(answers.get(timeout=LIMIT) for _ in ranks)))
            finally:
                for one in ranks:
                    one.join(LIMIT)
                    one.kill()


if __name__ == "__main__":
    main()
