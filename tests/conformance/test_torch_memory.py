"""Vectors that come and go with each step: whose memory serves the next one, and whose does not."""

import torch

from hvd_async.testing import Cluster
from hvd_async.torch.memory import ReusedMemory
from tests.conformance.cases import Case
from tests.conformance.torch_ranks import TorchVectors

CPU = torch.device("cpu")


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_memory_serves_again_when_the_last_tensor_on_it_is_gone():
    memory = ReusedMemory(most=8)
    first = memory.empty(400, CPU)
    where, view = address(first), first.view(torch.float32)[10:20].view(2, 5)
    del first
    assert address(memory.empty(400, CPU)) != where  # a view of it lives
    view.fill_(7.0)
    other = memory.empty(400, CPU)
    assert view.tolist() == [[7.0] * 5] * 2
    del view
    assert address(memory.empty(404, CPU)) != where  # another length
    assert where in {address(again) for again in (other, memory.empty(400, CPU), memory.empty(400, CPU))}


def test_a_gradient_that_a_user_keeps_is_not_written_over():
    memory, parameter = ReusedMemory(most=8), torch.nn.Parameter(torch.zeros(8))
    parameter.grad = memory.empty(32, CPU).view(torch.float32).fill_(3.0)
    kept, parameter.grad = parameter.grad, None
    memory.empty(32, CPU).fill_(0)
    assert kept.tolist() == [3.0] * 8


def test_a_rank_that_has_finished_keeps_none_while_others_go_on():
    """Rank 1's later steps come back only when rank 0 has finished."""
    ranks = {}

    def train(rank: int) -> tuple[int, int]:
        one = ranks[rank] = TorchVectors([64], Case("unit", "sgd", 1.0), quorum="all")
        for _ in range(6 if rank else 2):
            one.take(torch.ones(64))
        kept = [sum(map(len, ranks[each].opt._async.replica.layout.memory._free.values())) for each in (0, rank)]
        one.opt.drain()
        return kept[0], kept[1]

    (own, _), (finished, active) = Cluster(2).run(train)
    assert own > 0
    assert active > 0
    assert finished == 0
