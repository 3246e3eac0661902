"""What every case of the benchmarks does, from its command line to its table, JSON and picture; no job is started."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from hvd_async.advisor.advice import advise
from tests.unit import bench_jobs

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "tests" / "fixtures" / "benchmarks"
CASES = list(bench_jobs.OPTIONS)
RUNS = bench_jobs.OPTIONS | bench_jobs.VARIANTS
COMMON = {"arm", "setting", "value", "unit", "low", "high", "speedup", "bound", "accuracy"}


@pytest.fixture
def bench(monkeypatch):
    """``scripts/bench.py`` as it is run, with jobs that are made up; ``asked``: (job, ranks, plan, limit) of each."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    module = importlib.import_module("bench")
    from benchmarks.cases import skew
    from benchmarks.support import arms, launch, plot

    def run(
        job, ranks, plan, *, limit, on_block=None, while_running=None, env=None, mbit=None, virtual=False, elastic=False
    ):
        module.asked.append((job, ranks, plan, limit))
        found = bench_jobs.blocks_of(job, ranks, plan, module.well)
        for block in found if on_block is not None else ():
            on_block(block)
        return found

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(arms, "PACKAGES", {})  # rivals are there
    monkeypatch.setattr(skew, "even_seed", lambda ranks, rounds, first, start: start)  # looks for long
    monkeypatch.setattr(plot, "DPI", 20)
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)  # takes longer than to draw
    module.asked, module.well = [], True
    return module


def run(bench, monkeypatch, *line):
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, line)])
    return bench.main()


def numbers(value):
    """All of them, however deep they are."""
    if isinstance(value, dict | list):
        return [one for each in (value.values() if isinstance(value, dict) else value) for one in numbers(each)]
    return [value] if isinstance(value, int | float) else []


def told(row):
    """A row of the JSON in a line: its setting, and of all other figures how many numbers, and their mean."""
    more = {key: numbers(value) for key, value in sorted(row.items()) if key not in COMMON}
    figures = [f"{key} {len(found)} x {statistics.fmean(found):.5g}" for key, found in more.items() if found]
    return f"{row['arm']} {row['unit']}: {json.dumps(row['setting'])} {', '.join(figures)}\n"


@pytest.mark.parametrize(("name", "well"), [*((name, True) for name in RUNS), *((name, False) for name in CASES)])
def test_a_run_is_told_judged_written_and_drawn(bench, monkeypatch, tmp_path, capsys, name, well):
    """Table, remarks, goals and the JSON's rows are those of the fixture, to the letter."""
    bench.well, case = well, name.split()[0]
    assert run(bench, monkeypatch, case, *RUNS[name].split(), "--json", tmp_path / "found.json") == 0
    out, err = capsys.readouterr()
    content = json.loads((tmp_path / "found.json").read_text())
    found = f"{out}\n{''.join(map(told, content['rows'])) if well else ''}"
    file = TABLES / f"{name.replace(' ', '_')}.{'well' if well else 'ill'}.txt"
    assert found == file.read_text(), f"{file.name} is to be:\n{found}"
    assert all(each.keys() >= COMMON for each in content["rows"])
    assert well <= all(goal["met"] for goal in content["goals"])
    blocks = [(ranks, json.dumps(block)) for _, ranks, plan, _ in bench.asked for block in plan.get("blocks", ())]
    assert len(set(blocks)) == len(blocks), "the same block twice: the second's result would be that of the first"
    assert f"[{len(blocks)}/{len(blocks)}]" in err or not blocks
    bench.CASES[case].draw(figure := Figure(layout="constrained"), content["rows"])
    assert all(axes.has_data() for axes in figure.axes), "an empty panel"


