"""torch on a GPU: nothing of this library waits for what the device has to do besides; on a CPU streams do nothing."""

from __future__ import annotations

import time

import pytest
import torch

from hvd_async.algorithms.eager.gradient_format import ReducedRound
from hvd_async.torch import hyperparameters, streams
from hvd_async.torch.gradient_format import Layout
from hvd_async.torch.gradient_replica import Checks

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none here"),
]
BUSY = 2**31
"""Clock cycles that the device is kept busy for: about a second."""


def busy_after(vector: torch.Tensor) -> torch.cuda.Event:
    """Queue a second of work on this thread's stream; the event is of its end."""
    torch.cuda._sleep(BUSY)
    return torch.cuda.current_stream(vector.device).record_event()


class TestOnAGpu:
    pytestmark = on_gpu

    @pytest.fixture(autouse=True, scope="class")
    def kernels(self) -> None:
        """A kernel is loaded, a stream made and its memory allocated at their first use, which waits for the device."""
        vector = streams.record_ready(torch.ones(1000, device="cuda"))
        with streams.on_engine_stream_after(vector):
            total = vector.sum()
        streams.use_here(total).add_(1).item()
        Checks(1).empty_unless_finite(0, vector)
        streams.copy_to_host(vector[-2:].clone())

    def test_a_marked_vector_is_read_while_the_device_is_busy(self):
        vector = streams.record_ready(torch.full((1000,), 3.0, device="cuda"))
        end = busy_after(vector)
        with streams.on_engine_stream_after(vector):
            total = vector.sum()
            read = torch.cuda.current_stream().record_event()
        read.synchronize()
        assert not end.query(), "it waited for what was queued afterwards"
        assert streams.use_here(total).item() == 3000.0

    def test_pinned_memory_is_the_hosts_whatever_the_default_device(self):
        with torch.device("cuda"):
            assert streams.gpu.pinned((1,), torch.float32).is_pinned()

    def test_a_vector_that_was_changed_since_is_waited_for(self):
        vector = streams.record_ready(torch.zeros(1000, device="cuda"))
        torch.cuda._sleep(BUSY)
        vector += 1
        with streams.on_engine_stream_after(vector):
            total = vector.sum()
        assert total.item() == 1000.0

    def test_what_a_collective_has_brought_is_fetched_while_the_device_is_busy(self):
        vector = torch.arange(10.0, device="cuda")
        torch.cuda.current_stream().record_event().synchronize()  # (it is there)
        end = busy_after(vector)
        assert streams.copy_to_host(vector[-2:]).tolist() == [8.0, 9.0]
        assert not end.query()

    def test_gradients_are_handed_over_and_rounds_shown_while_the_device_is_busy(self):
        parameters = [torch.nn.Parameter(torch.zeros(shape, device="cuda")) for shape in ((20, 10), (10,), (1,))]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        layout = Layout(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        first = layout.vector(0, 0.5)  # (loads the kernels)
        end = busy_after(first)
        vector = layout.vector(0, 0.5)
        layout.set_gradients(ReducedRound(1, (vector,), [], (1,)), 2.0, set())
        hyperparameters.read(optimizer.param_groups)
        number = streams.Later(vector[-1])
        assert not end.query(), "something waited"
        assert float(number) == 1.0
        assert [p.grad.sum().item() for p in parameters] == [200.0, 10.0, 1.0]

    def test_memory_is_not_transferred_while_the_other_stream_reads_it(self):
        vector = streams.record_ready(torch.full((1_000_000,), 5.0, device="cuda"))
        with streams.on_engine_stream_after(vector):
            torch.cuda._sleep(BUSY)
            copy = vector.clone()
        del vector
        torch.zeros(1_000_000, device="cuda")  # would take its place
        assert copy.min().item() == 5.0

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_vectors_that_are_not_finite_are_emptied_there(self, bad):
        checks = Checks(2)
        fine, sick = torch.ones(100, device="cuda"), torch.ones(100, device="cuda")
        sick[7] = bad
        torch.cuda._sleep(BUSY)
        started = time.perf_counter()
        checks.empty_unless_finite(0, fine)
        checks.empty_unless_finite(1, sick)
        assert time.perf_counter() - started < 0.2, "it waited for the device"
        assert checks.emptied(wait=True) == [[1]]
        assert checks.emptied(wait=True) == []
        assert (fine.sum().item(), sick.sum().item()) == (100.0, 0.0)
