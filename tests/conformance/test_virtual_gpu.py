"""Each mode's predicted speed on a GPU, and what its threads do there, stay within budgets (``virtual_gpu``).

All numbers are in virtual time: they are the same on every machine with Python 3.11 and torch 2.13.
``python -m tests.conformance.virtual_gpu MODE`` prints them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch

from hvd_async.algorithms.eager.rank import RoundsInFlight
from hvd_async.torch.gradient_replica import GradientReplica
from tests.conformance.virtual_gpu import PRICE_SETS, Cost, Setup, run
from tests.conftest import LONG_RUN

# A thread that still runs when its world ends gets a SystemExit wherever it is.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Budget(NamedTuple):
    """Limits of a mode on the rank where each is worst.

    Attributes:
        ratio: the least images/s over plain torch's, on rank 0.
        training: the most milliseconds of the training thread's work in a step.
        waits: the most waits of the training thread for the device, or for a collective to complete, in a step.
        wakeups: the most times that the engine wakes up and finds work, in a step.
    """

    ratio: float
    training: float
    waits: float
    wakeups: float


BUDGETS = {
    ("all", 1): Budget(0.99, 32.3, 0.0, 5.0),
    ("solo", 1): Budget(0.99, 32.8, 0.0, 6.5),
    ("sgp", 1): Budget(0.99, 28.3, 0.0, 0.0),
    ("adpsgd", 1): Budget(0.98, 28.8, 0.0, 1.0),
    ("lsgd", 1): Budget(0.99, 28.9, 0.0, 1.2),
    ("all", 2): Budget(0.97, 32.5, 0.0, 5.0),
    ("solo", 2): Budget(0.96, 33.4, 0.0, 7.5),
    ("sgp", 2): Budget(0.97, 29.3, 0.0, 4.0),
    ("osgp", 2): Budget(0.97, 30.4, 0.0, 3.0),
    ("adpsgd", 2): Budget(0.975, 30.7, 0.0, 3.0),
    ("lsgd", 2): Budget(0.98, 29.0, 0.0, 1.3),
}
"""By mode and number of ranks."""
PLAIN_MS = 33.57
"""A step of plain torch: the device's time of both passes, and of the optimizer's kernels."""

PRICES = list(PRICE_SETS)[: None if LONG_RUN else 2]
SLOW = {"host": {"slow_host": 6.0}, **({"device": {"slow_device": 1.3}} if LONG_RUN else {})}
measured = functools.cache(run)


def ratio(setup: Setup) -> float:
    (plain,) = measured(setup._replace(mode="plain", ranks=1))
    return plain.step_ms / measured(setup)[0].step_ms


def test_two_runs_agree_exactly():
    assert run(Setup("adpsgd", ranks=2)) == measured(Setup("adpsgd", ranks=2))


@pytest.mark.parametrize("prices", PRICES)
def test_the_device_limits_plain_torch(prices):
    (plain,) = measured(Setup("plain", PRICE_SETS[prices]))
    assert plain.step_ms == pytest.approx(PLAIN_MS, abs=0.01)
    assert sum(plain.idle.values()) < 0.01
    assert plain.training_ms < 0.9 * plain.step_ms
    assert (plain.waits, plain.engine_waits, plain.wakeups) == (0, 0, 0)


@pytest.mark.parametrize(("mode", "ranks"), BUDGETS)
def test_a_mode_stays_within_its_budget(mode, ranks):
    setup, budget = Setup(mode, ranks=ranks), BUDGETS[mode, ranks]
    costs = measured(setup)
    assert ratio(setup) >= budget.ratio
    assert max(cost.training_ms for cost in costs) <= budget.training
    assert max(cost.waits for cost in costs) <= budget.waits
    assert max(cost.wakeups for cost in costs) <= budget.wakeups


@pytest.mark.parametrize("prices", PRICES)
def test_quorums_are_as_fast_under_all_prices(prices):
    assert ratio(Setup("all", PRICE_SETS[prices])) >= 0.99
    assert ratio(Setup("solo", PRICE_SETS[prices])) >= 0.97
    assert ratio(Setup("all", PRICE_SETS[prices], item=True)) >= 0.93


def test_steps_that_are_not_announced_cost_the_engine_more(monkeypatch):
    (announced,) = measured(Setup("all"))
    monkeypatch.setenv("HVD_ASYNC_AGREE", "0")
    (apart,) = run(Setup("all"))
    assert apart.wakeups >= announced.wakeups + 1
    assert apart.training_ms >= announced.training_ms + 0.2


@pytest.mark.parametrize("slow", SLOW.values(), ids=SLOW)
def test_a_slow_rank_holds_up_the_modes_that_wait(slow):
    alone = {mode: measured(Setup(mode, ranks=2))[0].step_ms for mode in ("all", "adpsgd")}
    with_slow = {mode: measured(Setup(mode, ranks=2, **slow)) for mode in ("all", "adpsgd")}
    assert with_slow["all"][0].step_ms > alone["all"] + 3.0
    assert with_slow["all"][0].step_ms == pytest.approx(with_slow["all"][1].step_ms, abs=0.2)
    assert with_slow["adpsgd"][0].step_ms < alone["adpsgd"] + 1.0
    assert with_slow["adpsgd"][1].step_ms > alone["adpsgd"] + 1.0


# -- what a script does ------------------------------------------------------------------------------------------------


def test_a_script_that_reads_its_loss_waits_under_plain_torch_too():
    (plain,), (sgp,) = measured(Setup("plain", item=True)), measured(Setup("sgp", item=True))
    assert plain.waits == 1
    assert sgp.waits == measured(Setup("sgp"))[0].waits + 1
    assert plain.step_ms > measured(Setup("plain"))[0].step_ms + 1.0


@pytest.mark.parametrize("mode", ["plain", "all", "solo", "sgp", "adpsgd", "lsgd"])
def test_a_gradient_scaler_waits_once_unless_the_optimizer_takes_overflows(mode):
    assert measured(Setup(mode, scaler=True, fused=True))[0].waits == 0
    assert measured(Setup(mode, scaler=True))[0].waits == (mode not in ("all", "solo"))


# -- planted faults ----------------------------------------------------------------------------------------------------


def read_a_number() -> None:
    torch.ones(1).item()


def compare_two_tensors() -> None:
    torch.equal(torch.ones(1), torch.ones(1))


def work() -> None:
    """Call Python for 0.4 ms of virtual time. A round has five buckets."""
    calls = round(0.4e3 / Setup("all").price.python)
    nothing = lambda: None  # noqa: E731  (a call of its own)
    for _ in range(calls):
        nothing()


def planted(patch: pytest.MonkeyPatch, kind: type, name: str, fault: object, mode: str) -> tuple[Cost, Cost]:
    """Call ``fault`` before each call of a method; return what a step costs without it and with it."""
    (sound,) = measured(Setup(mode))
    method = getattr(kind, name)

    def with_fault(*args, **kwargs):
        fault()
        return method(*args, **kwargs)

    patch.setattr(kind, name, with_fault)
    (cost,) = run(Setup(mode))
    return sound, cost


@pytest.mark.parametrize("fault", [read_a_number, compare_two_tensors])
def test_a_wait_in_step_is_found(fault, monkeypatch):
    sound, cost = planted(monkeypatch, GradientReplica, "handed_over", fault, "all")
    assert cost.waits == sound.waits + 1
    assert cost.step_ms > sound.step_ms  # (by little: the step has waited before)


def test_a_wait_in_a_hook_is_found(monkeypatch):
    sound, cost = planted(monkeypatch, GradientReplica, "_bucket_ready", read_a_number, "all")
    assert cost.waits >= sound.waits + 4
    assert cost.step_ms > sound.step_ms + 0.4


def test_work_of_the_engine_is_found(monkeypatch):
    sound, cost = planted(monkeypatch, RoundsInFlight, "_prepare", work, "all")
    assert cost.lock_ms > sound.lock_ms + 1.0
    assert cost.training_ms > sound.training_ms + 1.0
    assert cost.step_ms > sound.step_ms + 0.5
