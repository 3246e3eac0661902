"""Private process groups: their ranks meet again each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from hvd_async.torch.distributed.world import World


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
