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
from tests.unit.bench_jobs import OPTIONS, VARIANTS, blocks_of

ROOT = Path(__file__).resolve().parents[2]
FIXED = json.loads((ROOT / "tests" / "fixtures" / "benchmarks" / "rows.json").read_text())
"""By case: what its JSON was before the cases were put on one timed job: keys of rows and settings, units, the name."""
COMMON = {"arm", "setting", "value", "unit", "low", "high", "speedup", "bound", "accuracy"}


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """``scripts/bench.py``, run with a command line and made-up jobs: returns the JSON, if the run writes one.

    ``asked``: (job, ranks, plan, limit) of each job; ``well``: whether jobs find what is hoped for.
    """

    def job(job, ranks, plan, *, limit, on_block=None, **how):
        run.asked.append((job, ranks, plan, limit))
        found = blocks_of(job, ranks, plan, run.well)
        for block in found if on_block is not None else ():
            on_block(block)
        return found

    def run(case, line="", *, code=0):
        written = [] if case == "all" else ["--json", str(tmp_path / "found.json")]
        monkeypatch.setattr(sys, "argv", ["bench.py", case, *line.split(), *written])
        run.asked.clear()
        assert module.main() == code
        return json.loads((tmp_path / "found.json").read_text()) if written else None

    few = {"resamples": 1, "steps": 10}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(launch, "run", job)
    monkeypatch.setattr(advice, "advise", lambda trace, modes, resamples, everything: advise(trace, modes=modes, **few))
    monkeypatch.setattr(arms, "PACKAGES", {})  # rivals are there
    monkeypatch.setattr(plot, "DPI", 20)
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)  # takes longer than to draw
    run.asked, run.well = [], True
    return run


def check_drawing(case, rows):
    """Draw rows: no panel is empty."""
    plot.draw(figure := Figure(layout="constrained"), module.CASES[case], rows)
    assert figure.axes
    assert all(axes.has_data() for axes in figure.axes), "an empty panel"


@pytest.mark.parametrize("name", RUNS := OPTIONS | VARIANTS)
def test_a_run_is_judged_written_and_drawn_with_the_keys_that_rows_have_always_had(bench, capsys, name):
    case = name.split()[0]
    content, fixed = bench(case, RUNS[name]), FIXED[case]
    out, err = capsys.readouterr()
    assert content.keys() >= {"case", "ranks", "transport", "machine", "rows", "goals", "notes"}
    assert content["case"] == fixed["case"]
    assert all(row.keys() >= COMMON for row in content["rows"])
    assert {row["unit"] for row in content["rows"]} <= {*fixed["units"]}
    if name == case:
        assert {*fixed["keys"]} <= {key for row in content["rows"] for key in row}
        assert {*fixed["setting"]} <= {key for row in content["rows"] for key in row["setting"]}
        assert content["goals"] or name == "advice"
    assert len(out.splitlines()) > len(content["rows"])
    blocks = [(ranks, json.dumps(block)) for _, ranks, plan, _ in bench.asked for block in plan.get("blocks", ())]
    assert len(set(blocks)) == len(blocks), "the same block twice: the second's result would be that of the first"
    assert f"[{len(blocks)}/{len(blocks)}]" in err or not blocks
    check_drawing(case, content["rows"])


@pytest.mark.parametrize("case", OPTIONS)
def test_a_bad_run_misses_goals_and_a_quick_one_is_smaller_and_judges_only_what_is_exact(bench, case):
    """(``advice`` predicts what was recorded, which here is what is measured.)"""

    bench(case)
    usual, quick = bench.asked.copy(), bench(case, "--quick")
    assert len(json.dumps([plan for _, _, plan, _ in bench.asked])) < len(json.dumps([plan for _, _, plan, _ in usual]))
    assert sum(limit for *_, limit in bench.asked) <= sum(limit for *_, limit in usual)
    assert "a quick run" in quick["notes"][-1]
    assert all(goal["judged"] == goal["exact"] for goal in quick["goals"])
    check_drawing(case, quick["rows"])
    bench.well = False
    bad = bench(case, OPTIONS[case])
    assert case == "advice" or not all(goal["met"] for goal in bad["goals"])


def test_lists_that_are_named_stay_in_a_quick_run_which_is_drawn(bench, tmp_path):
    bench("straggler", f"--quick --arms horovod,all --delay 0.7 --plot {tmp_path / 'drawn.png'}")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    blocks = bench.asked[0][2]["blocks"]
    assert {(block["arm"], block["delay"]) for block in blocks} == {("horovod", 0.7), ("all", 0.7)}


@pytest.mark.parametrize("name", ["straggler", "sequence_lengths", "hetero", "network", "advice", "time_to_accuracy"])
def test_arms_alternate_within_a_job(bench, name):
    """Each repetition has all arms, and begins with another one."""
    bench(name, f"{OPTIONS[name]} --repetitions 3")
    for _, _, plan, _ in bench.asked:
        blocks = [block for block in plan["blocks"] if not block.get("tuning") and "trace" not in block]
        same = [str((block.get("delay"), block.get("even"))) for block in blocks]
        for setting in dict.fromkeys(same):
            order = [block["arm"] for block, own in zip(blocks, same, strict=True) if own == setting]
            arms = list(dict.fromkeys(order))
            rounds = [order[i : i + len(arms)] for i in range(0, len(order), len(arms))]
            assert all(sorted(each) == sorted(arms) for each in rounds)
            assert len({each[0] for each in rounds}) == min(3, len(arms), len(rounds))


