"""The choice of the data plane of torch ranks: Horovod, or torch.distributed.

A leaf module. It imports neither a framework nor Horovod, so that ``hvd_async doctor`` can use it in any environment.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hvd_async.runtime import launch

VARIABLE = "HVD_ASYNC_TRANSPORT"
STAGE = "HVD_ASYNC_STAGE"
"""Environment variable: tensors on GPUs travel through the CPU unless it is unset, empty or 0."""
HOROVOD, TORCH = "horovod", "torch"


class DataPlane(NamedTuple):
    """Data plane of this process.

    Attributes:
        name: ``HOROVOD`` or ``TORCH``.
        reason: why it was chosen, as a clause that can follow "because".
    """

    name: str
    reason: str


class Job(NamedTuple):
    """Launch and data plane of this process, decided by ``hvd.init()``.

    Attributes:
        plane: the data plane.
        launch: this rank, as the launcher or the default process group says; under Horovod its MPI may know better.
    """

    plane: DataPlane
    launch: launch.Launch


def understand(
    environment: Mapping[str, str],
    group: launch.Group | None = None,
    has_horovod: bool | None = None,
    has_gpu: bool = False,
    horovods_script: bool = False,
) -> Job:
    """Return the job of a process with this environment and default process group.

    Args:
        environment, has_horovod, has_gpu, horovods_script: as for ``choose``.
        group: torch.distributed's default process group.

    Raises:
        ValueError, ImportError: as ``choose`` and ``launch.read``.
    """
    plane = choose(environment, has_horovod, has_gpu, horovods_script, group)
    if plane.name == TORCH:
        return Job(plane, launch.read(environment, group))
    return Job(plane, launch.ALONE if launch.is_elastic(environment) else launch.parse(environment))


def choose(
    environment: Mapping[str, str] = os.environ,
    has_horovod: bool | None = None,
    has_gpu: bool = False,
    horovods_script: bool = False,
    group: launch.Group | None = None,
) -> DataPlane:
    """Return the data plane of torch ranks in a process with this environment.

    All ranks of a job must choose alike. Apart from ``has_gpu``, the choice uses only what launchers set alike on all
    ranks. If ranks choose differently, those on torch.distributed miss the others, and ``hvd.init()`` raises on them.

    Args:
        environment: variables by name.
        has_horovod: whether Horovod is installed with its torch extension; None to search for it.
        has_gpu: whether torch sees a GPU in this process.
        horovods_script: whether the script has imported ``horovod.torch``, whose ``init()`` it will call.
        group: torch.distributed's default process group.

    Raises:
        ValueError: ``HVD_ASYNC_TRANSPORT`` is set to an unknown value.
        ImportError: Horovod is required and not installed.
    """
    installed = find_horovod() is not None if has_horovod is None else has_horovod
    asked = environment.get(VARIABLE, "")
    if asked not in ("", HOROVOD, TORCH):
        raise ValueError(f"{VARIABLE} must be {HOROVOD!r} or {TORCH!r}, got {asked!r}. Unset it for the default.")
    if asked:
        chosen = DataPlane(asked, f"{VARIABLE}={asked}")
    elif has_gpu and not horovods_script and environment.get(STAGE, "0") in ("", "0") and _can_meet(environment, group):
        chosen = DataPlane(TORCH, "torch sees a GPU")
    elif "HOROVOD_RANK" in environment:
        chosen = DataPlane(HOROVOD, "horovodrun has started this process")
    elif "TORCHELASTIC_RUN_ID" in environment:
        chosen = DataPlane(TORCH, "torchrun has started this process")
    elif {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        chosen = DataPlane(TORCH, "RANK, WORLD_SIZE and MASTER_ADDR are set")
    elif group is not None and group.size > 1 and not horovods_script:
        chosen = DataPlane(TORCH, "there is a default process group")
    elif installed:
        chosen = DataPlane(HOROVOD, "Horovod is installed")
    else:
        chosen = DataPlane(TORCH, "Horovod is not installed for torch")
    if chosen.name == HOROVOD and not installed:
        raise ImportError(
            f"the data plane is Horovod, because {chosen.reason}, and Horovod is not installed for torch. Set "
            f"{VARIABLE}=torch and start the job with torchrun; or build Horovod, in a checkout of hvd_async: "
            f'bash scripts/install_horovod.sh --python "$(which python)"'
        )
    return chosen


def hint_of_absence(environment: Mapping[str, str], installed: bool) -> str:
    """Return a sentence for errors of ranks on torch.distributed that miss others; empty unless a rank without a GPU
    would have chosen Horovod.

    Args:
        environment: variables by name.
        installed: whether Horovod is installed with its torch extension.
    """
    if not installed or choose(environment, True).name == TORCH:
        return ""
    return f" Ranks without a GPU use Horovod: if there are some, set {VARIABLE}={HOROVOD} on all ranks."


def _can_meet(environment: Mapping[str, str], group: launch.Group | None) -> bool:
    """Return whether the ranks can meet on torch.distributed: not in elastic jobs of horovodrun, and on several hosts
    of some launchers only with ``MASTER_ADDR`` and ``MASTER_PORT``."""
    try:
        launch.read(environment, group)
    except ValueError:
        return False
    return True


def find_horovod() -> Path | None:
    """Return the path of Horovod's compiled extension for torch, None if there is none. Imports nothing."""
    spec = importlib.util.find_spec("horovod")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        found = sorted(Path(folder).glob("torch/mpi_lib_v2*.so"))
        if found:
            return found[0]
    return None
