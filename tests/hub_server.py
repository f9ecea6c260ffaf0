"""A hub on 127.0.0.1: what huggingface_hub asks of one, for models that lie in local folders."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)/(?P<what>revision|tree)/(?P<revision>[^/]+)")
_FILE = re.compile(r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class Repository:
    """A model: the folder of each commit, and the commit of each branch. With `token`, it is gated."""

    commits: dict[str, Path]
    branches: dict[str, str]
    token: str | None = None

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)


@dataclass(frozen=True)
class Asked:
    """One request: method, path, its Range header and the status of the answer."""

    method: str
    path: str
    range: str | None
    status: int


@dataclass
class Hub:
    """What is served, what was asked, and after how many bytes the next answer for a file is cut off."""

    url: str = ""
    models: dict[str, Repository] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    def add(self, model_id: str, folder: Path, branch: str = "main", token: str | None = None) -> str:
        """Puts a folder onto a branch and returns the new commit."""
        model = self.models.setdefault(model_id, Repository({}, {}, token))
        commit = hashlib.sha1(f"{model_id} {len(model.commits)}".encode()).hexdigest()
        model.commits[commit] = folder
        model.branches[branch] = commit
        return commit

    def fetched(self, suffix: str = "") -> list[str]:
        """The files that were asked for, in order of their names."""
        files = {match["file"] for asked in self.asked if asked.method == "GET" and (match := _FILE.match(asked.path))}
        return sorted(file for file in files if file.endswith(suffix))


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub without models."""
    hub = Hub()

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Requests are noted in the hub."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        match = _API.fullmatch(path) or _FILE.fullmatch(path)
        model = self.served.models.get(match["id"]) if match else None
        if match is None or model is None:
            known = self.headers.get("Authorization")
            return self._send(404 if known else 401, {"X-Error-Code": "RepoNotFound"} if known else {})
        commit = model.commit(match["revision"])
        if commit is None:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        folder = model.commits[commit]
        if "what" in match.groupdict():
            files = sorted(file for file in folder.iterdir() if file.is_file())
            if match["what"] == "tree":
                return self._json([_tree_entry(file) for file in files])
            return self._json({"id": match["id"], "sha": commit, "siblings": [{"rfilename": f.name} for f in files]})
        if model.token and self.headers.get("Authorization") != f"Bearer {model.token}":
            status = 403 if self.headers.get("Authorization") else 401
            return self._send(status, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        file = folder / match["file"]
        if not file.is_file():
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        return self._send_file(file, commit)

    def _send_file(self, file: Path, commit: str) -> None:
        content = file.read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": commit,
            "X-Linked-Size": str(len(content)),
            "Accept-Ranges": "bytes",
        }
        cut = self.served.cut.pop(file.name, None) if self.command == "GET" else None
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if wanted is None:
            return self._send(200, headers, content, cut)
        start = int(wanted[1])
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self._send(206, headers, content[start:], cut)

    def _json(self, content: object) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"", cut: int | None = None) -> None:
        """With `cut`, the connection ends after so many bytes of the body."""
        self.served.asked.append(Asked(self.command, self.path, self.headers.get("Range"), status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


def _tree_entry(file: Path) -> dict[str, object]:
    oid = hashlib.sha1(file.name.encode()).hexdigest()
    return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": oid}
