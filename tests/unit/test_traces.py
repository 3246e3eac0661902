"""Traces: what is recorded is what is read, what is no whole trace is refused, optimizers are recorded as they are."""

from __future__ import annotations

import types
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from hvd_async.traces.format import HOROVOD, PLAIN, file_of, read_trace
from hvd_async.traces.recorded import recorded
from hvd_async.traces.recorder import BUFFERED, LAUNCHES, Recorder


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch) -> None:
    """Whatever has started the tests."""
    for name in ("SLURM_JOB_ID", *LAUNCHES):
        monkeypatch.delenv(name, raising=False)


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


def write(folder, rank: int, ranks: int, steps: Iterable[tuple[float, float, float]], **header) -> None:
    """Record a rank's steps: seconds of computation, of waiting, of the update."""
    clock = Clock()
    recorder = Recorder(folder, rank, ranks, clock=clock, **header)
    for compute, wait, update in steps:
        clock.pass_(compute)
        recorder.arrived()
        clock.pass_(wait)
        recorder.released()
        clock.pass_(update)
        recorder.done()
    recorder.close()


def write_all(folder, ranks: int = 3, steps: int = 30, **header) -> None:
    for rank in range(ranks):
        write(folder, rank, ranks, [(0.1 * (rank + 1), 0.05, 0.01)] * steps, **header)


def test_what_was_recorded_is_read(tmp_path):
    write_all(tmp_path, steps=BUFFERED + 30, parameter_bytes=400, algorithm="eager", options={"quorum": "solo"})
    trace = read_trace(tmp_path, skip=10)
    assert (trace.ranks, trace.steps, trace.left_out) == (3, BUFFERED + 20, 10)
    assert trace.headers[1].rank == 1
    assert trace.headers[0].parameter_bytes == 400
    assert trace.headers[0].options == {"quorum": "solo"}
    np.testing.assert_allclose(trace.work, np.tile([0.11, 0.21, 0.31], (trace.steps, 1)), atol=1e-5)
    np.testing.assert_allclose(trace.waits, 0.05, atol=1e-5)
    assert trace.steps_per_s == pytest.approx(np.mean([1 / 0.16, 1 / 0.26, 1 / 0.36]), rel=1e-4)


def test_of_several_marks_the_first_arrival_and_the_last_release_count(tmp_path):
    clock = Clock()
    recorder = Recorder(tmp_path, 0, 1, clock=clock)
    recorder.released()  # of a step in which nothing has arrived: no mark
    for mark in (recorder.arrived, recorder.arrived, recorder.released, recorder.released, recorder.done):
        clock.pass_(1.0)
        mark()
    recorder.close()
    trace = read_trace(tmp_path, skip=0, least=1)
    np.testing.assert_allclose(trace.work, 2.0, atol=1e-5)
    np.testing.assert_allclose(trace.waits, 3.0, atol=1e-5)


def test_a_step_may_be_told_at_its_end(tmp_path):
    clock = Clock()
    recorder = Recorder(tmp_path, 0, 1, clock=clock)
    for waited in (0.25, 9.0):  # (no step can have waited for longer than it took)
        clock.pass_(1.0)
        recorder.stepped(waited)
    recorder.close()
    trace = read_trace(tmp_path, skip=0, least=1)
    np.testing.assert_allclose(trace.waits[:, 0], [0.25, 1.0], atol=1e-5)
    np.testing.assert_allclose(trace.work[:, 0], [0.75, 0.0], atol=1e-5)


def test_waits_of_a_step_are_recorded_as_one_that_ends_with_the_last(tmp_path):
    clock = Clock()
    recorder = Recorder(tmp_path, 0, 1, clock=clock)
    for waits in ((0.5, 0.25), (0.125,)):
        for wait in waits:
            clock.pass_(1.0)
            clock.pass_(wait)
            recorder.waited(wait)
        clock.pass_(2.0)
        recorder.arrived()  # (the step has waited already, so it is no mark)
        recorder.done()
    recorder.close()
    trace = read_trace(tmp_path, skip=0, least=1)
    np.testing.assert_allclose(trace.waits[:, 0], [0.75, 0.125], atol=1e-5)
    np.testing.assert_allclose(trace.work[:, 0], [4.0, 3.0], atol=1e-5)
    np.testing.assert_allclose((trace.done - trace.released)[:, 0], 2.0, atol=1e-5)


