"""``hvd_async doctor``: what it says of environments with faults, on the command line; judgements; the network."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from hvd_async.cli.main import main
from hvd_async.cli.output import show_findings
from hvd_async.doctor import machine, network, programs, software
from hvd_async.doctor.findings import Finding, Verdict, note, ok, problem
from hvd_async.doctor.machine import GIB
from hvd_async.doctor.network import Allreduce, Link, Measurement, judge_network, latency, listening
from hvd_async.doctor.programs import RESULT, Outcome, run_limited
from hvd_async.doctor.software import PATCH, Answer, Build
from hvd_async.errors import EngineError
from hvd_async.runtime.launch import Seat
from tests.unit.test_runner_loop import Job

ROOT = Path(__file__).resolve().parents[2]


def verdicts(found: Iterable[Finding]) -> dict[str, str]:
    return {one.name: one.verdict.value for one in found}


# -- an environment of made-up packages, looked at on the command line ----------------------------------------------

BUILT = "gloo_built = lambda: True\nmpi_built = lambda: False\nnccl_built = lambda: 0"
LIBRARY = {name: f"horovod/{path}{sysconfig.get_config_var('EXT_SUFFIX')}" for name, path in software.LIBRARIES.items()}


def version(name: str, number: str) -> dict[str, str]:
    """The file that says which version of a package is installed."""
    return {f"{name}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"}


GOOD = {
    "torch/__init__.py": "class cuda:\n    device_count = staticmethod(lambda: 0)\n"
    "class version:\n    cuda = None\n__version__ = '2.13.0'",
    "tensorflow/__init__.py": "class config:\n    list_physical_devices = staticmethod(lambda kind: [])\n"
    "class sysconfig:\n    get_build_info = staticmethod(dict)\n__version__ = '2.21.0'",
    "horovod/__init__.py": "",
    "horovod/metadata.json": '{"pytorch": "2.13.0", "tensorflow": "2.21.0"}',
    **{f"horovod/{framework}/__init__.py": BUILT for framework in LIBRARY},
    **{path: f"\0{PATCH.decode()}" for path in LIBRARY.values()},
    **version("torch", "2.13.0"), **version("tensorflow", "2.21.0"),
    **version("keras", "3.9"), **version("horovod", "0.28.1"),
}  # fmt: skip
"""Files of packages: torch, TensorFlow, Keras, and Horovod for both."""


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def doctor(
    folder: Path, *options: str, changed: Mapping[str, str] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Call the command where these packages come before all others, with variables of the environment."""
    write(folder, {**GOOD, **(changed or {})})
    environment = {"PYTHONPATH": f"{folder}:{ROOT}", "PATH": str(folder), **variables}
    command = [sys.executable, "-m", "hvd_async", "doctor", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def findings_in(text: str) -> dict[str, dict[str, Any]]:
    value = json.loads(text)
    assert value["format"] == 1
    assert (value["verdict"] == "problem") == any(one["verdict"] == "problem" for one in value["findings"])
    return {one["name"]: one for one in value["findings"]}


def test_a_good_environment(tmp_path: Path):
    alone = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}
    done = doctor(tmp_path, "--no-self-test", "--local-ranks", "1", "--json", str(tmp_path / "out.json"), **alone)
    assert done.returncode == 0, done.stdout + done.stderr
    found = findings_in((tmp_path / "out.json").read_text())
    good = ("python", "torch", "tensorflow", "keras", "horovod", "data plane", "horovod.torch", "horovod.tensorflow")
    assert {found[name]["verdict"] for name in (*good, "OMP_NUM_THREADS")} == {"ok"}
    assert found["horovod"]["fact"] == "0.28.1, built for torch 2.13.0 and tensorflow 2.21.0"
    assert found["horovod.torch"]["values"] == {"gloo": True, "mpi": False, "nccl": False}
    assert found["horovodrun"]["verdict"] == "note", "PATH is this folder"
    assert "mpirun" not in found, "Horovod was built without MPI"
    assert "ok       horovod.torch       imports; built with Gloo\n" in done.stdout
    assert "\033" not in done.stdout
    assert "0 problems, " in done.stdout.splitlines()[-1]


