"""Private process groups: their ranks meet again each time, and what they receive reuses memory."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hvd_async.torch.distributed import world
from hvd_async.torch.streams import ReusedMemory
from hvd_async.torch.torch_collectives import TorchCollectives


def test_a_group_of_the_same_name_finds_no_addresses_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is started again makes its groups again; ranks that came first would connect to closed ports."""
    stores: list[Any] = []
    monkeypatch.setattr(dist, "ProcessGroupGloo", lambda store, *arguments: stores.append(store))
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    ranks = world.World(1)
    ranks.group("engine.x", [0])
    stores[0].set("0", "an address")
    ranks.group("engine.x", [0])
    assert stores[0].check(["0"])
    assert not stores[1].check(["0"])


def test_received_rows_reuse_the_memory_of_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the receiver refers to them, not even a reference cycle: fresh memory costs more than the copy."""

    def begin(tensors: list[torch.Tensor], place: int, tag: int) -> Any:
        return SimpleNamespace(wait=lambda limit: None, tensors=tensors)  # (as Gloo's works do)

    group = SimpleNamespace(send=begin, recv=begin)
    ranks = SimpleNamespace(rank=0, size=2, group=lambda *_: group, close=lambda _: None)
    monkeypatch.setattr(world, "current", lambda: ranks)
    own, memory, done, addresses = TorchCollectives(), ReusedMemory(most=4), threading.Semaphore(0), set()
    own.start(done.release)
    for number in range(20):
        into = memory.empty(1 << 16, torch.device("cpu")).view(1, -1)
        addresses.add(into.data_ptr())
        handle = own.alltoall(torch.empty_like(into), [0, 1], [0, 1], f"exchange.{number}", into=into)
        assert done.acquire(timeout=30)
        handle.result()
    own.stop()
    assert len(addresses) <= 4, "one of this exchange, one of the last, and some between the two"
