"""The doctor on cores, memory, open files, oneDNN, addresses and ports."""

from __future__ import annotations

import dataclasses
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_async.doctor import interfaces, machine
from hvd_async.doctor.findings import Verdict
from hvd_async.doctor.interfaces import Addresses
from hvd_async.doctor.machine import GIB, Machine

GOOD = Machine(8, None, 32 * GIB, frozenset({"avx2", "avx512f"}), "x86_64", 65536, 65536)
FOUND = Addresses({"lo": ("127.0.0.1",), "eth0": ("10.0.0.5",)}, ("10.0.0.5", "127.0.0.1"), "node5", "10.0.0.5")


def but(**changes) -> Machine:
    return dataclasses.replace(GOOD, **changes)


def test_the_facts_of_this_machine(tmp_path: Path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2**20}\n")
    (tmp_path / "memory.current").write_text("576\n")
    (tmp_path / "cpuinfo").write_text("processor: 0\nflags\t\t: fpu avx2 sse\n")
    found = machine.read_machine(tmp_path, tmp_path / "cpuinfo")
    assert (found.quota, found.available, found.flags) == (1.5, 2**20 - 576, {"fpu", "avx2", "sse"})
    (tmp_path / "memory.stat").write_text("anon 76\ninactive_file 500\nactive_file 0\n")
    assert machine.read_machine(tmp_path, tmp_path / "cpuinfo").available == 2**20 - 76, "files in cache are given back"
    assert found.soft == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    found = machine.read_machine(tmp_path, tmp_path / "no such file")
    assert found.quota is None
    assert found.available > 2**20
    assert not found.flags


@pytest.mark.parametrize(
    ("facts", "omp", "cores", "threads"),
    [
        (GOOD, "4", "ok", "ok"),
        (GOOD, "", "ok", "note"),
        (GOOD, "5", "ok", "note"),
        (GOOD, "4,2", "ok", "ok"),
        (GOOD, "many", "ok", "problem"),
        (but(cores=1), "1", "note", "ok"),
        (but(quota=1.5), "1", "note", "ok"),
        (but(quota=1.5), "2", "note", "note"),
    ],
)
def test_cores_and_threads_of_two_ranks(facts, omp, cores, threads):
    found = machine.judge_cores(facts, 2, {"OMP_NUM_THREADS": omp} if omp else {})
    assert [one.verdict.value for one in found] == [cores, threads]


def test_one_rank_may_have_all_cores():
    assert [one.verdict for one in machine.judge_cores(GOOD, 1, {})] == [Verdict.OK, Verdict.OK]


@pytest.mark.parametrize(("gib", "verdict"), [(4, "ok"), (3, "note"), (0.9, "problem")])
def test_memory_of_two_ranks(gib, verdict):
    found = machine.judge_memory(but(available=int(gib * GIB)), 2)
    assert found.verdict.value == verdict
    assert f"{gib:.1f} GiB free" in found.fact


@pytest.mark.parametrize(
    ("soft", "hard", "verdict"), [(0, 0, "ok"), (None, None, "ok"), (-1, 0, "note"), (-1, -1, "problem")]
)
def test_open_files_of_64_ranks(soft, hard, verdict, monkeypatch):
    """Limits are given by how far they are from what is needed."""
    monkeypatch.setattr(machine, "needed_for", lambda ranks: 2 * ranks + 140)
    limits = {"soft": soft if soft is None else 268 + soft, "hard": hard if hard is None else 268 + hard}
    found = machine.judge_descriptors(but(**limits), 64)
    assert found.verdict.value == verdict
    assert found.fact.endswith("rank 0 of 64 ranks needs 268")


def test_a_limit_on_open_files_that_is_really_low():
    code = (
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
        "from hvd_async.doctor.machine import judge_descriptors, read_machine\n"
        "found = judge_descriptors(read_machine(), 64)\nprint(found.verdict.value, found.fact)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("problem 200 open files; rank 0 of 64 ranks needs "), done.stderr


@pytest.mark.parametrize(
    ("flags", "chosen", "verdicts"),
    [
        ({"avx512f"}, None, ["ok"]),
        ({"avx512f"}, "0", ["note"]),
        ({"avx2"}, None, ["note"]),
        ({"avx2"}, "1", ["ok"]),
        ({"avx2", "amx_tile"}, None, ["ok"]),
        (set(), None, []),
    ],
)
def test_onednn(flags, chosen, verdicts):
    environ = {} if chosen is None else {"TF_ENABLE_ONEDNN_OPTS": chosen}
    found = machine.judge_onednn(but(flags=frozenset(flags)), "2.21.0", environ)
    assert [one.verdict.value for one in found] == verdicts


def test_onednn_is_tensorflows_and_of_x86():
    assert machine.judge_onednn(but(flags=frozenset({"avx2"})), "", {}) == []
    assert machine.judge_onednn(but(architecture="aarch64"), "2.21.0", {}) == []


# -- addresses and ports --------------------------------------------------------------------------------------


def names_but_ok(found: Addresses, **environ: str) -> dict[str, str]:
    findings = interfaces.judge_addresses(found, environ)
    return {one.name: one.verdict.value for one in findings if one.verdict is not Verdict.OK}


def test_addresses_that_are_right():
    assert names_but_ok(FOUND) == {}
    assert names_but_ok(FOUND, HOROVOD_GLOO_IFACE="eth0", HVD_ASYNC_ADDRESS="10.0.0.5") == {}


def test_addresses_that_are_not():
    assert names_but_ok(FOUND, HOROVOD_GLOO_IFACE="ib0") == {"HOROVOD_GLOO_IFACE": "problem"}
    assert names_but_ok(FOUND, HVD_ASYNC_ADDRESS="10.0.0.6") == {"HVD_ASYNC_ADDRESS": "note"}
    assert names_but_ok(dataclasses.replace(FOUND, named="127.0.1.1")) == {"host name": "note"}
    assert names_but_ok(dataclasses.replace(FOUND, named="")) == {"host name": "note"}
    alone = Addresses({"lo": ("127.0.0.1", "::1")}, ("127.0.0.1",), "here", "127.0.0.1")
    assert names_but_ok(alone) == {"interfaces": "note"}


def test_the_addresses_of_this_machine():
    found = interfaces.read_addresses()
    assert "127.0.0.1" in found.ordered
    assert found.name


def test_ports():
    (found,) = interfaces.judge_ports(["127.0.0.1"], 28232)
    assert found.verdict is Verdict.OK  # (a real connection)
    (found,) = interfaces.judge_ports(["127.0.0.1"], 100)
    assert found.verdict is Verdict.NOTE
    (found,) = interfaces.judge_ports(["10.0.0.5"], 28232, lambda address: address == "127.0.0.1")
    assert found.verdict is Verdict.PROBLEM
    assert "10.0.0.5" in found.fact
    assert "127" not in found.fact


def test_an_address_of_another_machine_takes_no_connection_here():
    assert not interfaces.connects("192.0.2.77")


def test_the_range_of_ports(tmp_path: Path):
    (tmp_path / "range").write_text("32768\t60999\n")
    assert interfaces.free_ports(tmp_path / "range") == 28232
    assert interfaces.free_ports(tmp_path / "none") is None
