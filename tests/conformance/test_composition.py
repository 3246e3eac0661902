"""A wrapped optimizer is the wrapped one's class, methods that forward, and one attribute: its driver."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import keras
import pytest
import torch

import hvd_async.tensorflow.keras as hvd_keras
import hvd_async.torch as hvd_torch
from hvd_async.optimizers.driver import Driver
from tests.conformance.drive import scripted_engine

pytestmark = pytest.mark.usefixtures("quick_garbage_collection")
WRAPPERS: dict[str, dict[str, Any]] = {"EagerOptimizer": {}, "GossipOptimizer": {}, "LeaderOptimizer": {"group": 1}}


def plain_torch() -> Any:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)


def plain_keras() -> Any:
    return keras.optimizers.SGD(0.1)


CASES = [
    pytest.param(functools.partial(getattr(hvd, name), **options), make, id=f"{make.__name__}-{name}")
    for hvd, make in ((hvd_torch, plain_torch), (hvd_keras, plain_keras))
    for name, options in WRAPPERS.items()
]


@pytest.mark.parametrize(("wrapper", "make"), CASES)
def test_what_is_wrapped_gains_public_methods_and_a_driver(wrapper: Callable[..., Any], make: Callable[[], Any]):
    with scripted_engine(1):
        plain = make()
        wrapped = wrapper(plain)
    assert vars(wrapped).keys() - vars(plain).keys() == {"_async"}
    assert isinstance(wrapped._async, Driver)
    gained = {name for name in dir(type(wrapped)) if name not in dir(type(plain))}
    private = {name for name in gained if name.startswith("_") and not name.startswith("__")}
    assert private <= {"_wrapped_class", "_step_supports_amp_scaling"}


@pytest.mark.parametrize(("wrapper", "make"), CASES)
def test_what_is_wrapped_goes_with_its_last_reference(wrapper: Callable[..., Any], make: Callable[[], Any]):
    """Its memory too: neither its driver nor its replica holds it, so nobody waits for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        with scripted_engine(1):
            wrapped = wrapper(make())
        driver, gone = weakref.ref(wrapped._async), weakref.ref(wrapped)
        del wrapped
        assert gone() is None
        assert driver() is None
    finally:
        gc.enable()
