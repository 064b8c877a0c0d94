"""Lists of hosts, as users and schedulers write them: ``a:4,b:4``, a hostfile, ``node[01-16,20]``."""

from __future__ import annotations

import itertools
import re
import socket
import subprocess
from collections.abc import Iterable
from typing import NamedTuple


class HostsError(Exception):
    """What was said about hosts cannot work: one line for the user."""


class Host(NamedTuple):
    """A host and how many ranks it is to take; 0: nobody said."""

    name: str
    slots: int


def parse(text: str) -> list[Host]:
    """``--hosts a:4,b:4``; the numbers may be left out."""
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"([A-Za-z0-9][\w.-]*)(?::(\d+))?", word.strip())
        if match is None:
            raise HostsError(f"--hosts {text}: {word.strip()!r} is no host: write it as name:ranks, as in a:4,b:4")
        if match[2] is not None and int(match[2]) == 0:
            raise HostsError(f"--hosts {text}: {match[1]} has no slots: give it 1 or more, or leave it out")
        found.append(Host(match[1], int(match[2] or 0)))
    twice = [host.name for host in found if sum(same(host.name, other.name) for other in found) > 1]
    if twice:
        raise HostsError(f"--hosts {text}: {twice[0]} is named twice")
    return found


def read_file(path: str) -> list[Host]:
    """A hostfile: Open MPI's (``a slots=4``), MPICH's (``a:4``), or a line for each rank (``a``, ``a``)."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except OSError as error:
        raise HostsError(f"cannot read the hostfile {path}: {error.strerror}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        match = re.fullmatch(r"([A-Za-z0-9][\w.-]*)(?::(\d+)|(?:\s+\w+=\S+)*?\s+slots=(\d+))?(?:\s+\w+=\S+)*", line)
        if match is None:
            raise HostsError(f"{path}, line {number}: {line!r} is no host: write it as name slots=ranks")
        slots = int(match[2] or match[3] or 1)
        if slots == 0 or "0" in (match[2], match[3]):
            raise HostsError(f"{path}, line {number}: {match[1]} has no slots: give it 1 or more, or leave it out")
        found.append(Host(match[1], slots))
    if not found:
        raise HostsError(f"the hostfile {path} names no host")
    return added_up(found)


def added_up(hosts: Iterable[Host]) -> list[Host]:
    """Each host once, in the order of first mention, with all its slots."""
    total: dict[str, int] = {}
    for host in hosts:
        total[host.name] = total.get(host.name, 0) + host.slots
    return [Host(name, slots) for name, slots in total.items()]


def expand(text: str) -> list[str]:
    """``n[1-3],gpu[07,09]`` as Slurm and Flux write it: n1, n2, n3, gpu07, gpu09."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^]]*\])+", text):
        pieces = [_numbers(piece[1:-1]) if piece.startswith("[") else [piece]
                  for piece in re.findall(r"\[[^]]*\]|[^\[]+", part)]
        names += ["".join(way) for way in itertools.product(*pieces)]
    return names


def _numbers(text: str) -> list[str]:
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return found


def counts(text: str) -> list[int]:
    """``2(x3),1`` as Slurm writes numbers a node: 2, 2, 2, 1."""
    found = []
    for part in text.split(","):
        number, _, times = part.rstrip(")").partition("(x")
        found += [int(number)] * int(times or 1)
    return found


def same(name: str, other: str) -> bool:
    """Whether two names are one host's; one may be short, the other have a domain."""
    if "." in name and "." in other:
        return name.lower() == other.lower()
    return name.partition(".")[0].lower() == other.partition(".")[0].lower()


def is_here(name: str) -> bool:
    """Whether this is the host we are on."""
    return name in ("localhost", "127.0.0.1") or same(name, socket.gethostname())


def known(name: str) -> bool:
    """Whether the name leads to an address, by itself or by what ssh's configuration makes of it."""
    return is_here(name) or _has_address(name) or _has_address(_ssh_name(name))


def _has_address(name: str) -> bool:
    try:
        return bool(name and socket.getaddrinfo(name, None))
    except OSError:
        return False


def _ssh_name(name: str) -> str:
    try:
        done = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(r"^hostname (.+)$", done, re.M)
    return found[1] if found and found[1] != name else ""
