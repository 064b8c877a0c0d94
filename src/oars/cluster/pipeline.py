"""``pipeline.toml``: stages that wait for each other in a scheduler's queue.

::

    [stage.pack]
    command = "oars data pack images/ packed/"
    time = "30m"
    makes = ["packed"]

    [stage.train]
    command = "oars run train.py --data packed"
    nodes = 4
    time = "12h"
    needs = ["pack"]
    makes = ["model.pt"]

    [stage.report]
    command = "oars report {train}"
    needs = ["train"]

Each stage is a job with a run folder of its own. When it has ended well, a *manifest* in that folder says what it has
made: every file, its size, its time and a digest. A stage whose files are still as the manifest says, whose command is
the same, and whose needs are done, is done. In a command ``{train}`` is the run folder of a stage that it needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from oars import runfolder
from oars.cluster import jobs
from oars.cluster.queues import Ask, State, parse_time
from oars.cluster.submit import QUEUES, check_env, is_run, job_script, named, put, read
from oars.runfolder import RUNS, UsageError, make_folder

MANIFEST = "manifest.json"
KEYS = {"command": str, "nodes": int, "per_node": int, "gpus_per_node": int, "time": str, "partition": str,
        "queue": str, "account": str, "env": str, "max_restarts": int, "flags": list, "needs": list, "makes": list}


class Stage(NamedTuple):
    """One stage, as the file has it."""

    name: str
    command: str
    ask: Ask
    needs: list[str]
    makes: list[str]


def load(path: Path, given: Ask) -> list[Stage]:
    """The stages, each after those it needs; ``given``: what the command line says for all of them."""
    import tomllib

    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"no such pipeline: {path}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    strange = [key for key in data if key != "stage"]
    if strange or not isinstance(data.get("stage"), dict) or not data["stage"]:
        trouble = f"unknown {strange[0]!r}" if strange else "no stages"
        raise UsageError(f"{path}: {trouble}: a stage begins with [stage.NAME]")
    return ordered(path, [_stage(path, name, table, given) for name, table in data["stage"].items()])


def _stage(path: Path, name: str, table: Any, given: Ask) -> Stage:
    where = f"{path}, stage {name}"
    if not re.fullmatch(r"[\w-]+", name) or not isinstance(table, dict):
        raise UsageError(f"{where}: a stage begins with [stage.NAME], where the name is a word")
    for key, value in table.items():
        if key not in KEYS:
            raise UsageError(f"{where}: unknown {key!r}: there are {', '.join(KEYS)}")
        if not isinstance(value, KEYS[key]) or isinstance(value, bool) or (
                isinstance(value, list) and not all(isinstance(item, str) for item in value)):
            kind = {str: "string", int: "number"}.get(KEYS[key], "list of strings")
            raise UsageError(f"{where}: {key} = {value!r} is no {kind}")
        if isinstance(value, int) and value < (key != "max_restarts"):
            raise UsageError(f"{where}: {key} = {value} is too few")
    if not table.get("command", "").strip():
        raise UsageError(f"{where}: no command")
    try:
        seconds = parse_time(table["time"]) if "time" in table else given.seconds
        command = words(table["command"], {})
    except (UsageError, ValueError) as error:
        raise UsageError(f"{where}: {error}") from None
    if is_run(command) and any(re.match("--name(=|$)", word) for word in command):
        raise UsageError(f"{where}: leave out --name: the run folder is the stage's")
    ask = Ask(given.on, table.get("nodes", given.nodes), table.get("per_node", given.per_node), seconds,
              table.get("partition", table.get("queue", given.queue)), table.get("account", given.account),
              table.get("gpus_per_node", given.gpus), table.get("env", given.env),
              (*given.flags, *table.get("flags", [])), table.get("max_restarts", given.max_restarts))
    return Stage(name, table["command"], ask, table.get("needs", []), table.get("makes", []))


def words(command: str, folders: dict[str, str]) -> list[str]:
    """A stage's command: ours as it is, so that a run can be resumed; anything else is for the shell."""
    for need, folder in folders.items():
        command = shlex.quote(folder).join(re.split(rf"(?<!\$)\{{{re.escape(need)}\}}", command))
    split = shlex.split(command)
    plain = not re.search(r"[|&;<>()$`*?\[\]{}~\n]", command)
    return split if plain and split[0] == "oars" else ["bash", "-c", command]


def ordered(path: Path, stages: list[Stage]) -> list[Stage]:
    """Each stage after those it needs."""
    left, found = {stage.name: stage for stage in stages}, []
    for stage in stages:
        missing = [need for need in stage.needs if need not in left]
        if missing:
            raise UsageError(f"{path}, stage {stage.name} needs {missing[0]}, and there is no such stage")
    while left:
        ready = [stage for stage in left.values() if not set(stage.needs) & set(left)]
        if not ready:
            raise UsageError(f"{path}: these stages wait for each other in a circle: {' -> '.join(_circle(left))}")
        for stage in ready:
            found.append(left.pop(stage.name))
    return found


