"""Gossip of every binding that goes on in another job, from what was saved after drain() and after cut()."""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any

import numpy as np
import pytest

from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance import gossip_ranks as ranks
from tests.conformance import gossip_reference as reference
from tests.conformance.drive import scripted_engine
from tests.conformance.gossip_ranks import ADAM, EXACT, PAIRED, PAIRS, RING, STAR, Binding, Rank, Seen, both, by_options


@functools.cache
def states(binding: Binding, algorithm: str = "sgp", end: str = "cut") -> list[dict[str, Any]]:
    """States that three ranks have saved after four steps."""

    def work(rank: int) -> dict[str, Any]:
        options = PAIRS if algorithm == "adpsgd" else STAR
        trainer = binding.make(binding.problem(3), rank, **options).train(4)
        getattr(trainer.opt, end)()
        return trainer.saved()

    return Cluster(3).run(work)


def share(state: dict[str, Any], name: str) -> Any:
    """An entry of a rank's share of a state, in torch's form or in Keras'."""
    return state["opt"]["hvd_async"][name] if "opt" in state else state[f"hvd_async.{name}"]


@pytest.mark.parametrize("size", [1, 2, 5])
@both
def test_rank_0s_drained_state_resumes_at_any_size(binding, size):
    """Weights, momentum, and the number of rounds; data goes on."""
    state = states(binding, end="drain")[0]
    problem = binding.problem(size)

    def work(rank: int) -> tuple[Any, Any, Any]:
        trainer = binding.make(problem, rank, **STAR).resumed(state, 4)
        began, moments = trainer.weights(), trainer.moments()
        assert trainer.opt.rounds == share(state, "rounds") > 0
        trainer.train(3).opt.drain()
        assert trainer.opt.rounds == share(state, "rounds") + trainer.opt.stats().rounds
        return began, moments, trainer.weights()

    seen = Cluster(size).run(work)
    first, moments = seen[0][:2]
    resumed = dataclasses.replace(
        problem,
        start=np.tile(first, (size, 1)),
        gradient=lambda z, rank, step: problem.gradient(z, rank, 4 + step),
        states=(reference.start(first)._replace(t=4, first=moments),) * size,
    )
    expected = reference.sgp(resumed, ranks.graph("star", size), 3).drained()
    for began, _, weights in seen:
        assert began.tolist() == first.tolist()
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("steps", [(5, 5, 5), (3, 6, 4)], ids=["even", "uneven"])
@by_options(
    STAR,
    RING | {"compression": "int8"},
    STAR | {"hierarchical": 3},
    PAIRS | {"hierarchical": 3},
    STAR | {"average_every": 3},
    STAR | {"gossip_every": 3},
    PAIRED,
    EXACT,
    EXACT | {"compression": "int8", "gossip_every": 2},
    RING | {"gossip_every": 2},
    RING | {"quasi_global": True},
    STAR | {"quasi_global": True, "compression": "int8"},
    STAR | {"hierarchical": 3, "compression": "int8", "average_every": 3},
)
@both
def test_each_ranks_own_state_goes_on_as_if_nothing_had_been(binding, options, steps):
    """Bit by bit, beside a job that made the cut and went on."""
    problem, saved = binding.problem(3), list[Any]([None] * 3)

    def whole(rank: int) -> tuple[Any, ...]:
        trainer = binding.make(problem, rank, **options).train(steps[rank])
        trainer.opt.cut()
        saved[rank] = trainer.saved()
        return finish(trainer)

    def second(rank: int) -> tuple[Any, ...]:
        trainer = binding.make(problem, rank, **options).resumed(saved[rank], steps[rank])
        assert share(trainer.saved(), "cut")  # (what was loaded can be saved again)
        return finish(trainer)

    def finish(trainer: Rank) -> tuple[Any, ...]:
        path = [trainer.train(1).weights().tobytes() for _ in range(5)]
        weight = trainer.opt.stats().push_sum_weight
        trainer.opt.drain()
        return path, weight, trainer.weights().tobytes(), trainer.moments().tobytes()

    ends = Cluster(3).run(whole)
    assert Cluster(3).run(second) == ends
    if options == STAR:
        assert all(abs(share(state, "weight") - 1.0) > 0.01 for state in saved)


