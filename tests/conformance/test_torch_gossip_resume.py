"""torch: gossip that goes on in another job, from what was saved after drain() and after cut()."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.conformance import gossip_reference as reference
from tests.conformance.cases import CASES
from tests.conformance.gossip_reference import Problem, least_squares
from tests.conformance.torch_gossip_ranks import GossipTrainer, Seen, graph, resume, saved
from tests.conformance.torch_ranks import plain

MOMENTUM, ADAM = CASES[1], CASES[6]
STAR = {"algorithm": "sgp", "topology": "star"}
RING = {"algorithm": "dpsgd", "topology": "ring"}
PAIRS = {"algorithm": "adpsgd", "topology": "ring"}


def first_job(problem: Problem, steps: Sequence[int], end: str, **options: Any) -> list[dict[str, Any]]:
    """Each rank's state."""

    def train(rank: int) -> dict[str, Any]:
        trainer = GossipTrainer(problem, rank, **options).train(steps[rank])
        getattr(trainer.opt, end)()
        return saved(trainer)

    return Cluster(len(steps)).run(train)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("options", [STAR, RING, PAIRS, {"algorithm": "allreduce"}], ids=lambda one: one["algorithm"])
def test_rank_0s_drained_state_resumes_at_any_size(options, size):
    state = first_job(least_squares(2, ADAM), [4, 4], "drain", **options)[0]
    problem = least_squares(size, ADAM)

    def train(rank: int) -> tuple[Any, Any]:
        trainer = resume(state, GossipTrainer(problem, rank, **STAR), 4)
        began = trainer.weights()
        trainer.train(3)
        trainer.opt.drain()
        assert trainer.opt.rounds == state["opt"]["hvd_async"]["rounds"] + trainer.opt.stats().exchanges
        return began, trainer.weights()

    moments = [state["opt"]["state"][index] for index in (0, 1)]
    held = [np.concatenate([one[key].double().numpy().ravel() for one in moments]) for key in ("exp_avg", "exp_avg_sq")]
    first = np.concatenate([one.double().numpy().ravel() for one in state["model"]])
    resumed = dataclasses.replace(
        problem,
        start=np.tile(first, (size, 1)),
        gradient=lambda z, rank, step: problem.gradient(z, rank, 4 + step),
        states=(reference.State(4, *held),) * size,
    )
    expected = reference.sgp(resumed, graph("star", size), 3).drained()
    for began, weights in Cluster(size).run(train):
        assert began.tolist() == first.tolist()
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("steps", [(5, 5, 5), (3, 6, 4)], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "options",
    [STAR, RING | {"compression": "int8"}, STAR | {"compression": "int8"}, {"compression": "bf16"},
     STAR | {"hierarchical": 3}, STAR | {"average_every": 3}],
    ids=lambda one: "-".join(map(str, one.values())),
)  # fmt: skip
def test_each_ranks_own_state_goes_on_as_if_nothing_had_been(options, steps):
    """Bit by bit, beside a job that made the cut and went on."""
    problem = least_squares(3, MOMENTUM)
    states = list[Any]([None] * 3)

    def whole(rank: int) -> tuple[Any, ...]:
        trainer = GossipTrainer(problem, rank, **options).train(steps[rank])
        trainer.opt.cut()
        states[rank] = saved(trainer)
        return finish(trainer)

    def second(rank: int) -> tuple[Any, ...]:
        trainer = resume(states[rank], GossipTrainer(problem, rank, **options), steps[rank])
        assert saved(trainer)["opt"]["hvd_async"]["cut"]  # (what was loaded can be saved again)
        return finish(trainer)

    def finish(trainer: GossipTrainer) -> tuple[Any, ...]:
        path = [trainer.train(1).weights().tobytes() for _ in range(5)]
        weight = trainer.opt.stats().push_sum_weight
        trainer.opt.drain()
        return path, weight, trainer.weights().tobytes()

    ends = Cluster(3).run(whole)
    if options == STAR:
        assert all(abs(state["opt"]["hvd_async"]["weight"] - 1.0) > 0.01 for state in states)

    def at_once(rank: int) -> list[float]:
        trainer = resume(states[rank], GossipTrainer(problem, rank, **options), steps[rank])
        trainer.opt.drain()
        weights: list[float] = trainer.weights().tolist()
        return weights

    assert Cluster(3).run(second) == ends
    x = [torch.cat([part.reshape(-1) for part in one["model"]]) * one["opt"]["hvd_async"]["weight"] for one in states]
    for weights in Cluster(3).run(at_once):
        np.testing.assert_allclose(weights, sum(x) / 3, rtol=0, atol=1e-6)


