"""``scripts/plot.py``: pictures of runs and of benchmarks, and what it says of files that it cannot draw."""

import dataclasses
import importlib
import json
import math
import pathlib

import pytest

from hvd_async.runner.report import (
    COLUMNS,
    KEYS,
    JobCounts,
    MetricsFile,
    OptimizerCounts,
    write_leaders,
    write_step_times,
)
from scripts.benchmarks.cases import CASES
from scripts.benchmarks.support import plot as drawing
from scripts.benchmarks.support import runs
from scripts.benchmarks.support.figures import Interval
from scripts.benchmarks.support.report import Panel, Report, row

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
PULLS = [(10.0, 0, 1), (10.2, 1, 3), (11.0, -1, 3), (12.0, 0, 0), (13.5, -1, 0)]


@pytest.fixture
def plot(monkeypatch):
    """scripts/plot.py, imported as Python does when it is run."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module("plot")
    for own in (drawing, module.plot):
        monkeypatch.setattr(own, "DPI", 20)
    return module


def summary_of(algorithm, quorum=None, ranks=2, **more):
    known = dict.fromkeys(KEYS) | {"algorithm": algorithm, "quorum": quorum, "world_size": ranks}
    known |= {"step_time_s": {"mean": 0.1, "p50": 0.1, "p95": 0.2}, "wait_s_by_rank": [8.0] * ranks}
    return known | {"staleness": {"mean": 0.5, "max": 3}, "test_accuracy": 0.9} | more


def epoch_row(values, ranks):
    return dict(zip(COLUMNS, values, strict=False)) | JobCounts.of(ranks).columns()


def logged(folder, algorithm="eager", quorum="solo", ended=True, epochs=3):
    """A runner's folder, written by what the runner writes it with."""
    table = MetricsFile(folder / "metrics.csv", resumed=False)
    ranks = [
        OptimizerCounts(4, wait_s=0.5, staleness={0: 2, 3: 1}, held_s=(0.25, 1.5)),
        OptimizerCounts(4, wait_s=0.125, staleness={0: 1}),
    ]
    for epoch in range(1, epochs + 1):
        accuracy_ = None if epoch == 2 else 0.3 * epoch
        table.add(epoch_row((epoch, 9, 0.1, 1 / epoch, accuracy_, 4.0, 9.0, 0.1, 0.2, 0.0, None), ranks))
    if ended:
        (folder / "summary.json").write_text(json.dumps(summary_of(algorithm, quorum)))
        write_step_times(folder / "step_times.csv", [[0.1, 0.2, 0.3], [0.2]])
    return folder


# -- reading --------------------------------------------------------------------------------------------------


def test_a_folder_tells_what_the_runner_wrote(tmp_path):
    (run,) = runs.read([logged(tmp_path)])
    assert (run.arm, run.ranks, len(run.epochs)) == ("solo", 2, 3)
    assert run.curve("epoch", "train_loss") == ([1, 2, 3], [1, 0.5, pytest.approx(1 / 3)])
    assert run.curve("seconds", "test_accuracy") == ([4.0, 12.0], [pytest.approx(0.3), pytest.approx(0.9)])
    assert run.curve("epoch", "consensus_distance") == ([], [])
    assert run.by_rank("wait_s") == [1.5, 0.375], "of all epochs; the summary tells of the last start"
    assert run.by_rank("held_s") == [0.75, 4.5]
    assert [times[50] for times in run.step_times] == [0.2, 0.2]
    assert [times[100] for times in run.step_times] == [0.3, 0.2]


def test_a_run_that_was_resumed_with_more_ranks_has_the_sums_of_all(tmp_path):
    logged(tmp_path, epochs=1)
    table = MetricsFile(tmp_path / "metrics.csv", resumed=True)
    ranks = [OptimizerCounts(4, wait_s=seconds) for seconds in (1.0, 2.0, 3.0)]
    table.add(epoch_row((2, 18, 0.1, 0.5, 0.9, 4.0, 9.0, 0.1, 0.2, 0.0, None), ranks))
    (run,) = runs.read([tmp_path])
    assert run.by_rank("wait_s") == [1.5, 2.125, 3.0]
    assert run.ranks == 3


# -- pictures of runs -----------------------------------------------------------------------------------------


