"""The doctor's programs with a time limit, its self-test's verdicts, what it shows, and its command line."""

from __future__ import annotations

import io
import json
import sys

import pytest

from hvd_async.cli import doctor as command
from hvd_async.cli.main import main
from hvd_async.doctor import checkup, findings, network_job, render, trial
from hvd_async.doctor.checkup import Plan, check_machine
from hvd_async.doctor.findings import Verdict, as_json, note, ok, problem, worst
from hvd_async.doctor.network import Link, Measurement
from hvd_async.doctor.processes import MARK, RESULT, Outcome, last_error, run_limited, tell
from hvd_async.doctor.software import Build
from hvd_async.errors import EngineError

ALL = [
    ok("cores", "8", cores=8),
    note("memory", "1.0 GiB", "Use less."),
    problem("horovod", "not installed", "Build it."),
]
LEARNED = {"loss_before": 1.0, "loss_after": 0.1, "distance": 0.0, "rounds": 20}


# -- programs with a time limit -------------------------------------------------------------------------------


def test_results_and_the_exit_status_of_a_program():
    code = "from hvd_async.doctor.processes import tell\nprint('noise')\ntell({'a': 1})\nraise SystemExit(3)"
    outcome = run_limited([sys.executable, "-c", code], 60)
    assert outcome.returncode == 3
    assert outcome.results() == [{"a": 1}]


def test_results_behind_a_launchers_prefix(capsys):
    tell({"rounds": 3})
    assert Outcome(0, "[0]<stdout>:" + capsys.readouterr().out, 1.0).results() == [{"rounds": 3}]


def test_a_result_is_read_where_mpirun_goes_on_in_the_line(capsys):
    tell({"rounds": 3})
    line = capsys.readouterr().out.rstrip("\n")
    assert Outcome(0, f"[1,0]<stdout>:{line}[1,0]<stdout>:\n", 1.0).results() == [{"rounds": 3}]


def test_a_program_whose_time_is_up_is_ended_with_all_that_it_has_started():
    children = (
        "import subprocess, sys, os\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'],"
        " start_new_session=True)\nprint(p.pid, flush=True)\np.wait()"
    )
    outcome = run_limited([sys.executable, "-c", children], 2)
    assert outcome.returncode is None
    import psutil

    assert not psutil.pid_exists(int(outcome.output.split()[0]))


def test_a_program_that_is_not_there():
    with pytest.raises(EngineError, match="cannot be started"):
        run_limited(["/no/such/program"], 5)


def test_the_mark_is_in_the_environment_that_is_given():
    outcome = run_limited([sys.executable, "-c", f"import os; print(len(os.environ[{MARK!r}]))"], 60, {"A": "b"})
    assert outcome.output.strip() == "32"


def test_the_last_error_of_an_output():
    assert last_error("ImportError: a\n[1]<stderr>:ValueError: b: c\nThis is no Error: d\n") == "ValueError: b: c"
    assert last_error("all is well: no error\n") == ""


# -- the self-test's verdict -----------------------------------------------------------------------------------


def ended(code: int | None = 0, output: str = "", **changes: float) -> Outcome:
    told = RESULT + json.dumps({**LEARNED, **changes}) if changes or not output else ""
    return Outcome(code, f"{told}\n{output}", 4.0)


def test_a_training_that_went_well():
    found = trial.judge_trial("torch", ended(), 60)
    assert found.verdict is Verdict.OK
    assert "20 rounds" in found.fact


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (ended(1, "[1]<stderr>:RuntimeError: no"), "exit status 1: RuntimeError: no"),
        (ended(None, "waiting"), "not done within 60 s"),
        (ended(0, "nothing"), "no result"),
        (ended(distance=0.5), "replicas differ by 0.5"),
        (ended(loss_after=2.0), "the loss went from 1 to 2"),
        (ended(loss_after=float("nan")), "the loss went from 1 to nan"),
    ],
)
def test_a_training_that_did_not(outcome, says):
    found = trial.judge_trial("torch", outcome, 60)
    assert found.verdict is Verdict.PROBLEM
    assert says in found.fact
    assert found.advice


