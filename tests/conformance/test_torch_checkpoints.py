"""torch: states saved after drain() and after cut(), taken back by as many ranks, by others, by plain torch."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.cases import Case
from tests.conformance.torch_ranks import TINY, TorchTrainer, backwards, conv_model, flat, plain

MOMENTUM = Case("momentum", "sgd", 0.05, momentum=0.9)
ADAM = Case("adam", "adam", 0.01)


class Saved:
    """What a script would save: a model's and an optimizer's state, through a file's format."""

    def __init__(self, model: torch.nn.Module, opt: Any) -> None:
        self.model, self.opt = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())

    def into(self, model: torch.nn.Module, opt: Any) -> None:
        model.load_state_dict(self.model)
        opt.load_state_dict(copy.deepcopy(self.opt))  # (torch keeps the tensors it is given)


def run(
    case: Case, steps: Sequence[range], states: Sequence[Saved] | None = None, end: str = "drain", **options: Any
) -> list[tuple[bytes, Saved, Any]]:
    """Every rank's weights, state and optimizer after its steps.

    Args:
        steps: of each rank.
        states: each rank's, or one for all, to begin with.
        end: how it ends.
    """

    def train(rank: int) -> tuple[bytes, Saved, Any]:
        trainer = TorchTrainer(case, **options)
        if states is not None:
            states[rank % len(states)].into(trainer.model, trainer.opt)
        trainer.train(rank, steps[rank])
        getattr(trainer.opt, end)()
        return trainer.weights().tobytes(), Saved(trainer.model, trainer.opt), trainer.opt

    return Cluster(len(steps)).run(train)


@pytest.mark.parametrize("case", [MOMENTUM, ADAM], ids=lambda case: case.name)
@pytest.mark.parametrize("end", ["drain", "cut"])
@pytest.mark.parametrize("cap", [25.0, TINY])
def test_a_synchronous_job_that_is_resumed_ends_with_the_same_bits(case, end, cap):
    options = {"quorum": "all", "bucket_cap_mb": cap}
    whole = run(case, [range(8)] * 2, **options)
    first = run(case, [range(5)] * 2, end=end, **options)
    assert [opt.rounds for _, _, opt in first] == [5, 5]
    second = run(case, [range(5, 8)] * 2, [saved for _, saved, _ in first], **options)
    assert [weights for weights, _, _ in second] == [weights for weights, _, _ in whole]
    assert [opt.rounds for _, _, opt in second] == [8, 8]
    assert [opt.stats().rounds for _, _, opt in second] == [3, 3]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("quorum", ["all", "solo"])
def test_rank_0s_drained_state_resumes_at_any_size(quorum, size):
    first = run(MOMENTUM, [range(4), range(6)], quorum=quorum)
    rounds = first[0][2].rounds
    second = run(MOMENTUM, [range(6, 9)] * size, [first[0][1]], quorum=quorum)
    assert len({weights for weights, _, _ in second}) == 1
    assert {opt.stats().gradients_applied for _, _, opt in second} == {3 * size}
    assert [opt.rounds - opt.stats().rounds for _, _, opt in second] == [rounds] * size
    if quorum == "all":
        model = conv_model()
        optimizer = plain(MOMENTUM, model.parameters())
        first[0][1].into(model, optimizer)
        reader = TorchTrainer.__new__(TorchTrainer)
        reader.model, reader.opt = model, optimizer
        for step in range(6, 9):
            average = torch.as_tensor(sum(reader.gradient(r, step) for r in range(size)) / size, dtype=torch.float32)
            parts = average.split([p.numel() for p in backwards(model)])
            for parameter, part in zip(backwards(model), parts, strict=True):
                parameter.grad = part.view_as(parameter).clone()
            optimizer.step()
        np.testing.assert_allclose(np.frombuffer(second[0][0]), flat(backwards(model)), rtol=0, atol=1e-6)


# -- gradients of whole numbers, so that every one that is lost shows -----------------------------------------


