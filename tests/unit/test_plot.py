import csv
import dataclasses
import importlib
import json
import math
import pathlib

import pytest

from hvd_async.runner.logs import write_leaders, write_step_times
from hvd_async.runner.metrics import JobMetrics, OptimizerCounts
from hvd_async.runner.report import EpochRow, MetricsFile
from hvd_async.runner.summary import KEYS
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


def logged(folder, algorithm="eager", quorum="solo", ended=True, epochs=3):
    """A runner's folder, written by what the runner writes it with."""
    table = MetricsFile(folder / "metrics.csv", resumed=False)
    ranks = [OptimizerCounts(4, 3, 4, 0.5, {0: 2, 3: 1}, held_s=(0.25, 1.5)), OptimizerCounts(4, 3, 4, 0.125, {0: 1})]
    for epoch in range(1, epochs + 1):
        accuracy_ = None if epoch == 2 else 0.3 * epoch
        table.add(EpochRow(epoch, 9, 0.1, 1 / epoch, accuracy_, 4.0, 9.0, 0.1, 0.2, 0.0, None, JobMetrics.of(ranks)))
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


def test_a_run_that_goes_on_is_told_as_far_as_it_went(tmp_path):
    (run,) = runs.read([logged(tmp_path / "now", ended=False, epochs=1)])
    assert (run.arm, run.ranks, runs.labels([run])) == (None, 2, ["now"])


def test_epochs_of_unknown_length_are_not_put_on_a_clock(tmp_path):
    logged(tmp_path)
    (run,) = runs.read([tmp_path / "metrics.csv"])
    run.epochs[1]["seconds"] = None
    assert run.curve("seconds", "train_loss") == ([4.0], [1.0])


def test_a_run_that_was_resumed_with_more_ranks_has_the_sums_of_all(tmp_path):
    logged(tmp_path, epochs=1)
    table = MetricsFile(tmp_path / "metrics.csv", resumed=True)
    ranks = [OptimizerCounts(4, 3, 4, seconds, {0: 4}) for seconds in (1.0, 2.0, 3.0)]
    table.add(EpochRow(2, 18, 0.1, 0.5, 0.9, 4.0, 9.0, 0.1, 0.2, 0.0, None, JobMetrics.of(ranks)))
    (run,) = runs.read([tmp_path])
    assert run.by_rank("wait_s") == [1.5, 2.125, 3.0]
    assert run.ranks == 3


def test_files_of_a_folder_are_one_run_and_summaries_are_their_own(tmp_path):
    logged(tmp_path)
    write_leaders(tmp_path / "leaders.csv", [PULLS])
    (run,) = runs.read([tmp_path / "metrics.csv", tmp_path / "leaders.csv"])
    assert (len(run.epochs), len(run.pulls), run.summary, run.ranks) == (3, 5, {}, 4)
    (tmp_path / "b.json").write_text(json.dumps(summary_of("sgp", ranks=3)))
    first, second = runs.read([tmp_path / "summary.json", tmp_path / "b.json"])
    assert (first.arm, second.arm, second.ranks) == ("solo", "sgp", 3)
    assert second.by_rank("wait_s") == [8.0] * 3


@pytest.mark.parametrize(
    ("algorithm", "quorum", "arm"),
    [("eager", 3, "k3"), ("eager", 0.75, "0.75"), ("eager", "auto", "auto"), ("allreduce", None, "horovod")],
)
def test_runs_are_called_as_in_the_benchmarks(algorithm, quorum, arm):
    assert runs.Run(pathlib.Path("x"), summary=summary_of(algorithm, quorum)).arm == arm


def test_runs_that_are_alike_are_called_by_their_folders():
    def run(place, algorithm):
        return runs.Run(pathlib.Path(place), summary=summary_of(algorithm))

    assert runs.labels([run("a/x", "sgp"), run("b/x", "osgp")]) == ["sgp", "osgp"]
    assert runs.labels([run("a/x", "sgp"), run("b/y", "sgp")]) == ["x", "y"]
    assert runs.labels([run("a/x", "sgp"), run("b/x", "sgp")]) == ["a/x", "b/x"]


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


def test_a_summary_alone_is_drawn_as_bars():
    alone = runs.Run(pathlib.Path("s.json"), summary=summary_of("sgp", leader_distance_by_rank=[0.5, 0.25]))
    drawn = titles(alone)
    assert list(drawn) == [
        *("test accuracy", "step time, median", "waiting for others", "staleness, mean"),
        "distance from leaders, or the centre",
    ]
    assert [patch.get_height() for patch in drawn["test accuracy"].patches] == [0.9]


def test_distances_of_any_size_can_be_told_apart():
    found = {"sgp": 5e-5, "lsgd": 0.07}
    given = [runs.Run(pathlib.Path(name), summary=summary_of(name, consensus_distance=d)) for name, d in found.items()]
    axes = titles(*given)["distance from the average (consensus)"]
    low, high = axes.get_ylim()
    assert axes.get_yscale() == "log"
    assert 5e-7 < low < 5e-5
    assert 0.07 < high < 1
    assert len(axes.get_yticks()) > 2


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
        ("x.csv", "epoch,train_loss\n1,2,3\n", [], "is no metrics.csv"),
        ("x.csv", "epoch,train_loss\n1,many\n", [], "could not convert string to float: 'many'"),
        ("x.csv", "epoch,train_loss\n", [], "x.csv tells nothing: no epoch had ended"),
        ("x.csv", "time_s,group,leader\n", [], "or nobody led"),
        ("x.csv", "time_s,group,leader\n0.0,,\n", [], "or nobody led (easgd has a centre)"),
        ("x.csv", "time_s,group,leader\n0.0,,3\n", ["--ranks", "2"], "--ranks 2: there were 4 in"),
        ("x.json", "{", [], "x.json cannot be read as JSON"),
        ("x.json", "[]", [], "x.json holds no JSON object"),
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
            "x.json: its rows are not those of hetero",
        ),
        ("x.json", '{"case": "hetero", "rows": []}', ["SCRIPTS"], "x.json is a benchmark's: give it by itself"),
        ("x.json", "{}", ["nowhere"], "nowhere is not there: give a runner's --log-dir"),
        ("x.png", "\ufeff\x00", [], "x.png is no metrics.csv"),
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


def test_metrics_are_those_that_the_runner_writes(tmp_path):
    logged(tmp_path)
    with (tmp_path / "metrics.csv").open() as file:
        names = csv.DictReader(file).fieldnames
    assert {"epoch", "train_loss", "test_accuracy", "seconds", "consensus_distance", "staleness_mean"} <= set(names)
    assert set(runs.BY_RANK) <= set(names)


def test_one_epoch_is_drawn_as_bars(tmp_path):
    (run,) = runs.read([logged(tmp_path, epochs=1)])
    drawn = titles(run)
    assert "test accuracy" in drawn
    assert not [title for title in drawn if " over " in title]
    (tmp_path / "summary.json").unlink()
    (run,) = runs.read([tmp_path])
    assert "training loss over epochs" in titles(run), "of a run that goes on there is nothing else"
