"""What every case of the benchmarks does, from its command line to its table, JSON and picture; no job is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from hvd_async.advisor.advice import advise
from scripts import bench as module
from scripts.benchmarks.cases import advice, overhead
from scripts.benchmarks.support import arms, launch, plot
from scripts.benchmarks.support.launch import NotHereError
from scripts.benchmarks.support.nemesis import drawn
from scripts.benchmarks.support.report import Case, Panel, Report, columns, row
from tests.unit import bench_jobs

ROOT = Path(__file__).resolve().parents[2]
FIXED = json.loads((ROOT / "tests" / "fixtures" / "benchmarks" / "rows.json").read_text())
"""By case: what its JSON was before the cases were put on one timed job: keys of rows and settings, units, the name."""
RUNS = bench_jobs.OPTIONS | bench_jobs.VARIANTS
COMMON = {"arm", "setting", "value", "unit", "low", "high", "speedup", "bound", "accuracy"}


@pytest.fixture
def bench(monkeypatch):
    """``scripts/bench.py`` as it is run, with jobs that are made up; ``asked``: (job, ranks, plan, limit) of each."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def run(job, ranks, plan, *, limit, on_block=None, **how):
        module.asked.append((job, ranks, plan, limit))
        found = bench_jobs.blocks_of(job, ranks, plan, module.well)
        for block in found if on_block is not None else ():
            on_block(block)
        return found

    few = {"resamples": 1, "steps": 10}
    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(advice, "advise", lambda trace, modes, resamples, everything: advise(trace, modes=modes, **few))
    monkeypatch.setattr(arms, "PACKAGES", {})  # rivals are there
    monkeypatch.setattr(plot, "DPI", 20)
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)  # takes longer than to draw
    module.asked, module.well = [], True
    return module


def run(bench, monkeypatch, *line):
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, line)])
    return bench.main()


def check_drawing(case, rows):
    """Draw rows: no panel is empty."""
    plot.draw(figure := Figure(layout="constrained"), case, rows)
    assert figure.axes
    assert all(axes.has_data() for axes in figure.axes), "an empty panel"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_judged_written_and_drawn_with_the_keys_that_rows_have_always_had(
    bench, monkeypatch, tmp_path, capsys, name
):
    case = name.split()[0]
    assert run(bench, monkeypatch, case, *RUNS[name].split(), "--json", tmp_path / "found.json") == 0
    out, err = capsys.readouterr()
    content, fixed = json.loads((tmp_path / "found.json").read_text()), FIXED[case]
    assert content.keys() >= {"case", "ranks", "transport", "machine", "rows", "goals", "notes"}
    assert content["case"] == fixed["case"]
    assert all(row.keys() >= COMMON for row in content["rows"])
    assert {row["unit"] for row in content["rows"]} <= {*fixed["units"]}
    if name in bench_jobs.OPTIONS:
        assert {*fixed["keys"]} <= {key for row in content["rows"] for key in row}
        assert {*fixed["setting"]} <= {key for row in content["rows"] for key in row["setting"]}
        assert content["goals"] or name == "advice"
    assert len(out.splitlines()) > len(content["rows"])
    blocks = [(ranks, json.dumps(block)) for _, ranks, plan, _ in bench.asked for block in plan.get("blocks", ())]
    assert len(set(blocks)) == len(blocks), "the same block twice: the second's result would be that of the first"
    assert f"[{len(blocks)}/{len(blocks)}]" in err or not blocks
    check_drawing(bench.CASES[case], content["rows"])


@pytest.mark.parametrize("case", [case for case in bench_jobs.OPTIONS if case != "advice"])
def test_a_bad_run_misses_goals(bench, monkeypatch, tmp_path, capsys, case):
    """(``advice`` predicts what was recorded, which here is what is measured.)"""
    bench.well = False
    assert run(bench, monkeypatch, case, *bench_jobs.OPTIONS[case].split(), "--json", tmp_path / "found.json") == 0
    goals = json.loads((tmp_path / "found.json").read_text())["goals"]
    assert not all(goal["met"] for goal in goals)
    assert "MISSED" in capsys.readouterr().out


@pytest.mark.parametrize("case", bench_jobs.OPTIONS)
def test_a_quick_run_is_smaller_and_judges_only_what_is_exact(bench, monkeypatch, tmp_path, case):
    assert run(bench, monkeypatch, case) == 0
    usual, bench.asked = bench.asked, []
    assert run(bench, monkeypatch, case, "--quick", "--json", tmp_path / "found.json") == 0
    assert sum(len(json.dumps(plan)) for _, _, plan, _ in bench.asked) < sum(len(json.dumps(p)) for _, _, p, _ in usual)
    assert sum(limit for *_, limit in bench.asked) <= sum(limit for *_, limit in usual)
    content = json.loads((tmp_path / "found.json").read_text())
    assert "a quick run" in content["notes"][-1]
    assert all(goal["judged"] == goal["exact"] for goal in content["goals"])
    check_drawing(bench.CASES[case], content["rows"])


