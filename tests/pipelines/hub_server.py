"""A small Hub on loopback: what `huggingface_hub` asks for, and the ways in which it fails.

Serves Diffusers folders as repositories: the listing of a revision, its tree, and the files, with
HEAD, ETag, Range and the commit. Faults are set as attributes while it runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_environment(endpoint: str, folder: Path, **settings: str) -> dict[str, str]:
    """Variables of a process that asks this Hub, with its caches in a folder."""
    return {
        **{name: text for name, text in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "STOPDOWN_CACHE": str(folder / "cache"),
        **settings,
    }


class HubServer:
    """A Hub for a `with` block.

    Attributes:
        repos: repository → folder with its files.
        gated: repositories that ask for an agreement.
        token: when set, what a request must carry.
        cut_once: files of which only half is sent, the first time.
        withheld: files that are answered with status 500.
        held_until: file to what it waits for before it is sent as a whole.
        broken: every request is answered with status 500.
        silent: no request whose path holds this is answered; None for an answer to each.
        forged: file → the bytes that are sent in place of its own, under its own ETag.
        etags: file → the ETag that is announced in place of its own.
        requests: (method, path, Range header) in the order in which they came.
    """

    def __init__(self, repos: dict[str, Path]) -> None:
        self.repos = repos
        self.gated: set[str] = set()
        self.token = ""
        self.cut_once: set[str] = set()
        self.withheld: set[str] = set()
        self.held_until: dict[str, Callable[[], bool]] = {}
        self.broken = False
        self.silent: str | None = None
        self.forged: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        self.stopping = threading.Event()
        self.requests: list[tuple[str, str, str | None]] = []

    def __enter__(self) -> HubServer:
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Go away: from now on connections are refused."""
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def downloaded(self) -> set[str]:
        """Names of the files that were asked for with GET."""
        return {
            path.split("/resolve/")[1].partition("/")[2]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        }


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        hub, path = self.server_hub, unquote(urlparse(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if hub.silent is not None and hub.silent in path:
            hub.stopping.wait()
        if path.endswith(tuple(f"/{name}" for name in hub.repos)):
            path += "/revision/main"  # what is asked for without a revision
        repo = next((name for name in hub.repos if f"/{name}/" in path), None)
        if hub.broken:
            self._fail(500, "", "the server has a bad day")
        elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._fail(401, "", "Invalid username or password.")
        elif repo is None:
            self._fail(401, "RepoNotFound", "Repository not found")
        elif repo in hub.gated:
            self._fail(403, "GatedRepo", "Access to this repository is restricted")
        else:
            self._answer_repo(repo, path.partition(f"/{repo}/")[2], with_body=with_body)

    def _answer_repo(self, repo: str, rest: str, *, with_body: bool) -> None:
        folder = self.server_hub.repos[repo]
        verb, _, tail = rest.partition("/")
        revision, _, file = tail.partition("/")
        if revision not in ("main", COMMIT):
            self._fail(404, "RevisionNotFound", "Invalid rev id")
        elif verb == "revision":
            self._send_json({"id": repo, "sha": COMMIT, "siblings": _list_siblings(folder)})
        elif verb == "tree":
            self._send_json([_describe_file(folder, path) for path in _list_files(folder)])
        elif file in self.server_hub.withheld:
            self._fail(500, "", "this file has a bad day")
        elif (folder / file).is_file():
            self._send_file(folder / file, file, with_body=with_body)
        else:
            self._fail(404, "EntryNotFound", "Entry not found")

    def _send_json(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, path: Path, name: str, *, with_body: bool) -> None:
        content = path.read_bytes()
        etag = self.server_hub.etags.get(name, f'"{hashlib.sha256(content).hexdigest()}"')
        content = self.server_hub.forged.get(name, content)
        first, _, last = (self.headers.get("Range") or "bytes=0-")[6:].partition("-")
        start, is_part = int(first), bool(last) or first != "0"
        end = min(int(last) + 1, len(content)) if last else len(content)
        body = content[start:end]
        self.send_response(206 if is_part else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", etag)
        self.send_header("X-Repo-Commit", COMMIT)
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.end_headers()
        if not with_body:
            return
        while not (is_part or self.server_hub.held_until.get(name, lambda: True)()):
            if self.server_hub.stopping.wait(0.1):
                return
        if name in self.server_hub.cut_once:
            self.server_hub.cut_once.discard(name)
            body = body[: len(body) // 2]
            self.close_connection = True
        self.wfile.write(body)

    def _fail(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _list_siblings(folder: Path) -> list[dict[str, str]]:
    return [{"rfilename": path.relative_to(folder).as_posix()} for path in _list_files(folder)]


def _describe_file(folder: Path, path: Path) -> dict[str, Any]:
    name = path.relative_to(folder).as_posix()
    oid = hashlib.sha1(path.read_bytes()).hexdigest()
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": oid}
