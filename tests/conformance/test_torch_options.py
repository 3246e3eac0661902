"""torch: the parameters that Horovod's wrapper has too, against averages in float64; and what they refuse."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import horovod.torch
import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.runtime.process_sets import SingleRank
from hvd_async.testing import Cluster
from hvd_async.torch.collectives import HorovodCollectives
from tests.conformance.drive import scripted_engine
from tests.conformance.torch_ranks import TINY, ProcessSet, conv_model

STEPS = 5
SHAPES = ((3, 2), (4,), (1,))
Array = np.ndarray[Any, np.dtype[np.float64]]


def gradient(rank: int, step: int, index: int) -> Array:
    """Whole numbers from -8 to 8, which even bfloat16 holds and adds exactly for a few ranks."""
    return np.random.default_rng([rank, step, index]).integers(-8, 9, SHAPES[index]).astype(np.float64)


def trained(
    rank: int, options: dict[str, Any], dtype: torch.dtype = torch.float32, passes: int = 1, steps: int = STEPS
) -> tuple[list[Array], Any]:
    """One rank's weights after plain SGD with learning rate 1, and its optimizer."""
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    if callable(options.get("groups")):
        options = {**options, "groups": options["groups"](parameters)}
    opt = hvd.EagerOptimizer(torch.optim.SGD(parameters, lr=1.0), **options)
    for step in range(steps):
        opt.zero_grad()
        for part in range(passes):
            fed = [torch.as_tensor(gradient(rank, step * passes + part, i), dtype=dtype) for i in range(len(SHAPES))]
            sum((p * g).sum() for p, g in zip(parameters, fed, strict=True)).backward()
        opt.step()
    opt.drain()
    return [p.detach().double().numpy() for p in parameters], opt


def expected(ranks: Any, factor: float, steps: int = STEPS) -> list[Array]:
    """Minus ``factor`` times the sum of the ranks' gradients, in float64."""
    return [-factor * sum(gradient(r, s, i) for r in ranks for s in range(steps)) for i in range(len(SHAPES))]


def check(weights: list[Array], want: list[Array], tolerance: float = 1e-5) -> None:
    for got, exact in zip(weights, want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=0, atol=tolerance)


QUORUMS = pytest.mark.parametrize("quorum", ["all", "solo"])


@QUORUMS
@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 1 / 3),
        ({"op": horovod.torch.Sum}, 1.0),
        ({"op": hvd.Average}, 1 / 3),
        ({"gradient_predivide_factor": 4.0}, 1 / 3),
        ({"gradient_predivide_factor": 0.5, "op": horovod.torch.Average}, 1 / 3),
    ],
)
def test_op_and_predivide(options, factor, quorum):
    for weights, _ in Cluster(3).run(lambda rank: trained(rank, {"quorum": quorum, **options})):
        check(weights, expected(range(3), factor))


def test_predivide_divides_before_the_sum():
    """Sums that would not fit into float16 do once they are divided first."""

    def train(rank: int) -> float:
        parameter = torch.nn.Parameter(torch.zeros(1))
        opt = hvd.EagerOptimizer(
            torch.optim.SGD([parameter], lr=1.0), quorum="all", compression=hvd.Compression.fp16,
            gradient_predivide_factor=4.0, max_staleness=2,
        )  # fmt: skip
        parameter.grad = torch.full((1,), 60000.0)
        opt.step()
        opt.drain()
        return parameter.item()

    assert Cluster(4).run(train) == [pytest.approx(-60000.0, rel=1e-3)] * 4


@QUORUMS
@pytest.mark.parametrize(
    ("options", "buckets"),
    [
        ({}, 1),
        ({"bucket_cap_mb": TINY}, 3),
        ({"groups": 1, "bucket_cap_mb": TINY}, 1),
        ({"groups": 2}, 2),
        ({"groups": 9}, 3),
        ({"num_groups": 2}, 2),
        ({"groups": lambda ps: [[ps[2], ps[0]]]}, 2),
        ({"groups": lambda ps: [[ps[1]], [ps[0]], [ps[2]]]}, 3),
        ({"groups": lambda ps: [[ps[1], ps[2]]], "bucket_cap_mb": TINY}, 2),
        ({"groups": lambda ps: [ps], "bucket_cap_mb": TINY}, 1),
    ],
)
@pytest.mark.filterwarnings("ignore:num_groups")
def test_groups_travel_together_and_change_no_number(options, buckets, quorum):
    for weights, opt in Cluster(2).run(lambda rank: trained(rank, {"quorum": quorum, **options})):
        check(weights, expected(range(2), 1 / 2))
        assert len(opt._async.replica.layout) == buckets


