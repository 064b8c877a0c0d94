"""The addresses of the server, and what each takes and gives. Every request goes through the gate (``security.py``).

Work is done in threads, by ``desk.py``; this file only checks what came and says what goes. No path ever comes from a
request: the page's files are listed when the server starts.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from oars.data.errors import DataError
from oars.label import export, features
from oars.label import folder as folder_
from oars.label.desk import Actor
from oars.label.errors import LabelError, Repeated
from oars.label.pixels import png
from oars.label.security import Gate, Patient
from oars.label.serving import Serving

PAGE = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml",
          ".png": "image/png"}
_ALL = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]
_BEAT = 15.0  # seconds between signs of life to a listening page

Handler = Callable[[Request], Any]


class Server:
    """The routes."""

    def __init__(self, serving: Serving, port: int) -> None:
        self.serving, self.desk = serving, serving.desk
        folder = serving.folder
        self.project = hashlib.sha256(folder.token().encode()).hexdigest()[:16]  # which one a page's actions are for
        self.gate = Gate(port, folder.token(), folder.file(folder_.REFUSED), self.desk.log.sessions(),
                         self.desk.log.add_session)
        self.page = {path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in sorted(PAGE.glob("*"))
                     if path.suffix in _TYPES}
        gets: dict[str, Handler] = {
            "/": functools.partial(self._file, "index.html"), "/api/state": self._state, "/api/groups": self._groups,
            "/api/boundary": self._boundary, "/api/map": self._map, "/api/map/colours": self._colours,
            "/api/near": self._near, "/api/thumbs": self._thumbs, "/api/image": self._image, "/api/about": self._about,
            "/api/exam": self._exam, "/api/audit": self._audit, "/api/disputes": self._disputes,
            "/api/labels.csv": self._csv, "/api/live": self._live}
        gets |= {f"/page/{name}": functools.partial(self._file, name) for name in self.page}
        posts: dict[str, Handler] = {
            "/enter": self._enter, "/api/label": self._label, "/api/class": self._class,
            "/api/class/rename": self._rename, "/api/person": self._person, "/api/undo": self._undo,
            "/api/redo": self._redo, "/api/split": self._split, "/api/audit": self._judge, "/api/accept": self._accept}
        routes = [Route(path, self._route(gets.get(path), posts.get(path)), methods=_ALL)
                  for path in dict.fromkeys([*gets, *posts])]
        routes.append(Route("/api/events", self._events, methods=_ALL))
        routes.append(Route("/{rest:path}", self._route(None, None), methods=_ALL))
        self.app = Starlette(routes=routes)

    def _route(self, get: Handler | None, post: Handler | None) -> Any:
        async def answer(request: Request) -> Response:
            handler = post if request.method == "POST" else get
            if handler is None:
                known = get is not None or post is not None
                return JSONResponse({"error": "there is nothing here"}, 405 if known else 404)
            try:
                found = await run_in_threadpool(handler, request)
            except Repeated as error:
                return JSONResponse({"event": error.event, "changed": 0, "conflicts": [], "repeated": True})
            except LabelError as error:
                return JSONResponse({"error": str(error)}, error.status)
            except DataError as error:
                return JSONResponse({"error": str(error)}, 500)
            return found if isinstance(found, Response) else JSONResponse(found)

        async def gated(request: Request) -> Response:
            return await self.gate(request, answer)

        return gated

    async def _events(self, request: Request) -> Response:
        async def answer(request: Request) -> Response:
            if request.method == "POST":
                return JSONResponse({"error": "there is nothing here"}, 405)
            since = _number(request, "since", 0)

            async def lines() -> AsyncIterator[str]:
                with self.serving.listening() as queue:
                    last = self.desk.state.last
                    yield "retry: 1000\n\n"
                    if last > since:
                        yield f"data: {json.dumps({'event': last, 'what': 'label'})}\n\n"
                    while True:
                        try:
                            yield f"data: {await asyncio.wait_for(queue.get(), _BEAT)}\n\n"
                        except TimeoutError:
                            yield ": still here\n\n"

            return StreamingResponse(lines(), media_type="text/event-stream")

        return await self.gate(request, answer)

    def _who(self, request: Request) -> str:
        return self.gate.person(request) or ""

    def _actor(self, request: Request) -> Actor:
        """Who acts; stops here if the same action was done already, or was for what was served here before."""
        body = _body(request)
        action = body.get("action")
        if body.get("project", self.project) != self.project:
            raise LabelError("this was done in another project, and was not done in this one", 421)
        if action is not None and not (isinstance(action, str) and 0 < len(action) <= 80):
            raise LabelError("action: the page's name for it, 1 to 80 letters")
        actor = Actor(self._who(request), action)
        self.desk.once(actor)
        return actor

    def _person(self, request: Request) -> Response:
        self.desk.call(self._actor(request), _body(request, name=str)["name"])
        return Response(status_code=204)

    # ---- the page ----------------------------------------------------------------------------------------------------

    def _file(self, name: str, request: Request) -> Response:
        if name not in self.page:
            raise LabelError("this installation has no page: install manyoars again", 404)
        data, kind = self.page[name]
        return Response(data, media_type=kind)

    def _enter(self, request: Request) -> Any:
        answer = self.gate.enter(request, _body(request, token=str)["token"])
        if answer is None:
            raise LabelError("this token does not open the page: use the address that oars label printed", 403)
        return answer

    # ---- questions ---------------------------------------------------------------------------------------------------

    def _state(self, request: Request) -> Any:
        serving = self.serving
        return {"source": serving.folder.source, **self.desk.overview(self._who(request)), "live": serving.follow,
                "project": self.project, "image": serving.image, "progress": serving.progress,
                "coming": features.name_of(serving.coming) if serving.coming else None,
                "note": serving.note or next((one.note for one in (serving.live, serving.tuning) if one), None)
                or (self.desk.learner.failed if self.desk.learner else None)}

    def _live(self, request: Request) -> Any:
        if not self.serving.follow:
            raise LabelError("nothing is followed: start oars label with --live", 404)
        self.desk.ready()
        if self.serving.live is None:
            raise LabelError("following begins in a moment", 503)
        return self.serving.live.overview()

    def _exam(self, request: Request) -> Any:
        return self.desk.next_exam()

    def _disputes(self, request: Request) -> Any:
        return self.desk.disputes()

    def _groups(self, request: Request) -> Any:
        return self.desk.groups(_number(request, "size", 60, 1, 256), _number(request, "n", 8, 1, 100))

    def _boundary(self, request: Request) -> Any:
        return self.desk.boundary(_number(request, "n", 24, 1, 500))

    def _near(self, request: Request) -> Any:
        return self.desk.near(_number(request, "row"), _number(request, "n", 24, 1, 500))

    def _about(self, request: Request) -> Any:
        row = _number(request, "row")
        found = self.desk.about(row)
        return {**found, "key": self.serving.keys(row),
                "profile": self.serving.pictures.ask("profile", row=row)[0]["profile"]}

    def _thumbs(self, request: Request) -> Response:
        words = request.query_params.get("rows", "").split(",")
        if not all(word.isdecimal() and len(word) < 12 for word in words) or len(words) > 256:
            raise LabelError("rows= takes 1 to 256 numbers of rows, with commas between")
        rows = [int(word) for word in words]
        if max(rows) >= self.serving.folder.rows:
            raise LabelError(f"row {max(rows)} of {self.serving.folder.rows}")
        return Response(png(self.serving.thumbs(rows, _number(request, "size", 64, 8, 256))), media_type="image/png")

    def _image(self, request: Request) -> Response:
        row = _number(request, "row")
        if row >= self.serving.folder.rows:
            raise LabelError(f"row {row} of {self.serving.folder.rows}")
        found, data = self.serving.pictures.ask("image", row=row)
        return Response(data, media_type="application/octet-stream", headers={
            f"X-{name.capitalize()}": str(found[name]) for name in ("height", "width", "dtype")})

    def _map(self, request: Request) -> Response:
        found = self.serving.map()
        if found is None:
            return JSONResponse({"progress": self.serving.progress}, 202)
        return Response(np.uint32(len(found)).astype("<u4").tobytes() + found.astype("<f4").tobytes(),
                        media_type="application/octet-stream")

    def _colours(self, request: Request) -> Response:
        with self.desk.lock:
            state, labels = self.desk.state, self.desk.state.labels()
            table = np.zeros(len(state.names) + 1, np.uint8)
            for at, number in enumerate(state.classes()[:126]):
                table[number] = at + 1
            guess = self.desk.learner.guess if self.desk.learner else None
            colours = table[labels]
            if guess is not None:
                still = state.open()
                colours[still] = table[guess.best[still]] | 128
        return Response(colours[:self.serving.mapped].tobytes(), media_type="application/octet-stream")

    def _audit(self, request: Request) -> Any:
        return self.serving.audits.draw(request.query_params.get("class", ""))

    def _csv(self, request: Request) -> Response:
        return Response(export.text(self.desk, self.serving.keys), media_type="text/csv",
                        headers={"Content-Disposition": "attachment; filename=labels.csv"})

    # ---- actions -----------------------------------------------------------------------------------------------------

    def _label(self, request: Request) -> Any:
        body = _body(request, rows=list, how=str, seen=int)
        if "class" not in body or not (body["class"] is None or isinstance(body["class"], str)):
            raise LabelError("class: a class's name, or null")
        return self.desk.label(self._actor(request), _rows(body["rows"]), body["class"], body["how"],
                               max(0, min(body["seen"], 1 << 60)), body.get("final") is True)

    def _class(self, request: Request) -> Any:
        return self.desk.add_class(self._actor(request), _body(request, name=str)["name"])

    def _rename(self, request: Request) -> Any:
        body = _body(request, **{"from": str, "to": str})
        return self.desk.rename(self._actor(request), body["from"], body["to"])

    def _undo(self, request: Request) -> Any:
        return self.desk.undo(self._actor(request), False)

    def _redo(self, request: Request) -> Any:
        return self.desk.undo(self._actor(request), True)

    def _split(self, request: Request) -> Any:
        return self.desk.split(_rows(_body(request, rows=list)["rows"]))

    def _judge(self, request: Request) -> Any:
        body = _body(request, **{"class": str, "rows": list, "wrong": list})
        return self.serving.audits.judge(self._actor(request), body["class"], _rows(body["rows"]), _rows(body["wrong"]))

    def _accept(self, request: Request) -> Any:
        return self.serving.audits.accept(self._actor(request), _body(request, **{"class": str})["class"])


def _number(request: Request, name: str, usual: int | None = None, low: int = 0, high: int = 1 << 40) -> int:
    text = request.query_params.get(name, "" if usual is None else str(usual))
    if not text.isdecimal() or len(text) > 15 or not low <= int(text) <= high:
        raise LabelError(f"{name}={text[:40]!r} is no number from {low} to {high}")
    return int(text)


def _rows(rows: list[Any]) -> list[int]:
    if not all(type(row) is int and 0 <= row < 1 << 40 for row in rows):
        raise LabelError("rows are numbers, from 0 on")
    return rows


def _body(request: Request, **types: type) -> dict[str, Any]:
    try:
        body = json.loads(request.state.body)
    except (ValueError, RecursionError):
        raise LabelError("the request is not JSON") from None
    if not isinstance(body, dict) or not all(type(body.get(name)) is kind for name, kind in types.items()):
        raise LabelError("the request needs " + ", ".join(f"{name} ({kind.__name__})" for name, kind in types.items()))
    return body


def serve(serving: Serving, listener: socket.socket) -> None:
    """Until Ctrl-C, or SIGTERM."""
    port = listener.getsockname()[1]
    config = uvicorn.Config(Server(serving, port).app, http=Patient, ws="none", lifespan="off", log_level="error",
                            access_log=False, server_header=False, timeout_keep_alive=30, limit_concurrency=200,
                            h11_max_incomplete_event_size=32768, timeout_graceful_shutdown=1, proxy_headers=False)
    uvicorn.Server(config).run(sockets=[listener])
