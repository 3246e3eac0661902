"""torch: optimizers of all families at once on a data plane that starts collectives in one order, as on NCCL."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.runtime import engine
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster, MemoryCollectives
from tests.conformance.torch_ranks import ProcessSet, seeded

SIZE, STEPS = 3, 6
SETS = {1: (0, 1), 2: (1, 2)}
OTHERS = {
    "sgp": {"algorithm": "sgp", "average_every": 2},
    "dpsgd": {"algorithm": "dpsgd", "average_every": 2},
    "adpsgd": {"algorithm": "adpsgd"},
    "local": {"algorithm": "local", "average_every": 2},
    "int8": {"algorithm": "diloco", "average_every": 2, "fragments": 2, "compression": "int8"},
}


class OneOrder:
    """Wraps the collectives of all ranks; each must start them in the order of the rank that is ahead."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.names = defaultdict[Sequence[int], list[str]](list)
        self._places = defaultdict[Any, int](int)

    def started(self, rank: int, members: Sequence[int], name: str) -> None:
        """Check that it is the rank's turn to start this."""
        with self._lock:
            names, place = self.names[members], self._places[members, rank]
            self._places[members, rank] += 1
            if place == len(names):
                names.append(name)
            assert names[place] == name, f"rank {rank} starts {name} where another rank has started {names[place]}"

    def wrap(self, collectives: MemoryCollectives) -> MemoryCollectives:
        """Return the collectives of a rank, checked."""
        order = self

        class Checked(MemoryCollectives):
            in_order = True

            def _join(self, name: str, members: Sequence[int], *rest: Any) -> Any:
                order.started(self.rank, tuple(members), name)
                return super()._join(name, members, *rest)

        return Checked(collectives._board, collectives.rank, collectives.size)


def easgd(process_set: Any) -> tuple[Any, Callable[[], None]]:
    """Return an optimizer of a process set, and its step."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.LeaderOptimizer(
        torch.optim.SGD([weight], lr=0.1), algorithm="easgd", global_period=1, process_set=process_set
    )

    def step() -> None:
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()

    return optimizer, step


def train(other: str, order: OneOrder, seed: int) -> list[Any]:
    """Train three optimizers of different families in each step; return each rank's weights after a drain."""

    def work(rank: int) -> Any:
        models = [seeded(torch.nn.Linear(4, 4)) for _ in range(3)]
        plain = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5) for model in models]
        optimizers = [
            hvd.EagerOptimizer(plain[0], quorum="solo", bucket_cap_mb=1e-5),
            hvd.GossipOptimizer(plain[1], **OTHERS[other]),
            hvd.LeaderOptimizer(plain[2], algorithm="easgd", global_period=2),
        ]
        data = torch.Generator().manual_seed(seed + rank)
        for step in range(STEPS - rank):  # (ranks end at different steps)
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss = model(torch.randn(2, 4, generator=data)).square().mean()
                if optimizer is optimizers[2]:
                    optimizer.record_loss(loss.detach())
                loss.backward()
                optimizer.step()
            if step == 2:
                optimizers[0].drain()
        for optimizer in optimizers:
            optimizer.drain()
        return [parameter.detach().clone() for model in models for parameter in model.parameters()]

    return Cluster(SIZE, jitter=0.002, seed=seed, wrap=order.wrap).run(work, timeout=60.0)


@pytest.mark.parametrize("other", OTHERS)
def test_all_ranks_start_all_collectives_in_one_order(other: str) -> None:
    order = OneOrder()
    ranks = train(other, order, seed=1)
    for weights in zip(*ranks, strict=True):
        assert all(torch.equal(one, weights[0]) for one in weights)
    kinds = {name.split(".")[1] for name in order.names[0, 1, 2]}
    assert kinds >= {"eager", "pull"}
    assert kinds & {"gossip", "average"}


def test_a_rank_in_two_process_sets_is_drained_while_another_set_continues() -> None:
    """Ranks 0 and 1 share an optimizer, and 1 and 2. Rank 0 is done with a drain and trains on, which pulls rank 1;
    that still drains with rank 2, which comes later."""
    rank_0_continues = threading.Event()

    def work(rank: int) -> list[int]:
        own = [easgd(ProcessSet(*ranks, number=number)) for number, ranks in SETS.items() if rank in ranks]
        this = local_engine()
        assert this is not None
        for part in (1, 2):
            for _ in range(3):
                for _, step in own:
                    step()
            if (rank, part) == (0, 2):
                rank_0_continues.set()
            if (rank, part) == (2, 1):
                assert rank_0_continues.wait(30.0)
            this.drain()
        return [optimizer.stats().steps for optimizer, _ in own]

    assert Cluster(SIZE, wrap=OneOrder().wrap).run(work, timeout=60.0) == [[6], [6, 6], [6]]


def test_collectives_that_start_at_once_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.CollectiveOrder, "start", lambda self, turn, start: start())
    with pytest.raises(Exception, match="where another rank has started"):
        [train("int8", OneOrder(), seed) for seed in range(20)]
