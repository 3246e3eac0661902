"""Checks the collectives of ranks that may share a GPU: ``torchrun ... nccl_ranks.py nccl``; on a CPU ``gloo``.

NCCL refuses ranks of one host that share a GPU, but tells hosts apart by ``NCCL_HOSTID``: each rank gets its own.
"""

from __future__ import annotations

import os
import sys

os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"  # (read when the first communicator is made)

import torch
import torch.distributed as dist


def main(backend: str) -> None:
    """Sum, broadcast and exchange; raise AssertionError if a result is wrong."""
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    for elements in (1, 1_000, 1_000_000):
        own = torch.full((elements,), float(rank + 1), device=device)
        total = own.clone()
        dist.all_reduce(total)
        assert (total == size * (size + 1) / 2).all(), "all_reduce"
        first = own.clone()
        dist.broadcast(first, 0)
        assert (first == 1.0).all(), "broadcast"
        received = torch.empty_like(own)
        exchange = [
            dist.P2POp(dist.isend, own, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        assert (received == float((rank - 1) % size + 1)).all(), "send and recv"
    if rank == 0:
        print(f"{size} ranks on {backend}: sums, broadcasts and exchanges are right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
