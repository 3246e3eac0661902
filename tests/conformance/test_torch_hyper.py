"""torch: a round's hyperparameters are its leader's; schedulers that run apart do not split the replicas."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.testing import Cluster
from tests.conformance.cases import SCHEDULES, SCRIPTS
from tests.conformance.drive import with_late_rank
from tests.conformance.torch_ranks import TorchTrainer, conv_model, flat, quadratic, wrap_scripted


class SpySGD(torch.optim.SGD):
    """Writes down what each of its steps was done with."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.done: list[tuple[float, float]] = []

    def step(self, closure: Any = None) -> Any:
        self.done.append((self.param_groups[0]["lr"], self.param_groups[0]["momentum"]))
        return super().step(closure)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_round_has_its_leaders_hyperparameters(schedule, tapes):
    """Rank r starts at lr 0.01 (r + 1), momentum 0.1 (r + 1), and its scheduler has a speed of its own."""

    def make(rank: int) -> TorchTrainer:
        trainer = TorchTrainer.__new__(TorchTrainer)
        trainer.model = conv_model()
        plain = SpySGD(trainer.model.parameters(), lr=0.01 * (rank + 1), momentum=0.1 * (rank + 1))
        trainer.opt = hvd.EagerOptimizer(plain, quorum=schedule.quorum)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.opt, 0.5 + 0.1 * rank)
        done = trainer.opt.step

        def step() -> None:
            done()
            scheduler.step()
            expected = 0.01 * (rank + 1) * (0.5 + 0.1 * rank) ** scheduler.last_epoch
            assert trainer.opt.param_groups[0]["lr"] == pytest.approx(expected)  # its own again
            assert trainer.opt.param_groups[0]["momentum"] == 0.1 * (rank + 1)

        trainer.step = step  # type: ignore[method-assign]
        trainers[rank] = trainer
        return trainer

    trainers: dict[int, TorchTrainer] = {}
    outcomes = with_late_rank(schedule, make)
    leaders = set()
    for rank, outcome in enumerate(outcomes):
        assert outcome.after.tobytes() == outcomes[0].after.tobytes()
        rounds = [r for r in tapes[rank].rounds if r.gradients]
        assert trainers[rank].opt.done == [(r.hyper[0]["lr"], r.hyper[0]["momentum"]) for r in rounds]
        for round_ in rounds:
            leader = round(round_.hyper[0]["momentum"] / 0.1) - 1
            leaders.add(leader)
            if round_.index <= 3:
                assert leader < schedule.size - 1, "the late rank led a round it was not in"
                own = 0.01 * (leader + 1) * (0.5 + 0.1 * leader) ** (round_.index - 1)
                assert round_.hyper[0]["lr"] == pytest.approx(own)
    assert leaders <= set(range(schedule.size))


def test_groups_keep_their_own_hyperparameters():
    slow, fast = quadratic(1.0), quadratic(1.0)
    groups = [{"params": [slow], "lr": 0.1}, {"params": [fast], "lr": 0.5, "weight_decay": 0.2}]

    def train(rank: int) -> list[float]:
        mine = [quadratic(1.0), quadratic(1.0)]
        own = [{**group, "params": [p]} for group, p in zip(groups, mine, strict=True)]
        opt = hvd.EagerOptimizer(torch.optim.SGD(own), quorum="all")
        opt.step()
        opt.drain()
        return [p.item() for p in mine]

    for weights in Cluster(2).run(train):
        assert weights == pytest.approx([1 - 0.1, 1 - 0.5 * 1.2])


def test_tuples_and_tensors_stay_what_they_are():
    parameter = quadratic(1.0)
    plain = torch.optim.Adam([parameter], lr=torch.tensor(0.01), betas=(0.8, 0.9))
    opt = wrap_scripted(plain, SCRIPTS[0])
    opt._async.worker.lr = 0.02
    opt.step()
    assert isinstance(opt.param_groups[0]["lr"], torch.Tensor)
    assert opt.param_groups[0]["lr"].item() == pytest.approx(0.01)
    assert opt.param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("before", [True, False])
def test_scheduler_made_before_or_after_wrapping(before):
    parameter = quadratic(0.0)
    plain = torch.optim.SGD([parameter], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if before:
            scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
            opt = wrap_scripted(plain, SCRIPTS[0])
        else:
            opt = wrap_scripted(plain, SCRIPTS[0])
            scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
        rates = []
        for _ in range(3):
            parameter.grad = torch.ones(1)
            opt.step()
            rates.append(opt._async.worker.hypers[-1][0]["lr"])
            scheduler.step()
    assert rates == [1.0, 0.5, 0.25]


# -- schedulers -----------------------------------------------------------------------------------------------

Step = Callable[[int], None]


def step_lr(opt: Any, rank: int) -> Step:
    """Halves the rate every 1 + rank steps."""
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1 + rank, gamma=0.5)
    return lambda step: scheduler.step()


def plateau(opt: Any, rank: int) -> Step:
    """Halves it when this rank's own loss, made up here, has not fallen."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=rank)
    return lambda step: scheduler.step(1.0 if rank < 2 else 1.0 / (1 + step))


def one_cycle(opt: Any, rank: int) -> Step:
    """Changes momentum too; rank r steps it only every r + 1 steps."""
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=50)
    return lambda step: scheduler.step() if step % (rank + 1) == 0 else None


def by_hand(opt: Any, rank: int) -> Step:
    """Sets rates, momentum and decay of the groups as it likes."""

    def change(step: int) -> None:
        for index, group in enumerate(opt.param_groups):
            group.update(lr=0.01 * (1 + rank + step % 3 + index), momentum=0.1 * rank, weight_decay=0.01 * index)

    return change


@pytest.mark.parametrize("quorum", ["solo", "majority", 2, "all"])
@pytest.mark.parametrize("schedule", [step_lr, plateau, one_cycle, by_hand], ids=lambda f: f.__name__)
def test_schedulers_that_run_apart_do_not_split_the_replicas(schedule, quorum):
    def train(rank: int) -> tuple[bytes, bytes, list[float], list[float]]:
        trainer = TorchTrainer.__new__(TorchTrainer)
        trainer.model = conv_model()
        parameters = list(trainer.model.parameters())
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}]
        plain = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)
        trainer.opt = hvd.EagerOptimizer(plain, quorum=quorum, max_staleness=4, bucket_cap_mb=2e-4)
        alone = torch.optim.SGD([{**group, "params": [torch.nn.Parameter(torch.zeros(1))]} for group in groups],
                                lr=0.05, momentum=0.9, weight_decay=0.01)  # fmt: skip
        change, expected = schedule(trainer.opt, rank), schedule(alone, rank)
        for step in range(8 + rank):
            trainer.gradient(rank, step)
            trainer.step()
            change(step)
            alone.step()
            expected(step)
        trainer.opt.drain()
        state = trainer.opt.state_dict()["state"].values()
        rates, own = ([g["lr"] for g in opt.param_groups] for opt in (trainer.opt, alone))
        return trainer.weights().tobytes(), flat(s["momentum_buffer"] for s in state).tobytes(), rates, own

    outcomes = Cluster(3, jitter=0.002).run(train)
    assert len({weights for weights, _, _, _ in outcomes}) == 1
    assert len({state for _, state, _, _ in outcomes}) == 1
    assert len({tuple(rates) for _, _, rates, _ in outcomes}) > 1, "the schedulers did not run apart"
    for _, _, rates, own in outcomes:
        assert rates == own  # as if no other rank were there