def test_what_is_skipped_is_in_no_step(tmp_path):
    clock = Clock()
    recorder = Recorder(tmp_path, 0, 1, clock=clock)
    for pause in (0.0, 50.0):
        clock.pass_(pause)
        recorder.skip()
        clock.pass_(0.5)
        recorder.arrived()
        recorder.done()
    recorder.close()
    np.testing.assert_allclose(read_trace(tmp_path, skip=0, least=1).work, 0.5, atol=1e-5)


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    write_all(tmp_path)
    path = file_of(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-20])
    assert read_trace(tmp_path).steps == 30 - 1 - 3


def test_what_is_no_whole_trace_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no rank\.0\.jsonl"):
        read_trace(tmp_path)
    write_all(tmp_path)
    file_of(tmp_path, 2).unlink()
    with pytest.raises(ValueError, match=r"is of 3 ranks and lacks rank\.2\.jsonl"):
        read_trace(tmp_path)
    write(tmp_path, 2, 3, [(0.1, 0.0, 0.0)] * 5)
    with pytest.raises(ValueError, match="rank 2 has recorded 5 steps"):
        read_trace(tmp_path)
    write(tmp_path, 2, 4, [(0.1, 0.0, 0.0)] * 30)
    with pytest.raises(ValueError, match="the folder mixes runs"):
        read_trace(tmp_path)


def test_files_of_different_runs_are_refused(tmp_path):
    for folder, run in (("a", "1"), ("b", "2")):
        write_all(tmp_path / folder, ranks=2, run=run)
    assert [header.run for header in read_trace(tmp_path / "a").headers] == ["1", "1"]
    file_of(tmp_path / "b", 1).replace(file_of(tmp_path / "a", 1))
    with pytest.raises(ValueError, match=r"are of different runs \(2, 1\): copy all ranks' files"):
        read_trace(tmp_path / "a")
    write(tmp_path / "a", 1, 2, [(0.1, 0.0, 0.0)] * 30)  # (of a version that did not tell)
    with pytest.raises(ValueError, match="are of different runs"):
        read_trace(tmp_path / "a")


def test_a_trace_that_does_not_tell_its_run_is_read(tmp_path):
    write_all(tmp_path)
    assert b"run" not in file_of(tmp_path, 0).read_bytes().split(b"\n")[0]
    assert read_trace(tmp_path).headers[0].run is None


SLURM = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environment", "run"),
    [
        ({}, None),
        ({"HOROVOD_GLOO_RENDEZVOUS_PORT": ""}, None),
        ({"SLURM_JOB_ID": "12"}, None),  # (of an allocation in which each run starts ranks by other means)
        (SLURM, "SLURM_STEP_ID:12:0"),
        ({**SLURM, "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711"}, "HOROVOD_GLOO_RENDEZVOUS_PORT:4711"),
        ({"PMIX_NAMESPACE": "77", "MASTER_PORT": "29500"}, "PMIX_NAMESPACE:77"),
        ({"MASTER_PORT": "29500"}, "MASTER_PORT:29500"),
    ],
)
def test_a_run_is_told_by_its_launcher(tmp_path, monkeypatch, environment, run):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    write_all(tmp_path)
    assert {header.run for header in read_trace(tmp_path).headers} == {run}


def test_a_run_takes_the_place_of_an_earlier_one_with_more_ranks(tmp_path):
    (tmp_path / "rank.notes.jsonl").write_text("mine")
    write_all(tmp_path, ranks=4)
    write_all(tmp_path, ranks=2, steps=40)
    assert {path.name for path in tmp_path.iterdir()} == {"rank.0.jsonl", "rank.1.jsonl", "rank.notes.jsonl"}
    assert read_trace(tmp_path).steps == 40 - 3


