"""A small network trained in every mode under torch's CUDA sanitizer.

``python -m scripts.benchmarks.jobs.sanitized --json FILE``. One rank. The sanitizer sees kernels of the training
thread, of autograd's, and of the engine's. Without a GPU the modes run and nothing is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

STEPS = 10
EAGER, GOSSIP, LEADERS = ("all", "solo"), ("sgp", "osgp", "dpsgd", "adpsgd"), ("lsgd", "easgd")


def train(mode: str) -> None:
    """Take some steps in a mode."""
    import torch

    import hvd_async.torch as hvd
    from hvd_async.testing import stop_engine

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 10)
    ).to(device)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    named: dict[str, Any] = {"named_parameters": model.named_parameters()}
    if mode in EAGER:
        optimizer = hvd.EagerOptimizer(inner, quorum=mode, **named)
    elif mode in LEADERS:
        optimizer = hvd.LeaderOptimizer(inner, algorithm=mode, **named)
    else:
        optimizer = hvd.GossipOptimizer(inner, **_plan(mode), **named)
    x = torch.randn(4, 3, 8, 8, device=device)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if mode in LEADERS:
            optimizer.record_loss(loss.detach())
        loss.backward()
        optimizer.step()
    optimizer.drain()
    stop_engine(optimizer)


def _plan(mode: str) -> dict[str, Any]:
    from scripts.benchmarks.support.names import gossip_of

    plan = gossip_of(mode)
    assert plan is not None
    return dict(plan._asdict())


def watch() -> bool:
    """Enable the sanitizer, in the engine's threads too; return whether there is a GPU."""
    import torch

    if not torch.cuda.is_available():
        return False
    from torch.cuda import _sanitizer as sanitizer
    from torch.utils._python_dispatch import TorchDispatchMode

    lock, run = threading.RLock(), threading.Thread.run  # (the handler expects one thread at a time)

    def locked(handle: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            with lock:
                return handle(*arguments, **more)

        return call

    for name, handle in list(vars(sanitizer.EventHandler).items()):
        if name.startswith("_handle_"):
            setattr(sanitizer.EventHandler, name, locked(handle))
    sanitizer.enable_cuda_sanitizer()

    class SameHandler(sanitizer.CUDASanitizerDispatchMode):  # type: ignore[misc]
        """The mode of another thread: a dispatch mode belongs to a thread, and all share what is known of streams."""

        def __init__(self) -> None:
            TorchDispatchMode.__init__(self)
            self.event_handler = sanitizer.cuda_sanitizer.dispatch.event_handler

    def watched(thread: threading.Thread) -> None:
        if not thread.name.startswith("hvd_async-engine"):
            run(thread)
            return
        with SameHandler():
            run(thread)

    mock.patch.object(threading.Thread, "run", watched).start()
    return True


def main() -> int:
    """Train in every mode; return 1 if the sanitizer, or anything else, complains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the complaints there, by mode")
    args = parser.parse_args()
    os.environ["HVD_ASYNC_TRANSPORT"] = "torch"
    checked, complaints = watch(), dict[str, str]()
    import hvd_async.torch as hvd

    hvd.init()
    for mode in (*EAGER, *GOSSIP, *LEADERS):
        try:
            train(mode)
        except Exception as error:  # noqa: BLE001  the other modes are to be run whatever fails
            complaints[mode] = f"{type(error).__name__}: {error}"
        print(f"{mode}: {complaints.get(mode, 'silence')}", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps({"checked": checked, "complaints": complaints}, indent=1) + "\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
