"""What other users of a machine can put in the way of a run: connections, and files in the host's temporary folder."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest
from running import finished, oars

from oars.hosts.keeper import Proxy


@pytest.mark.parametrize("words", [b"{}\n", b"[1]\n", b"nothing\n", b'{"secret": "guessed", "what": "data"}\n',
                                   b'{"secret": 5}\n', b'{"secret": "\xc3\xa9"}\n', b"x" * 5000])
def test_who_does_not_know_the_secret_is_not_let_through_to_mpirun(words):
    with socket.create_server(("127.0.0.1", 0)) as mpirun:
        proxy = Proxy("127.0.0.1", mpirun.getsockname()[1], 5.0, True)
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as stranger:
            stranger.sendall(words)
            with pytest.raises((ConnectionResetError, EOFError)):
                if not stranger.recv(1):
                    raise EOFError
        assert not proxy.connected.is_set()


def test_who_knows_it_is():
    with socket.create_server(("127.0.0.1", 0)) as mpirun:
        proxy = Proxy("127.0.0.1", mpirun.getsockname()[1], 5.0, True)
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as friend:
            friend.sendall(json.dumps({"secret": proxy.secret, "what": "data"}).encode() + b"\n")
            mpirun.settimeout(10)
            with mpirun.accept()[0] as link:
                friend.sendall(b"hello")
                assert link.recv(5) == b"hello"


def old(folder: Path) -> Path:
    """A folder that looks as if a killed rank had left it an hour ago."""
    os.utime(folder, (time.time() - 3600, time.time() - 3600))
    return folder


def test_what_lies_in_the_temporary_folder_does_not_hold_up_a_run(tmp_path):
    pipe, link, left = tmp_path / "oars-1-pipe", tmp_path / "oars-1-link", tmp_path / "oars-1-left"
    for folder in (pipe, link, left):
        folder.mkdir()
    os.mkfifo(pipe / "journal")  # who opens it waits for a writer
    (tmp_path / "precious").write_text("")
    (link / "journal").symlink_to(tmp_path / "precious")
    (left / "journal").write_text("")
    (tmp_path / "oars-1-file").write_text("")
    for folder in (pipe, link, left, tmp_path / "oars-1-file"):
        old(folder)
    (tmp_path / "train.py").write_text("print('done')\n")
    done = oars(tmp_path, "run", "--quiet", "-n", "2", "train.py", code=0, timeout=60, TMPDIR=str(tmp_path))
    assert done.stdout == "done\n"
    assert not left.exists() and link.exists() and (tmp_path / "oars-1-file").exists()


def test_a_cache_that_another_user_has_made_is_not_used(tmp_path):
    asked = "import os; os.getuid = lambda: 4242\nfrom oars.data import cache\nprint(cache.folder())"
    env = {"XDG_CACHE_HOME": "none", "OARS_CACHE": "", "TMPDIR": str(tmp_path)}  # a home that is no full path
    assert finished(tmp_path, sys.executable, "-c", asked, code=0, **env).stdout == f"{tmp_path}/oars-cache-4242/oars\n"
    (tmp_path / "oars-cache-4242").mkdir()  # by this user, who has another number
    done = finished(tmp_path, sys.executable, "-c", asked, **env)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
        f"oars.data.errors.DataError: {tmp_path}/oars-cache-4242 belongs to another user: set OARS_CACHE to a folder "
        "of your own")
