"""Private process groups: their ranks meet anew each time, and what they receive reuses memory."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hvd_async.torch.distributed import world
from hvd_async.torch.distributed.world import World
from hvd_async.torch.streams import ReusedMemory
from hvd_async.torch.torch_collectives import TorchCollectives


def test_a_group_of_the_same_name_finds_no_addresses_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is started again makes its groups again; ranks that came first would connect to closed ports."""
    stores: list[Any] = []
    monkeypatch.setattr(dist, "ProcessGroupGloo", lambda store, *arguments: stores.append(store))
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    world = World(1)
    world.group("engine.x", [0])
    stores[0].set("0", "an address")
    world.group("engine.x", [0])
    assert stores[0].check(["0"])
    assert not stores[1].check(["0"])


def test_received_rows_reuse_the_memory_of_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the receiver refers to them, not even a reference cycle: fresh memory costs more than the copy."""
    store, memory, addresses = dist.HashStore(), ReusedMemory(most=4), set()
    limit = timedelta(seconds=30)

    def plane(rank: int) -> TorchCollectives:
        def group(name: str, ranks: list[int], timeout: timedelta) -> Any:
            return dist.ProcessGroupGloo(store, rank, 2, limit)

        ranks = SimpleNamespace(rank=rank, size=2, group=group, close=lambda groups: None)
        monkeypatch.setattr(world, "current", lambda: ranks)
        return TorchCollectives()

    def exchange(own: TorchCollectives) -> None:
        done = threading.Event()
        own.start(done.set)
        other = 1 - own.rank
        counts = [int(place == other) for place in range(2)]
        for number in range(20):
            done.clear()
            into = memory.empty(1 << 16, torch.device("cpu")).view(1, -1)
            addresses.add(into.data_ptr())
            rows = torch.full((1, 1 << 16), own.rank, dtype=torch.uint8)
            handle = own.alltoall(rows, counts, counts, f"exchange.{number}", into=into)
            assert done.wait(30.0)
            assert handle.result()[0, 0] == other
            del handle, into
        own.stop()

    planes = [plane(rank) for rank in range(2)]
    gc.disable()
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(exchange, planes))
    finally:
        gc.enable()
    assert len(addresses) <= 6, "each rank has a block in use, one of the last exchange, and one between the two"
