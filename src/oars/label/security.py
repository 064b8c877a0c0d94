"""Who may talk to the server: only pages of its own, of people who have its token, on this machine.

Other people work on the same login node, and other pages run in the same browser. So: an exact ``Host`` (no other name
may be bound to us), a cookie that only the token buys, for everything that changes something the exact ``Origin`` and
``application/json``, small bodies that come soon. What is refused is written down.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

LARGEST_BODY = 1 << 20
SECONDS = 10.0  # for a request to arrive
_LONGEST_LOG = 10 << 20
OPEN = ("/", "/page/", "/enter")  # without a cookie: they hold nothing of the project

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
                               "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Gate:
    """Lets requests in, or says why not."""

    def __init__(self, port: int, token: str, log: Path, sessions: dict[str, str],
                 remember: Callable[[str, str], None]) -> None:
        self.hosts = {f"{name}:{port}" for name in ("localhost", "127.0.0.1")}
        self.cookie = f"oars-label-{port}"
        self._token, self._log = token, log
        self._sessions, self._remember = sessions, remember
        self._entering = threading.Lock()

    async def __call__(self, request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        why = self._refused(request)
        if why is None and request.method == "POST":
            why = await self._body(request)
        if why is not None:
            self.note(request, why[1])
            response: Response = JSONResponse({"error": why[1]}, why[0])
            if request.method == "POST":
                response.headers["Connection"] = "close"  # the rest of its body is not read
        else:
            response = await go_on(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    def _refused(self, request: Request) -> tuple[int, str] | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if host not in self.hosts:
            return 421, f"this server does not answer to the name {host[:80]!r}"
        if request.method not in ("GET", "HEAD", "POST"):
            return 405, f"{request.method[:20]} is not done here"
        path = request.url.path
        if origin is not None and origin != f"http://{host}":
            return 403, f"a page of {origin[:80]!r} may not ask this server"
        followed = path == "/" and request.method == "GET" and request.headers.get("sec-fetch-mode") == "navigate" \
            and request.headers.get("sec-fetch-dest") == "document"  # a link: the page itself holds nothing
        if request.headers.get("sec-fetch-site") in ("cross-site", "same-site") and not followed:
            return 403, "a page of another site may not ask this server"
        if origin is None and (request.method == "POST" or (
                path == "/api/events" and request.headers.get("sec-fetch-site") != "same-origin")):
            return 403, "the request does not say which page it is from (Origin)"
        if request.method == "POST" and request.headers.get("content-type", "").partition(";")[0].strip() != \
                "application/json":
            return 415, "only application/json is read"
        if not any(path == one or (one.endswith("e/") and path.startswith(one)) for one in OPEN):
            if self.person(request) is None:
                return 401, "open the address that oars label printed: this browser has no cookie of it"
        return None

    async def _body(self, request: Request) -> tuple[int, str] | None:
        """Read it, if it is small and comes in time; Starlette keeps it for the handler."""
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > LARGEST_BODY:
            return 413, f"the request is longer than {LARGEST_BODY} bytes"
        parts, size = [], 0
        try:
            async with asyncio.timeout(SECONDS):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > LARGEST_BODY:
                        return 413, f"the request is longer than {LARGEST_BODY} bytes"
        except TimeoutError:
            return 408, f"the request took longer than {SECONDS:.0f} s to arrive"
        request.state.body = b"".join(parts)
        return None

    def person(self, request: Request) -> str | None:
        """Whose cookie this is."""
        secret = request.cookies.get(self.cookie, "")
        return self._sessions.get(_hash(secret)) if secret else None

    def enter(self, request: Request, token: Any) -> Response | None:
        """A cookie for the token; None if it is another token."""
        if not isinstance(token, str) or not secrets.compare_digest(token.encode(), self._token.encode()):
            self.note(request, "a wrong token")
            return None
        response = Response(status_code=204)
        if self.person(request) is None:
            secret = secrets.token_urlsafe(32)
            with self._entering:  # browsers that enter at once are different people
                person = f"person {len(self._sessions) + 1}"
                self._remember(_hash(secret), person)
                self._sessions[_hash(secret)] = person
            response.set_cookie(self.cookie, secret, httponly=True, samesite="strict", max_age=90 * 86400, path="/")
        return response

    def note(self, request: Request, why: str) -> None:
        """Write down what was refused, so long as the file is not large."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {request.method[:20]} {request.url.path[:200]!r}: {why}\n"
        try:
            if not self._log.exists() or self._log.stat().st_size < _LONGEST_LOG:
                with open(self._log, "a") as file:
                    file.write(line)
        except OSError:
            pass  # a full disk must not keep the server from refusing


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class Patient(H11Protocol):
    """Closes a connection on which no whole request begins within ten seconds: slow clients hold nobody up."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = self.loop.call_later(SECONDS, self._late)

    def data_received(self, data: bytes) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._timer is None:
            self._timer = self.loop.call_later(SECONDS, self._late)
        super().data_received(data)
        if self._timer is not None and self.cycle is not None and not self.cycle.response_complete:
            self._timer.cancel()
            self._timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _late(self) -> None:
        self._timer = None
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()
