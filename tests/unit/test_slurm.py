"""What the SLURM job is made of, without a SLURM; scripts/slurm/try.sh tries it on one."""

import os
import pathlib
import signal
import subprocess
import sys
import urllib.request

import pytest

from scripts.slurm.ranks import interface_of, rank_environment, read_hosts

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "slurm"
RANKS = [sys.executable, str(FOLDER / "ranks.py")]


def bash(*line, **env):
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = ["bash", str(FOLDER / "train.sbatch"), *line]
    return subprocess.run(command, env={**outside, **env}, capture_output=True, text=True, timeout=60)


def environment(node, local, hosts="a:2,b:2", addresses=("127.0.0.1", "127.0.0.2"), **env):
    task = {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(local), **env}
    return rank_environment(read_hosts(hosts), addresses, 1234, task)


def test_tasks_become_ranks_node_by_node():
    keys = ("HOSTNAME", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    environments = [[environment(node, local)[f"HOROVOD_{key}"] for key in keys] for node in (0, 1) for local in (0, 1)]
    assert [" ".join(values) for values in environments] == [
        "a 0 4 0 2 0 2", "a 1 4 1 2 0 2", "b 2 4 0 2 1 2", "b 3 4 1 2 1 2"
    ]  # fmt: skip


def test_a_rank_talks_by_the_interface_that_leads_to_the_other_nodes_unless_one_was_named():
    own = environment(1, 0)
    assert own["HOROVOD_GLOO_IFACE"] == interface_of("127.0.0.1") is not None
    assert own["HVD_ASYNC_ADDRESS"] == "127.0.0.1"
    assert (own["HOROVOD_GLOO_RENDEZVOUS_ADDR"], own["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == ("127.0.0.1", "1234")
    assert environment(0, 0, "a:1", ["unknown.invalid"])["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1", "a node alone"
    assert interface_of("192.0.2.1") is None
    named = environment(1, 0, HOROVOD_GLOO_IFACE="ib0")
    assert not {"HOROVOD_GLOO_IFACE", "HVD_ASYNC_ADDRESS"} & named.keys(), "it is left alone"


def test_the_server_runs_until_its_input_ends():
    command = [*RANKS, "serve", "--hosts", "a:1,b:1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        port = int(server.stdout.readline())
        put = urllib.request.Request(f"http://127.0.0.1:{port}/scope/key", b"value", method="PUT")
        urllib.request.urlopen(put, timeout=10).close()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/scope/key", timeout=10) as found:
            assert found.read() == b"value"
        server.send_signal(signal.SIGUSR1)  # as `scancel --signal=USR1` does to all steps of a job
        server.stdin.close()
        assert server.wait(20) == 0


def test_a_rank_of_mpi_only_keeps_the_signal_for_later():
    code = "import signal; print(signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    done = subprocess.run([*RANKS, "run", "--", sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


def test_the_script_says_how_it_is_used():
    help_text = bash("--help").stdout
    assert help_text.startswith("usage: sbatch ")
    assert max(map(len, help_text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("line", "env", "hint"),
    [
        (("--algorithm", "sgp"), {"SLURM_JOB_ID": ""}, "submit it with sbatch"),
        ((), {"HVD_ASYNC_ROOT": "/nowhere"}, "say where with HVD_ASYNC_ROOT"),
        (("--framework", "jax"), {}, "take torch or tensorflow"),
        (("--framework",), {}, "--framework wants torch or tensorflow"),
    ],
)
def test_the_script_says_what_is_wrong(line, env, hint):
    job = {"SLURM_JOB_ID": "1", "HVD_ASYNC_ROOT": str(FOLDER.parents[1]), **env}
    done = bash(*line, **job)
    assert done.returncode == 1
    assert hint in done.stderr
