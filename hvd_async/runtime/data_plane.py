"""The choice of the data plane of torch ranks: Horovod, or torch.distributed.

A leaf module. It imports neither a framework nor Horovod, so that ``hvd_async doctor`` can use it in any environment.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

VARIABLE = "HVD_ASYNC_TRANSPORT"
HOROVOD, TORCH = "horovod", "torch"


class DataPlane(NamedTuple):
    """Data plane of this process.

    Attributes:
        name: ``HOROVOD`` or ``TORCH``.
        reason: why it was chosen, as a clause that can follow "because".
    """

    name: str
    reason: str


def choose(environment: Mapping[str, str] = os.environ, has_horovod: bool | None = None) -> DataPlane:
    """Return the data plane of torch ranks in a process with this environment.

    Args:
        environment: variables by name.
        has_horovod: whether Horovod is installed with its torch extension; None to search for it.

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
    elif "HOROVOD_RANK" in environment:
        chosen = DataPlane(HOROVOD, "horovodrun has started this process")
    elif "TORCHELASTIC_RUN_ID" in environment:
        chosen = DataPlane(TORCH, "torchrun has started this process")
    elif {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        chosen = DataPlane(TORCH, "RANK, WORLD_SIZE and MASTER_ADDR are set")
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


def find_horovod() -> Path | None:
    """Return the path of Horovod's compiled extension for torch, None if there is none. Imports nothing."""
    spec = importlib.util.find_spec("horovod")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        found = sorted(Path(folder).glob("torch/mpi_lib_v2*.so"))
        if found:
            return found[0]
    return None