@pytest.mark.parametrize(
    ("line", "said"),
    [(b'{"version":2,"what":"else"}\n', "version 2"), (b'{"rank":0}\n', "no file of a trace"), (b"", "no file of a")],
)
def test_another_format_is_refused(tmp_path, line, said):
    file_of(tmp_path, 0).write_bytes(line)
    with pytest.raises(ValueError, match=said):
        read_trace(tmp_path)


def test_there_is_no_rank_beyond_the_last(tmp_path):
    with pytest.raises(ValueError, match="rank 3 of 3"):
        Recorder(tmp_path, 3, 3)


def test_clocks_of_one_host_are_one(tmp_path):
    write_all(tmp_path)
    np.testing.assert_array_equal(read_trace(tmp_path).clocks_ahead, 0.0)


@pytest.mark.parametrize(("hosts", "size"), [("aaaa", 4), ("aabb", 2), ("abcd", 1), ("abab", 1), ("aab", 1)])
def test_ranks_of_a_host_are_counted_where_all_have_as_many(tmp_path, monkeypatch, hosts, size):
    for rank, host in enumerate(hosts):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        write(tmp_path, rank, len(hosts), [(0.1, 0.1, 0.0)] * 30)
    assert read_trace(tmp_path).local_size == size


def test_clocks_of_hosts_are_told_from_the_ends_of_waits(tmp_path, monkeypatch):
    for rank in range(2):
        monkeypatch.setattr("socket.gethostname", lambda rank=rank: f"host{rank}")
        monkeypatch.setattr("time.time", lambda rank=rank: 1e9 + 7.0 * rank)
        write(tmp_path, rank, 2, [(0.1 + 0.1 * rank, 0.2 - 0.1 * rank, 0.0)] * 30, algorithm=HOROVOD)
    np.testing.assert_allclose(read_trace(tmp_path).clocks_ahead, [0.0, 7.0], atol=1e-5)


def test_clocks_of_hosts_are_unknown_where_ranks_do_not_wait_for_all(tmp_path, monkeypatch):
    for rank in range(2):
        monkeypatch.setattr("socket.gethostname", lambda rank=rank: f"host{rank}")
        write(tmp_path, rank, 2, [(0.1, 0.1, 0.0)] * 30, algorithm="sgp")
    assert read_trace(tmp_path).clocks_ahead is None


# -- optimizers -----------------------------------------------------------------------------------------------


def plain() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()


def test_a_recorded_optimizer_trains_as_before_and_under_a_scheduler(tmp_path):
    torch.manual_seed(0)
    model, optimizer = plain()
    torch.manual_seed(0)
    other, untouched = plain()
    recorder = recorded(optimizer, tmp_path, 0, 1)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (optimizer, untouched)]
    for _ in range(4):
        for each, own, scheduler in zip((model, other), (optimizer, untouched), schedulers, strict=True):
            train(each, own, 1)
            scheduler.step()
    assert torch.equal(model.weight, other.weight)
    assert optimizer.state_dict().keys() == untouched.state_dict().keys()
    recorder.close()
    trace = read_trace(tmp_path, skip=0, least=1)
    assert trace.steps == 4
    assert (trace.headers[0].algorithm, trace.headers[0].parameter_bytes) == (PLAIN, 16)


def test_an_optimizer_is_recorded_once(tmp_path):
    _, optimizer = plain()
    recorded(optimizer, tmp_path, 0, 1)
    with pytest.raises(ValueError, match="recorded already"):
        recorded(optimizer, tmp_path, 0, 1)


def test_of_horovods_optimizer_the_wait_is_in_synchronize(tmp_path):
    clock_marks: list[str] = []
    model, optimizer = plain()
    step = optimizer.step

    def synchronize(_) -> None:
        clock_marks.append("synchronize")

    def stepping(self) -> None:
        self.synchronize()
        clock_marks.append("step")
        step()

    optimizer.synchronize = types.MethodType(synchronize, optimizer)
    optimizer.skip_synchronize = None
    optimizer.step = types.MethodType(stepping, optimizer)
    recorder = recorded(optimizer, tmp_path, 0, 1)
    train(model, optimizer, 1)
    recorder.close()
    trace = read_trace(tmp_path, skip=0, least=1)
    assert clock_marks == ["synchronize", "step"]
    assert trace.headers[0].algorithm == HOROVOD
    assert trace.synchronous
    assert trace.begin < trace.arrived < trace.released < trace.done


