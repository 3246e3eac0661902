"""``hvd_async doctor``: what it says of environments with faults, on the command line; and single judgements."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_async.cli.main import main
from hvd_async.doctor import findings, machine, software
from hvd_async.doctor.findings import Finding, Verdict, note, ok, problem
from hvd_async.doctor.machine import GIB
from hvd_async.doctor.programs import RESULT, Outcome, run_limited
from hvd_async.doctor.software import PATCH, Answer, Build
from hvd_async.errors import EngineError

ROOT = Path(__file__).resolve().parents[2]


def verdicts(found: list[Finding]) -> dict[str, str]:
    return {one.name: one.verdict.value for one in found}


# -- an environment of made-up packages, looked at on the command line ----------------------------------------------

TORCH = (
    "class cuda:\n    device_count = staticmethod(lambda: 0)\nclass version:\n    cuda = None\n__version__ = '2.13.0'"
)
TENSORFLOW = (
    "class config:\n    list_physical_devices = staticmethod(lambda kind: [])\n"
    "class sysconfig:\n    get_build_info = staticmethod(dict)\n__version__ = '2.21.0'"
)
HIDDEN = (
    *("OMP_NUM_THREADS", "TF_ENABLE_ONEDNN_OPTS", "HOROVOD_GLOO_IFACE", "HVD_ASYNC_ADDRESS", "HOROVOD_RANK"),
    *("HVD_ASYNC_TRANSPORT", "TORCHELASTIC_RUN_ID", "RANK"),
)
"""Variables of the tests' own environment that would change findings."""
BUILT = "gloo_built = lambda: True\nmpi_built = lambda: False\nnccl_built = lambda: 0"


