"""A person without a browser: talks to the server over HTTP, as the page does. ``--simulate`` and the tests use it."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

from oars.label.errors import LabelError


class Client:
    """One browser's worth of cookie, on one connection."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self.cookie = port, ""
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.post("/enter", token=token)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any, bytes]:
        """Status, headers and body of an answer, whatever it is."""
        words = {"Host": f"127.0.0.1:{self._port}", "Cookie": self.cookie, **headers}
        self._connection.request(method, path, body, {name: value for name, value in words.items() if value})
        answer = self._connection.getresponse()
        return answer.status, answer.headers, answer.read()

    def get(self, path: str) -> Any:
        """The JSON that this address gives."""
        return self._json(*self.ask("GET", path))

    def post(self, path: str, **body: Any) -> Any:
        """Do this action; the JSON that it answers."""
        return self._json(*self.ask("POST", path, json.dumps(body).encode(), **{
            "Content-Type": "application/json", "Origin": f"http://127.0.0.1:{self._port}"}))

    def _json(self, status: int, headers: Any, body: bytes) -> Any:
        if headers.get("Set-Cookie"):
            self.cookie = headers["Set-Cookie"].partition(";")[0]
        found: Any = json.loads(body) if body else None
        if status >= 400:
            raise LabelError(found["error"], status)
        return found

    def settled(self, seconds: float = 600, whole: bool = False) -> dict[str, Any]:
        """The state, once the images are read and the model knows all labels; ``whole``: on all features, also on those
        that take long."""
        until = time.monotonic() + seconds
        while True:
            state = self.get("/api/state")
            if state["features"] and not state["model"]["busy"] and not (whole and state["coming"]):
                return state
            if time.monotonic() > until or (state["note"] and not state["progress"] and not state["features"]):
                raise LabelError(state["note"] or "the server has not come to rest")
            time.sleep(0.05)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