def test_runs_are_compared(plot, tmp_path, capsys):
    logged(tmp_path / "a")
    logged(tmp_path / "b", "lsgd", None)
    write_leaders(tmp_path / "b" / "leaders.csv", [PULLS])
    (tmp_path / "c.json").write_text(json.dumps(summary_of("sgp", consensus_distance=0.5)))
    files = [str(tmp_path / name) for name in ("a", "b", "c.json")]
    plot.main([*files, "--plot", str(tmp_path / "new" / "runs.png")])
    assert (tmp_path / "new" / "runs.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote" in capsys.readouterr().out


def titles(*given):
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    runs.draw(figure, dict(zip(runs.labels(given), given, strict=True)))
    return {axes.get_title(): axes for axes in figure.axes}


def test_there_is_a_panel_for_everything_that_is_told(tmp_path):
    (run,) = runs.read([logged(tmp_path)])
    drawn = titles(run)
    assert [title.split(":")[0] for title in drawn] == [
        *("training loss over epochs", "training loss over time", "test accuracy over epochs"),
        *("test accuracy over time", "step times", "waiting for others", "others waited for this rank", "staleness"),
    ]
    assert all(axes.get_ylabel() and axes.get_xlabel() for axes in drawn.values())
    assert [patch.get_height() for patch in drawn["waiting for others"].patches] == [1.5, 0.375]
    (line,) = drawn["training loss over time"].lines
    assert line.get_xdata() == pytest.approx([4, 8, 12])


def test_who_led_is_drawn_from_what_a_runner_wrote(plot, tmp_path, capsys):
    write_leaders(tmp_path / "leaders.csv", [PULLS])
    (run,) = runs.read([tmp_path / "leaders.csv"], 6)
    assert run.pulls == [(0.0, 0, 1), (0.2, 1, 3), (1.0, -1, 3), (2.0, 0, 0), (3.5, -1, 0)]
    assert run.ranks == 6
    (axes,) = titles(run).values()
    assert [text.get_text() for text in axes.get_yticklabels()] == [f"rank {rank}" for rank in range(6)]
    drawn = [str(tmp_path / "leaders.csv"), "--plot", str(tmp_path / "leaders.png")]
    with pytest.raises(SystemExit):  # (which ranks are a group depends on how many there were)
        plot.main(drawn)
    assert "tells of 2 groups, and not how many ranks there are: give --ranks" in capsys.readouterr().err
    plot.main([*drawn, "--ranks", "6"])
    assert (tmp_path / "leaders.png").read_bytes().startswith(b"\x89PNG")


# -- pictures of benchmarks -----------------------------------------------------------------------------------


def test_bars_stand_in_groups_with_their_ends_and_marks():
    from matplotlib.figure import Figure

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
    marks = [
        (line.get_xdata()[0], line.get_ydata()[0])
        for line in axes.lines
        if line.get_marker() == "D" and len(line.get_xdata())
    ]
    assert marks == [(pytest.approx(quarter), 95.0), (pytest.approx(1 + quarter), 95.0)]


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


# -- what cannot be drawn -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "arguments", "told"),
    [
        ("x.csv", "a,b\n1,2\n", [], "x.csv is no metrics.csv, step_times.csv, leaders.csv of a runner (it begins with"),
        ("x.csv", "", [], "is no metrics.csv"),
        ("x.csv", "epoch,train_loss\n1,many\n", [], "could not convert string to float: 'many'"),
        ("x.csv", "epoch,train_loss\n", [], "x.csv tells nothing: no epoch had ended"),
        ("x.csv", "time_s,group,leader\n0.0,,\n", [], "or no rank led (easgd has a centre)"),
        ("x.csv", "time_s,group,leader\n0.0,,3\n", ["--ranks", "2"], "--ranks 2: there were 4 in"),
        ("x.json", "{", [], "x.json cannot be read as JSON"),
        ("x.json", '{"algorithm": "sgp"}', [], "x.json is no runner's summary (it has no framework)"),
        (
            "x.json",
            '{"case": "chess", "rows": []}',
            [],
            "is of a case 'chess' that is not there: give one of straggler",
        ),
        (
            "x.json",
            '{"case": "hetero", "ranks": 4, "transport": "gloo", "rows": [{"value": 1}]}',
            [],
            "x.json: its rows do not fit hetero",
        ),
        ("x.json", '{"case": "hetero", "rows": []}', ["SCRIPTS"], "is a benchmark's: pass no other file with it"),
        ("x.json", "{}", ["nowhere"], "nowhere is not there: give a runner's --log-dir"),
        ("empty/x", "", ["empty"], "empty holds no metrics.csv, step_times.csv, leaders.csv or summary.json"),
    ],
)
def test_what_cannot_be_drawn_says_so(plot, tmp_path, capsys, monkeypatch, name, text, arguments, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / name).write_text(text)
    files = [] if arguments in (["empty"], ["nowhere"]) else [name]
    arguments = [str(SCRIPTS) if each == "SCRIPTS" else each for each in arguments]
    with pytest.raises(SystemExit) as stopped:
        plot.main([*files, *arguments, "--plot", str(tmp_path / "no.png")])
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "no.png").exists()