class Site:
    """A folder of packages that comes before all others: torch, TensorFlow, Keras, and Horovod for both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, version in (("torch", "2.13.0"), ("tensorflow", "2.21.0"), ("keras", "3.9"), ("horovod", "0.28.1")):
            self.install(name, version)
        self.package("torch", TORCH)
        self.package("tensorflow", TENSORFLOW)
        self.package("horovod", "")
        for framework, library in software.LIBRARIES.items():
            self.package(f"horovod/{framework}", BUILT)
            self.library(library).write_bytes(b"\0" + PATCH)
        (folder / "horovod/metadata.json").write_text('{"pytorch": "2.13.0", "tensorflow": "2.21.0"}')

    def install(self, name: str, version: str) -> None:
        path = self.folder / f"{name}.dist-info"
        path.mkdir(parents=True, exist_ok=True)
        (path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def package(self, name: str, source: str) -> None:
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / name / "__init__.py").write_text(source)

    def library(self, name: str) -> Path:
        return self.folder / "horovod" / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"

    def doctor(self, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Call the command, with variables of the environment."""
        kept = {name: value for name, value in os.environ.items() if name not in HIDDEN}
        environment = {**kept, "PYTHONPATH": f"{self.folder}:{ROOT}", "PATH": str(self.folder), **variables}
        command = [sys.executable, "-m", "hvd_async", "doctor", *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    def findings(self, *options: str, **variables: str) -> tuple[int, dict[str, dict[str, Any]]]:
        """The exit status and the findings by name, without the self-test."""
        done = self.doctor("--no-self-test", "--json", "-", *options, **variables)
        assert done.stdout, done.stderr
        value = json.loads(done.stdout)
        assert (value["format"], value["verdict"] == "problem") == (1, done.returncode == 1)
        return done.returncode, {one["name"]: one for one in value["findings"]}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_good_environment(site: Site, tmp_path: Path):
    done = site.doctor("--no-self-test", "--local-ranks", "1", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one["name"]: one for one in json.loads((tmp_path / "out.json").read_text())["findings"]}
    good = ("python", "torch", "tensorflow", "keras", "horovod", "data plane", "horovod.torch", "horovod.tensorflow")
    assert {found[name]["verdict"] for name in good} == {"ok"}
    assert found["horovod"]["fact"] == "0.28.1, built for torch 2.13.0 and tensorflow 2.21.0"
    assert found["horovod.torch"]["values"] == {"gloo": True, "mpi": False, "nccl": False}
    assert found["OMP_NUM_THREADS"]["verdict"] == "ok"
    assert found["horovodrun"]["verdict"] == "note", "PATH is this folder"
    assert "mpirun" not in found, "Horovod was built without MPI"
    assert "ok       horovod.torch       imports; built with Gloo\n" in done.stdout
    assert "\033" not in done.stdout
    assert "0 problems, " in done.stdout.splitlines()[-1]


def test_wrong_builds_and_variables(site: Site):
    site.install("torch", "2.2.2")
    site.install("keras", "2.15.0")
    site.library(software.LIBRARIES["torch"]).write_bytes(b"\0")
    site.package("horovod/torch", "raise ImportError('undefined symbol: x')")
    site.package("horovod/tensorflow", BUILT.replace("True", "False"))
    variables = {
        "OMP_NUM_THREADS": "many",
        "HOROVOD_GLOO_IFACE": "ib0",
        "HVD_ASYNC_ADDRESS": "192.0.2.77",
        "HVD_ASYNC_TRANSPORT": "smoke",
    }
    status, found = site.findings(**variables)
    assert status == 1
    expected = {
        "torch": ("problem", "2.2.2, too old", "pip install 'torch>=2.3'"),
        "keras": ("problem", "2.15.0, too old", "pip install 'keras>=3'"),
        "horovod build": ("problem", "built for torch 2.13.0, and 2.2.2 is installed", "install_horovod.sh"),
        "horovod changes": ("note", "not built by scripts/install_horovod.sh", "install_horovod.sh"),
        "data plane": ("problem", "none for torch", "HVD_ASYNC_TRANSPORT"),
        "horovod.torch": ("problem", "undefined symbol: x", "install_horovod.sh"),
        "horovod.tensorflow": ("problem", "no transport", "install_horovod.sh"),
        "OMP_NUM_THREADS": ("problem", "'many'", "unset it"),
        "HOROVOD_GLOO_IFACE": ("problem", "'ib0'", "Name one of "),
        "HVD_ASYNC_ADDRESS": ("note", "192.0.2.77 is not an address of this machine", "NAT"),
    }
    for name, (verdict, fact, advice) in expected.items():
        assert found[name]["verdict"] == verdict, name
        assert fact in found[name]["fact"]
        assert advice in found[name]["advice"]


def test_imports_that_crash_and_hang(site: Site):
    site.package("horovod/torch", "import os; os.abort()")
    site.package("tensorflow", "import threading; threading.Event().wait()")
    _, found = site.findings("--limit", "5")
    assert found["horovod.torch"]["fact"] == "killed by signal 6"
    assert found["import tensorflow"]["fact"] == "not done within 5 s"
    assert found["import tensorflow"]["verdict"] == found["horovod.torch"]["verdict"] == "problem"
    assert "import torch" not in found


@pytest.mark.parametrize(("gloo", "verdict"), [("False", "problem"), ("True", "note")])
def test_mpi_without_its_launcher(site: Site, gloo: str, verdict: str):
    site.package("horovod/torch", f"gloo_built = lambda: {gloo}\nmpi_built = lambda: True\nnccl_built = lambda: 0")
    _, found = site.findings()
    assert found["mpirun"]["verdict"] == verdict


def test_a_training_whose_ranks_cannot_be_connected_is_left_out(site: Site):
    for framework in software.FRAMEWORKS:
        site.package(f"horovod/{framework}", "raise ImportError('no')")
    done = site.doctor()
    assert done.returncode == 1
    assert done.stdout.count("Its ranks cannot be connected; see above.") == 2


def test_a_measurement_of_hosts_that_fails_or_cannot_begin(site: Site):
    site.package("horovod/runner", "")
    launch = "import sys\ndef run_commandline(): sys.exit('ssh: connect to host h2 port 22: Connection refused')"
    (site.folder / "horovod/runner/launch.py").write_text(launch)
    done = site.doctor("--hosts", "h1:1,h2:2")
    assert done.returncode == 2
    assert "the job on h1:1,h2:2 has failed, exit status 1" in done.stderr
    assert "Connection refused" in done.stderr
    for library in software.LIBRARIES.values():
        site.library(library).unlink()
    done = site.doctor("--hosts", "h1:1,h2:2")
    assert done.returncode == 2
    assert "no Horovod here that was built for torch or tensorflow: bash scripts/install_horovod.sh" in done.stderr
    assert "torchrun" in done.stderr


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--local-ranks", "0"], "must be at least 1, got 0"),
        (["--limit", "-1"], "must be a number of seconds above 0"),
        (["--hosts", "a"], "'a' is not HOST:RANKS"),
        (["--hosts", "a:x"], "'a:x' is not HOST:RANKS"),
        (["--network", "file"], "--network and --horovodrun are for a measurement: name the hosts"),
    ],
)
def test_options_that_are_not_valid(options: list[str], error: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *options])
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