def _circle(left: dict[str, Stage]) -> list[str]:
    way = [next(iter(left))]
    while way[-1] not in way[:-1]:
        way.append(next(need for need in left[way[-1]].needs if need in left))
    return way[way.index(way[-1]):]


def submit(path: Path, name: str | None, given: Ask, versions: dict[str, str], dry_run: bool) -> int:
    """Submit all stages that are not done; if one is refused, none is left in the queue."""
    stages, latest = load(path, given), runs_of(path)
    for stage in stages:
        check_env(stage.ask)
        job_script(stage.ask, Path(), words(stage.command, {}))
        going = jobs.status(latest[stage.name]).name if stage.name in latest else ""
        if going in ("queued", "running"):
            raise UsageError(f"{path}, stage {stage.name} is {going} ({latest[stage.name]}): "
                             f"wait for it, or: oars cancel {latest[stage.name].name}")
    queued: dict[str, str] = {}
    folders = {stage: str(folder) for stage, folder in latest.items()}
    for stage in stages:
        after = [need for need in stage.needs if need in queued]
        if not after and stage.name in latest and done(latest[stage.name], stage):
            print(f"{stage.name}: done, {latest[stage.name]}")
            continue
        base = f"{name or path.stem}-{stage.name}"
        command = words(stage.command, {need: folders[need] for need in stage.needs})
        if dry_run:
            folders[stage.name], queued[stage.name] = str(Path(RUNS, base)), ""
            print(f"# {stage.name}\n" + job_script(stage.ask, Path(RUNS, base), named(command, base)))
            continue
        try:
            folder = make_folder(None, base)
            folders[stage.name] = str(folder)
            queued[stage.name] = put(stage.ask, folder, named(command, folder.name), versions,
                                     [queued[need] for need in after], pipeline=str(path.resolve()), stage=stage.name,
                                     asked=stage.command, makes=stage.makes)
        except UsageError as error:
            for before in reversed(stages):
                if before.name in queued:
                    QUEUES[given.on].cancel(queued[before.name])
            raise UsageError(f"stage {stage.name}: {error}") from None
        print(f"{stage.name}: job {queued[stage.name]}{', after ' + ', '.join(after) if after else ''}, {folder}")
    return 0


def runs_of(path: Path) -> dict[str, Path]:
    """The newest run folder of each stage."""
    found: dict[str, tuple[float, Path]] = {}
    for file in Path(RUNS).glob(f"*/{runfolder.JOB_RECORD}"):
        job = read(file.parent)
        if job.get("pipeline") == str(path.resolve()):
            found[job["stage"]] = max(found.get(job["stage"], (0.0, file.parent)), (job["submitted"], file.parent))
    return {stage: folder for stage, (_, folder) in found.items()}


def done(folder: Path, stage: Stage) -> bool:
    """Whether a stage has ended well, with the same command, and what it made is whole."""
    try:
        data = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return read(folder)["asked"] == stage.command and data["makes"] == stage.makes and not damage(data["files"])


def damage(files: dict[str, list[Any]]) -> str:
    """The first file that is not as the manifest has it; only one whose time has changed is read."""
    for name, (size, changed, digest) in files.items():
        try:
            now = os.stat(name)
        except OSError:
            return name
        if now.st_size != size or (now.st_mtime_ns != changed and digest_of(Path(name)) != digest):
            return name
    return ""


def write_manifest(folder: Path, makes: list[str]) -> None:
    """Say what a stage has made; UsageError if something is missing."""
    files: dict[str, list[Any]] = {}
    for name in makes:
        path = Path(name)
        found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        if not found:
            raise UsageError(f"the stage has ended, but did not make {name}")
        for file in found:
            status = file.stat()
            files[str(file)] = [status.st_size, status.st_mtime_ns, digest_of(file)]
    runfolder.put(folder / MANIFEST, json.dumps({"makes": makes, "files": files}, indent=1) + "\n")


def digest_of(path: Path) -> str:
    """A checksum of a file's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def show(path: Path) -> int:
    """``oars pipeline status``: the chain with its states; 1 if a stage has failed."""
    stages = load(path, Ask("slurm"))
    latest = runs_of(path)
    states = {stage.name: jobs.status(latest[stage.name]) if stage.name in latest else State("not submitted")
              for stage in stages}
    rows = [["STAGE", "NEEDS", "STATE", "RUN", ""]]
    for stage in stages:
        state, folder = states[stage.name], latest.get(stage.name)
        why = jobs.detail(folder, state) if folder is not None else ""
        if state.name == "done" and folder is not None and not done(folder, stage):
            why = "what it made has changed, or its command"
        failed = [need for need in stage.needs if states[need].name in ("failed", "cancelled")]
        if state.name == "cancelled" and failed:
            why = f"needs {failed[0]}, which {'has failed' if states[failed[0]].name == 'failed' else 'was cancelled'}"
        rows.append([stage.name, ", ".join(stage.needs), state.name, folder.name if folder else "", why])
    jobs.table(rows)
    return int(any(state.name == "failed" for state in states.values()))