def whole(rank: int, step: int) -> list[torch.Tensor]:
    drawn = np.random.default_rng([rank, step]).integers(-8, 9, 5)
    return [torch.as_tensor(part, dtype=torch.float32) for part in (drawn[:2], drawn[2:])]


def whole_run(
    steps: Sequence[range], states: Sequence[Any], end: str, slow: int | None = None, **options: Any
) -> list[tuple[list[float], Any, Any]]:
    """As ``run``, with SGD of learning rate 1; a state is (weights, optimizer's).

    Args:
        slow: this rank takes its first step when all others have taken their last: its gradients are all late.
    """
    taken = [threading.Event() for _ in steps]

    def train(rank: int) -> tuple[list[float], Any, Any]:
        parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]
        opt = hvd.EagerOptimizer(torch.optim.SGD(parameters, lr=1.0), bucket_cap_mb=TINY, **options)
        if states:
            weights, state = states[rank % len(states)]
            with torch.no_grad():
                for parameter, values in zip(parameters, weights, strict=True):
                    parameter.copy_(values)
            opt.load_state_dict(state)
        opt._async.worker_now()
        for other, event in enumerate(taken):
            assert rank != slow or other == slow or event.wait(60)
        for step in steps[rank]:
            for parameter, values in zip(parameters, whole(rank, step), strict=True):
                parameter.grad = values.clone()
            opt.step()
        taken[rank].set()
        getattr(opt, end)()
        saved = ([p.detach().clone() for p in parameters], copy.deepcopy(opt.state_dict()))
        return [x for p in parameters for x in p.tolist()], saved, opt

    return Cluster(len(steps), jitter=0.002).run(train)


def total(counts: Sequence[int]) -> list[float]:
    """The weights once every rank's first so many gradients are applied."""
    sums = sum(torch.cat(whole(rank, step)) for rank, count in enumerate(counts) for step in range(count))
    return (-sums / len(counts)).tolist()  # type: ignore[union-attr]


def cut_with_two_pending(slow: int = 1) -> list[tuple[list[float], Any, Any]]:
    """Two ranks that cut after 6 steps, and the slow one after 2, which are both pending."""
    ends = whole_run([range((6, 2)[rank == slow]) for rank in range(2)], (), "cut", slow)
    for rank, (_, (_, state), _) in enumerate(ends):
        share = state["hvd_async"]
        assert [len(versions) for versions in share["versions"]] == ([2, 2] if rank == slow else [0, 0])
        assert share["rounds"] == 6
    return ends


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("quorum", ["solo", "majority", "all"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_a_cut_and_a_resumed_job_lose_no_gradient(quorum, slow, again):
    counts = [(6, 2)[rank == slow] for rank in range(2)]
    first = cut_with_two_pending(slow)
    states = [saved for _, saved, _ in first]
    if again:  # cut at once: what was pending still is
        states = [saved for _, saved, _ in whole_run([range(0)] * 2, states, "cut", quorum=quorum)]
    second = whole_run([range(count, count + 4) for count in counts], states, "drain", quorum=quorum)
    for rank, (weights, _, opt) in enumerate(second):
        assert weights == total([count + 4 for count in counts])
        stats = opt.stats()
        assert stats.gradients_applied == stats.total_produced == 8 + 2
        assert stats.gradients_produced == (6 if rank == slow else 4)
        assert opt.rounds == first[rank][2].rounds + stats.rounds


@pytest.mark.parametrize("quorum", ["solo", "all"])
def test_what_was_pending_goes_out_in_a_drain_without_any_step(quorum):
    states = [saved for _, saved, _ in cut_with_two_pending()]
    for _ in range(2):  # a state may be loaded again
        for weights, _, opt in whole_run([range(0)] * 2, states, "drain", quorum=quorum):
            assert weights == total([6, 2])
            assert opt.stats().steps == 0


def test_learning_rates_that_differ_by_rank_split_no_replica_in_a_drain_without_any_step():
    states = [saved for _, saved, _ in cut_with_two_pending()]
    for rank, (_, state) in enumerate(states):
        state["param_groups"][0]["lr"] = 1.0 + rank
    one, other = [weights for weights, _, _ in whole_run([range(0)] * 2, states, "drain")]
    assert one == other


def test_training_goes_on_after_a_cut_in_one_job():
    def train(rank: int) -> tuple[list[float], int]:
        parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]
        opt = hvd.EagerOptimizer(torch.optim.SGD(parameters, lr=1.0))
        for end in (opt.cut, opt.cut, opt.drain):
            for _ in range(3 + rank):
                for parameter, values in zip(parameters, whole(rank, opt.stats().steps), strict=True):
                    parameter.grad = values.clone()
                opt.step()
            end()
        return [x for p in parameters for x in p.tolist()], opt.stats().gradients_applied

    assert Cluster(2, jitter=0.002).run(train) == [(total([9, 12]), 21)] * 2


def test_a_state_with_pending_gradients_goes_to_its_own_rank_and_size_only():
    saved = cut_with_two_pending()[1][1]
    said = r"rank 1 of 2 after cut\(\), with 2 gradient\(s\) pending.*save after drain\(\)"
    for states in ([saved] * 2, [saved] * 3, [saved]):
        outcomes = _load(states)
        for other, outcome in enumerate(outcomes):
            if len(states) == 2 and other == 1:
                assert outcome == ""
            else:
                assert re.search(said, outcome), outcome
    said = r"pending in buckets of .* wrap it with the same bucket_cap_mb, groups"
    assert re.search(said, _load([saved] * 2, bucket_cap_mb=25.0)[1])


def _load(states: Sequence[Any], **options: Any) -> list[str]:
    """What each rank is told when it loads its state."""

    def load(rank: int) -> str:
        parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]
        opt = hvd.EagerOptimizer(torch.optim.SGD(parameters, lr=1.0), **{"bucket_cap_mb": TINY, **options})
        try:
            opt.load_state_dict(states[rank][1])
        except ValueError as error:
            return str(error)
        return ""

    return Cluster(len(states)).run(load)


