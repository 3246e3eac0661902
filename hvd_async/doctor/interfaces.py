"""This machine's addresses and ports: how other hosts will find it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvd_async.doctor.findings import Finding, note, ok, problem
from hvd_async.errors import EngineError
from hvd_async.runtime.addresses import own_addresses, reachable

FEW_PORTS = 2000
PORT_LIMIT = 3.0
"""Seconds in which a port of this machine must take a connection from it."""
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Addresses:
    """How a machine can be found.

    Attributes:
        interfaces: addresses of each interface.
        ordered: all addresses, as rank 0 would tell them, best guess first.
        name: the host's.
        named: the address that the name stands for; empty: it stands for none.
    """

    interfaces: Mapping[str, tuple[str, ...]]
    ordered: tuple[str, ...]
    name: str
    named: str


def read_addresses() -> Addresses:
    """Return this machine's addresses."""
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = {
        name: tuple(address.address.partition("%")[0] for address in found if address.family in families)
        for name, found in psutil.net_if_addrs().items()
    }
    name = socket.gethostname()
    try:
        named = socket.gethostbyname(name)
    except OSError:
        named = ""
    return Addresses({key: found for key, found in interfaces.items() if found}, tuple(own_addresses()), name, named)


def is_loopback(address: str) -> bool:
    """Whether an address is good on its own machine only."""
    return address.startswith("127.") or address == "::1"


def judge_addresses(found: Addresses, environ: Mapping[str, str]) -> list[Finding]:
    """Judge interfaces, the host's name, and the variables that choose among addresses."""
    outward = {
        name: addresses
        for name, addresses in found.interfaces.items()
        if not all(is_loopback(address) for address in addresses)
    }
    words = "; ".join(f"{name} {', '.join(addresses)}" for name, addresses in outward.items())
    values = {"interfaces": {name: list(addresses) for name, addresses in found.interfaces.items()}}
    if outward:
        results = [ok("interfaces", words, **values)]
    else:
        results = [note("interfaces", "loopback only", "Jobs on this machine alone will work.", **values)]
    chosen = environ.get("HOROVOD_GLOO_IFACE", "")
    if chosen and chosen not in found.interfaces:
        advice = f"Name one of {', '.join(found.interfaces)}, or unset it."
        results.append(problem("HOROVOD_GLOO_IFACE", f"there is no interface {chosen!r} with an address", advice))
    told, all_addresses = environ.get("HVD_ASYNC_ADDRESS", ""), set().union(*found.interfaces.values())
    if told and told not in all_addresses and told not in (found.name, "localhost"):
        advice = "Right only on other hosts than rank 0's, or behind a NAT: set it on rank 0's host to one of its own."
        results.append(note("HVD_ASYNC_ADDRESS", f"{told} is no address of this machine", advice))
    if not found.named:
        advice = "Gloo looks it up for process sets: add it to /etc/hosts, or set HOROVOD_GLOO_IFACE."
        results.append(note("host name", f"{found.name} has no address", advice, name=found.name, address=""))
    elif is_loopback(found.named) and outward:
        advice = (
            "For jobs on several hosts name the interface, HOROVOD_GLOO_IFACE="
            f"{next(iter(outward))}, or correct /etc/hosts (docs/clusters.md)."
        )
        fact = f"{found.name} is {found.named}, good on this machine only"
        results.append(note("host name", fact, advice, name=found.name, address=found.named))
    else:
        results.append(ok("host name", f"{found.name} is {found.named}", name=found.name, address=found.named))
    return results


def connects(address: str) -> bool:
    """Whether a port of this machine that its kernel has chosen takes a connection at an address of it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family) as server:
            reachable([address], server.getsockname()[1], PORT_LIMIT, "this machine")
    except (OSError, EngineError):
        return False
    return True


def free_ports(path: Path = RANGE) -> int | None:
    """Return how many ports the kernel chooses from; None if it does not say."""
    try:
        first, last = map(int, path.read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        return None
    return last - first + 1


def judge_ports(
    addresses: Sequence[str], ports: int | None, connects: Callable[[str], bool] = connects
) -> list[Finding]:
    """Judge whether ranks of this machine can connect to each other.

    Args:
        addresses: of this machine, best guess first; the first and loopback are tried.
        ports: how many the kernel chooses from.
        connects: whether an address takes connections.
    """
    tried = list(dict.fromkeys([*addresses[:1], "127.0.0.1"]))
    refused = [address for address in tried if not connects(address)]
    fact = f"connections to {' and '.join(tried)}; {ports if ports is not None else 'unknown number of'} ports"
    if refused:
        advice = "Ranks cannot meet: look for a firewall, or a sandbox without a network (docs/clusters.md)."
        return [problem("ports", f"no connection to {' and '.join(refused)}", advice, refused=refused)]
    if ports is not None and ports < FEW_PORTS:
        return [note("ports", fact, "Few: widen net.ipv4.ip_local_port_range for large jobs.", ports=ports)]
    return [ok("ports", fact, ports=ports)]