def test_lists_that_are_named_stay_in_a_quick_run_which_is_drawn(bench, monkeypatch, tmp_path):
    line = ["--arms", "horovod,all", "--delay", "0.7", "--plot", tmp_path / "drawn.png"]
    run(bench, monkeypatch, "straggler", "--quick", *line)
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    blocks = bench.asked[0][2]["blocks"]
    assert {(block["arm"], block["delay"]) for block in blocks} == {("horovod", 0.7), ("all", 0.7)}


@pytest.mark.parametrize("name", ["straggler", "sequence_lengths", "hetero", "network", "advice", "time_to_accuracy"])
def test_arms_alternate_within_a_job(bench, monkeypatch, name):
    """Each repetition has all arms, and begins with another one."""
    assert run(bench, monkeypatch, name, *bench_jobs.OPTIONS[name].split(), "--repetitions", "3") == 0
    for _, _, plan, _ in bench.asked:
        blocks = [block for block in plan["blocks"] if not block.get("tuning") and "trace" not in block]
        same = [str((block.get("delay"), block.get("even"))) for block in blocks]
        for setting in dict.fromkeys(same):
            order = [block["arm"] for block, own in zip(blocks, same, strict=True) if own == setting]
            arms = list(dict.fromkeys(order))
            rounds = [order[i : i + len(arms)] for i in range(0, len(order), len(arms))]
            assert all(sorted(each) == sorted(arms) for each in rounds)
            assert len({each[0] for each in rounds}) == min(3, len(arms), len(rounds))


def test_every_case_helps_and_has_its_old_name(bench, capsys):
    assert [name for name in bench.CASES if name != "scale"] == [n for n in bench.CASES if n in bench_jobs.OPTIONS]
    assert {*bench_jobs.OPTIONS} == {*bench.CASES} - {"scale"}
    parser = bench.parser()
    old = {"no_stragglers": "balanced", "split_classes": "hard", "sequence_lengths": "lengths"}
    assert {name: case.old_name for name, case in bench.CASES.items() if case.old_name} == old
    for name in [*bench.CASES, *old.values(), "all"]:
        with pytest.raises(SystemExit) as left:
            parser.parse_args([name, "--help"])
        assert left.value.code == 0
        assert "--quick" in capsys.readouterr().out
    for current, former in old.items():
        assert bench.current_name(former) == current
        assert vars(parser.parse_args([former])) == vars(parser.parse_args([current])) | {"case": former}


