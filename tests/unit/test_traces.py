"""Traces: what is recorded is what is read, incomplete traces are refused, optimizers are recorded unchanged."""

from __future__ import annotations

import contextlib
import resource
import types
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from hvd_async.cli.main import main
from hvd_async.runtime.launch import LAUNCHERS
from hvd_async.traces.format import HOROVOD, PLAIN, file_of, read_trace
from hvd_async.traces.recorded import recorded
from hvd_async.traces.recorder import BUFFERED, LAUNCHES, Recorder


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch) -> None:
    """The tests may run under a launcher."""
    for name in ("SLURM_JOB_ID", *LAUNCHES, *(name for one in LAUNCHERS for name in (one.rank, one.size))):
        monkeypatch.delenv(name, raising=False)


class Timed:
    """A recorder of one rank whose clock a test moves."""

    def __init__(self, folder, rank: int = 0, ranks: int = 1, **header) -> None:
        self.now = 100.0
        self.recorder = Recorder(folder, rank, ranks, clock=lambda: self.now, **header)

    def marks(self, *marks: float | str | tuple[str, float]) -> None:
        """Let seconds pass (numbers), and call the recorder's methods (names, with an argument)."""
        for mark in marks:
            if isinstance(mark, float | int):
                self.now += mark
            else:
                name, *given = (mark,) if isinstance(mark, str) else mark
                getattr(self.recorder, name)(*given)


def write(folder, rank: int, ranks: int, steps: Iterable[tuple[float, float, float]], **header) -> None:
    """Record a rank's steps: seconds of computation, of waiting, of the update."""
    timed = Timed(folder, rank, ranks, **header)
    for compute, wait, update in steps:
        timed.marks(compute, "arrived", wait, "released", update, "done")
    timed.recorder.close()


def write_all(folder, ranks: int = 3, steps: int = 30, **header) -> None:
    for rank in range(ranks):
        write(folder, rank, ranks, [(0.1 * (rank + 1), 0.05, 0.01)] * steps, **header)


def all_of(folder):
    """Read a trace with all its steps."""
    return read_trace(folder, skip=0, least=1)


def test_what_was_recorded_is_read(tmp_path):
    write_all(tmp_path, steps=BUFFERED + 30, parameter_bytes=400, algorithm="eager", options={"quorum": "solo"})
    trace = read_trace(tmp_path, skip=10)
    assert (trace.ranks, trace.steps, trace.left_out) == (3, BUFFERED + 20, 10)
    assert (trace.headers[1].rank, trace.headers[0].parameter_bytes) == (1, 400)
    assert trace.headers[0].options == {"quorum": "solo"}
    np.testing.assert_allclose(trace.work, np.tile([0.11, 0.21, 0.31], (trace.steps, 1)), atol=1e-5)
    np.testing.assert_allclose(trace.waits, 0.05, atol=1e-5)
    np.testing.assert_array_equal(trace.clocks_ahead, 0.0)
    assert trace.steps_per_s == pytest.approx(np.mean([1 / 0.16, 1 / 0.26, 1 / 0.36]), rel=1e-4)


MARKS = {
    "the first arrival and the last release count": (
        ("released", 1, "arrived", 1, "arrived", 1, "released", 1, "released", 1, "done"), [2], [3], [1],
    ),
    "what is skipped is in no step": (
        (0.5, "arrived", "done", 50, "skip", 0.5, "arrived", "done"), [0.5, 0.5], [0, 0], [0, 0],
    ),
    "marked at its end; no step can have waited for longer than it took": (
        (1, ("stepped", 0.25), 1, ("stepped", 9.0)), [0.75, 0], [0.25, 1], [0, 0],
    ),
    "waits become one that ends with the last; then the arrival is no mark": (
        (1.5, ("waited", 0.5), 1.25, ("waited", 0.25), 2, "arrived", "done",
         1.125, ("waited", 0.125), 2, "arrived", "done"), [4, 3], [0.75, 0.125], [2, 2],
    ),
}  # fmt: skip
"""Marks of a step, and its seconds of work, of waits and after them."""


@pytest.mark.parametrize("what", MARKS)
def test_marks(tmp_path, what):
    marks, *seconds = MARKS[what]
    timed = Timed(tmp_path)
    timed.marks(*marks)
    timed.recorder.close()
    trace = all_of(tmp_path)
    found = [each[:, 0] for each in (trace.work, trace.waits, trace.done - trace.released)]
    np.testing.assert_allclose(found, seconds, atol=1e-5)


