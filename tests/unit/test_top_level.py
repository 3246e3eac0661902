"""``hvd_async.EagerOptimizer`` and its like hand over by the optimizer's framework, reported without importing one."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

import hvd_async


def optimizer_of(module: str, *bases: type) -> Any:
    """An object whose class says that it is from ``module``."""
    return type("Custom", bases, {"__module__": module})()


WRAPPERS = ["EagerOptimizer", "GossipOptimizer", "LeaderOptimizer"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("module", "binding"),
    [
        ("torch.optim.sgd", "torch"),
        ("keras.src.optimizers.sgd", "tensorflow"),
        ("tensorflow.python.training", "tensorflow"),
        ("tf_keras.optimizers", "tensorflow"),
    ],
)
def test_hands_over_to_the_binding_with_all_arguments(monkeypatch, module, binding, wrapper):
    stand_in = types.ModuleType(f"hvd_async.{binding}")
    setattr(stand_in, wrapper, lambda *args, **kwargs: (args, kwargs))
    monkeypatch.setitem(sys.modules, f"hvd_async.{binding}", stand_in)
    derived = optimizer_of("my.project", type(optimizer_of(module)))
    assert getattr(hvd_async, wrapper)(derived, 1, quorum=2) == ((derived, 1), {"quorum": 2})


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("what", [None, 3, "sgd", object(), [], optimizer_of("torchlike.optim"), dict])
def test_an_unknown_optimizer_is_reported_what_to_pass(what, wrapper):
    with pytest.raises(
        ValueError, match=r"neither a torch\.optim\.Optimizer nor a Keras optimizer: pass one"
    ) as caught:
        getattr(hvd_async, wrapper)(what)
    assert "EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))" in str(caught.value)
    assert "EagerOptimizer(keras.optimizers.SGD(0.1))" in str(caught.value)


def test_all():
    assert {*WRAPPERS, *hvd_async.__all__} <= set(dir(hvd_async))
    assert set(WRAPPERS) <= set(hvd_async.__all__)
