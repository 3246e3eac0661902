"""``bench.py all``: every case in turn, whatever becomes of one; files and goals of all."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench.py"


@pytest.fixture
def bench(monkeypatch):
    """The command with two cases that start no job: one is well, one fails."""
    monkeypatch.syspath_prepend(str(BENCH.parent))
    spec = importlib.util.spec_from_file_location("bench", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from benchmarks.support.launch import JobError, NotHereError
    from benchmarks.support.report import Column, Goal, Report, row

    def well(args, say):
        rows = [row("sgp", {"ranks": args.ranks}, 2.0 if args.quick else 3.0, "s")]
        goals = [Goal("speed", 2.0, ">= 1", met=True), Goal("size", 2.0, "<= 1", met=False)]
        goals.append(Goal("same", "no", "always", met=False, exact=True))
        return Report("well", 4, rows, (Column("arm", "arm"), Column("s", "value", ".1f")), goals, draw=draw)

    def draw(figure, rows):
        figure.subplots(1, 1).bar([0], [rows[0]["value"]])

    def ill(args, say):
        raise JobError("much output\nthe job ill ended with exit code 3")

    def elsewhere(args, say):
        raise NotHereError("it needs a GPU")

    def broken(args, say):
        raise KeyError("a bug in a case")

    def case(run):
        return types.SimpleNamespace(run=run, HELP="help", __doc__="Doc.", add_arguments=lambda one: None)

    cases = {"ill": ill, "well": well, "elsewhere": elsewhere, "broken": broken}
    monkeypatch.setattr(module, "CASES", {name: case(run) for name, run in cases.items()})
    return module


def run(bench, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
    return bench.main()


def test_a_case_that_fails_does_not_end_the_run(bench, monkeypatch, tmp_path, capsys):
    assert run(bench, monkeypatch, "all", "--quick", "--out", str(tmp_path / "new"), "--only", "ill", "well") == 1
    out, err = capsys.readouterr()
    assert "case 2 of 2: well" in err
    assert "failed: the job ill ended with exit code 3" in out
    assert out.strip().endswith(
        "well: met     speed: 2 (>= 1)\nwell: open    size: 2 (<= 1)\nwell: MISSED  same: no (always)\nFAILED  ill"
    )
    found = json.loads((tmp_path / "new" / "well.json").read_text())
    assert found["rows"][0]["value"] == 2.0
    assert len(found["notes"]) == 1
    assert "a quick run" in found["notes"][0]
    assert (tmp_path / "new" / "well.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "new" / "ill.json").exists()


def test_one_case(bench, monkeypatch, capsys):
    assert run(bench, monkeypatch, "well") == 0
    out = capsys.readouterr().out
    assert "sgp  3.0" in out
    assert "MISSED  size: 2 (<= 1)" in out  # (it is not a quick run)
    assert run(bench, monkeypatch, "ill") == 1
    assert "much output" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["split_classes", "hard"])
def test_a_case_has_its_old_name_too_and_files_keep_it(bench, monkeypatch, tmp_path, capsys, name):
    monkeypatch.setattr(bench, "CASES", {"split_classes": bench.CASES["well"]})
    assert run(bench, monkeypatch, name, "--json", str(tmp_path / "one.json")) == 0
    assert (tmp_path / "one.json").exists()
    assert run(bench, monkeypatch, "all", "--only", name, "--out", str(tmp_path)) == 0
    assert "split_classes: met     speed" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hard.json", "hard.png", "one.json"]


def test_a_case_that_is_not_there_is_refused(bench, monkeypatch, capsys):
    with pytest.raises(SystemExit) as left:
        run(bench, monkeypatch, "all", "--only", "nothing")
    assert left.value.code == 2
    assert "nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "code", "end", "told"),
    [
        ("elsewhere", 0, "SKIPPED elsewhere: it needs a GPU", ""),
        ("broken", 1, "FAILED  broken", "KeyError: 'a bug in a case'"),
    ],
)
def test_a_case_that_cannot_be_here_or_has_a_bug_does_not_end_the_run(
    bench, monkeypatch, tmp_path, capsys, name, code, end, told
):
    assert run(bench, monkeypatch, "all", "--out", str(tmp_path), "--only", name, "well") == code
    out, err = capsys.readouterr()
    assert out.strip().endswith(end)
    assert told in err
    assert json.loads((tmp_path / "well.json").read_text())["rows"][0]["value"] == 3.0


def test_a_quick_run_has_fewer_arms_unless_they_are_named(bench, monkeypatch, capsys):
    from benchmarks.support.report import Column, Report, row

    seen = []

    def note(args, say):
        seen.append(args.arms)
        return Report("noted", 4, [row("solo", {}, 1.0, "s")], (Column("arm", "arm"),))

    case = types.SimpleNamespace(run=note, HELP="help", __doc__="Doc.", QUICK="horovod")
    case.add_arguments = lambda one: one.set_defaults(arms="horovod,solo")
    monkeypatch.setattr(bench, "CASES", {"noted": case})
    for line in ([], ["--quick"], ["--quick", "--arms", "solo"]):
        assert run(bench, monkeypatch, "noted", *line) in (0, None)
    assert seen == ["horovod,solo", "horovod", "solo"]