def test_findings_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "60")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal())
    findings.show_findings([ok("cores", "[bold]x[/bold]"), note("memory", "1 GiB", "q " * 60), problem("z", "no", "")])
    shown = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert "\033[1;31mproblem\033[0m  z " in shown
    assert "[bold]x[/bold]" in shown
    assert shown.count("q") == 60
    assert max(map(len, shown.splitlines())) < 90, "advice is wrapped to the terminal, colours aside"
    assert "1 problem, 1 note, 1 ok: fix the problems first." in shown


# -- single judgements ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "verdict"), [((3, 11, 7), "ok"), ((3, 13, 0), "ok"), ((3, 14, 0), "note"), ((3, 9, 1), "problem")]
)
def test_python(version: tuple[int, ...], verdict: str):
    assert software.judge_python(version).verdict.value == verdict


@pytest.mark.parametrize(
    ("installed", "build", "expected"),
    [
        ("", Build(), {"frameworks": "problem", "horovod": "problem"}),
        ("torch", Build(), {"torch": "ok", "horovod": "note"}),
        ("tensorflow", Build(), {"tensorflow": "ok", "keras": "problem", "horovod": "problem"}),
        ("torch", Build("0.28.1"), {"torch": "ok", "horovod": "problem"}),
        ("torch", Build("0.27.0", {"torch": "9.9"}, True), {"torch": "ok", "horovod": "note"}),
        (
            "torch tensorflow keras",
            Build("0.28.1", {"torch": "9.9"}, True),
            {"torch": "ok", "tensorflow": "ok", "keras": "ok", "horovod": "note"},
        ),
    ],
)
def test_what_is_missing(installed: str, build: Build, expected: dict[str, str]):
    versions = {name: "9.9" if name in installed.split() else "" for name in software.OLDEST}
    found = [*software.judge_frameworks(versions), *software.judge_build(build, versions)]
    assert verdicts(found) == expected
    assert all(bool(one.advice) == (one.verdict is not Verdict.OK) for one in found)


@pytest.mark.parametrize(
    ("built", "environment", "fact"),
    [
        (True, {}, "Horovod for torch, as Horovod is installed; under torchrun torch.distributed"),
        (True, {"HOROVOD_RANK": "0"}, "Horovod for torch, as horovodrun has started this process"),
        (True, {"HVD_ASYNC_TRANSPORT": "horovod"}, "Horovod for torch, as HVD_ASYNC_TRANSPORT=horovod"),
        (False, {}, "torch.distributed for torch, as Horovod is not installed for torch"),
        (False, {"HVD_ASYNC_TRANSPORT": "horovod"}, "none for torch"),
    ],
)
def test_the_data_plane_and_its_reason(built: bool, environment: dict[str, str], fact: str):
    found = software.judge_data_plane(Build("0.28.1", {"torch": "2.13.0"}) if built else Build(), environment)
    assert found.fact == fact
    assert (found.verdict is Verdict.OK) != fact.startswith("none")


def answer(gpus: int | None = 0, *transports: str) -> Answer:
    return Answer(gpus, {name: name in transports for name in software.TRANSPORTS}, "")