# -- in the middle of training --------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "allowed"), [({}, False), ({"quorum": 1}, False), ({"quorum": "all"}, True),
                                                  ({"max_staleness": 0}, True)])  # fmt: skip
def test_a_state_in_mid_training(options, allowed):
    def train(rank: int) -> None:
        trainer = TorchTrainer(MOMENTUM, **options)
        trainer.opt.state_dict()
        trainer.train(rank, range(3))
        if allowed:
            state = trainer.opt.state_dict()
            assert not any(state["hvd_async"]["versions"])
        else:
            with pytest.raises(ReplicaStateError, match=r"would be lost.*drain\(\).*cut\(\)"):
                trainer.opt.state_dict()
            with pytest.raises(ReplicaStateError, match=r"call drain\(\) before loading"):
                trainer.opt.load_state_dict({**saved, "hvd_async": fresh(trainer.opt)})
        trainer.opt.drain()
        trainer.opt.state_dict()

    def fresh(opt: Any) -> dict[str, Any]:
        return {"size": 2, "index": 0, "rounds": 0, "nbytes": list(opt._async.replica.layout.nbytes), "vectors": [],
                "versions": []}  # fmt: skip

    saved = plain(MOMENTUM, conv_model().parameters()).state_dict()
    Cluster(2).run(train)


def test_a_plain_optimizer_takes_our_state_and_we_take_its():
    ours = run(MOMENTUM, [range(4)] * 2, quorum="all")
    model = conv_model()
    optimizer = plain(MOMENTUM, model.parameters())
    ours[0][1].into(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    theirs = Saved(model, optimizer)
    assert "hvd_async" not in theirs.opt
    back = run(MOMENTUM, [range(4, 6)] * 2, [theirs], quorum="all")
    assert back[0][0] == back[1][0] != ours[0][0]
    assert [opt.rounds for _, _, opt in back] == [2, 2]
    buffers = back[0][1].opt["state"]
    assert len(buffers) == 4
    assert all("momentum_buffer" in held for held in buffers.values())