def test_adpsgd_goes_on_from_each_ranks_own_state():
    """As the reference does from the same weights and moments, in the order that the ranks have recorded."""
    problem, together = least_squares(4, MOMENTUM), threading.Barrier(4)
    states = first_job(problem, [5] * 4, "cut", **PAIRS)

    def train(rank: int) -> tuple[Any, Any, Seen]:
        trainer = resume(states[rank], GossipTrainer(problem, rank, **PAIRS), 5)
        moments = [trainer.opt.state[p]["momentum_buffer"].double().numpy().ravel() for p in trainer.parameters]
        first, seen = trainer.weights(), trainer.watch()
        together.wait(30)
        trainer.train(20)
        trainer.opt.drain()
        seen.drained = trainer.weights()
        return first, reference.State(5, np.concatenate(moments), np.zeros(6)), seen

    firsts, moments, seen = zip(*Cluster(4).run(train), strict=True)
    assert np.abs(np.array(firsts) - firsts[0]).max() > 1e-3
    resumed = dataclasses.replace(
        problem,
        start=np.array(firsts),
        gradient=lambda z, rank, step: problem.gradient(z, rank, 5 + step),
        states=moments,
    )
    outcome = reference.adpsgd(resumed, [own.log[: own.log.index(("drained",))] for own in seen])
    for rank, own in enumerate(seen):
        np.testing.assert_allclose(own.path, outcome.path[rank], rtol=0, atol=1e-5)
        np.testing.assert_allclose(own.drained, outcome.drained(), rtol=0, atol=1e-5)


def test_a_state_after_cut_goes_to_its_own_rank_and_size_only():
    states = first_job(least_squares(3, MOMENTUM), [4] * 3, "cut", **STAR)

    def load(rank: int) -> None:
        size = local_engine().size  # type: ignore[union-attr]
        trainer = GossipTrainer(least_squares(size, MOMENTUM), rank, **STAR)
        plain_state = trainer.opt.state_dict()
        other = states[(rank + 1) % 3]["opt"]
        if size == 3:
            said = rf"rank {(rank + 1) % 3} of 3 after cut.*that rank.s own.*this is rank {rank} of 3. Load each"
        else:
            said = rf"rank 1 of 3 after cut.*this is rank {rank} of {size}. .* or save after drain\(\)"
            other = states[1]["opt"]
        with pytest.raises(ValueError, match=said):
            trainer.opt.load_state_dict(other)
        assert trainer.opt.state_dict() == plain_state  # nothing has changed
        trainer.train(2)
        trainer.opt.drain()

    for size in (1, 2, 3):
        Cluster(size).run(load)


def test_what_cannot_be_saved_or_loaded_says_what_to_do():
    def train(rank: int) -> None:
        trainer = GossipTrainer(least_squares(2, MOMENTUM), rank, **STAR)
        fresh = trainer.opt.state_dict()
        trainer.train(2)
        with pytest.raises(ReplicaStateError, match=r"on their way.*drain\(\).*rank 0's.*cut\(\)"):
            trainer.opt.state_dict()
        with pytest.raises(ReplicaStateError, match=r"call drain\(\) before loading"):
            trainer.opt.load_state_dict(fresh)
        trainer.opt.cut()
        trainer.opt.state_dict()
        trainer.train(1)
        trainer.opt.drain()
        trainer.opt.load_state_dict(trainer.opt.state_dict())
        trainer.train(1)  # the ranks meet anew
        trainer.opt.drain()
        assert trainer.opt.stats().steps == 4

    Cluster(2).run(train)


@pytest.mark.parametrize(
    "options",
    [{}, {"algorithm": "dpsgd"}, {"compression": "int8"}, {"hierarchical": 2, "peers": 1}, {"average_every": 3},
     {"algorithm": "allreduce", "average_every": 4}],
    ids=str,
)  # fmt: skip
def test_cuts_change_nothing(options):
    """Neither is a graph of several phases begun anew, nor what is counted for ``average_every``."""

    def train(rank: int, cuts: bool) -> list[bytes]:
        trainer, path = GossipTrainer(least_squares(8, MOMENTUM), rank, **options), list[bytes]()
        for _ in range(7):
            path.append(trainer.train(1).weights().tobytes())
            if cuts:
                trainer.opt.consensus_distance()
        return path

    assert Cluster(8).run(lambda rank: train(rank, True)) == Cluster(8).run(lambda rank: train(rank, False))


def test_a_hosts_state_after_a_cut_is_its_own_whatever_another_host_does_meanwhile():
    def train(rank: int) -> bytes:
        trainer = GossipTrainer(least_squares(4, MOMENTUM), rank, hierarchical=2, topology="ring").train(2)
        trainer.opt.cut()
        if rank >= 2:  # the other host is in its next step, and its message is here
            worker = trainer.opt._async.worker_now()
            worker.engine.wait(lambda: bool(worker._letters.received))
        assert trainer.opt.state_dict()["hvd_async"]["cut"]
        trainer.train(1).opt.drain()
        return trainer.weights().tobytes()

    assert len(set(Cluster(4).run(train))) == 1