REFUSED = {
    "time_to_accuracy --arms solo,sgp": "needs the arm 'horovod'",
    "time_to_accuracy --targets 0.9 0.8": "the lower one first",
    "time_to_accuracy --grid 0 1": "take numbers above 0",
    "time_to_accuracy --kinds rain": "invalid choice: 'rain'",
    "sequence_lengths --batch-size 0": "there are 2048 clips",
    "split_classes --arms horovod,lsgd-far": "no arm 'lsgd-far'",
    "network --mbit 0": "take numbers above 0",
    "network --per-host 3": "8 ranks cannot be divided so",
    "nemesis --ranks 4": "schedules begin with 3 ranks",
    "nemesis --arms horovod": "no arm 'horovod' in this case",
    "nemesis --arms solo --seeds 3": "none of these schedules is of these arms",
    "elastic --arms auto": "no arm 'auto' in this case",
    "elastic --framework tensorflow": "does not work on Keras 3",
    "advice --arms all,horovod": "there is no mode 'horovod'",
    "gpu --ranks 2": "the arm 'plain' is of one rank",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_is_refused_before_any_job(bench, monkeypatch, capsys, line):
    with pytest.raises(SystemExit) as left:
        run(bench, monkeypatch, *line.split())
    assert left.value.code == 2
    assert REFUSED[line] in capsys.readouterr().err
    assert not bench.asked


# -- options that a case must keep ------------------------------------------------------------------------------------


def test_nemesis_goes_through_the_schedules_of_its_seeds_again(bench, monkeypatch):
    """As a job's end by force leaves it: the others follow in another job, and the broken one counts as a violation."""

    whole = launch.run
    seen = []

    def dies(job, ranks, plan, **how):
        seen.append([schedule["seed"] for schedule in plan["schedules"]])
        if 12 in seen[-1]:
            whole(job, ranks, plan | {"schedules": plan["schedules"][: seen[-1].index(12)]}, **how)
            raise launch.JobError("hung")
        return whole(job, ranks, plan, **how)

    monkeypatch.setattr(launch, "run", dies)
    arms = ",".join({drawn(seed).kind for seed in (11, 12, 13)})
    assert run(bench, monkeypatch, "nemesis", "--seeds", 11, 12, 13, "--arms", arms) == 0
    assert seen == [[11, 12, 13], [13]]


def test_ratios_end_when_they_are_known(bench, monkeypatch):
    """The driver says so by a file, and the job does no further repetition."""

    ended = []

    def job(job, ranks, plan, *, limit, on_block, while_running, **how):
        assert plan["may_end"]
        folder = Path(how.pop("folder", "."))
        for block in bench_jobs.blocks_of(job, ranks, plan, True):
            on_block(block)
            if not ended and block["repetition"] >= 8:
                while_running(folder)
                ended.append(block["repetition"])
        return []

    touched = []
    monkeypatch.setattr(launch, "run", job)
    monkeypatch.setattr(Path, "touch", lambda self: touched.append(self.name))
    assert run(bench, monkeypatch, "no_stragglers", "--repetitions", "9", "--arms", "horovod,all") == 0
    assert touched == [launch.ENOUGH]


# -- all cases --------------------------------------------------------------------------------------------------------


def test_all_runs_every_case_and_one_that_fails_does_not_end_it(bench, monkeypatch, tmp_path, capsys):

    def case(name, work):
        return Case(name, "help", "Text.", work, columns("arm"), (Panel(),), 4, "solo", 1, old_name=f"old_{name}")

    def well(args, say):
        return Report(bench.CASES["well"], 4, [row("solo", {}, 3.0, "s")])

    def raises(error):
        def work(args, say):
            raise error

        return work

    found = {"well": well, "elsewhere": raises(NotHereError("it needs a GPU")), "broken": raises(KeyError("a bug"))}
    monkeypatch.setattr(bench, "CASES", {name: case(name, work) for name, work in found.items()})
    assert run(bench, monkeypatch, "all", "--out", tmp_path) == 1
    out, err = capsys.readouterr()
    assert "SKIPPED elsewhere: it needs a GPU" in out
    assert "FAILED  broken" in out
    assert "KeyError" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old_well.json", "old_well.png"]
    assert json.loads((tmp_path / "old_well.json").read_text())["rows"][0]["value"] == 3.0
    bench.CASES.pop("broken")
    assert run(bench, monkeypatch, "all", "--out", tmp_path) == 0


def test_without_a_gpu_the_case_says_so(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(NotHereError, match="needs a GPU, and none is visible"):
        overhead.visible_devices()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotHereError, match="no nvidia-smi"):
        overhead.visible_devices()


def test_results_are_kept_and_a_run_continues_with_what_is_left(monkeypatch, tmp_path):

    args = types.SimpleNamespace(ranks=2, resume=tmp_path / "kept", limit=None)
    blocks = [launch.block_of(arm, seed, {"name": "small"}, steps=1) for seed in (0, 1) for arm in ("all", "solo")]
    asked = []

    def job(job, ranks, plan, *, on_block, dies=(), **how):
        for block in plan["blocks"]:
            asked.append((block["arm"], block["repetition"]))
            if asked[-1] == ("all", 1) and len(asked) == 3:
                raise launch.JobError("killed")
            on_block(block | {"by_rank": []})

    monkeypatch.setattr(launch, "run", job)
    how = {"say": lambda _: None, "tell": lambda _: "", "seconds": 1.0}
    with pytest.raises(launch.JobError):
        launch.measure(args, "timed", blocks, **how)
    with args.resume.open("a") as file:
        file.write('["cut off')
    found = launch.measure(args, "timed", blocks, **how)
    assert asked == [("all", 0), ("solo", 0), ("all", 1), ("all", 1), ("solo", 1)]
    assert [(block["arm"], block["repetition"]) for block in found] == [
        ("all", 0),
        ("solo", 0),
        ("all", 1),
        ("solo", 1),
    ]
    launch.measure(args, "timed", [launch.block_of("all", 0, {"name": "small"}, steps=2)], **how)
    assert len(asked) == 6, "another block"


@pytest.mark.parametrize("script", ["bench.py", "plot.py"])
def test_the_command_runs_from_any_folder(script, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "scripts" / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: scripts/{script}" in done.stdout