def test_wrong_builds_and_variables(tmp_path: Path):
    changed = {
        LIBRARY["torch"]: "",
        "horovod/torch/__init__.py": "raise ImportError('undefined symbol: x')",
        "horovod/tensorflow/__init__.py": "import os\nos.kill(os.getpid(), 9)",
        **version("torch", "2.2.2"),
        **version("keras", "2.15.0"),
    }
    variables = {
        "OMP_NUM_THREADS": "many",
        "HOROVOD_GLOO_IFACE": "ib0",
        "HVD_ASYNC_ADDRESS": "192.0.2.77",
        "HVD_ASYNC_TRANSPORT": "smoke",
    }
    done = doctor(tmp_path, "--json", "-", changed=changed, **variables)
    assert done.returncode == 1, done.stderr
    found = findings_in(done.stdout)
    expected = {
        "torch": ("problem", "2.2.2, too old", "pip install 'torch>=2.3'"),
        "keras": ("problem", "2.15.0, too old", "pip install 'keras>=3'"),
        "horovod build": ("problem", "built for torch 2.13.0, and 2.2.2 is installed", "install_horovod.sh"),
        "horovod changes": ("note", "not built by scripts/install_horovod.sh", "install_horovod.sh"),
        "data plane": ("problem", "none for torch", "HVD_ASYNC_TRANSPORT"),
        "horovod.torch": ("problem", "undefined symbol: x", "install_horovod.sh"),
        "horovod.tensorflow": ("problem", "killed by signal 9", "install_horovod.sh"),
        "OMP_NUM_THREADS": ("problem", "'many'", "unset it"),
        "HOROVOD_GLOO_IFACE": ("problem", "'ib0'", "Name one of "),
        "HVD_ASYNC_ADDRESS": ("note", "192.0.2.77 is not an address of this machine", "NAT"),
        "self-test torch": ("note", "left out", "Its ranks cannot be connected; see above."),
        "self-test tensorflow": ("note", "left out", "Its ranks cannot be connected; see above."),
    }
    for name, (verdict, fact, advice) in expected.items():
        assert found[name]["verdict"] == verdict, name
        assert fact in found[name]["fact"]
        assert advice in found[name]["advice"]


def test_imports_that_take_too_long(tmp_path: Path):
    found = findings_in(doctor(tmp_path, "--limit", "0.001", "--json", "-").stdout)
    for framework in software.FRAMEWORKS:
        hung = found[f"import {framework}"]
        assert (hung["verdict"], hung["fact"]) == ("problem", "not done within 0.001 s")
        assert f"horovod.{framework}" not in found


def test_a_measurement_of_hosts_that_fails_or_cannot_begin(tmp_path: Path):
    refused = "import sys\ndef run_commandline(): sys.exit('ssh: connect to host h2 port 22: Connection refused')"
    changed = {"horovod/runner/__init__.py": "", "horovod/runner/launch.py": refused}
    failed = doctor(tmp_path, "--hosts", "h1:1,h2:2", changed=changed)
    assert "the job on h1:1,h2:2 has failed, exit status 1" in failed.stderr
    assert "Connection refused" in failed.stderr
    without = tmp_path / "without"
    lost = doctor(without, "--hosts", "h1:1,h2:2", changed={"horovod.dist-info/METADATA": ""})
    assert "no Horovod here that was built for torch or tensorflow: bash scripts/install_horovod.sh" in lost.stderr
    assert "torchrun" in lost.stderr
    assert failed.returncode == lost.returncode == 2


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


def test_findings_as_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "60")
    show_findings([ok("cores", "2"), note("memory", "1 GiB", "q " * 60), problem("z", "no", "")])
    shown = capsys.readouterr().out.splitlines()
    assert (shown[0], shown[-2]) == ("ok       cores   2", "problem  z       no")
    assert shown[2] == " " * 17 + "q " * 21 + "q"
    assert shown[-1] == "1 problem, 1 note, 1 ok: fix the problems first."


