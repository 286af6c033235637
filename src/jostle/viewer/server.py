"""The page and its answers over HTTP, for this machine alone unless asked otherwise.

No request names a path: files of the page are known by name from the start, and runs by their number on the command
line. On another address than the loopback one, every request needs the token that was printed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
import socket
import threading
import webbrowser
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from jostle.errors import ChainsFailedError, InputError
from jostle.viewer.answers import STATIC, Answers
from jostle.viewer.reading import UnreadableError

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
LOOPBACK = ("127.0.0.1", "localhost")
COOKIE = "jostle-token"
PORT = 8797


def make_app(answers: Answers, *, token: str | None = None) -> Starlette:
    """Return the application; with a token, only for those who have it."""
    files = {path.name: path for path in STATIC.iterdir() if path.suffix in TYPES}
    policy = _policy(files["index.html"].read_text())

    async def page(request: Request) -> Response:
        return _file(files["index.html"])

    async def static(request: Request) -> Response:
        path = files.get(request.path_params["name"])
        return _refusal("there is no such file", 404) if path is None else _file(path)

    async def answer(request: Request) -> Response:
        question = answers.questions.get(request.path_params["question"])
        if question is None:
            return _refusal("there is no such question", 404)
        try:
            found = await run_in_threadpool(question, dict(request.query_params))
        except (UnreadableError, ChainsFailedError) as problem:
            return _refusal(str(problem), 409)
        except InputError as error:
            return _refusal(str(error), 400)
        if isinstance(found, bytes):
            return Response(found, media_type="application/octet-stream")
        return Response(json.dumps(found, ensure_ascii=False, allow_nan=False), media_type="application/json")

    async def guard(request: Request, forward: Callable[[Request], Awaitable[Response]]) -> Response:
        if token is not None and not _known(request, token):
            return _refusal("this page needs the token that `jostle view` printed: open the address with ?token=…", 403)
        if token is not None and "token" in request.query_params:
            # Out of the address, so that a link that is passed on does not carry it.
            response: Response = RedirectResponse(request.url.path)
            response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        else:
            response = await forward(request)
        response.headers.update(
            {
                "Content-Security-Policy": policy,
                "X-Content-Type-Options": "nosniff",
                "X-Frame-Options": "DENY",
                "Referrer-Policy": "no-referrer",
                "Cross-Origin-Resource-Policy": "same-origin",
                "Cache-Control": "no-store",
            }
        )
        return response

    middleware = [Middleware(BaseHTTPMiddleware, dispatch=guard)]
    if token is None:
        # A name of somebody else's that resolves to this machine (DNS rebinding) is no name of ours.
        middleware.insert(0, Middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK], www_redirect=False))
    return Starlette(
        routes=[
            Route("/", page),
            Route("/static/{name}", static),
            Route("/api/{question}", answer),
        ],
        middleware=middleware,
    )


def _file(path: Path) -> Response:
    return Response(path.read_bytes(), media_type=TYPES[path.suffix])


def _refusal(message: str, status: int) -> Response:
    return JSONResponse({"error": message}, status_code=status)


def _known(request: Request, token: str) -> bool:
    given = request.query_params.get("token", request.cookies.get(COOKIE, ""))
    return hmac.compare_digest(given.encode(), token.encode())


def _policy(page: str) -> str:
    """Only our own files, and the one script that stands in the page: its map of modules."""
    scripts = re.findall(r"<script type=\"importmap\">(.*?)</script>", page, flags=re.DOTALL)
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    return (
        f"default-src 'none'; script-src 'self' {hashes}; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def serve(
    answers: Answers,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    open_browser: bool = True,
    say: Callable[[str], None] = print,
) -> None:
    """Serve until interrupted.

    Raises:
        InputError: the port is taken, or the address is none of this machine's.
    """
    outside = host not in LOOPBACK
    token = secrets.token_urlsafe(24) if outside else None
    bound = _bind(host, port)
    number = bound.getsockname()[1]
    shown = host if ":" not in host else f"[{host}]"
    address = f"http://{shown}:{number}/" + (f"?token={token}" if token else "")
    say(f"{address}  (Ctrl-C ends it)")
    if outside:
        say("anybody who can reach this machine and has this address can look at the runs")
    server = uvicorn.Server(uvicorn.Config(make_app(answers, token=token), log_level="warning", lifespan="off"))
    # The first click should not wait for the traces to be read.
    threading.Thread(target=answers.warm, daemon=True).start()
    if open_browser:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    server.run(sockets=[bound])


def _bind(host: str, port: int | None) -> socket.socket:
    """Our usual port or, where that is taken, any; the one that was asked for, or none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    candidates: Sequence[int] = (PORT, 0) if port is None else (port,)
    failure: Any = None
    for candidate in candidates:
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, candidate))
        except OSError as error:
            bound.close()
            failure = error
        else:
            return bound
    raise InputError(
        "view",
        got=f"{host} port {port or PORT} ({failure.strerror or failure})",
        expected="an address of this machine and a free port",
    )