def test_of_ours_the_wait_is_what_the_worker_says(tmp_path):
    model, optimizer = plain()
    worker = types.SimpleNamespace(wait_s=5.0)
    settings = {"algorithm": "sgp", "topology": torch.nn.Linear}
    optimizer._async = types.SimpleNamespace(worker=worker, settings=settings, size=1)
    step = optimizer.step

    def waiting(_) -> None:
        step()
        worker.wait_s += 1e-6

    optimizer.step = types.MethodType(waiting, optimizer)
    recorder = recorded(optimizer, tmp_path, 0, 1)
    train(model, optimizer, 1)
    recorder.close()
    trace = read_trace(tmp_path, skip=0, least=1)
    assert trace.waits[0, 0] == pytest.approx(1e-6, abs=5e-7)
    assert trace.headers[0].algorithm == "sgp"
    assert "Linear" in trace.headers[0].options["topology"]


def test_what_ours_waits_between_steps_is_no_work(tmp_path):
    _, optimizer = plain()
    worker = types.SimpleNamespace(wait_s=5.0)
    optimizer._async = types.SimpleNamespace(worker=worker, settings={"algorithm": "eager"}, size=1)
    recorder = recorded(optimizer, tmp_path, 0, 1)
    now = [100.0]
    recorder._clock = lambda: now[0]
    for _ in range(2):
        now[0] += 0.005  # computation, then synchronize()
        now[0] += 0.020
        worker.wait_s += 0.020
        optimizer.step()
    recorder.close()
    trace = read_trace(tmp_path, skip=1, least=1)
    assert trace.work[0, 0] == pytest.approx(0.005, abs=1e-6)
    assert trace.waits[0, 0] == pytest.approx(0.020, abs=1e-6)


def test_an_optimizer_of_a_process_set_is_refused(tmp_path):
    _, optimizer = plain()
    optimizer._async = types.SimpleNamespace(worker=None, settings={"algorithm": "eager"}, size=2)
    with pytest.raises(ValueError, match="shared by 2 ranks of 4"):
        recorded(optimizer, tmp_path, 0, 4)
    assert not list(tmp_path.iterdir())


def test_pauses_that_were_left_out_are_in_no_step(tmp_path):
    now = [0.0]
    recorder = Recorder(tmp_path, 0, 1, clock=lambda: now[0])
    for step in range(4):
        now[0] += 0.1
        recorder.stepped(0.0)
        if step == 1:
            now[0] += 10.0
            recorder.skip()
    recorder.close()
    assert read_trace(tmp_path, skip=0, least=1).steps_per_s == pytest.approx(10.0, rel=1e-3)
    with pytest.raises(ValueError, match="skip=-1"):
        read_trace(tmp_path, skip=-1, least=1)


def test_steps_are_written_while_the_job_goes_on(tmp_path):
    now = [0.0]
    recorder = Recorder(tmp_path, 0, 1, clock=lambda: now[0])
    for _ in range(30):
        now[0] += 0.1
        recorder.stepped(0.0)
    assert read_trace(tmp_path, skip=0, least=1).steps >= 20, "a job that is killed now leaves these"
    recorder.close()


def test_a_recorder_that_is_closed_late_leaves_a_later_ones_file_alone(tmp_path):
    now = [0.0]
    early, late = (Recorder(tmp_path, 0, 1, clock=lambda: now[0]) for _ in range(2))
    for recorder, steps in ((early, 9), (late, 4)):
        for _ in range(steps):
            now[0] += 0.01
            recorder.stepped(0.0)
    late.close()
    early.close()
    assert read_trace(tmp_path, skip=0, least=1).steps == 4


def test_a_device_is_waited_for_before_every_mark(tmp_path):
    model, optimizer = plain()
    waits: list[int] = []
    recorder = recorded(optimizer, tmp_path, 0, 1, synchronize=lambda: waits.append(1))
    train(model, optimizer, 3)
    recorder.close()
    assert len(waits) == 2 * 3
