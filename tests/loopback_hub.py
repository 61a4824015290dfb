"""A Hugging Face hub on 127.0.0.1: real clients talk to it when HF_ENDPOINT names `Hub.url`.

Serves root/datasets/OWNER/NAME and root/models/OWNER/NAME.
"""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0de"


@dataclass
class Hub:
    root: Path
    gated: dict[str, int] = field(default_factory=dict)  # repository: 401 or 403, for its files but not its pages
    failing: dict[str, int] = field(default_factory=dict)  # path: how often it answers 503 at first
    silent: set[str] = field(default_factory=set)  # repositories that are never answered for
    url: str = ""
    requests: list[str] = field(default_factory=list)
    bytes_served: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    def environment(self, home: Path) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}


class HubError(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code, self.message = status, code, message


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    server = Server(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield hub
    server.shutdown()
    server.server_close()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Clients hang up: those that are killed, and those that lose their patience."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        posted = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if any(repo in path for repo in self.hub.silent):
            time.sleep(60)
        if self.hub.failed[path] < self.hub.failing.get(path, 0):
            self.hub.failed[path] += 1
            return self.reply(503, b"busy")
        try:
            self.route(path.strip("/").split("/"), posted)
        except HubError as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": error.message, "X-Repo-Commit": COMMIT}
            self.reply(error.status, json.dumps({"error": error.message}).encode(), headers)

    do_HEAD = do_POST = do_GET

    def route(self, parts: list[str], posted: bytes) -> None:
        if parts[0] == "api" and parts[1:2] and parts[1] in ("datasets", "models"):
            kind, repo, verb, rest = parts[1], "/".join(parts[2:4]), parts[4:5], parts[5:]
        elif "resolve" in parts:
            kind = "datasets" if parts[0] == "datasets" else "models"
            at = parts.index("resolve")
            repo, verb, rest = "/".join(parts[at - 2 : at]), ["resolve"], parts[at + 1 :]
        else:
            raise HubError(404, "EntryNotFound", "no such page")
        folder = self.hub.root / kind / repo
        if not folder.is_dir():
            raise HubError(401, "RepoNotFound", "Repository not found")
        if rest[:1] and rest[0] not in ("main", COMMIT):
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {rest[0]}")
        if verb in ([], ["revision"]):
            self.info(repo, folder)
        elif verb == ["tree"]:
            self.tree(folder, folder.joinpath(*rest[1:]))
        elif verb == ["paths-info"]:
            self.paths_info(folder, posted)
        elif verb == ["resolve"]:
            if repo in self.hub.gated:
                raise HubError(self.hub.gated[repo], "GatedRepo", f"Access to {repo} is restricted")
            self.file(folder.joinpath(*rest[1:]))
        else:
            raise HubError(404, "EntryNotFound", f"no such verb: {verb}")

    def info(self, repo: str, folder: Path) -> None:
        files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
        info = {"id": repo, "sha": COMMIT, "private": False, "gated": "auto" if repo in self.hub.gated else False}
        info |= {"disabled": False, "downloads": 0, "likes": 0, "tags": [], "siblings": [{"rfilename": f} for f in files]}
        self.json(info)

    def tree(self, folder: Path, sub: Path) -> None:
        if not sub.is_dir():
            raise HubError(404, "EntryNotFound", "no such folder")
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", [""])[0].lower() in ("true", "1")
        self.json([entry(folder, path) for path in sorted(sub.rglob("*") if recursive else sub.iterdir())])

    def paths_info(self, folder: Path, posted: bytes) -> None:
        is_json = "json" in self.headers.get("Content-Type", "")
        wanted = json.loads(posted)["paths"] if is_json else parse_qs(posted.decode())["paths"]
        paths = [folder / name for name in ([wanted] if isinstance(wanted, str) else wanted)]
        self.json([entry(folder, path) for path in paths if path.exists()])

    def file(self, path: Path) -> None:
        if not path.is_file():
            raise HubError(404, "EntryNotFound", "Entry not found")
        data = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if wanted is None:
            return self.reply(200, data, headers)
        low, _, high = wanted.removeprefix("bytes=").partition("-")
        start = int(low) if low else len(data) - int(high)
        stop = min(int(high) + 1 if low and high else len(data), len(data))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self.reply(206, data[start:stop], headers)

    def json(self, content: Any) -> None:
        self.reply(200, json.dumps(content).encode())

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.hub.bytes_served += len(body)


def entry(folder: Path, path: Path) -> dict[str, Any]:
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
    data = path.read_bytes()
    return {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name}