@pytest.mark.parametrize(
    ("given", "verdict", "words"),
    [
        (answer(0, "gloo"), "ok", "built with Gloo"),
        (answer(0, "mpi"), "note", "horovodrun --mpi"),
        (answer(2, "gloo"), "note", "Tensors on GPUs go by way of the CPU"),
        (answer(2, "gloo", "mpi", "nccl"), "ok", "Gloo, MPI, NCCL"),
        (answer(0), "problem", "no transport"),
    ],
)
def test_transports(given: Answer, verdict: str, words: str):
    (found,) = software.judge_answer("torch", given, Build("0.28.1", {"torch": ""}))
    assert found.verdict.value == verdict
    assert words in found.fact + found.advice
    assert not list(software.judge_answer("torch", given, Build("0.28.1"))), "Horovod was not built for it"


def test_the_self_test_uses_the_data_plane_or_a_transport(monkeypatch: pytest.MonkeyPatch):
    for name in ("HVD_ASYNC_TRANSPORT", "HOROVOD_RANK", "TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    horovod = Build("0.28.1", {"torch": "", "tensorflow": ""})
    assert software.transport_of("torch", answer(0, "gloo", "mpi"), horovod) == "gloo"
    assert software.transport_of("tensorflow", answer(0, "mpi"), horovod) == "mpi"
    assert software.transport_of("torch", Answer(0, None, ""), Build()) == "torch"
    assert software.transport_of("torch", Answer(None, None, ""), Build()) == ""
    monkeypatch.setenv("HVD_ASYNC_TRANSPORT", "torch")
    assert software.transport_of("torch", answer(0, "gloo"), horovod) == "torch"


def trained(code: int | None = 0, output: str = "", **changes: float) -> Outcome:
    learned = {"loss_before": 1.0, "loss_after": 0.1, "distance": 0.0, "rounds": 20, **changes}
    return Outcome(code, output or f"[0]<stdout>:{RESULT}{json.dumps(learned)}[0]<stdout>:", 4.0)


@pytest.mark.parametrize(
    ("outcome", "verdict", "fact"),
    [
        (trained(), "ok", "2 ranks, 20 rounds, replicas bit-identical, 4 s"),
        (trained(1, "[1]<stderr>:RuntimeError: no\nall is Error: not"), "problem", "exit status 1: RuntimeError: no"),
        (trained(None, "waiting"), "problem", "not done within 60 s"),
        (trained(0, "nothing"), "problem", "no result"),
        (trained(distance=0.5), "problem", "replicas differ by 0.5"),
        (trained(loss_after=float("nan")), "problem", "the loss went from 1 to nan"),
    ],
)
def test_trainings(outcome: Outcome, verdict: str, fact: str):
    found = software.judge_training("torch", outcome, 60, "mpi")
    assert found.verdict.value == verdict
    assert fact in found.fact
    assert outcome.results() or "horovodrun -np 2 --mpi" in found.advice


@pytest.mark.parametrize(("count", "driver", "verdict"), [(0, False, "ok"), (2, True, "ok"), (0, True, "note")])
def test_gpus(count: int, driver: bool, verdict: str):
    assert software.judge_gpus({"torch": count, "tensorflow": None}, driver).verdict.value == verdict


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "expected"),
    [(8, 2, "4", "ok ok"), (8, 2, "", "ok note"), (8, 2, "5", "ok note"), (8, 2, "4,2", "ok ok"),
     (1.5, 2, "1", "note ok"), (1.5, 2, "2", "note note"), (8, 1, "", "ok ok")],
)  # fmt: skip
def test_cores_and_threads(cores: float, ranks: int, threads: str, expected: str):
    found = machine.judge_cores(cores, ranks, {"OMP_NUM_THREADS": threads} if threads else {})
    assert " ".join(one.verdict.value for one in found) == expected


@pytest.mark.parametrize(("gib", "verdict"), [(4, "ok"), (3, "note"), (0.9, "problem")])
def test_memory_of_two_ranks(gib: float, verdict: str):
    assert machine.judge_memory(int(gib * GIB), 2).verdict.value == verdict