def test_a_group_is_a_bucket():
    with scripted_engine(2):
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        opt: Any = hvd.EagerOptimizer(torch.optim.SGD(parameters, lr=1.0), groups=[[parameters[2], parameters[0]]])
    held = [{id(p) for p in bucket.parameters} for bucket in opt._async.replica.layout.buckets]
    assert held == [{id(parameters[0]), id(parameters[2])}, {id(parameters[1])}]


def test_num_groups_says_that_it_is_old():
    with scripted_engine(2), pytest.warns(DeprecationWarning, match="pass groups="):
        hvd.EagerOptimizer(torch.optim.SGD(conv_model().parameters(), lr=1.0), num_groups=2)
    with scripted_engine(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.EagerOptimizer(torch.optim.SGD(conv_model().parameters(), lr=1.0), groups=2)


class Eighth:
    """A compression of one's own: sends an eighth, as float64."""

    calls = 0

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        Eighth.calls += 1
        return tensor.double() / 8, (8, tensor.dtype)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return (tensor * ctx[0]).to(ctx[1])


@QUORUMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_compression_halves_what_travels_and_keeps_whole_numbers(compression, dtype, quorum):
    options = {"compression": getattr(hvd.Compression, compression), "quorum": quorum, "max_staleness": 3}
    for weights, opt in Cluster(3).run(lambda rank: trained(rank, options, dtype)):
        check(weights, expected(range(3), 1 / 3))
        stats, elements = opt.stats(), sum(int(np.prod(shape)) for shape in SHAPES)
        width = {"none": 8 if dtype == torch.float64 else 4}.get(compression, 2)
        assert stats.bytes_sent == stats.rounds * (elements + opt._async.replica.slots) * width


def test_compression_rounds_what_travels_and_not_what_is_pending():
    """Gradients of 1 + 2^-10 are lost to bfloat16 one by one, and kept while they add up."""

    def train(rank: int) -> float:
        parameter = torch.nn.Parameter(torch.zeros(1))
        compression = getattr(hvd.Compression, "bf16")  # noqa: B009
        opt = hvd.EagerOptimizer(torch.optim.SGD([parameter], lr=1.0), quorum="all", compression=compression)
        parameter.grad = torch.full((1,), 1 + 2.0**-10)
        opt.step()
        opt.drain()
        return parameter.item()

    assert Cluster(2).run(train) == [-1.0, -1.0]


def test_a_compression_of_ones_own():
    before = Eighth.calls
    for weights, _ in Cluster(2).run(lambda rank: trained(rank, {"compression": Eighth, "quorum": "all"})):
        check(weights, expected(range(2), 1 / 2))
    assert Eighth.calls > before + 2 * STEPS - 1


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_narrow_dtype_counts_far_enough(size):
    """bfloat16 counts to 256: with a bound of 100 rounds a slot is good for two ranks."""
    options = {"compression": hvd.Compression.bf16, "max_staleness": 100, "quorum": "all"}
    for weights, opt in Cluster(size).run(lambda rank: trained(rank, options)):
        check(weights, expected(range(size), 1 / size), 1e-4)
        assert opt._async.replica.slots == -(-size // 2)
        assert opt.stats().gradients_applied == size * STEPS


@QUORUMS
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_backward_passes_add_up(passes, quorum):
    options = {"backward_passes_per_step": passes, "quorum": quorum, "bucket_cap_mb": TINY}
    for weights, opt in Cluster(2).run(lambda rank: trained(rank, options, passes=passes)):
        check(weights, expected(range(2), 1 / 2, STEPS * passes))
        assert opt.stats().gradients_produced == STEPS


@QUORUMS
def test_process_sets_average_over_their_ranks_alone(quorum):
    """Ranks 0 and 2 together, 1 and 3 together, and then all four in one."""
    sets = [ProcessSet(0, 2, number=1), ProcessSet(1, 3, number=2)]

    def train(rank: int) -> tuple[list[Array], list[Array], Any]:
        steps = 3 + rank % 2
        own, opt = trained(rank, {"quorum": quorum, "process_set": sets[rank % 2]}, steps=steps)
        every, _ = trained(rank, {"quorum": quorum})
        return own, every, opt.stats()

    for rank, (own, every, stats) in enumerate(Cluster(4).run(train)):
        check(own, expected(sets[rank % 2].ranks, 1 / 2, 3 + rank % 2))
        check(every, expected(range(4), 1 / 4))
        assert len(stats.held_s) == 2
        assert max(stats.contributors) <= 2


@pytest.mark.parametrize("quorum", ["all", "solo", 2, "auto"])  # (2: of the process set)
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.bf16], ids=["none", "bf16"])
def test_a_rank_outside_the_process_set_steps_by_itself(quorum, compression):
    pair = ProcessSet(1, 2)

    def train(rank: int) -> tuple[list[Array], int]:
        options = {"quorum": quorum, "process_set": pair, "compression": compression, "max_staleness": 4}
        weights, opt = trained(rank, options, steps=3 + 2 * rank)
        return weights, opt.rounds

    (alone, rounds), *pairs = Cluster(3).run(train)
    check(alone, expected([0], 1.0, 3))
    assert rounds == 3
    for weights, _ in pairs:
        both = zip(expected([1], 1 / 2, 5), expected([2], 1 / 2, 7), strict=True)
        check(weights, [one + other for one, other in both])