def test_a_jobs_environment_is_not_the_ranks_that_started_it():
    made = trial.environment({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_GLOO_IFACE": "eth0", "A": "b"})
    assert "HOROVOD_RANK" not in made
    assert "HOROVOD_SIZE" not in made
    assert (made["HOROVOD_GLOO_IFACE"], made["A"], made["OMP_NUM_THREADS"]) == ("eth0", "b", "1")


# -- a whole check-up, with faults ------------------------------------------------------------------------------


@pytest.fixture
def healthy(monkeypatch):
    """A machine with torch and a Horovod for it, whose programs are not run; returns the outcomes to change."""
    steps = [
        {"step": "framework", "version": "2.13.0", "gpus": 0, "cuda": ""},
        {"step": "horovod", "gloo": True, "mpi": False, "nccl": False},
    ]
    outcomes = {
        "ask": Outcome(0, "\n".join(RESULT + json.dumps(step) for step in steps), 1.0),
        "trial": ended(),
        "build": Build("0.28.1", {"torch": "2.13.0"}, True),
    }
    monkeypatch.setattr(checkup, "installed", lambda name: "2.13.0" if name == "torch" else "")
    monkeypatch.setattr(checkup, "read_build", lambda: outcomes["build"])
    monkeypatch.setattr(checkup, "ask_all", lambda names, limit: dict.fromkeys(names, outcomes["ask"]))
    monkeypatch.setattr(checkup, "run_trial", lambda framework, transport, limit: outcomes["trial"])
    monkeypatch.setattr(checkup.shutil, "which", lambda name: f"/bin/{name}")
    for name in ("HVD_ASYNC_TRANSPORT", "HOROVOD_RANK", "TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(checkup, "read_machine", lambda: GOOD)
    return outcomes


GOOD = checkup.read_machine()


def problems(found: list[findings.Finding]) -> list[str]:
    return [one.name for one in found if one.verdict is Verdict.PROBLEM]


def test_a_healthy_machine_has_no_problem(healthy):
    found = check_machine(Plan())
    assert problems(found) == []
    assert "self-test torch" in [one.name for one in found]


def test_without_the_self_test(healthy):
    assert "self-test torch" not in [one.name for one in check_machine(Plan(self_test=False))]


def without_horovod(outcomes) -> None:
    outcomes["build"] = Build()
    outcomes["ask"] = Outcome(1, outcomes["ask"].output.splitlines()[0], 1.0)


def transport_tested(found: list[findings.Finding]) -> object:
    """The transport of torch's self-test, or the reason why there was none."""
    (one,) = (one for one in found if one.name == "self-test torch")
    return one.values.get("transport", one.fact)


def test_torch_without_horovod_trains_on_torch_distributed(healthy):
    without_horovod(healthy)
    found = check_machine(Plan())
    assert problems(found) == []
    assert "torch trains without it" in next(one.advice for one in found if one.name == "horovod")
    assert transport_tested(found) == "torch"


def test_horovod_is_demanded_and_is_not_there(healthy, monkeypatch):
    without_horovod(healthy)
    monkeypatch.setenv("HVD_ASYNC_TRANSPORT", "horovod")
    found = check_machine(Plan())
    assert problems(found) == ["data plane"]
    assert "HVD_ASYNC_TRANSPORT=torch" in next(one.advice for one in found if one.name == "data plane")
    assert transport_tested(found) == "left out"


def test_the_self_test_is_of_the_data_plane_that_is_taken(healthy, monkeypatch):
    assert transport_tested(check_machine(Plan())) == "gloo"
    monkeypatch.setenv("HVD_ASYNC_TRANSPORT", "torch")
    assert transport_tested(check_machine(Plan())) == "torch"


def test_a_horovod_with_mpi_and_without_gloo(healthy, monkeypatch):
    horovods = json.dumps({"step": "horovod", "gloo": False, "mpi": True, "nccl": False})
    healthy["ask"] = Outcome(0, healthy["ask"].output.splitlines()[0] + "\n" + RESULT + horovods, 1.0)
    found = check_machine(Plan())
    assert problems(found) == []
    assert "horovodrun --mpi" in next(one.advice for one in found if one.name == "horovod.torch")
    assert transport_tested(found) == "mpi"
    monkeypatch.setattr(checkup.shutil, "which", lambda name: None)
    assert problems(check_machine(Plan())) == ["mpirun"]


@pytest.mark.parametrize(("transport", "command"), [("mpi", "horovodrun -np 2 --mpi"), ("torch", "torch.distributed")])
def test_a_training_that_failed_can_be_run_by_hand(transport, command):
    assert command in trial.judge_trial("torch", ended(1), 60, transport).advice


@pytest.mark.parametrize(
    ("variables", "several"),
    [
        ({}, False),
        ({"HOROVOD_SIZE": "1"}, False),
        ({"HOROVOD_SIZE": "2"}, True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"WORLD_SIZE": "2"}, False),
    ],
)
def test_a_rank_of_several_is_known_by_its_launcher(monkeypatch, variables, several):
    for name in (*network_job.SIZES, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert network_job.in_a_job() == several


def test_with_a_training_that_fails(healthy):
    healthy["trial"] = ended(1, "RuntimeError: x")
    assert problems(check_machine(Plan())) == ["self-test torch"]


# -- what is shown --------------------------------------------------------------------------------------------


def test_the_worst_verdict():
    assert worst([]) is Verdict.OK
    assert worst(ALL) is Verdict.PROBLEM
    assert worst(ALL[:2]) is Verdict.NOTE


def test_findings_as_json():
    value = json.loads(json.dumps(as_json(ALL, network={"ranks": 2})))
    assert (value["format"], value["verdict"], value["network"]) == (1, "problem", {"ranks": 2})
    assert value["findings"][0] == {"name": "cores", "verdict": "ok", "fact": "8", "advice": "", "values": {"cores": 8}}


def test_findings_are_plain_where_they_are_piped():
    out = io.StringIO()
    render.show_findings(ALL, out)
    lines = out.getvalue().splitlines()
    assert lines[0] == "ok       cores    8"
    assert lines[2].strip() == "Use less."
    assert lines[-1] == "1 problem, 1 note, 1 ok: mend the problems first."
    assert "\033" not in out.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_findings_and_tables_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    render.show_findings([*ALL, ok("odd", "[bold]x[/bold]"), note("long", "x", "x" * 100)], out)
    assert out.getvalue().count("x") >= 102  # (nothing is cut off)
    assert "not installed" in out.getvalue()
    assert "[bold]x[/bold]" in out.getvalue()
    assert "\033" in out.getvalue()
    render.show_table("Links", ["from", "ms"], [["a[0] -> b", "1.0"]], out)
    assert "a[0] -> b" in out.getvalue()


def test_a_plain_table():
    assert render.plain_table(["from", "ms"], [["a -> b", "1.25"]]) == "from      ms\na -> b  1.25"


# -- the command line ------------------------------------------------------------------------------------------


def test_the_exit_status_and_both_outputs(healthy, tmp_path, capsys):
    assert main(["doctor", "--json", str(tmp_path / "out.json"), "--local-ranks", "1"]) == 0
    assert "self-test torch" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["verdict"] in ("ok", "note")
    healthy["trial"] = ended(None, "waiting")
    assert main(["doctor", "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "problem"


def test_a_rank_that_prints_nothing_does_not_end_the_job(monkeypatch, capsys):
    """A launcher ends all ranks when one has failed: also rank 0, which has to print the problem."""
    links = (Link("a", "b", None, 1e6, 2**20, "no route"),)
    measured = Measurement({"a": 1, "b": 1}, 2, "torch", "Gloo", 0.001, links, (), {"a": "x", "b": "x"})
    monkeypatch.setattr(command, "in_a_job", lambda: True)
    monkeypatch.setattr(command, "measure_here", lambda: (1, measured))
    assert main(["doctor"]) == 0
    assert not capsys.readouterr().out
    monkeypatch.setattr(command, "measure_here", lambda: (0, measured))
    assert main(["doctor"]) == 1
    assert "no route" in capsys.readouterr().out


def test_the_plan_is_the_options(healthy, monkeypatch):
    made = []
    monkeypatch.setattr(command, "check_machine", lambda plan: made.append(plan) or [])
    main(["doctor", "--no-self-test", "--local-ranks", "4", "--ranks", "9", "--limit", "5"])
    assert made == [Plan(4, 9, False, 5.0)]


@pytest.mark.parametrize(
    "options",
    [["--local-ranks", "0"], ["--limit", "-1"], ["--hosts", "a"], ["--hosts", "a:x"], ["--network", "file"]],
)
def test_options_that_cannot_be(options):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *options])
    assert ended.value.code == 2


def test_a_measurement_of_hosts_without_horovod(monkeypatch, capsys):
    monkeypatch.setattr("hvd_async.doctor.network_job.read_build", Build)
    with pytest.raises(SystemExit):
        main(["doctor", "--hosts", "a:1,b:1"])
    error = capsys.readouterr().err
    assert "install_horovod.sh" in error
    assert "torchrun" in error
