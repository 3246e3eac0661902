"""A rank is killed while a round is queued, and the seconds until the other's next call raises.

``python -m scripts.benchmarks.jobs.killed --json FILE``: two ranks of torch.distributed, on a GPU over NCCL (each takes
the other for another host's), without one over Gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAST = 20
"""Step in which rank 1 ends."""
LIMIT = 90.0
"""Seconds that the ranks may take."""


def rank(folder: Path) -> None:
    """Train; rank 1 kills itself between ``backward()`` and ``step()``, rank 0 writes what it then sees."""
    os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"  # (read when the first communicator is made)
    import torch

    import hvd_async.torch as hvd

    hvd.init()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).to(device)
    optimizer = hvd.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), quorum="all")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    x = torch.ones(64, 256, device=device)
    for step in range(LAST + 50):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if step == LAST and hvd.rank() == 1:
            (folder / "died").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            optimizer.step()
            if step > LAST:
                loss.item()
        except RuntimeError as error:
            seconds = time.time() - float((folder / "died").read_text())
            found = {"seconds": seconds, "step": step, "error": f"{type(error).__name__}: {error}"[:500]}
            (folder / "seen").write_text(json.dumps(found))
            os._exit(0)  # (a regular end waits for collectives that will not end)


def main() -> int:
    """Run both ranks; print and write what rank 0 saw; return 1 if it saw nothing in time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it there")
    parser.add_argument("--rank", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args.rank)
        return 1
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HVD_ASYNC_TRANSPORT": "torch"}
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "scripts.benchmarks.jobs.killed", "--rank", name]
        own = [{**os.environ, **shared, "RANK": str(number)} for number in range(2)]
        processes = [subprocess.Popen(command, env=env) for env in own]
        deadline = time.monotonic() + LIMIT
        try:
            for process in processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"a rank has not ended within {LIMIT:.0f} s")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        seen = Path(name) / "seen"
        found = json.loads(seen.read_text()) if seen.exists() else {"seconds": None}
    print(json.dumps(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found) + "\n")
    return 0 if found["seconds"] is not None else 1


if __name__ == "__main__":
    sys.exit(main())