@pytest.mark.parametrize("case", CASES)
def test_a_quick_run_is_smaller_is_drawn_and_judges_only_what_is_exact(bench, monkeypatch, tmp_path, case):
    from benchmarks.cases import advice

    few = {"resamples": 2, "steps": 40}  # (what is predicted is in the fixtures, and is not looked at here)
    monkeypatch.setattr(advice, "advise", lambda trace, modes, resamples: advise(trace, modes=modes, **few))
    assert run(bench, monkeypatch, case) == 0
    usual, bench.asked = bench.asked, []
    files = [f"--json={tmp_path / 'found.json'}", f"--plot={tmp_path / 'drawn.png'}"]
    assert run(bench, monkeypatch, case, "--quick", *files) == 0
    assert sum(len(json.dumps(plan)) for _, _, plan, _ in bench.asked) < sum(len(json.dumps(p)) for _, _, p, _ in usual)
    assert sum(limit for *_, limit in bench.asked) <= sum(limit for *_, limit in usual)
    content = json.loads((tmp_path / "found.json").read_text())
    assert "a quick run" in content["notes"][-1]
    assert all(goal["judged"] == goal["exact"] for goal in content["goals"])
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_every_case_helps_and_has_its_old_name(bench, capsys):
    assert [name for name in bench.CASES if name != "scale"] == CASES  # (that one starts no job)
    parser = bench.parser()
    for name in [*CASES, *bench.OLD_NAMES.values(), "all"]:
        with pytest.raises(SystemExit) as left:
            parser.parse_args([name, "--help"])
        assert left.value.code == 0
        assert "--quick" in capsys.readouterr().out
    for current, old in bench.OLD_NAMES.items():
        assert bench.current_name(old) == current
        assert vars(parser.parse_args([old])) == vars(parser.parse_args([current])) | {"case": old}


REFUSED = {
    "convergence --groups 3": "--groups 3: 4 ranks cannot be parted into so many",
    "race --groups 3": "8 and 4 ranks cannot be parted into so many",
    "race --arms horovod --leadership x.png": "nobody leads",
    "race --arms broadcast": "no arm 'broadcast'",
    "time_to_accuracy --arms solo,sgp": "needs the arm 'horovod'",
    "time_to_accuracy --targets 0.9 0.8": "the lower one first",
    "time_to_accuracy --grid 0 1": "take numbers above 0",
    "time_to_accuracy --kinds rain": "invalid choice: 'rain'",
    "exchange_cost --arms alltoall,solo": "no arm 'solo' in this case",
    "exchange_cost --ranks 3": "3 ranks cannot be parted into pairs",
    "sequence_lengths --arms majority,solo": "needs the arm 'horovod'",
    "sequence_lengths --arms horovod,ddp --framework tensorflow": "'ddp' is not there in this case",
    "sequence_lengths --arms horovod,sgp": "'sgp' is not there in this case",
    "sequence_lengths --batch-size 0": "there are 2048 clips",
    "late_gradients --ranks 2": "one process trains in place of all ranks",
    "late_gradients --arms none": "needs the arm 'synchronous'",
    "late_gradients --tasks clips16": "invalid choice: 'clips16'",
    "sleeping_rank --sleeper 8": "--sleeper 8: ranks are 0 to 7",
    "sleeping_rank --arms solo": "neither gossips nor follows",
    "split_classes --arms horovod,lsgd-far": "no arm 'lsgd-far'",
    "split_classes --arms lsgd-close": "no arm was named",  # (what to compare it with?)
    "network --mbit 0": "take numbers above 0",
    "network --per-host 3": "8 ranks cannot be parted so",
    "no_stragglers --recorded --framework tensorflow": "it is measured in torch",
    "nemesis --ranks 4": "schedules begin with 3 ranks",
    "nemesis --arms horovod": "no arm 'horovod' in this case",
    "nemesis --arms solo --seeds 3": "none of these schedules is of these arms",
    "deaths --arms horovod": "no arm 'horovod' in this case",
    "elastic --arms auto": "no arm 'auto' in this case",
    "elastic --framework tensorflow": "does not work on Keras 3",
    "advice --arms all,horovod": "there is no mode 'horovod'",
    "host --arms all,auto": "no arm 'auto' in this case",
    "gpu --ranks 2": "the arm 'plain' is of one rank",
    "pull_cost --parts wire,air": "no arm 'air' in this case",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_is_refused_before_any_job(bench, monkeypatch, capsys, line):
    with pytest.raises(SystemExit) as left:
        run(bench, monkeypatch, *line.split())
    assert left.value.code == 2
    assert REFUSED[line] in capsys.readouterr().err
    assert not bench.asked
