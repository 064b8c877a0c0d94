"""Drives Chromium through its DevTools protocol: real events of mouse, keys and fingers; pictures; the console.

A websocket of our own: one connection, text frames, no fragments from our side.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from running import environment

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-component-update", "--disable-background-networking", "--remote-debugging-port=0")
CODES = {"Enter": 13, "Escape": 27, " ": 32, "Tab": 9, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36,
         "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
SHIFT = 8


class Chromium:
    """A browser with an empty profile below ``folder``."""

    def __init__(self, folder: Path, *flags: str, size: tuple[int, int] = (1280, 720)) -> None:
        program = shutil.which("chromium")
        assert program, "these tests need Chromium: apt-get install chromium"
        profile = folder / "profile"
        profile.mkdir(parents=True)
        self.size = size
        self.process = subprocess.Popen([program, *FLAGS, *flags, f"--user-data-dir={profile}", "about:blank",
                                         f"--window-size={size[0]},{size[1]}"], stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL, env=environment())
        note = profile / "DevToolsActivePort"
        wait_for(lambda: note.exists() and note.read_text().count("\n"), "Chromium does not start", 60)
        self.port = int(note.read_text().split()[0])
        self.tabs: list[Tab] = []

    def open(self, address: str, touch: bool = False, size: tuple[int, int] | None = None) -> Tab:
        with urlopen(Request(f"http://127.0.0.1:{self.port}/json/new?about:blank", method="PUT"), timeout=30) as answer:
            tab = Tab(json.load(answer)["webSocketDebuggerUrl"], size or self.size, touch)
        self.tabs.append(tab)
        tab.go(address)
        return tab

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        for tab in self.tabs:
            tab.socket.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Tab:
    """One page. ``console`` has what it said: errors, warnings, requests that the browser refused."""

    def __init__(self, address: str, size: tuple[int, int], touch: bool) -> None:
        self.socket = _connect(address)
        self.number = 0
        self.console: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1,
                  mobile=touch)
        if touch:
            self.call("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        _send(self.socket, json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(_receive(self.socket))
            if message.get("id") == self.number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            self.console.append(params["exceptionDetails"].get("exception", {}).get("description", str(params)))
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif message["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.console.append(" ".join(str(word.get("value")) for word in params["args"]))

    def go(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def js(self, code: str) -> Any:
        """The value of an expression; promises are waited for."""
        done = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, f"{code}: {done['exceptionDetails']}"
        return done["result"].get("value")

    def until(self, code: str, seconds: float = 90) -> Any:
        """Waits until an expression is true, and gives its value."""
        return wait_for(lambda: self.js(code), f"never true: {code}", seconds,
                        lambda: f"\nsaid: {self.text('#said')}\nconsole: {self.console[-5:]}")

    def text(self, selector: str) -> str:
        return self.js(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")

    def where(self, selector: str, index: int = 0) -> tuple[float, float]:
        """The middle of an element, once it is there and nothing lies over it."""
        find = f"[...document.querySelectorAll({json.dumps(selector)})].at({index})"
        code = f"""(() => {{ const e = {find}; if (!e) return null; const b = e.getBoundingClientRect();
            const [x, y] = [b.x + b.width / 2, b.y + b.height / 2]; const top = document.elementFromPoint(x, y);
            return top && (e.contains(top) || top.contains(e)) && b.width ? [x, y] : null; }})()"""
        x, y = self.until(code)
        return x, y

    # The mouse.

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str, index: int = 0, modifiers: int = 0) -> None:
        x, y = self.where(selector, index)
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1, modifiers=modifiers)

    def drag(self, *places: tuple[float, float], steps: int = 6) -> None:
        """The pressed mouse along these places."""
        self.mouse("mouseMoved", *places[0])
        self.mouse("mousePressed", *places[0], button="left", clickCount=1)
        for x, y in _along(places, steps):
            self.mouse("mouseMoved", x, y, button="left", buttons=1)
        self.mouse("mouseReleased", *places[-1], button="left", clickCount=1)

    def wheel(self, x: float, y: float, by: float) -> None:
        self.mouse("mouseWheel", x, y, deltaX=0, deltaY=by)

    # Fingers.

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        self.call("Input.dispatchTouchEvent", type=kind,
                  touchPoints=[{"x": x, "y": y, "id": at} for at, (x, y) in enumerate(points)])

    def tap(self, selector: str, index: int = 0) -> None:
        self.touch("touchStart", self.where(selector, index))
        self.touch("touchEnd")

    def swipe(self, *places: tuple[float, float], rest: float = 0, steps: int = 8) -> None:
        """One finger along these places, after it rested a while on the first."""
        self.touch("touchStart", places[0])
        time.sleep(rest)
        for place in _along(places, steps):
            self.touch("touchMove", place)
        self.touch("touchEnd")

    # Keys.

    def press(self, *keys: str, modifiers: int = 0) -> None:
        """Keys one after another: characters, or names such as ArrowLeft."""
        for key in keys:
            shift = SHIFT if len(key) == 1 and (key.isupper() or key in "?+") else 0
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            more = {"key": key, "code": _code(key), "modifiers": modifiers | shift,
                    "windowsVirtualKeyCode": CODES.get(key, ord(key.upper()) if len(key) == 1 else 0)}
            self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **more)
            self.call("Input.dispatchKeyEvent", type="keyUp", **more)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


def wait_for(true: Callable[[], Any], else_: str, seconds: float = 90, more: Callable[[], str] = str) -> Any:
    until = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < until, else_ + more()
        time.sleep(0.05)
    return value


def _code(key: str) -> str:
    """The name of the key itself, whatever letter is on it."""
    if key.isdigit():
        return f"Digit{key}"
    if len(key) == 1 and key.isalpha():
        return f"Key{key.upper()}"
    return {" ": "Space", "?": "Slash", "+": "Equal", "-": "Minus"}.get(key, key)


def _along(places: tuple[tuple[float, float], ...], steps: int) -> list[tuple[float, float]]:
    return [(x + (to_x - x) * step / steps, y + (to_y - y) * step / steps)
            for (x, y), (to_x, to_y) in zip(places, places[1:], strict=False) for step in range(1, steps + 1)]


def _connect(address: str) -> socket.socket:
    host, path = address.removeprefix("ws://").split("/", 1)
    name, port = host.split(":")
    wire = socket.create_connection((name, int(port)), timeout=120)
    key = base64.b64encode(os.urandom(16)).decode()
    wire.sendall(f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                 f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += wire.recv(1)
    assert b" 101 " in head, head
    return wire


def _send(wire: socket.socket, text: str) -> None:
    data, mask = text.encode(), os.urandom(4)
    size = bytes([0x80 | len(data)]) if len(data) < 126 else struct.pack("!BH", 0xFE, len(data)) if len(data) < 65536 \
        else struct.pack("!BQ", 0xFF, len(data))
    wire.sendall(b"\x81" + size + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(data)))


def _receive(wire: socket.socket) -> str:
    text = b""
    while True:
        first, second = _exactly(wire, 2)
        size = second & 0x7F
        if size >= 126:
            size = int.from_bytes(_exactly(wire, 2 if size == 126 else 8), "big")
        data = _exactly(wire, size)
        if first & 0x0F in (0, 1):
            text += data
            if first & 0x80:
                return text.decode()
        assert first & 0x0F != 8, "Chromium closed the connection"


def _exactly(wire: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = wire.recv(size - len(data))
        assert more, "Chromium is gone"
        data += more
    return data