def test_horovods_collectives_leave_a_lonely_rank_alone():
    collectives = object.__new__(HorovodCollectives)  # (nothing of Horovod is needed for one rank)
    given = torch.tensor([1.0, 2.0])
    halved = collectives.allreduce_sum(given, "mine", SingleRank(3), keep=True, scale=0.5)
    assert halved.done()
    assert halved.result().tolist() == [0.5, 1.0]
    assert given.tolist() == [1.0, 2.0]
    assert (
        collectives.allreduce_sum(given, "mine", SingleRank(3), keep=True).result() is not given
    )  # it is going to be changed
    assert collectives.broadcast(given, 3, "mine", SingleRank(3)).result().tolist() == [1.0, 2.0]


def test_the_global_process_set_is_all_ranks():
    for process_set in (hvd.global_process_set, None):
        for weights, _ in Cluster(2).run(lambda rank, one=process_set: trained(rank, {"process_set": one})):
            check(weights, expected(range(2), 1 / 2))


# -- what is refused ------------------------------------------------------------------------------------------


class Counting:
    """Compresses to whole numbers."""

    compress = staticmethod(lambda tensor: (tensor.to(torch.int32), tensor.dtype))
    decompress = staticmethod(lambda tensor, ctx: tensor.to(ctx))


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"op": horovod.torch.Adasum}, r"Adasum.*take hvd\.Average or hvd\.Sum"),
        ({"op": horovod.torch.Min}, r"take hvd\.Average or hvd\.Sum"),
        ({"op": "mean"}, r"take hvd\.Average or hvd\.Sum"),
        ({"gradient_predivide_factor": 0.0}, "take a number above 0"),
        ({"gradient_predivide_factor": 2.0, "op": horovod.torch.Sum}, "leave it out with Sum"),
        ({"backward_passes_per_step": 0}, "take 1 or more"),
        ({"backward_passes_per_step": 1.5}, "take 1 or more"),
        ({"compression": "fp16"}, r"take hvd\.Compression\.none, \.fp16, \.bf16, or a class with"),
        ({"compression": Counting}, "take one to a float type"),
        ({"compression": hvd.Compression.bf16, "max_staleness": 256}, "lower max_staleness or leave compression out"),
        ({"groups": -1}, "take 0 .none. or more, or lists of parameters"),
        ({"groups": True}, "take 0 .none. or more, or lists of parameters"),
        ({"groups": 1.5}, "take 0 .none. or more, or lists of parameters"),
        ({"num_groups": -2}, "take 0 .none. or more, or lists of parameters"),
        ({"groups": [[torch.zeros(1)]]}, "no parameter of this optimizer"),
        ({"groups": list(conv_model().parameters())}, "no parameter of this optimizer|lists of parameters"),
        ({"groups": [torch.tensor(1.0)]}, "no parameter of this optimizer|lists of parameters"),
        ({"process_set": object()}, "process_set="),
        ({"process_set": ProcessSet(0, 2, number=None)}, r"pass it to hvd\.init\(process_sets="),
        ({"process_set": ProcessSet(0, 2), "quorum": 3}, "of 2 ranks"),
        ({"bucket_cap_mb": 0}, "take a number above 0"),
        ({"pace": "slow"}, "'steps', 'rounds'"),
        ({"pace": "rounds", "quorum": "all"}, 'take pace="steps"'),
        ({"nonfinite": "ignore"}, "'skip', 'raise'"),
        ({"scaler": "dynamic"}, "scaler="),
    ],
)
@pytest.mark.filterwarnings("ignore:num_groups")
def test_wrong_values_are_refused_with_a_hint_on_construction(options, hint):
    with scripted_engine(4), pytest.raises(ValueError, match=hint):
        hvd.EagerOptimizer(torch.optim.SGD(conv_model().parameters(), lr=0.1), **options)


def test_a_parameter_in_two_groups_is_refused():
    model = conv_model()
    first = next(model.parameters())
    make = functools.partial(hvd.EagerOptimizer, torch.optim.SGD(model.parameters(), lr=0.1))
    with scripted_engine(2), pytest.raises(ValueError, match="each may be in one group only"):
        make(groups=[[first], [first]])