def test_a_job_that_is_killed_leaves_the_steps_written_so_far(tmp_path):
    timed = Timed(tmp_path)
    timed.marks(*(0.1, ("stepped", 0.0)) * 30)
    assert all_of(tmp_path).steps >= 20
    timed.recorder.close()
    path = file_of(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-20])
    assert all_of(tmp_path).steps == 29, "a line that was cut off is left out"


@contextlib.contextmanager
def room_for(size):
    """A file of this process can grow up to ``size`` bytes: as a full disk, on any file system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_the_recording_and_not_the_job(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("hvd_async.traces.recorder.warn", said.append)
    timed = Timed(tmp_path)
    timed.marks(0.1, ("stepped", 0.0), "flush")
    with room_for(file_of(tmp_path, 0).stat().st_size + 10):
        timed.marks(*(1.0, ("stepped", 0.0)) * 100, "close")
    assert ["later steps are not recorded" in one for one in said] == [True]
    assert all_of(tmp_path).steps == 1


@pytest.mark.parametrize("kind", ["full", "a file"])
def test_a_folder_that_cannot_be_written_is_found_before_the_script_runs(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.setattr("hvd_async.traces.recorded.record_what_is_made", lambda *_: [])  # (torch is imported already)
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text("raise AssertionError('the script has run')")
    if kind == "a file":
        out.write_text("")
    with room_for(1 << 40 if kind == "a file" else 0), pytest.raises(SystemExit) as ended:
        main(["record", "--out", str(out), str(script)])
    assert ended.value.code == 2
    assert "the script has run" not in capsys.readouterr().err


def test_incomplete_traces_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no rank\.0\.jsonl"):
        read_trace(tmp_path)
    write_all(tmp_path)
    with pytest.raises(ValueError, match="skip must be a number of steps, at least 0, got -1"):
        read_trace(tmp_path, skip=-1)
    file_of(tmp_path, 2).unlink()
    with pytest.raises(ValueError, match=r"is of 3 ranks and lacks rank\.2\.jsonl"):
        read_trace(tmp_path)
    write(tmp_path, 2, 3, [(0.1, 0.0, 0.0)] * 5)
    with pytest.raises(ValueError, match="rank 2 has recorded 5 steps"):
        read_trace(tmp_path)
    write(tmp_path, 2, 4, [(0.1, 0.0, 0.0)] * 30)
    with pytest.raises(ValueError, match="the folder mixes runs"):
        read_trace(tmp_path)
    for line, error in (
        (b'{"version":2,"what":"else"}\n', "version 2"),
        (b'{"rank":0}\n', "read as a file of a trace"),
    ):
        file_of(tmp_path, 0).write_bytes(line)
        with pytest.raises(ValueError, match=error):
            read_trace(tmp_path)
    with pytest.raises(ValueError, match="rank must be from 0 to 2, got rank 3 of 3"):
        Recorder(tmp_path, 3, 3)


def test_files_of_different_runs_are_refused(tmp_path):
    for folder, run in (("a", "1"), ("b", "2")):
        write_all(tmp_path / folder, ranks=2, run=run)
    assert [header.run for header in read_trace(tmp_path / "a").headers] == ["1", "1"]
    file_of(tmp_path / "b", 1).replace(file_of(tmp_path / "a", 1))
    with pytest.raises(ValueError, match=r"are of different runs \(2, 1\): copy all ranks' files"):
        read_trace(tmp_path / "a")
    write(tmp_path / "a", 1, 2, [(0.1, 0.0, 0.0)] * 30)  # (of a version that did not record it)
    with pytest.raises(ValueError, match="are of different runs"):
        read_trace(tmp_path / "a")


SLURM = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environment", "run"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "12"}, None),  # (of an allocation in which each run starts ranks by other means)
        (SLURM, "SLURM_STEP_ID:12:0"),
        ({**SLURM, "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711"}, "HOROVOD_GLOO_RENDEZVOUS_PORT:4711"),
        ({"PMIX_NAMESPACE": "77", "MASTER_PORT": "29500"}, "PMIX_NAMESPACE:77"),
    ],
)
def test_a_run_is_named_by_its_launcher(tmp_path, monkeypatch, environment, run):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    write_all(tmp_path)
    assert {header.run for header in read_trace(tmp_path).headers} == {run}


def test_a_run_replaces_an_earlier_one(tmp_path):
    (tmp_path / "rank.notes.jsonl").write_text("mine")
    write_all(tmp_path, ranks=4)
    early = Timed(tmp_path, 0, 2)
    early.marks(*(0.1, "arrived", "done") * 9)
    write_all(tmp_path, ranks=2, steps=40)
    early.recorder.close()  # (it leaves the later file alone)
    assert {path.name for path in tmp_path.iterdir()} == {"rank.0.jsonl", "rank.1.jsonl", "rank.notes.jsonl"}
    assert read_trace(tmp_path).steps == 40 - 3


@pytest.mark.parametrize(
    ("hosts", "nodes", "size"), [("aabb", "", 2), ("abab", "", 1), ("aab", "", 1), ("aaaa", "", 4), ("aaaa", "0011", 2)]
)
def test_ranks_of_a_host_are_counted_where_all_have_as_many(tmp_path, monkeypatch, hosts, nodes, size):
    """Two containers of one host name are two hosts."""
    for rank, host in enumerate(hosts):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        if nodes:
            for variable, value in (("RANK", rank), ("WORLD_SIZE", len(hosts)), ("GROUP_RANK", nodes[rank])):
                monkeypatch.setenv(variable, str(value))
        write(tmp_path, rank, len(hosts), [(0.1, 0.1, 0.0)] * 30)
    trace = read_trace(tmp_path)
    assert trace.local_size == size
    assert trace.hosts == (["a", "a", "a#1", "a#1"] if nodes else list(hosts))


@pytest.mark.parametrize(("algorithm", "ahead"), [(HOROVOD, pytest.approx([0.0, 7.0], abs=1e-5)), ("sgp", None)])
def test_clocks_of_hosts_are_compared_at_the_ends_of_waits(tmp_path, monkeypatch, algorithm, ahead):
    for rank in range(2):
        monkeypatch.setattr("socket.gethostname", lambda rank=rank: f"host{rank}")
        monkeypatch.setattr("time.time", lambda rank=rank: 1e9 + 7.0 * rank)
        write(tmp_path, rank, 2, [(0.1 + 0.1 * rank, 0.2 - 0.1 * rank, 0.0)] * 30, algorithm=algorithm)
    assert read_trace(tmp_path).clocks_ahead == ahead


# -- optimizers -----------------------------------------------------------------------------------------------


def test_a_recorded_optimizer_trains_as_before_and_under_a_scheduler(tmp_path):
    def trained(**how) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        keys = optimizer.state_dict().keys()
        recorder = recorded(optimizer, tmp_path, 0, 1, **how) if how else None
        if recorder is not None:
            with pytest.raises(ValueError, match="recorded already"):
                recorded(optimizer, tmp_path, 0, 1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            scheduler.step()
        assert optimizer.state_dict().keys() == keys
        if recorder is not None:
            recorder.close()
        return model.weight

    waits: list[int] = []
    assert torch.equal(trained(synchronize=lambda: waits.append(1)), trained())
    assert len(waits) == 2 * 4, "the device is waited for before every mark"
    trace = all_of(tmp_path)
    assert (trace.steps, trace.headers[0].algorithm, trace.headers[0].parameter_bytes) == (4, PLAIN, 16)


def test_under_this_library_the_wait_is_what_the_worker_says_also_between_steps(tmp_path):
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    worker = types.SimpleNamespace(wait_s=5.0)
    settings = {"algorithm": "sgp", "topology": torch.nn.Linear}
    optimizer._async = types.SimpleNamespace(worker=worker, settings=settings, size=1)
    with pytest.raises(ValueError, match="shared by 1 ranks of 4"):  # (of a process set)
        recorded(optimizer, tmp_path, 0, 4)
    assert not list(tmp_path.iterdir())
    recorder = recorded(optimizer, tmp_path, 0, 1)
    now = [100.0]
    recorder._clock = lambda: now[0]
    for _ in range(2):
        now[0] += 0.025  # computation, and 20 ms of it in synchronize()
        worker.wait_s += 0.020
        optimizer.step()
    recorder.close()
    trace = read_trace(tmp_path, skip=1, least=1)
    assert trace.work[0, 0] == pytest.approx(0.005, abs=1e-6)
    assert trace.waits[0, 0] == pytest.approx(0.020, abs=1e-6)
    assert trace.headers[0].algorithm == "sgp"
    assert "Linear" in trace.headers[0].options["topology"]
