"""The jobs that tests share: one for each framework, number of ranks and transport, which runs once a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jobs.table import Share
from launch import DEVICE, PLANE, Job, RunJob

from tests.conftest import LONG_RUN


@dataclass(frozen=True)
class Setting:
    """A job of ``jobs/library.py``.

    Attributes:
        framework: "torch" or "tensorflow".
        ranks: how many.
        transport: "gloo" or "mpi", of Horovod; "torch": without Horovod.
        topics: modules of ``jobs/``, in their order.
        share: how many cases of each topic it has.
        sets: which process sets it has: "none", "dynamic" or "static".
        launched: whether ``horovodrun`` or ``torchrun`` starts it, and not a fork server alone.
    """

    framework: str
    ranks: int
    transport: str = "gloo"
    topics: tuple[str, ...] = ()
    share: Share = "all"
    sets: str = "none"
    launched: bool = True

    def __str__(self) -> str:
        return f"{self.framework}-{self.ranks}-{self.transport}"

    @property
    def reference(self) -> str:
        """What the float64 references call the framework."""
        return "torch" if self.framework == "torch" else "keras"

    def run(self, run: RunJob) -> Job:
        """Run the job, by a launcher or a fork server."""
        chosen = ("--topics", ",".join(self.topics), "--cases", self.share, "--sets", self.sets)
        # Horovod fuses what comes together, and adds more than two ranks up in another order then, which shows in the
        # last bits of what "torch_features" compares.
        env = {"HOROVOD_FUSION_THRESHOLD": "0"} if "torch_features" in self.topics else {}
        if "hosts" in self.topics:  # the ranks of one have a relay, and the coordinator has a process, as in large jobs
            env["HVD_ASYNC_RELAYS_FROM"] = "1"
        line = ("--framework", self.framework, *chosen)
        return run(
            self.framework, "library.py", self.ranks, transport=self.transport, args=line, timeout=500.0, env=env
        )

    def case(self, job: Callable[[Setting], Job], name: str) -> list[dict[str, Any]]:
        """Every rank's result of a case."""
        return job(self).case(name)


EITHER = "torch" if PLANE == "torch" else "gloo"
TORCH = Setting("torch", 3, EITHER, ("torch_equality", "promises", "gossip", "leaders"), "all" if LONG_RUN else "some")
TORCH_4 = Setting("torch", 4, EITHER, ("gossip", "leaders", "torch_features", "hosts"), sets="dynamic", launched=False)
"""For what takes four ranks: two hosts of two, two process sets of two."""
TORCH_MPI = Setting("torch", 2, "mpi", TORCH.topics if LONG_RUN else ("torch_equality",), share="few")
TORCHRUN = Setting("torch", 3, "torch", TORCH.topics, share="few")
TORCHRUN_4 = Setting("torch", 4, "torch", ("gossip", "leaders", "hosts"), "few", "static", launched=False)
"""Without Horovod: every family, hosts, and process sets that ``hvd.init()`` is given."""
TENSORFLOW = Setting("tensorflow", 3, "gloo", ("promises", "gossip", "leaders", "tf_fits"), "some", "static", False)
TENSORFLOW_4 = Setting("tensorflow", 4, "gloo", ("gossip", "hosts"), "few", launched=False)
MPI = [TORCH_MPI]
"""Ranks that Open MPI starts import their framework each: an ordinary run has one job of torch with one topic."""
if LONG_RUN:
    MPI.append(Setting("tensorflow", 2, "mpi", ("promises", "gossip"), "few"))
ALONE = [Setting("torch", 1, topics=TORCH.topics, share="few")] if DEVICE == "cuda" else []
"""A rank that has its GPU for itself, on NCCL."""


def having(topic: str) -> list[Setting]:
    """Return the settings whose job has a topic."""
    every = (TORCH, TENSORFLOW, TORCH_4, TENSORFLOW_4, *MPI, TORCHRUN, TORCHRUN_4, *ALONE)
    return [setting for setting in every if topic in setting.topics]
