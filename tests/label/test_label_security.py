"""Who may talk to the server of ``oars label``: a test for each line of the list in docs/label.md.

Whatever is refused is answered with one line, written down, and changes nothing.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import threading

import pytest
from labelling import CLASSES, ROWS, Server, error, source, status
from running import oars, wait_for

from oars.label.client import Client


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("safe")
    source(folder)
    server = Server(folder, "run.h5", "--classes", ",".join(CLASSES))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def client(served):
    found = Client(served.port, served.token)
    found.settled()
    return found


def send(served, method, path, body=b"", **headers):
    """A request whose headers are those of the page unless others are given; None leaves one out."""
    words = {"Host": f"127.0.0.1:{served.port}", "Origin": f"http://127.0.0.1:{served.port}", "Connection": "close",
             "Content-Type": "application/json", "Content-Length": str(len(body)),
             **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in words.items() if value is not None)]
    return served.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


LABEL = json.dumps({"rows": [1], "class": "dark", "how": "human", "seen": 0}).encode()


@pytest.mark.parametrize(("headers", "code"), [
    ({"Host": "evil.example"}, 421),  # DNS rebinding
    ({"Host": "localhost"}, 421),
    ({"Host": "127.0.0.1"}, 421),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": None}, 403),
    ({"Origin": "http://127.0.0.1:1"}, 403),
    ({"Content_Type": "text/plain"}, 415),  # what a form of another page can send
    ({"Content_Type": None}, 415),
    ({"Cookie": None}, 401),
    ({"Cookie": "oars-label-1=abc"}, 401),
    ({"Sec_Fetch_Site": "cross-site"}, 403),
    ({"Content_Length": str(2 << 20)}, 413),
])
def test_requests_of_others_are_refused_written_down_and_change_nothing(served, client, headers, code):
    before = client.get("/api/state")["event"]
    log = served.folder / "run.oars-label" / "refused.log"
    lines = len(log.read_text().splitlines()) if log.exists() else 0
    answer = send(served, "POST", "/api/label", LABEL, **{"Cookie": client.cookie, **headers})
    assert status(answer) == code and error(answer)
    assert len(log.read_text().splitlines()) == lines + 1
    assert client.get("/api/state")["event"] == before


def test_a_chunked_body_that_is_too_large_is_refused(served, client):
    log = served.folder / "run.oars-label" / "refused.log"
    lines = log.read_text().splitlines()
    send(served, "POST", "/api/label", b"200000\r\n" + b"x" * 0x200000 + b"\r\n0\r\n\r\n", Cookie=client.cookie,
         Content_Length=None, Transfer_Encoding="chunked")
    assert log.read_text().splitlines()[:-1] == lines and "longer than" in log.read_text().splitlines()[-1]


@pytest.mark.parametrize("token", ["", "x", None, 7, ["a"]])
def test_only_the_token_buys_a_cookie(served, token):
    answer = send(served, "POST", "/enter", json.dumps({"token": token}).encode())
    assert status(answer) in (400, 403) and b"set-cookie" not in answer.lower()


def test_browsers_that_enter_at_once_are_different_people(served):
    clients = []
    ready = threading.Barrier(12)

    def enter():
        ready.wait()
        clients.append(Client(served.port, served.token))

    threads = [threading.Thread(target=enter) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    people = [client.get("/api/state")["person"] for client in clients]
    assert len(people) == len(set(people)) == 12


@pytest.mark.parametrize(("path", "site", "mode", "goal", "code"), [
    ("/", "cross-site", "navigate", "document", 200),  # the address was clicked in a terminal that is a page
    ("/", "same-site", "navigate", "document", 200),
    ("/", "cross-site", "navigate", "iframe", 403),
    ("/", "cross-site", "no-cors", "script", 403),
    ("/api/state", "cross-site", "navigate", "document", 403),
    ("/page/main.js", "cross-site", "navigate", "document", 403),
])
def test_of_other_sites_only_a_link_to_the_page_is_followed(served, client, path, site, mode, goal, code):
    answer = send(served, "GET", path, Cookie=client.cookie, Content_Length=None, Origin=None, Sec_Fetch_Site=site,
                  Sec_Fetch_Mode=mode, Sec_Fetch_Dest=goal)
    assert status(answer) == code


def test_the_cookie_is_for_this_server_and_not_for_scripts(served):
    answer = send(served, "POST", "/enter", json.dumps({"token": served.token}).encode()).lower()
    cookie = next(line for line in answer.split(b"\r\n") if line.startswith(b"set-cookie"))
    assert f"oars-label-{served.port}=".encode() in cookie
    assert b"httponly" in cookie and b"samesite=strict" in cookie


@pytest.mark.parametrize("path", ["/page/../project.json", "/page/..%2f..%2fproject.json", "/%2e%2e/etc/passwd",
                                  "/page//etc/passwd", "/api/../token", "//token", "/page/%00", "/project.json",
                                  "/api/image?row=../../etc/passwd", "/api/thumbs?rows=/etc/passwd",
                                  "/api/thumbs?rows=" + ",".join(["1"] * 257), f"/api/image?row={ROWS}",
                                  "/api/near?row=1&n=99999", "/api/thumbs?rows=1&size=100000", "/api/image?row=-1"])
def test_no_path_comes_from_a_request_and_numbers_are_checked(served, client, path):
    answer = send(served, "GET", path, Cookie=client.cookie, Content_Length=None)
    assert 400 <= status(answer) < 500 and error(answer) and b"root:" not in answer


@pytest.mark.parametrize("body", [b"", b"[", b"[" * 100_000, b"null", b'{"rows": 1}',
                                  b'{"rows": ["1"], "class": "dark", "how": "human", "seen": 0}',
                                  b'{"rows": [true], "class": "dark", "how": "human", "seen": 0}',
                                  b'{"rows": [1e400], "class": "dark", "how": "human", "seen": 0}',
                                  b'{"rows": [99999999999999999999], "class": "dark", "how": "human", "seen": 0}',
                                  b'{"rows": [1], "class": "dark", "how": "model", "seen": 0}',
                                  b'{"rows": [1], "class": {"$ne": 1}, "how": "human", "seen": 0}', b"\xff\xfe"])
def test_malformed_actions_are_refused(served, client, body):
    before = client.get("/api/state")["event"]
    answer = send(served, "POST", "/api/label", body, Cookie=client.cookie)
    assert status(answer) == 400 and error(answer)
    assert client.get("/api/state")["event"] == before


def test_get_changes_nothing(served, client):
    before = client.get("/api/state")["event"]
    for path in ("/api/label", "/api/undo", "/api/accept", "/api/class", "/enter"):
        assert status(send(served, "GET", path, Cookie=client.cookie, Content_Length=None)) == 405
    for method in ("PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"):
        assert status(send(served, method, "/api/label", LABEL, Cookie=client.cookie)) == 405
    assert client.get("/api/state")["event"] == before


def test_news_are_for_the_own_page_only(served, client):
    foreign = send(served, "GET", "/api/events", Cookie=client.cookie, Content_Length=None, Origin="http://evil.example")
    assert status(foreign) == 403
    assert status(send(served, "GET", "/api/events", Cookie=client.cookie, Content_Length=None, Origin=None)) == 403
    assert status(send(served, "GET", "/api/events", Content_Length=None)) == 401


def test_every_answer_forbids_what_the_page_does_not_need(served, client):
    for path in ("/", "/api/state", "/nowhere"):
        head = send(served, "GET", path, Cookie=client.cookie, Content_Length=None).partition(b"\r\n\r\n")[0].lower()
        for word in (b"default-src 'none'", b"script-src 'self'", b"frame-ancestors 'none'", b"nosniff",
                     b"cross-origin-resource-policy: same-origin"):
            assert word in head, (path, word)
        assert b"unsafe-inline" not in head and b"access-control" not in head


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 81, "\u202ex", "a\0b"])
def test_names_of_classes_are_checked(served, client, name):
    answer = send(served, "POST", "/api/class", json.dumps({"name": name}).encode(), Cookie=client.cookie)
    assert status(answer) == 400 and error(answer)


def test_a_formula_as_a_class_is_text_in_a_spreadsheet(served, client):
    row = client.get("/api/boundary?n=1")["rows"][0]["row"]
    for name in ("=1+1", "@x", "-1", "+1"):
        client.post("/api/class", name=name)
        client.post("/api/label", rows=[row], how="human", seen=1 << 40, **{"class": name})
        text = client.ask("GET", "/api/labels.csv")[2].decode()
        assert f"'{name}" in text and f",{name}" not in text


def test_the_address_is_that_of_the_socket_and_not_a_name(served, client):
    """What ``localhost`` is, the browser decides: it may be ::1, where another user of this machine listens."""
    assert served.address == f"http://127.0.0.1:{served.port}/#{served.token}"
    named = f"localhost:{served.port}"  # who types it himself is let in
    answer = send(served, "GET", "/api/state", Cookie=client.cookie, Content_Length=None, Host=named,
                  Origin=f"http://{named}")
    assert status(answer) == 200


def test_only_loopback_is_listened_to_and_other_hosts_are_refused(served, tmp_path):
    with socket.socket() as trial, pytest.raises(OSError):
        trial.settimeout(2)
        trial.connect((socket.gethostbyname(socket.gethostname()) if not socket.gethostbyname(
            socket.gethostname()).startswith("127.") else "192.0.2.1", served.port))
    done = oars(tmp_path, "label", served.folder / "run.h5", "--host", "0.0.0.0", code=2)
    assert done.stderr.count("\n") == 1 and "ssh -L" in done.stderr


def test_the_folder_is_its_owners_alone(served):
    folder = served.folder / "run.oars-label"
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    for name in ("token", "log.sqlite"):
        assert stat.S_IMODE(os.stat(folder / name).st_mode) == 0o600


def test_the_token_is_on_no_command_line(tmp_path):
    source(tmp_path)
    browser = tmp_path / "browser.sh"
    browser.write_text('#!/bin/sh\nprintf "%s" "$1" > "$0.tmp" && mv "$0.tmp" "$0.opened"\n')
    browser.chmod(0o700)
    server = Server(tmp_path, "run.h5", DISPLAY=":0", BROWSER=f"{browser} %s")
    opened = tmp_path / "browser.sh.opened"
    wait_for(opened.exists, "no browser was started")
    page = tmp_path / "run.oars-label" / "open.html"
    assert opened.read_text() == page.as_uri() and server.address in page.read_text()
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    server.kill()


def test_a_token_that_was_cut_is_made_anew(tmp_path):
    source(tmp_path)
    server = Server(tmp_path, "run.h5")
    server.kill()
    (tmp_path / "run.oars-label" / "token").write_text("")  # as a full disk leaves it
    again = Server(tmp_path, "run.h5", port=server.port)
    assert len(again.token) == 43 and again.token != server.token
    for token in ("", server.token):
        answer = send(again, "POST", "/enter", json.dumps({"token": token}).encode())
        assert status(answer) == 403 and b"set-cookie" not in answer.lower()
    assert Client(again.port, again.token).get("/api/state")["person"] == "person 1"
    again.kill()


def test_a_folder_that_others_can_use_is_refused(tmp_path):
    source(tmp_path)
    folder = tmp_path / "run.oars-label"
    folder.mkdir()
    for mode in (0o755, 0o770, 0o701):
        folder.chmod(mode)
        done = oars(tmp_path, "label", "run.h5", "--export", code=2)
        assert done.stderr.count("\n") == 1 and "chmod 700" in done.stderr
        assert not list(folder.iterdir()) and stat.S_IMODE(folder.stat().st_mode) == mode
    folder.chmod(0o700)
    assert "0 of 150" in oars(tmp_path, "label", "run.h5", "--export", code=0).stdout


def test_slow_clients_hold_nobody_up(served, client):
    answers = {}
    slow = {"head": b"POST /api/label HTTP/1.1\r\nHost: loc",
            "body": f"POST /api/label HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nOrigin: http://127.0.0.1:"
                    f"{served.port}\r\nCookie: {client.cookie}\r\nContent-Type: application/json\r\nContent-Length: 100"
                    "\r\n\r\n{".encode(), "nothing": b""}
    threads = [threading.Thread(target=lambda name=name, text=text: answers.update({name: served.raw(text, 25)}))
               for name, text in slow.items()]
    for thread in threads:
        thread.start()
    assert client.get("/api/state")["rows"] == ROWS  # others are served meanwhile
    for thread in threads:
        thread.join()
    assert answers["head"] == answers["nothing"] == b""
    assert status(answers["body"]) == 408
