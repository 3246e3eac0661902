"""Names that are ours instead of Horovod's, callbacks, wrong use, and starting again: at 2 ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from jobs.table import BROADCASTS
from launch import Job, RunJob, same

pytestmark = pytest.mark.multiproc

TORCH, TENSORFLOW = "torch", "tensorflow"
BOTH = pytest.mark.parametrize("framework", [TORCH, TENSORFLOW])
Names = Callable[[str], Job]


@pytest.fixture(scope="module")
def names(forked: RunJob) -> Names:
    """The job of a framework, which runs once."""
    return functools.cache(lambda framework: forked(framework, "names.py", 2, args=("--framework", framework)))


@BOTH
def test_the_job_ends_well(names: Names, framework: str) -> None:
    names(framework).check().case("end")


@BOTH
def test_wrapping_before_init_says_to_call_init(names: Names, framework: str) -> None:
    for rank in names(framework).case("too early"):
        assert rank["kind"] == "NotInitializedError"
        assert "hvd.init()" in rank["text"]


def test_different_weights_are_refused_everywhere_and_can_be_fixed_in_torch(names: Names) -> None:
    ranks = names(TORCH).case("different weights")
    for rank in ranks:
        assert rank["kind"] == "ReplicaMismatchError"
        assert "rank 1 from rank 0" in rank["text"]
        assert "'0.weight (16, 8) float32'" in rank["text"]
        assert "hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in rank["text"]
    assert same(ranks, "weights")


def test_different_weights_are_refused_everywhere_in_fit(names: Names) -> None:
    for rank in names(TENSORFLOW).case("different weights"):  # TensorFlow wraps what a graph raises
        assert "ReplicaMismatchError: " in rank["text"]
        assert "the weights differ before the first step: rank 1 from rank 0" in rank["text"]
        assert "kernel (8, 16) float32" in rank["text"]
        assert "BroadcastGlobalVariablesCallback(0)" in rank["text"]


@pytest.mark.parametrize(("kind", "steps"), BROADCASTS)
def test_broadcast_optimizer_state_sends_state_and_takes_no_step(
    names: Names, kind: str, steps: tuple[int, int]
) -> None:
    ranks = names(TORCH).case(f"broadcast {kind} {steps[0]} {steps[1]}")
    entries = {"sgd": 1, "adam": 3}[kind] * ranks[0]["parameters"] if steps[0] else 0
    for rank in ranks:
        assert not rank["moved"]
        assert rank["state"] == ranks[0]["own"]
        assert rank["entries"] == entries
        assert rank["lr"] == 0.01
        assert rank["steps"] == 2
        assert rank["rounds"] == 7 + 2
    assert same(ranks, "weights")
    assert same(ranks, "trained")


def test_broadcast_optimizer_state_takes_tensors_that_are_channels_last(names: Names) -> None:
    ranks = names(TORCH).case("broadcast channels last")
    assert ranks[0]["last"] == 1, "else it shows nothing"
    assert same(ranks, "state")


def test_tensors_of_every_dtype_are_taken_from_rank_0(names: Names) -> None:
    ranks = names(TORCH).case("any kind")
    for rank in ranks:
        assert rank["values"][1:] == rank["joined"][1:] == rank["expected"]
        assert rank["state"]["seen"] == rank["state joined"]["seen"] == [True, False]
        assert rank["scale"] == "scale 0"
    for key in ("values", "state", "joined", "state joined"):
        assert same(ranks, key)
    assert [rank["kept"] for rank in ranks] == ["scale 0", "scale 1"]


def test_variables_of_every_dtype_are_broadcast_but_seeds(names: Names) -> None:
    for number, rank in enumerate(names(TENSORFLOW).case("any kind")):
        assert rank["different"] == []
        assert rank["seeds"] == [number] * len(rank["seeds"])


@BOTH
def test_join_drains_and_names_the_last_rank(names: Names, framework: str) -> None:
    for rank in names(framework).case("join"):
        assert rank["last"] == 1
        assert rank["weights"] == rank["expected"]


@BOTH
def test_shutdown_and_init_again(names: Names, framework: str) -> None:
    for rank in names(framework).case("start again"):
        for what in ("after_shutdown", "new", "old"):
            assert rank[what] == rank[f"{what}_expected"], what
        assert rank["counts"] == [5, 5], "statistics continue after a shutdown"


def test_the_broadcast_callback_makes_seeds_and_rates_equal(names: Names) -> None:
    ranks = names(TENSORFLOW).case("broadcast callback")
    assert not same(ranks, "start")
    assert same(ranks, "once")
    assert same(ranks, "twice")
    assert ranks[0]["once"] != ranks[0]["twice"]
    assert [rank["lr"] for rank in ranks] == pytest.approx([0.1, 0.1])
    assert [rank["distance"] for rank in ranks] == [0.0, 0.0]


def test_distributed_optimizer_averages_and_horovods_does_not_on_keras_3(names: Names) -> None:
    ranks = names(TENSORFLOW).case("distributed optimizer")
    assert same(ranks, "start")
    assert same(ranks, "ours")
    assert any("EagerOptimizer" in text for text in ranks[0]["warned"])
    assert not same(ranks, "theirs"), (
        "Horovod's wrapper averages on Keras 3 now: README and docs/keras.md say it does not"
    )