@pytest.mark.parametrize(
    ("soft", "hard", "verdict"), [(9999, 9999, "ok"), (-1, -1, "ok"), (100, 9999, "note"), (100, 100, "problem")]
)
def test_open_files(soft: int, hard: int, verdict: str):
    assert resource.RLIM_INFINITY == -1
    assert machine.judge_descriptors(soft, hard, 64).verdict.value == verdict


@pytest.mark.parametrize(
    ("flags", "chosen", "verdict"),
    [("avx512f", "", "ok"), ("avx512f", "0", "note"), ("avx2", "", "note"), ("avx2", "1", "ok"), ("", "", "none")],
)
def test_onednn(flags: str, chosen: str, verdict: str):
    found = list(machine.judge_onednn(set(flags.split()), {"TF_ENABLE_ONEDNN_OPTS": chosen}))
    assert [one.verdict.value for one in found] == ([] if verdict == "none" else [verdict])


@pytest.mark.parametrize(
    ("interfaces", "named", "notes"),
    [
        ({"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"]}, "10.0.0.5", set()),
        ({"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"]}, "127.0.1.1", {"host name"}),
        ({"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"]}, "", {"host name"}),
        ({"lo": ["127.0.0.1", "::1"]}, "127.0.0.1", {"interfaces"}),
    ],
)
def test_addresses(interfaces: dict[str, list[str]], named: str, notes: set[str]):
    found = verdicts(list(machine.judge_addresses(interfaces, "node5", named, {})))
    assert {name for name, verdict in found.items() if verdict == "note"} == notes
    assert "problem" not in found.values()


def test_ports():
    assert machine.judge_ports(["127.0.0.1"], 28232).verdict is Verdict.OK  # (a real connection)
    assert machine.judge_ports(["127.0.0.1"], 100).verdict is Verdict.NOTE
    found = machine.judge_ports(["192.0.2.77"], 28232)  # (no address of this machine)
    assert (found.verdict, found.fact) == (Verdict.PROBLEM, "no connection to 192.0.2.77")


def test_a_container_and_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert machine.usable_cores(tmp_path) >= 1
    assert machine.free_memory(tmp_path) > 2**20
    assert machine.free_ports(tmp_path) is None
    cgroup = tmp_path / machine.CGROUP
    cgroup.mkdir(parents=True)
    (tmp_path / "proc/sys/net/ipv4").mkdir(parents=True)
    files = {
        cgroup / "cpu.max": "50000 100000\n",
        cgroup / "memory.max": f"{2**20}\n",
        cgroup / "memory.current": "576\n",
        cgroup / "memory.stat": "anon 76\ninactive_file 500\nactive_file 0\n",
        tmp_path / "proc/cpuinfo": "processor: 0\nflags\t\t: fpu avx2 sse\n",
        tmp_path / "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
    }
    for path, text in files.items():
        path.write_text(text)
    assert machine.usable_cores(tmp_path) == 0.5
    assert machine.free_memory(tmp_path) == 2**20 - 76, "cached files do not count as used"
    assert machine.processor_flags(tmp_path) == {"fpu", "avx2", "sse"}
    assert machine.free_ports(tmp_path) == 28232
    (cgroup / "memory.max").write_text("max\n")
    assert machine.free_memory(tmp_path) > 2**20


# -- programs with a time limit ---------------------------------------------------------------------------------------


def test_results_and_the_exit_status_of_a_program():
    code = (
        "import hvd_async.doctor.programs as p, os; print('noise'); p.report({'a': len(os.environ[p.MARK])}); exit(3)"
    )
    outcome = run_limited([sys.executable, "-c", code], 60)
    assert (outcome.returncode, outcome.results()) == (3, [{"a": 32}])


def test_a_program_whose_time_is_up_is_ended_with_all_that_it_has_started():
    children = (
        "import subprocess, sys, os\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'],"
        " start_new_session=True)\nprint(p.pid, flush=True)\np.wait()"
    )
    outcome = run_limited([sys.executable, "-c", children], 2)
    assert outcome.returncode is None
    assert not psutil.pid_exists(int(outcome.output.split()[0]))


def test_a_program_that_is_not_there():
    with pytest.raises(EngineError, match="cannot be started"):
        run_limited(["/no/such/program"], 5)