def test_every_case_is_tried_and_has_its_old_name():
    assert [name for name in module.CASES if name != "scale"] == list(OPTIONS)
    parser = module.parser()
    old = {"no_stragglers": "balanced", "split_classes": "hard", "sequence_lengths": "lengths"}
    assert {name: case.old_name for name, case in module.CASES.items() if case.old_name} == old
    for current, former in old.items():
        assert module.current_name(former) == current
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
    "gpu --arms plain,all:lead=7": "variants are confirm, check",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_is_refused_before_any_job(bench, capsys, line):
    case, _, options = line.partition(" ")
    with pytest.raises(SystemExit) as left:
        bench(case, options)
    assert left.value.code == 2
    assert REFUSED[line] in capsys.readouterr().err
    assert not bench.asked


# -- options that a case must keep ------------------------------------------------------------------------------------


def test_nemesis_goes_through_the_schedules_of_its_seeds_again(bench, monkeypatch):
    """As a job's end by force leaves it: the others follow in another job, and the broken one counts as a violation."""
    whole, seen = launch.run, []

    def dies(job, ranks, plan, **how):
        seen.append([schedule["seed"] for schedule in plan["schedules"]])
        if 12 in seen[-1]:
            whole(job, ranks, plan | {"schedules": plan["schedules"][: seen[-1].index(12)]}, **how)
            raise launch.JobError("hung")
        return whole(job, ranks, plan, **how)

    monkeypatch.setattr(launch, "run", dies)
    kinds = {drawn(seed).kind for seed in (11, 12, 13)}
    bench("nemesis", f"--seeds 11 12 13 --arms {','.join(kinds)}")
    assert seen == [[11, 12, 13], [13]]


def test_ratios_end_when_they_are_known(bench, monkeypatch, tmp_path):
    """The driver says so by a file, and the job does no further repetition."""
    enough = []

    def job(job, ranks, plan, *, on_block, while_running, **how):
        assert plan["may_end"]
        for block in blocks_of(job, ranks, plan, True):
            on_block(block)
            while_running(tmp_path)
            enough.append((tmp_path / launch.ENOUGH).exists())
        return []

    monkeypatch.setattr(launch, "run", job)
    bench("no_stragglers", "--repetitions 9 --arms horovod,all")
    assert True in enough
    assert not enough[0]


def test_gpu_runs_variants_of_arms(bench):
    arms = "plain,all,all:confirm,plain:item,solo:lead=8"
    content = bench("gpu", f"--arms {arms} --no-profile --repetitions 1")
    assert [row["arm"] for row in content["rows"]] == arms.split(",")
    blocks = {block["arm"]: block for _, _, plan, _ in bench.asked for block in plan["blocks"]}
    assert not any(block.get("keep") or block.get("profile") for block in blocks.values())
    assert "environment" not in blocks["all"]
    for arm, own in (
        ("all:confirm", {"base": "all", "environment": {"HVD_ASYNC_CONFIRM": "1"}}),
        ("plain:item", {"base": "plain", "reads_loss": True}),
        ("solo:lead=8", {"own": {"arrival_lead": 0.008}}),
    ):
        assert blocks[arm] | own == blocks[arm]


# -- all cases --------------------------------------------------------------------------------------------------------


def test_all_runs_every_case_and_one_that_fails_does_not_end_it(bench, monkeypatch, tmp_path, capsys):
    outcomes = {"well": None, "elsewhere": NotHereError("it needs a GPU"), "broken": KeyError("a bug")}

    def case(name):
        def work(args, say):
            if outcomes[name] is not None:
                raise outcomes[name]
            return Report(module.CASES[name], 4, [row("solo", {}, 3.0, "s")])

        return Case(name, "help", "Text.", work, columns("arm"), (Panel(),), 4, "solo", 1, old_name=f"old_{name}")

    monkeypatch.setattr(module, "CASES", {name: case(name) for name in outcomes})
    bench("all", f"--out {tmp_path}", code=1)
    out, err = capsys.readouterr()
    assert "SKIPPED elsewhere: it needs a GPU" in out
    assert "FAILED  broken" in out
    assert "KeyError" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old_well.json", "old_well.png"]
    assert json.loads((tmp_path / "old_well.json").read_text())["rows"][0]["value"] == 3.0
    bench("all", f"--out {tmp_path} --only well elsewhere")


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
    asked = []

    def job(job, ranks, plan, *, on_block, **how):
        for block in plan["blocks"]:
            asked.append((block["arm"], block["repetition"]))
            if len(asked) == 3:
                raise launch.JobError("killed")
            on_block(block)

    def measured(arms, repetitions, steps=1):
        blocks = [launch.block_of(arm, number, {}, steps=steps) for number in range(repetitions) for arm in arms]
        found = launch.measure(args, "timed", blocks, lambda _: None, lambda _: "", seconds=1.0)
        return [(block["arm"], block["repetition"]) for block in found]

    monkeypatch.setattr(launch, "run", job)
    with pytest.raises(launch.JobError):
        measured(["all", "solo"], 2)
    with args.resume.open("a") as file:
        file.write('["cut off')
    assert measured(["all", "solo"], 2) == [("all", 0), ("solo", 0), ("all", 1), ("solo", 1)]
    assert asked == [("all", 0), ("solo", 0), ("all", 1), ("all", 1), ("solo", 1)]
    measured(["all"], 1, steps=2)
    assert len(asked) == 6, "another block"


@pytest.mark.parametrize("script", ["bench.py", "plot.py"])
def test_the_command_runs_from_any_folder(script, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "scripts" / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: scripts/{script}" in done.stdout