def test_drained_states_go_from_one_wrapper_to_another_and_cut_ones_do_not():
    def train(rank: int) -> None:
        trainer = GossipTrainer(least_squares(2, MOMENTUM), rank, **STAR).train(2)
        trainer.opt.drain()
        drained = trainer.opt.state_dict()
        eager = hvd.EagerOptimizer(plain(MOMENTUM, trainer.parameters))
        eager.load_state_dict(drained)
        assert eager.rounds == trainer.opt.rounds > 0
        held = eager.state_dict()
        trainer.opt.load_state_dict(held)
        assert trainer.opt.rounds == eager.rounds
        trainer.train(1)
        trainer.opt.cut()
        with pytest.raises(ValueError, match=r"goes with this rank's own weights.*save it after drain\(\)"):
            eager.load_state_dict(trainer.opt.state_dict())
        trainer.opt.drain()
        held["hvd_async"] |= {"versions": [[1]]}
        with pytest.raises(ValueError, match=r"has gradients pending, which would be lost: save it after drain\(\)"):
            trainer.opt.load_state_dict(held)

    Cluster(2).run(train)


@pytest.mark.parametrize("who", [[0, 1, 2], [1]], ids=["adpsgd", "one-rank-only"])
def test_states_after_cut_that_do_not_fit_are_refused(who):
    states = first_job(least_squares(3, MOMENTUM), [4] * 3, "cut", **STAR)

    def train(rank: int) -> None:
        trainer = GossipTrainer(least_squares(3, MOMENTUM), rank, **(PAIRS if len(who) > 1 else STAR))
        if rank in who:
            resume(states[rank], trainer, 4)
        trainer.train(1)

    for outcome in Cluster(3).outcomes(train):
        if len(who) > 1:
            assert "push-sum weight" in str(outcome)
            assert "adpsgd knows none" in str(outcome)
        else:
            assert isinstance(outcome, ReplicaMismatchError)
            assert "weights as after cut()" in str(outcome)


def test_a_plain_optimizers_state_is_taken_and_ours_by_a_plain_optimizer():
    alone = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, 2))]
    other = plain(MOMENTUM, alone)
    for parameter in alone:
        parameter.grad = torch.full_like(parameter, 3.0)
    other.step()

    def train(rank: int) -> Any:
        trainer = GossipTrainer(least_squares(2, MOMENTUM), rank, **STAR)
        trainer.opt.load_state_dict(other.state_dict())
        assert trainer.opt.state[trainer.parameters[0]]["momentum_buffer"].tolist() == [3.0, 3.0]
        trainer.train(2)
        trainer.opt.drain()
        return trainer.opt.state_dict()

    for state in Cluster(2).run(train):
        fresh = plain(MOMENTUM, [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, 2))])
        fresh.load_state_dict(state)
        held = fresh.state_dict()["state"][1]["momentum_buffer"]
        assert torch.equal(held, state["state"][1]["momentum_buffer"])


def test_optimizer_state_is_broadcast_before_the_first_step(monkeypatch):
    """Rank 0 has loaded a checkpoint; nobody has stepped."""
    meeting, sent = threading.Barrier(2), dict[str, Any]()

    def broadcast(value: Any, root: int, name: str) -> Any:
        if local_engine().rank == root:  # type: ignore[union-attr]
            sent[name] = value
        meeting.wait(30)
        return sent[name]

    fake = SimpleNamespace(rank=lambda: local_engine().rank, broadcast=broadcast, broadcast_object=broadcast)  # type: ignore[union-attr]
    monkeypatch.setattr("hvd_async.torch.functions.hvd", fake)
    state = first_job(least_squares(2, MOMENTUM), [3, 3], "drain", **STAR)[0]

    def train(rank: int) -> tuple[Any, int]:
        trainer = GossipTrainer(least_squares(2, MOMENTUM), rank, **STAR)
        if rank == 0:
            trainer.opt.load_state_dict(state["opt"])
        hvd.broadcast_optimizer_state(trainer.opt, root_rank=0)
        assert trainer.opt.stats().steps == 0
        held = [trainer.opt.state[p]["momentum_buffer"].tolist() for p in trainer.parameters]
        rounds = trainer.opt.rounds
        trainer.train(1)
        trainer.opt.drain()
        return held, rounds

    expected = [state["opt"]["state"][index]["momentum_buffer"].tolist() for index in (0, 1)]
    assert Cluster(2).run(train) == [(expected, state["opt"]["hvd_async"]["rounds"])] * 2