# -- single judgements ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "build", "expected"),
    [
        ("", Build(), {"frameworks": "problem", "horovod": "problem"}),
        ("torch", Build(), {"torch": "ok", "horovod": "note"}),
        ("tensorflow", Build(), {"tensorflow": "ok", "keras": "problem", "horovod": "problem"}),
        ("torch", Build("0.28.1"), {"torch": "ok", "horovod": "problem"}),
        ("torch", Build("0.27.0", {"torch": "9.9"}, True), {"torch": "ok", "horovod": "note"}),
    ],
)
def test_what_is_missing(installed: str, build: Build, expected: dict[str, str]):
    versions = {name: "9.9" * (name == installed) for name in software.OLDEST}
    found = [*software.judge_frameworks(versions), *software.judge_build(build, versions)]
    assert verdicts(found) == expected
    assert all(bool(one.advice) == (one.verdict is not Verdict.OK) for one in found)


HOROVOD = Build("0.28.1", {"torch": "", "tensorflow": ""}, True)


def answer(gpus: int | None = 0, *transports: str) -> Answer:
    return Answer(gpus, {name: name in transports for name in software.TRANSPORTS}, "")


def transports(gpus: int, *names: str) -> Finding:
    return next(software.judge_answer("torch", answer(gpus, *names), HOROVOD))


def plane(build: Build, gpus: int = 0, **environment: str) -> Finding:
    return software.judge_data_plane(build, environment, gpus)


def trained(code: int | None = 0, output: str = "", **changes: float) -> Finding:
    learned = {"loss_before": 1.0, "loss_after": 0.1, "distance": 0.0, "rounds": 20, **changes}
    outcome = Outcome(code, output or f"[0]<stdout>:{RESULT}{json.dumps(learned)}[0]<stdout>:", 4.0)
    return software.judge_training("torch", outcome, 60, "mpi")


def cores(cores: float, ranks: int, threads: str = "") -> list[Finding]:
    return list(machine.judge_cores(cores, ranks, {"OMP_NUM_THREADS": threads} if threads else {}))


def onednn(flags: str, chosen: str = "") -> Finding:
    return next(machine.judge_onednn(set(flags.split()), {"TF_ENABLE_ONEDNN_OPTS": chosen}))


