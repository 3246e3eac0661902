"""torch: ranks' weights as flat vectors: the order of their elements, their memory, and what changes between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaMismatchError
from hvd_async.testing import Cluster
from hvd_async.torch.bucket_layout import memory_order
from hvd_async.torch.weight_vectors import WeightVectors
from tests.conformance.gossip_ranks import PAIRS, STAR, alike

LAST, PLAIN = torch.channels_last, torch.contiguous_format
INT8 = {**STAR, "compression": hvd.Compression.int8}
LSGD = {"algorithm": "lsgd", "group": 1, "global_period": 2}
SHAPES = [(4, 3, 2, 2), (5,), (2, 3), (4, 3, 1, 1), (), (0, 3)]


def made(memory_format: torch.memory_format = LAST, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Return parameters of all shapes, those of four dimensions in a memory format."""
    random = np.random.default_rng(1)
    tensors = [torch.as_tensor(random.normal(size=shape), dtype=dtype) for shape in SHAPES]
    formatted = [t.contiguous(memory_format=memory_format) if t.dim() == 4 else t for t in tensors]
    return [torch.nn.Parameter(tensor) for tensor in formatted]


def vectors_of(parameters: list[torch.nn.Parameter], dtype: torch.dtype = torch.float32) -> WeightVectors:
    return WeightVectors(parameters, dtype, [memory_order(p) for p in parameters])


class Rank:
    """One rank of any algorithm whose weights travel, with a gradient of its own in each step."""

    def __init__(self, rank: int, options: dict[str, Any], memory_format: torch.memory_format = PLAIN) -> None:
        self.rank, self.steps, self.leads = rank, 0, options is LSGD
        self.parameters = made(memory_format)
        sgd = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        self.opt = (hvd.LeaderOptimizer if self.leads else hvd.GossipOptimizer)(sgd, **options)

    def step(self) -> None:
        """Take a step."""
        random = np.random.default_rng((self.rank, self.steps))
        for parameter in self.parameters:
            gradient = torch.as_tensor(random.normal(size=tuple(parameter.shape)), dtype=parameter.dtype)
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        if self.leads:
            self.opt.record_loss(1.0 + self.rank)
        self.opt.step()
        self.steps += 1

    def bits(self) -> list[bytes]:
        """Return the bits of the weights, elements in contiguous order."""
        return [p.detach().contiguous().numpy().tobytes() for p in self.parameters]


def trained(options: dict[str, Any], between: Callable[[Rank], object], size: int) -> list[bytes]:
    """Train a few steps, with an action between them, and drain; return all ranks' bits."""

    def train(rank: int) -> list[bytes]:
        one = Rank(rank, options)
        for _ in range(4):
            one.step()
            between(one)
        one.opt.drain()
        return one.bits()

    return alike(train, size)


def convert(one: Rank) -> None:
    """Bring the weights into the other memory format, in new memory."""
    first = one.parameters[0]
    first.data = first.data.contiguous(memory_format=PLAIN if memory_order(first) else LAST)


# -- memory formats of ranks --------------------------------------------------------------------------------------


def test_a_rank_with_another_memory_format_is_refused_when_the_ranks_meet():
    def train(rank: int) -> None:
        with pytest.raises(ReplicaMismatchError, match=r"\(4, 3, 2, 2\) float32 channels_last"):
            Rank(rank, STAR, LAST if rank else PLAIN).step()

    Cluster(2).run(train)


@pytest.mark.parametrize("options", [STAR, PAIRS, LSGD], ids=["sgp", "adpsgd", "lsgd"])
def test_weights_that_move_to_other_memory_between_steps(options):
    """To the other format, to one that is neither, or by ``p.data``, as load_state_dict(assign=True) does."""
    size = 2 if options is STAR else 1  # (with more, what has arrived at a step depends on the machine)
    plain = trained(options, lambda one: None, size)
    assert trained(options, convert, size) == plain

    def strided(one: Rank) -> None:
        one.parameters[0].data = one.parameters[0].data.repeat(1, 1, 1, 2)[..., ::2].copy_(one.parameters[0].data)

    assert trained(options, strided, size) == plain

    def replace(one: Rank) -> None:
        kept = [p.data for p in one.parameters]
        for parameter in one.parameters:
            parameter.data = parameter.data.clone()
        for tensor in kept:
            tensor.fill_(7.0)

    assert trained(options, replace, size) == plain


# -- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loads", [LAST, PLAIN], ids=["the same format", "another"])
def test_vectors_in_a_checkpoint_load_only_with_the_same_memory_order(loads):
    saved: list[Any] = [None, None]

    def run(rank: int) -> list[bytes]:
        one = Rank(rank, INT8, LAST)
        for step in range(6):
            if step == 3:
                one.opt.cut()
                saved[rank] = copy.deepcopy((one.opt.state_dict(), [p.detach() for p in one.parameters]))
            one.step()
        one.opt.drain()
        return one.bits()

    whole = Cluster(2).run(run)

    def resume(rank: int) -> list[bytes] | None:
        one = Rank(rank, INT8, loads)
        state, weights = saved[rank]
        for parameter, tensor in zip(one.parameters, weights, strict=True):
            parameter.data.copy_(tensor)
        if loads is PLAIN:
            with pytest.raises(ValueError, match="only then bring the model into the format that you like"):
                one.opt.load_state_dict(copy.deepcopy(state))
            return None
        one.opt.load_state_dict(copy.deepcopy(state))
        one.steps = 3
        for _ in range(3):
            one.step()
        one.opt.drain()
        return one.bits()

    assert Cluster(2).run(resume) == (whole if loads is LAST else [None, None])


def test_a_checkpoint_in_contiguous_order_loads_into_a_model_that_is_converted_later():
    """Older versions saved that order, whatever the model's format."""
    saved: list[Any] = [None, None]

    def run(rank: int, resumes: bool) -> list[bytes]:
        one = Rank(rank, INT8)
        if resumes:
            one.opt.load_state_dict(copy.deepcopy(saved[rank][0]))
            convert(one)
            for parameter, tensor in zip(one.parameters, saved[rank][1], strict=True):
                parameter.data.copy_(tensor)
            one.steps = 3
        while one.steps < 6:
            if one.steps == 3 and not resumes:
                one.opt.cut()
                saved[rank] = copy.deepcopy((one.opt.state_dict(), [p.detach() for p in one.parameters]))
                assert "orders" not in saved[rank][0]["hvd_async"]
            one.step()
        one.opt.drain()
        return one.bits()

    whole = Cluster(2).run(lambda rank: run(rank, False))
    assert Cluster(2).run(lambda rank: run(rank, True)) == whole


# -- parameter groups -----------------------------------------------------------------------------------------------


def test_weights_converted_to_a_wider_dtype_after_the_ranks_met_are_refused():
    def train(rank: int) -> None:
        one = Rank(rank, STAR)
        one.step()
        for parameter in one.parameters:
            parameter.data = parameter.data.double()
        with pytest.raises(ValueError, match=r"travel as torch\.float32.*have become torch\.float64"):
            one.step()

    Cluster(1).run(train)
