"""A drain in the middle of a step or a drain, as a signal handler or a hook calls it, is refused; training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import torch

import hvd_async.tensorflow.keras as hvd_keras
import hvd_async.torch as hvd_torch
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.conformance.keras_ranks import Scalar

WORDS = r"signal handler or a hook.*set a flag"


class TorchScalar:
    """The counterpart of ``keras_ranks.Scalar``."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.opt = wrap(torch.optim.SGD([self.weight], lr=0.5))

    def step(self, gradient: float) -> float:
        self.opt.zero_grad()
        (self.weight * gradient).backward()
        self.opt.step()
        return float(self.weight.detach())


def keras_scalar(wrap: Callable[[Any], Any]) -> Scalar:
    return Scalar(wrap(keras.optimizers.SGD(0.5)))


class Interrupted:
    """The condition on which a rank waits; its first wait calls ``handler`` first, as a signal would."""

    def __init__(self, condition: threading.Condition, handler: Callable[[], None]) -> None:
        self._condition, self._handlers = condition, [handler]

    def __enter__(self) -> Any:
        return self._condition.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._condition.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._condition, name)

    def wait(self, timeout: float | None = None) -> bool:
        while self._handlers:
            self._handlers.pop()()
        return self._condition.wait(timeout)


KINDS = {
    "torch eager": lambda: TorchScalar(partial(hvd_torch.EagerOptimizer, quorum="all")),
    "torch gossip": lambda: TorchScalar(partial(hvd_torch.GossipOptimizer, algorithm="dpsgd", topology="ring")),
    "keras eager": lambda: keras_scalar(partial(hvd_keras.EagerOptimizer, quorum="all")),
    "keras gossip": lambda: keras_scalar(partial(hvd_keras.GossipOptimizer, algorithm="dpsgd", topology="ring")),
}


@pytest.mark.parametrize("call", ["step", "drain"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_drain_while_this_rank_waits_is_refused_and_changes_nothing(kind, call):
    def train(rank: int) -> float:
        trainer, told = KINDS[kind](), []
        trainer.step(1.0 + rank)

        def handler() -> None:
            with pytest.raises(ReplicaStateError, match=WORDS):
                trainer.opt.drain()
            told.append(rank)
            refused.set()

        if rank == 0:
            engine: Any = local_engine()
            engine.changed = Interrupted(engine.changed, handler)
        else:
            assert refused.wait(30.0)
        trainer.step(1.0 + rank) if call == "step" else trainer.opt.drain()
        trainer.step(1.0 + rank)
        trainer.opt.drain()
        assert told == [0] * (rank == 0)
        return float(trainer.weight.detach() if "torch" in kind else trainer.weight)

    refused = threading.Event()
    steps = 3 if call == "step" else 2
    np.testing.assert_allclose(Cluster(2).run(train), [-0.5 * 1.5 * steps] * 2, rtol=1e-6)


@pytest.mark.parametrize("wrap", [hvd_torch.EagerOptimizer, hvd_torch.GossipOptimizer])
def test_a_drain_in_a_step_hook_is_refused(wrap):
    def train(rank: int) -> None:
        trainer = TorchScalar(wrap)
        trainer.opt.register_step_post_hook(lambda *_: trainer.opt.drain())
        with pytest.raises(ReplicaStateError, match=WORDS):
            trainer.step(1.0)
        trainer.opt.discard()

    Cluster(1).run(train)
