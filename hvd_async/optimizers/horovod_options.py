"""The arguments that all wrappers have from Horovod: checked, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_compression(compression: Any) -> None:
    """Refuse what cannot compress.

    Raises:
        ValueError: with a hint.
    """
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise ValueError(
            f"compression={compression!r} cannot compress gradients: take hvd.Compression.none, .fp16, .bf16, or a "
            f"class with compress(tensor) and decompress(tensor, ctx)"
        )


def check_passes(backward_passes_per_step: int) -> None:
    """Refuse what is no number of backward passes.

    Raises:
        ValueError: with a hint.
    """
    passes = backward_passes_per_step
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step={passes!r} is not a number of backward passes: take 1 or more")


def scales(op: Any, average: Any, total: Any, predivide: float, size: int) -> tuple[float, float]:
    """By what a gradient is multiplied before the sum over the ranks, and the sum afterwards.

    Args:
        op: Horovod's, as the user gave it; ``average`` and ``total`` are ``hvd.Average`` and ``hvd.Sum``.
        predivide: Horovod's ``gradient_predivide_factor``.
        size: ranks that are averaged over.

    Raises:
        ValueError: an operation that a partial allreduce cannot do, or a factor that does not go with it.
    """
    if op not in (average, total):
        raise ValueError(
            f"op={op!r} does not go with partial allreduce, whose rounds add gradients up (Adasum, minimum and maximum "
            f"need all ranks' gradients at once): take hvd.Average or hvd.Sum"
        )
    if isinstance(predivide, bool) or not isinstance(predivide, int | float) or not 0 < predivide < float("inf"):
        raise ValueError(f"gradient_predivide_factor={predivide!r} is not a factor: take a number above 0")
    if op == total:
        if predivide != 1.0:
            raise ValueError("gradient_predivide_factor splits the division of op=hvd.Average: leave it out with Sum")
        return 1.0, 1.0
    return 1.0 / predivide, predivide / size


def check_local(given: Mapping[str, Any], average: Any, whose: str) -> None:
    """Refuse those of Horovod's arguments that mean nothing where weights travel and gradients do not.

    Args:
        given: as the user gave them.
        average: ``hvd.Average``.
        whose: for the messages.

    Raises:
        ValueError: with a hint.
    """
    if given["op"] != average:
        raise ValueError(f"op={given['op']!r}: {whose} mixes weights, by averages; leave op out, or take hvd.Average")
    if given["gradient_predivide_factor"] != 1.0:
        raise ValueError(f"gradient_predivide_factor: gradients stay on their rank in {whose}; leave it out")
    if given["groups"] or given["num_groups"]:
        raise ValueError(f"groups, num_groups: a rank's weights travel as one message in {whose}; leave them out")
    check_passes(given["backward_passes_per_step"])


def compression_name(compression: Any, known: Mapping[str, Any]) -> str:
    """How gossip's messages travel, by name.

    Args:
        compression: a name, or one of the values of ``known``.
        known: the binding's compressors by name.

    Raises:
        ValueError: another one; messages are coded by the library itself.
    """
    for name, compressor in known.items():
        if compression is compressor or compression == name:
            return name
    raise ValueError(
        f"compression={compression!r} of messages is not known: take hvd.Compression.{', .'.join(known)}, or one of "
        f"these names"
    )


def host_size(hierarchical: Any, hvd: Any, everyone: bool) -> int:
    """Ranks of a host that step together, or are averaged before they gossip; 1 if none are.

    Args:
        hierarchical: True for Horovod's local ranks, False for none, or a number of ranks, numbered host by host.
        hvd: Horovod's module; asked about its hosts if it is True.
        everyone: whether all ranks of the job share the optimizer, and no process set of them.

    Raises:
        ValueError: hosts of different sizes, ranks in another order, a process set, or no number of ranks.
    """
    if isinstance(hierarchical, bool):
        return local_ranks(hvd, everyone, "hierarchical=True", "leave it out") if hierarchical else 1
    if not isinstance(hierarchical, int) or hierarchical < 1:
        raise ValueError(f"hierarchical={hierarchical!r}: take True, False, or the number of ranks of a host")
    return hierarchical


def local_ranks(hvd: Any, everyone: bool, asked: str, instead: str) -> int:
    """Horovod's ranks of each host.

    Args:
        hvd: Horovod's module.
        everyone: whether all ranks of the job are meant, and no process set of them.
        asked, instead: what the user said, and what else could be.

    Raises:
        ValueError: hosts of different sizes, ranks in another order, or a process set.
    """
    if not everyone:
        raise ValueError(
            f"{asked} counts the ranks of a host, and some may be outside the process set: pass the number of ranks of "
            f"a host that are inside"
        )
    local, hosts = int(hvd.local_size()), int(hvd.cross_size())
    if local * hosts != hvd.size() or hvd.rank() != hvd.cross_rank() * local + hvd.local_rank():
        raise ValueError(
            f"{asked} needs as many ranks on each host, numbered host by host: start them so (horovodrun -H a:4,b:4), "
            f"or {instead}"
        )
    return local
