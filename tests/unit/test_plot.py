"""``scripts/plot.py``: pictures of runs and of benchmarks, and what it says of files that it cannot draw."""

import dataclasses
import json
import math

import pytest
from matplotlib.figure import Figure

from hvd_async.runner.report import (
    COLUMNS,
    KEYS,
    JobCounts,
    MetricsFile,
    OptimizerCounts,
    write_leaders,
    write_step_times,
)
from scripts import plot as module
from scripts.benchmarks.cases import CASES
from scripts.benchmarks.support import plot as drawing
from scripts.benchmarks.support import runs
from scripts.benchmarks.support.figures import Interval
from scripts.benchmarks.support.report import Panel, Report, row

PULLS = [(10.0, 0, 1), (10.2, 1, 3), (11.0, -1, 3), (12.0, 0, 0), (13.5, -1, 0)]


@pytest.fixture
def plot(monkeypatch):
    """``scripts/plot.py``, whose pictures are small."""
    monkeypatch.setattr(drawing, "DPI", 20)
    return module


def logged(folder, algorithm="eager", quorum="solo"):
    """A runner's folder, written by what the runner writes it with."""
    table = MetricsFile(folder / "metrics.csv", resumed=False)
    ranks = [
        OptimizerCounts(4, wait_s=0.5, staleness={0: 2, 3: 1}, held_s=(0.25, 1.5)),
        OptimizerCounts(4, wait_s=0.125, staleness={0: 1}),
    ]
    for epoch in (1, 2, 3):
        accuracy = None if epoch == 2 else 0.3 * epoch
        values = (epoch, 9, 0.1, 1 / epoch, accuracy, 4.0, 9.0, 0.1, 0.2, 0.0, None)
        table.add(dict(zip(COLUMNS, values, strict=False)) | JobCounts.of(ranks).columns())
    summary = dict.fromkeys(KEYS) | {"algorithm": algorithm, "quorum": quorum, "world_size": 2}
    (folder / "summary.json").write_text(json.dumps(summary))
    write_step_times(folder / "step_times.csv", [[0.1, 0.2, 0.3], [0.2]])
    return folder


def titles(*given):
    figure = Figure(layout="constrained")
    runs.draw(figure, dict(zip(runs.labels(given), given, strict=True)))
    return {axes.get_title(): axes for axes in figure.axes}


def test_a_folder_is_drawn_as_the_runner_wrote_it(tmp_path):
    (run,) = runs.read([logged(tmp_path)])
    assert (run.arm, run.ranks, len(run.epochs)) == ("solo", 2, 3)
    assert run.curve("seconds", "test_accuracy") == ([4.0, 12.0], [pytest.approx(0.3), pytest.approx(0.9)])
    assert run.by_rank("held_s") == [0.75, 4.5], "sums over the epochs"
    assert [times[50] for times in run.step_times] == [0.2, 0.2]
    drawn = titles(run)
    assert [title.split(":")[0] for title in drawn] == [
        *("training loss over epochs", "training loss over time", "test accuracy over epochs"),
        *("test accuracy over time", "step times", "waiting for others", "others waited for this rank"),
        "staleness, mean",
    ]
    assert [patch.get_height() for patch in drawn["waiting for others"].patches] == [1.5, 0.375]
    (line,) = drawn["training loss over time"].lines
    assert line.get_xdata() == pytest.approx([4, 8, 12])
    assert line.get_ydata() == pytest.approx([1, 1 / 2, 1 / 3])


def test_runs_are_compared_and_leaders_are_drawn_by_rank(plot, tmp_path, capsys):
    files = [logged(tmp_path / "a"), logged(tmp_path / "b", "lsgd", None)]
    write_leaders(tmp_path / "b" / "leaders.csv", [PULLS])
    plot.main([*map(str, files), "--plot", str(tmp_path / "new" / "runs.png")])
    assert (tmp_path / "new" / "runs.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote" in capsys.readouterr().out
    (run,) = runs.read([tmp_path / "b" / "leaders.csv"], 6)
    assert run.pulls == [(0.0, 0, 1), (0.2, 1, 3), (1.0, -1, 3), (2.0, 0, 0), (3.5, -1, 0)]
    (axes,) = titles(run).values()
    assert [text.get_text() for text in axes.get_yticklabels()] == [f"rank {rank}" for rank in range(6)]


# -- pictures of benchmarks -----------------------------------------------------------------------------------


def test_bars_stand_in_groups_with_their_ends_and_marks():
    rows = [
        row(arm, {"ranks": ranks}, Interval(10.0 * ranks + place, 5.0, 90.0), "s", most=95.0 if place else None)
        for ranks in (8, 4)
        for place, arm in enumerate(("horovod", "solo"))
    ]
    case = dataclasses.replace(CASES["straggler"], panels=(Panel(marks=("most",)),), group="{ranks} ranks")
    drawing.draw(figure := Figure(), case, rows)
    (axes,) = figure.axes
    middles = [patch.get_x() + patch.get_width() / 2 for patch in axes.patches]
    quarter = drawing.WIDTH / 4
    assert middles == pytest.approx([-quarter, quarter, 1 - quarter, 1 + quarter])
    assert [patch.get_height() for patch in axes.patches] == [80.0, 81.0, 40.0, 41.0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8 ranks", "4 ranks"]
    ends = [segment[:, 1].tolist() for bars in axes.collections for segment in bars.get_segments()]
    assert ends == [[5.0, 90.0]] * 4
    (marks,) = (line for line in axes.lines if line.get_marker() == "D")
    assert marks.get_xdata() == pytest.approx([quarter, 1 + quarter])
    assert list(marks.get_ydata()) == [95.0, 95.0]


def test_a_benchmark_is_drawn_again_as_it_was(plot, tmp_path):
    """A report's picture is drawn from its JSON, which knows no infinity."""
    case, gap = CASES["split_classes"], {"difference": 0.0, "difference_low": -math.inf, "difference_high": math.inf}
    rows = [row(arm, {"delay": None}, 0.9, "share", **gap) for arm in ("horovod", "solo")]
    report = Report(case, 4, rows)
    report.write(tmp_path / "found.json")
    drawing.save(case, report.content(), tmp_path / "first.png")
    plot.main([str(tmp_path / "found.json"), "--plot", str(tmp_path / "again.png")])
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "first.png").read_bytes()
    assert report.content()["rows"][0]["difference_low"] is None


HETERO = '{"case": "hetero", "ranks": 4, "transport": "gloo", "rows": [{"value": 1}]}'


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("x.csv", "a,b\n1,2\n", "x.csv is no metrics.csv, step_times.csv, leaders.csv of a runner (it begins with"),
        ("x.csv", "epoch,train_loss\n1,many\n", "could not convert string to float: 'many'"),
        ("x.csv", "epoch,train_loss\n", "x.csv has no finished epoch, step or leader"),
        ("nowhere.csv", None, "nowhere.csv is no metrics.csv"),
        ("x.json", "{", "x.json cannot be read as JSON"),
        ("x.json", '{"case": "chess", "rows": []}', "is of a case 'chess' that is not there: pass one of straggler"),
        ("x.json", HETERO, "x.json: its rows do not fit hetero"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_refused(plot, tmp_path, capsys, name, text, expected):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as stopped:
        plot.main([str(tmp_path / name), "--plot", str(tmp_path / "no.png")])
    assert stopped.value.code == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "no.png").exists()
