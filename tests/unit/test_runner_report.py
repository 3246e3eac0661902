import csv
import struct
import subprocess
import sys

import pytest
from tensorboard.compat.proto.event_pb2 import Event

from hvd_async.runner.logs import write_atomically
from hvd_async.runner.metrics import JobMetrics, OptimizerCounts
from hvd_async.runner.report import AT_THE_END, EpochRow, Reporter


def row(epoch=1, loss=0.5, accuracy=0.75, distance=None):
    ranks = [
        OptimizerCounts(4, 3, 4, 0.5, {0: 2, 3: 1}, 1, {1: 3, 2: 1}, (0.25, 1.5), 100, 0.5, 7),
        OptimizerCounts(4, 2, 4, 0.125, {0: 1}, 0, {1: 3, 2: 1}, (0.25, 1.5), 60, 1.5, 8),
    ]
    return EpochRow(epoch, 10 * epoch, 0.1, loss, accuracy, 4.0, 100.0, 0.01, 0.02, 0.0, distance, JobMetrics.of(ranks))


def scalars_in(folder):
    """(step, tag, value) of every scalar in a folder of TensorBoard events."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            found += [(event.step, value.tag, pytest.approx(value.simple_value)) for value in event.summary.value]
            content = content[16 + length :]
    return found


def test_one_line_an_epoch_off_a_terminal(capsys):
    with Reporter(enabled=True, epochs=3) as reporter:
        for step in range(5):
            reporter.step(step, 0.1, 0.1)
        reporter.end_epoch(row(2))
        reporter.end_epoch(row(3, None, None))
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "epoch 2/3: loss 0.5000, 100.0 images/s, test accuracy 0.7500",
        "epoch 3/3: 100.0 images/s",
    ]
    assert captured.err == ""


def test_a_bar_when_asked(capsys):
    with Reporter(enabled=True, epochs=3, progress="bar") as reporter:
        reporter.begin_epoch(0, 2)
        reporter.step(0, 0.25, 0.1)
        reporter.step(1, 0.125, 0.1)
        reporter.end_epoch(row())
    captured = capsys.readouterr()
    assert "epoch 1/3" in captured.err
    assert "2/2" in captured.err
    assert "loss=0.1250" in captured.err
    assert "test accuracy 0.7500" in captured.err, "lines go where the bar is"


def test_other_ranks_say_and_write_nothing(capsys, tmp_path):
    with Reporter(enabled=False, epochs=3, progress="bar", log_dir=tmp_path / "logs") as reporter:
        reporter.begin_epoch(0, 2)
        reporter.step(0, 0.25, 0.1)
        reporter.end_epoch(row())
        reporter.note("done")
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""
    assert not (tmp_path / "logs").exists()


def test_csv_starts_afresh_or_goes_on(tmp_path):
    def rows(resumed, *epochs):
        with Reporter(enabled=True, epochs=9, progress="lines", log_dir=tmp_path, resumed=resumed) as reporter:
            for epoch in epochs:
                reporter.end_epoch(row(epoch, accuracy=None))
        with (tmp_path / "metrics.csv").open() as file:
            return [(line["epoch"], line["train_loss"], line["test_accuracy"]) for line in csv.DictReader(file)]

    assert rows(False, 1, 2) == [("1", "0.5", ""), ("2", "0.5", "")]
    assert rows(True, 3) == [("1", "0.5", ""), ("2", "0.5", ""), ("3", "0.5", "")]
    assert rows(False, 1) == [("1", "0.5", "")]


def test_tensorboard_events(tmp_path):
    with Reporter(enabled=True, epochs=1, log_dir=tmp_path) as reporter:
        reporter.step(4, 0.25, 0.125)
        reporter.end_epoch(row(1, None))
    assert (4, "train/loss_rank0", 0.25) in scalars_in(tmp_path)
    assert (4, "train/learning_rate", 0.125) in scalars_in(tmp_path)
    assert (10, "test/accuracy", 0.75) in scalars_in(tmp_path)
    assert "train/loss" not in {tag for _, tag, _ in scalars_in(tmp_path)}


def test_the_consensus_distance_is_logged_where_there_is_one(tmp_path):
    with Reporter(enabled=True, epochs=2, log_dir=tmp_path) as reporter:
        reporter.end_epoch(row(1))
        reporter.end_epoch(row(2, distance=0.25))
    logged = [(step, value) for step, tag, value in scalars_in(tmp_path) if tag == "train/consensus_distance"]
    assert logged == [(20, 0.25)]
    with (tmp_path / "metrics.csv").open() as file:
        assert [line["consensus_distance"] for line in csv.DictReader(file)] == ["", "0.25"]


COUNTED = {
    "rounds": 4,
    "contributors": 1.25,
    "staleness_mean": 0.75,
    "staleness_max": 3,
    "fresh": 0.75,
    "skipped": 1,
    "latency_s": 0.25,
    "bytes_sent": 160,
}
BY_RANK = {"wait_s": (0.5, 0.125), "held_s": (0.25, 1.5)}


def test_a_new_run_does_not_keep_the_end_of_an_earlier_one(tmp_path):
    for resumed, left in ((True, AT_THE_END), (False, ())):
        for name in AT_THE_END:
            (tmp_path / name).touch()
        Reporter(enabled=True, epochs=1, log_dir=tmp_path, resumed=resumed).close()
        assert [name for name in AT_THE_END if (tmp_path / name).exists()] == list(left)


def test_tensorboard_has_what_the_optimizers_counted(tmp_path):
    with Reporter(enabled=True, epochs=1, log_dir=tmp_path) as reporter:
        reporter.end_epoch(row())
    found = {tag: value for step, tag, value in scalars_in(tmp_path) if step == 10 and tag.startswith("rounds/")}
    by_rank = {f"{name}/rank{rank}": v for name, values in BY_RANK.items() for rank, v in enumerate(values)}
    assert found == {f"rounds/{name}": value for name, value in (COUNTED | by_rank).items()}


def test_csv_has_what_the_optimizers_counted(tmp_path):
    with Reporter(enabled=True, epochs=1, log_dir=tmp_path) as reporter:
        reporter.end_epoch(row())
    with (tmp_path / "metrics.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert {name: float(line[name]) for name in COUNTED} == COUNTED
    assert {name: tuple(map(float, line[name].split(" "))) for name in BY_RANK} == BY_RANK
    assert None not in line, "more values than columns"
    assert None not in line.values(), "fewer"


def test_neither_framework_is_needed(tmp_path):
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from hvd_async.runner import data, image_folder, loop\n"
        "from hvd_async.runner.report import Reporter\n"
        "data.Digits(8, vary=True)\n"
        "with Reporter(enabled=True, epochs=1, log_dir=Path(sys.argv[1])) as r: r.step(0, 1.0, 1.0)\n"
        "sys.exit(' '.join(sorted({'torch', 'tensorflow', 'horovod', 'keras'} & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), f"imported: {done.stderr}"


def test_a_file_is_whole_or_not_changed(tmp_path):
    path = tmp_path / "new" / "last.keras"
    write_atomically(path, lambda place: place.write_text("one"))

    def fails(place):
        assert place.suffix == ".keras"
        place.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fails)
    assert path.read_text() == "one"
    assert [found.name for found in path.parent.iterdir()] == ["last.keras"]


def test_a_resumed_runs_file_of_another_version_is_refused_and_left_alone(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch,step\n1,9\n")
    with pytest.raises(ValueError, match="move it away, or name another --log-dir"):
        Reporter(enabled=True, epochs=3, log_dir=tmp_path, resumed=True)
    assert (tmp_path / "metrics.csv").read_text() == "epoch,step\n1,9\n"
