"""docs/keras_hosts.md: what each way of training Keras 3 on two workers ends in, by its script."""

from __future__ import annotations

import re
import socket

import pytest
from launch import REPOSITORY, RunJob

from tests.conftest import LONG_RUN

pytestmark = pytest.mark.multiproc
long_run = pytest.mark.skipif(not LONG_RUN, reason="what others' code does changes with their versions alone")
SCRIPT = str(REPOSITORY / "docs" / "examples" / "keras3" / "errors.py")
PAGE = REPOSITORY / "docs" / "keras_hosts.md"


def said(output: str) -> list[str]:
    """What each of the two ranks said, in their order."""
    found = dict(re.findall(r"rank ([01]): (.*)", output))
    assert found.keys() == {"0", "1"}, output
    return [found["0"], found["1"]]


@long_run
def test_horovods_callback_fails(forked: RunJob) -> None:
    """(Ours is not imported, next to which Horovod's callback says what to import.)"""
    error = "'Variable' object has no attribute 'ref'"
    assert all(error in line for line in said(forked("plain tensorflow", SCRIPT, 2, args=("callback",)).check().output))
    assert error in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(("way", "alike"), [*([("optimizer", False)] if LONG_RUN else []), ("hvd_async", True)])
def test_ranks_have_one_model_with_ours_alone(forked: RunJob, way: str, alike: bool) -> None:
    first, second = said(forked("tensorflow", SCRIPT, 2, args=(way,)).check().output)
    assert first.startswith("[")
    assert (first == second) == alike


@long_run
def test_the_multi_worker_strategy_fails(forked: RunJob) -> None:
    error = "with an unsupported type (<class 'tensorflow.python.distribute.values.PerReplica'>) to a Tensor"
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = ",".join(str(each.getsockname()[1]) for each in (one, other))
    job = forked("plain tensorflow", SCRIPT, 2, args=("strategy",), env={"WORKERS_PORTS": ports}).check()
    assert all(error in line for line in said(job.output))
    assert error in PAGE.read_text(encoding="utf-8")