@both
def test_adpsgd_goes_on_from_each_ranks_own_state(binding):
    """The reference does the same from the same weights and moments, in the order that the ranks have recorded."""
    problem, together, saved = binding.problem(3), threading.Barrier(3), states(binding, "adpsgd")

    def work(rank: int) -> tuple[Any, Any, Seen]:
        trainer = binding.make(problem, rank, **PAIRS).resumed(saved[rank], 4)
        first, moments = trainer.weights(), trainer.moments()
        seen = ranks.watch(trainer)
        together.wait(30)
        ranks.train(trainer, seen, 20)
        return first, reference.start(first)._replace(t=4, first=moments), ranks.drain(trainer, seen)

    firsts, moments, seen = zip(*Cluster(3).run(work), strict=True)
    assert np.abs(np.array(firsts) - firsts[0]).max() > 1e-3
    resumed = dataclasses.replace(
        problem,
        start=np.array(firsts),
        gradient=lambda z, rank, step: problem.gradient(z, rank, 4 + step),
        states=moments,
    )
    outcome = reference.adpsgd(resumed, [own.log[: own.log.index(("drained",))] for own in seen])
    for rank, own in enumerate(seen):
        np.testing.assert_allclose(own.path, outcome.path[rank], rtol=0, atol=1e-5)
        np.testing.assert_allclose(own.drained, outcome.drained(), rtol=0, atol=1e-5)


@both
def test_a_state_after_cut_goes_to_its_own_rank_and_size_only(binding):
    saved = states(binding)
    for size, rank, other in ((3, 0, 1), (3, 2, 0), (2, 1, 1), (1, 0, 0)):
        said = rf"rank {other} of 3 after cut.*that rank.s own.*this is rank {rank} of {size}\. Load each .* save after"
        with scripted_engine(size, rank):
            trainer = binding.make(binding.problem(size), rank)
            fresh = trainer.saved()
            with pytest.raises(ValueError, match=said):
                trainer.resumed(saved[other], 4)
            trainer.assign(binding.problem(size).start[rank])
            assert str(trainer.saved()) == str(fresh)  # nothing has changed
    with scripted_engine(3, 1):
        binding.make(binding.problem(3), 1).resumed(saved[1], 4)


@both
def test_what_cannot_be_saved_or_loaded_says_what_to_do(binding):
    def work(rank: int) -> None:
        trainer = binding.make(binding.problem(2), rank, **STAR)
        fresh = trainer.saved()
        trainer.train(2)
        with pytest.raises(ReplicaStateError, match=r"on their way.*drain\(\).*rank 0's.*cut\(\)"):
            trainer.saved()
        with pytest.raises(ReplicaStateError, match=r"call drain\(\) before loading"):
            trainer.resumed(fresh, 2)
        trainer.opt.cut()
        trainer.saved()
        trainer.train(1).opt.drain()
        trainer.resumed(trainer.saved(), 3)
        trainer.train(1).opt.drain()  # the ranks meet anew
        assert trainer.opt.stats().steps == 4

    Cluster(2).run(work)


@pytest.mark.parametrize("who", [[0, 1, 2], [1]], ids=["adpsgd", "one-rank-only"])
@both
def test_states_after_cut_that_do_not_fit_are_refused(binding, who):
    saved = states(binding)

    def work(rank: int) -> None:
        trainer = binding.make(binding.problem(3), rank, **(PAIRS if len(who) > 1 else STAR))
        if rank in who:
            trainer.resumed(saved[rank], 4)
        trainer.train(1)

    for outcome in Cluster(3).outcomes(work):
        if len(who) > 1:
            assert "push-sum weight" in str(outcome)
            assert "adpsgd knows none" in str(outcome)
        else:
            assert isinstance(outcome, ReplicaMismatchError)
            assert "weights as after cut()" in str(outcome)


@both
def test_drained_states_go_from_one_wrapper_to_another_and_cut_ones_do_not(binding):
    keras = binding.framework == "keras"

    def state_of(opt: Any) -> dict[str, Any]:
        return dict(opt.get_state() if keras else opt.state_dict())

    def load(opt: Any, state: dict[str, Any]) -> None:
        (opt.set_state if keras else opt.load_state_dict)(state)

    def work(rank: int) -> bytes:
        trainer = binding.make(binding.problem(2, ADAM), rank, **STAR).train(2)
        trainer.opt.drain()
        eager = trainer.eager()
        load(eager, state_of(trainer.opt))
        assert eager.rounds == trainer.opt.rounds > 0
        held = state_of(eager)
        load(trainer.opt, held)
        assert trainer.opt.rounds == eager.rounds
        trainer.train(1).opt.cut()
        with pytest.raises(ValueError, match=r"goes with this rank's own weights.*save it after drain\(\)"):
            load(eager, state_of(trainer.opt))
        trainer.opt.drain()
        pending = {"hvd_async.versions.0": np.ones(2)}
        if not keras:
            pending = {"hvd_async": held["hvd_async"] | {"versions": [[1]]}}
        with pytest.raises(ValueError, match=r"has gradients pending, which would be lost: save it after drain\(\)"):
            load(trainer.opt, held | pending)
        return trainer.weights().tobytes()

    ranks.alike(work, 2)
