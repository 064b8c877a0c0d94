"""The place of a run: which hosts there are, and how ranks are spread over them."""

from __future__ import annotations

import os
from types import ModuleType
from typing import NamedTuple

from oars.cluster import flux, lsf, pbs, slurm
from oars.cluster.host_list import Host, HostsError, is_here, known, parse, read_file, same

SCHEDULERS = (slurm, pbs, lsf, flux)
# Set by launchers for each of several processes: then this is one of them.
LAUNCHED = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class Where(NamedTuple):
    """What the user says about hosts."""

    hosts: str | None = None  # a:4,b:4
    hostfile: str | None = None
    per_node: int | None = None


class Place(NamedTuple):
    """Hosts, how programs are started there, and who named them."""

    hosts: list[Host]
    reach: list[str]
    named_by: str
    asked: bool  # by the user, who means these numbers


def find(where: Where) -> Place | None:
    """What ``--hosts`` or ``--hostfile`` name; else all of the job we are in; None outside of one."""
    named, hostfile = where.hosts, where.hostfile
    if named is not None and hostfile is not None:
        raise HostsError("--hosts and --hostfile both name the hosts: give one of them")
    check_alone()
    wanted = parse(named) if named is not None else read_file(hostfile) if hostfile is not None else None
    how = "--hosts" if named is not None else f"--hostfile {hostfile}"
    job = our_job()
    if job is None:
        if wanted is None:
            return None
        strange = [host.name for host in wanted if not known(host.name)]
        if strange:
            raise HostsError(f"{how}: unknown host {strange[0]}: its name has no address")
        return Place(wanted, ["ssh", "-x"], how, True)
    given = job.hosts()
    if wanted is None:
        return Place(given, job.reach(), f"this {job.NAME} job", False)
    return Place([_of_job(host, given, how, job.NAME) for host in wanted], job.reach(), how, True)


def our_job() -> ModuleType | None:
    """The scheduler whose job we are in."""
    return next((scheduler for scheduler in SCHEDULERS if scheduler.inside()), None)


def _of_job(wanted: Host, given: list[Host], how: str, scheduler: str) -> Host:
    for host in given:
        if same(host.name, wanted.name):
            return Host(host.name, wanted.slots or host.slots)
    raise HostsError(f"{how}: unknown host {wanted.name}: this {scheduler} job has "
                     + ", ".join(host.name for host in given))


def check_alone() -> None:
    """Not one of several: ``srun -n 4 oars run`` would be four runs in one place."""
    for name in LAUNCHED:
        many = os.environ.get(name, "1")
        if many.isdecimal() and int(many) > 1:
            raise HostsError(f"this is one of {many} processes that a launcher started ({name}), and oars starts the "
                             "ranks itself: run it once, without srun or mpirun")


def spread(place: Place, ranks: int | None, per_node: int | None) -> list[Host]:
    """How many ranks go where: hosts are filled one after the other, in their order."""
    if per_node is not None:
        hosts = [Host(host.name, per_node) for host in place.hosts]
    else:
        hosts = place.hosts
        unsaid = [host.name for host in hosts if not host.slots]
        if unsaid:
            raise HostsError(f"{place.named_by}: {unsaid[0]} has no slots: write {unsaid[0]}:4 for 4 ranks there, "
                             "or give --per-node")
    there = sum(host.slots for host in hosts)
    left = there if ranks is None else ranks
    if left > there:
        raise HostsError(f"-n {left}, but {place.named_by} has {there} slot{'s' * (there > 1)} on {len(hosts)} "
                         f"host{'s' * (len(hosts) > 1)}: use -n {there}, or --per-node to put more on each")
    used = []
    for host in hosts:
        if left:
            used.append(Host(host.name, min(left, host.slots)))
            left -= used[-1].slots
    return used


def only_here(hosts: list[Host]) -> bool:
    """Whether all ranks are on this machine."""
    return len(hosts) == 1 and is_here(hosts[0].name)