LOOPBACK, BOTH = {"lo": ["127.0.0.1", "::1"]}, {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"]}


def host_name(named: str) -> Finding:
    return list(machine.judge_addresses(BOTH, "node5", named, {}))[-1]


JUDGEMENTS: list[tuple[Finding, str, str]] = [
    (software.judge_python((3, 13, 0)), "ok", ""),
    (software.judge_python((3, 14, 0)), "note", "Not tested"),
    (software.judge_python((3, 9, 1)), "problem", "3.10"),
    (plane(HOROVOD), "ok", "Horovod for torch, as Horovod is installed; under torchrun torch.distributed"),
    (plane(HOROVOD, HOROVOD_RANK="0"), "ok", "Horovod for torch, as horovodrun has started this process"),
    (plane(HOROVOD, HVD_ASYNC_TRANSPORT="horovod"), "ok", "Horovod for torch, as HVD_ASYNC_TRANSPORT=horovod"),
    (plane(HOROVOD, 1, HOROVOD_RANK="0", HOROVOD_SIZE="1"), "ok", "torch.distributed for torch, as torch sees a GPU"),
    (plane(Build()), "ok", "torch.distributed for torch, as Horovod is not installed for torch"),
    (plane(Build(), HVD_ASYNC_TRANSPORT="horovod"), "problem", "none for torch"),
    (transports(0, "gloo"), "ok", "built with Gloo"),
    (transports(0, "mpi"), "note", "horovodrun --mpi"),
    (transports(2, "gloo"), "note", "Tensors on GPUs go by way of the CPU"),
    (transports(2, "gloo", "mpi", "nccl"), "ok", "Gloo, MPI, NCCL"),
    (transports(0), "problem", "no transport"),
    (software.judge_gpus({"torch": 0, "tensorflow": None}, False), "ok", "none"),
    (software.judge_gpus({"torch": 2, "tensorflow": None}, True), "ok", "torch sees 2"),
    (software.judge_gpus({"torch": 0, "tensorflow": None}, True), "note", "torch cannot use it"),
    (trained(), "ok", "2 ranks, 20 rounds, replicas bit-identical, 4 s"),
    (trained(1, "[1]<stderr>:RuntimeError: no\nall is Error: not"), "problem", "exit status 1: RuntimeError: no"),
    (trained(None, "waiting"), "problem", "not done within 60 s"),
    (trained(0, "nothing"), "problem", "horovodrun -np 2 --mpi"),
    (trained(distance=0.5), "problem", "replicas differ by 0.5"),
    (trained(loss_after=float("nan")), "problem", "the loss went from 1 to nan"),
    (cores(8, 2)[0], "ok", "4 a rank"),
    (cores(1.5, 2)[0], "note", "0.75 a rank"),
    (cores(8, 1)[1], "ok", "not set, one rank"),
    (cores(8, 2)[1], "note", "set OMP_NUM_THREADS=4"),
    (cores(8, 2, "4,2")[1], "ok", "8 threads in all"),
    (cores(8, 2, "5")[1], "note", "More threads than cores"),
    (machine.judge_memory(4 * GIB, 2), "ok", "2.0 GiB a rank"),
    (machine.judge_memory(3 * GIB, 2), "note", "small models only"),
    (machine.judge_memory(GIB // 2, 2), "problem", "Too little"),
    (machine.judge_descriptors(-1, -1, 64), "ok", "no limit"),
    (machine.judge_descriptors(100, 9999, 64), "note", "ulimit -n"),
    (machine.judge_descriptors(100, 100, 64), "problem", "ulimit -Hn"),
    (onednn("avx512f"), "ok", "AVX-512; on"),
    (onednn("avx512f", "0"), "note", "switched off"),
    (onednn("avx2"), "note", "AVX2; off"),
    (onednn("avx2", "1"), "ok", "AVX2; on"),
    (next(machine.judge_addresses(LOOPBACK, "node5", "127.0.0.1", {})), "note", "loopback only"),
    (host_name("10.0.0.5"), "ok", "node5 is 10.0.0.5"),
    (host_name("127.0.1.1"), "note", "HOROVOD_GLOO_IFACE=eth0"),
    (host_name(""), "note", "has no address"),
]


@pytest.mark.parametrize(("found", "verdict", "words"), JUDGEMENTS, ids=lambda one: getattr(one, "name", None))
def test_judgements(found: Finding, verdict: str, words: str):
    assert (found.verdict.value, words in f"{found.fact}. {found.advice}") == (verdict, True), found


def test_ports():
    assert machine.judge_ports(["127.0.0.1"], 28232).verdict is Verdict.OK  # (a real connection)
    assert machine.judge_ports(["127.0.0.1"], 100).verdict is Verdict.NOTE
    assert machine.judge_ports(["192.0.2.77"], 28232).fact == "no connection to 192.0.2.77"


def test_the_self_test_uses_the_data_plane_or_a_transport(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", {})
    assert software.transport_of("torch", answer(0, "gloo", "mpi"), HOROVOD) == "gloo"
    assert software.transport_of("torch", answer(1, "gloo", "mpi"), HOROVOD) == "torch"
    assert software.transport_of("tensorflow", answer(0, "mpi"), HOROVOD) == "mpi"
    assert software.transport_of("torch", Answer(0, None, ""), Build()) == "torch"
    assert software.transport_of("torch", Answer(None, None, ""), Build()) == ""


def test_a_container_and_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert machine.usable_cores(tmp_path) >= 1
    assert machine.free_memory(tmp_path) > 2**20
    assert machine.free_ports(tmp_path) is None
    files = {
        "sys/fs/cgroup/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/memory.max": f"{2**20}\n",
        "sys/fs/cgroup/memory.current": "576\n",
        "sys/fs/cgroup/memory.stat": "anon 76\ninactive_file 500\nactive_file 0\n",
        "proc/cpuinfo": "processor: 0\nflags\t\t: fpu avx2 sse\n",
        "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
    }
    write(tmp_path, files)
    assert machine.usable_cores(tmp_path) == 0.5
    assert machine.free_memory(tmp_path) == 2**20 - 76, "cached files do not count as used"
    assert machine.processor_flags(tmp_path) == {"fpu", "avx2", "sse"}
    assert machine.free_ports(tmp_path) == 28232


# -- programs with a time limit ---------------------------------------------------------------------------------------


def test_a_program_that_cannot_be_started():
    with pytest.raises(EngineError, match="/no/such/program cannot be started"):
        run_limited(["/no/such/program"], 5)


def test_a_program_whose_time_is_up_is_ended_with_all_that_it_has_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(programs, "GOODBYE", 1.0)
    children = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'],"
        " start_new_session=True)\nprint(p.pid, flush=True)\np.wait()"
    )
    outcome = run_limited([sys.executable, "-c", children], 2)
    assert outcome.returncode is None
    with contextlib.suppress(psutil.NoSuchProcess):  # (it may take a moment until it is reaped)
        assert psutil.Process(int(outcome.output.split()[0])).status() == psutil.STATUS_ZOMBIE


# -- the network: ranks as threads, in simulated time -----------------------------------------------------------------

SOFTWARE = 0.002
"""Seconds that every collective takes."""


class Net:
    """``network.Ranks`` of one rank: its collectives take as long as the links make them."""

    framework, transport, now = "paper 1.0", "Gloo", 0.0

    def __init__(self, job: Job, rank: int, bandwidth: Callable[[int, int], float]) -> None:
        self.rank, self.size, self.bandwidth = rank, job.size, bandwidth
        self.gather = functools.partial(job.world(rank).gather, name="doctor")

    def allreduce(self, size: int) -> None:
        slowest = min(self.bandwidth(rank, (rank + 1) % self.size) for rank in range(self.size))
        self.now += SOFTWARE + 2 * (self.size - 1) / self.size * size / slowest

    def alltoall(self, splits: Sequence[int]) -> None:
        sent = enumerate(self.gather(list(splits)))
        self.now += SOFTWARE + max(size / self.bandwidth(i, j) for i, row in sent for j, size in enumerate(row))


def measured(
    monkeypatch: pytest.MonkeyPatch, hosts: str, bandwidth: Callable[[int, int], float] = lambda i, j: 1e9
) -> Measurement:
    """Return the measurements of all ranks, whose hosts are letters; a capital one is another host of the same name."""
    job, thread = Job(len(hosts)), threading.local()

    def run(rank: int) -> Measurement:
        thread.net = Net(job, rank, bandwidth)
        return network.measure(thread.net)

    def seat(_: Any) -> Seat:
        return Seat(hosts[thread.net.rank].lower(), hosts[thread.net.rank])

    monkeypatch.setattr(network, "time", SimpleNamespace(perf_counter=lambda: thread.net.now))
    monkeypatch.setattr(network, "own_seat", seat)
    found = job.run(run)
    assert found == found[:1] * len(hosts)
    return found[0]


def test_each_link_has_its_own_bandwidth(monkeypatch: pytest.MonkeyPatch):
    found = measured(monkeypatch, "abc", lambda i, j: 2.5e6 if (i, j) == (2, 0) else 25e6)
    links = {(link.sender, link.receiver): link for link in found.links}
    assert len(links) == 6
    for pair, link in links.items():
        assert link.bandwidth_bytes_s == pytest.approx(2.5e6 if pair == ("c", "a") else 25e6, rel=1e-4)
        assert link.latency_s is not None
    assert found.bandwidth_bytes_s == pytest.approx(2.5e6, rel=1e-4)
    assert found.software_s == pytest.approx(SOFTWARE, rel=0.01)
    assert found.allreduce[-1].bandwidth_bytes_s == pytest.approx(2.5e6, rel=1e-3)
    assert found.hosts == {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize(("hosts", "other"), [("aabb", "b"), ("aaAA", "a#1")])
def test_the_first_rank_of_each_host_is_measured_and_a_failure_is_reported(
    monkeypatch: pytest.MonkeyPatch, hosts: str, other: str
):
    def refused(addresses: Sequence[str], port: int, owner: str) -> float:
        raise EngineError(f"{owner} is behind a wall")

    monkeypatch.setattr(network, "latency", refused)
    found = measured(monkeypatch, hosts)
    second = f"{other}[2]"
    assert {(link.sender, link.receiver) for link in found.links} == {("a[0]", second), (second, "a[0]")}
    assert (found.hosts, found.latency_s) == ({"a": 2, other: 2}, None)
    assert found.versions.keys() == found.hosts.keys()
    assert f"a[0] to {second}: {second} is behind a wall" in next(iter(judge_network(found))).fact


def a_measurement(rates: Sequence[float] = (25e6, 25e6, 25e6), **changes: Any) -> Measurement:
    links = tuple(Link("a", f"b{place}", 0.0001 * (place + 1), rate, 2**23) for place, rate in enumerate(rates))
    sums = (Allreduce(2**20, 0.05, 24e6),)
    made = Measurement(0.0002, 25e6, {"a": 1, "b": 1}, 2, "torch 2", "Gloo", 0.001, links, sums, {"a": "x", "b": "x"})
    return msgspec.structs.replace(made, **changes)


def test_verdicts_on_a_network():
    def judged(*arguments: Any, **changes: Any) -> dict[str, str]:
        return verdicts(list(judge_network(a_measurement(*arguments, **changes))))

    assert judged() == {"connections": "ok", "bandwidth": "ok", "versions": "ok"}
    assert judged((25e6, 12e6, 25e6))["bandwidth"] == "note"
    assert judged((25e6, 13e6, 25e6))["bandwidth"] == "ok"
    assert judged(versions={"a": "x", "b": "y"})["versions"] == "problem"
    assert judged(hosts={"a": 2})["hosts"] == judged(hosts={"a": 2, "b": 1}, ranks=3)["hosts"] == "note"


def test_only_rank_0_prints_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A launcher ends all ranks when one has failed: also rank 0, which has to print the problem."""
    broken = Link("a", "b", None, 1e6, 2**20, "no route")
    found = a_measurement(links=(broken,), latency_s=None, bandwidth_bytes_s=1e6)
    monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": "2"})
    monkeypatch.setattr(network, "measure_here", lambda: (1, found))
    assert main(["doctor"]) == 0
    assert not capsys.readouterr().out
    monkeypatch.setattr(network, "measure_here", lambda: (0, found))
    assert main(["doctor", "--network", str(tmp_path / "network.json")]) == 1
    shown = capsys.readouterr().out
    assert "  a -> b      none         8\n" in shown
    assert "Allreduce of 2 ranks (Gloo, torch 2):\n" in shown
    assert "  1 MiB    50.0      192\n" in shown
    assert "a to b: no route" in shown
    written = json.loads((tmp_path / "network.json").read_text())
    assert (written["latency_s"], written["bandwidth_bytes_s"]) == (None, 1e6), "what advise reads"
    assert msgspec.convert(written, Measurement) == found, "what measure_hosts reads"


def test_half_of_a_connection_is_the_latency(monkeypatch: pytest.MonkeyPatch):
    with listening() as port:
        number = port.getsockname()[1]
        assert 0 < latency(["127.0.0.1"], number, "b") < 1
    monkeypatch.setattr(network, "PATIENCE", 0.5)
    with pytest.raises(EngineError, match="cannot be reached"):
        latency(["127.0.0.1"], number, "b")
