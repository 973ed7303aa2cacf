# SPDX-License-Identifier: Apache-2.0
"""A hub of one model on localhost: the part of its HTTP interface that a download uses."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

MODEL = "somebody/Some-Model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Status and headers of the hub's answers to a question that it refuses.
REFUSALS: dict[str, tuple[int, dict[str, str]]] = {
    "missing": (404, {"X-Error-Code": "RepoNotFound"}),
    "gated": (403, {"X-Error-Code": "GatedRepo"}),
    "revision": (404, {"X-Error-Code": "RevisionNotFound"}),
    "failing": (500, {}),
    "a web page": (200, {}),
}


class Hub:
    """What was asked for, and what is there."""

    def __init__(self, directory: Path | None, refusal: str, sizes: dict[str, int]):
        self.directory = directory
        self.refusal = refusal
        self.sizes = sizes
        """Sizes in the listing that differ from the files'."""
        self.fetched: list[str] = []
        self.url = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path."""
        if self.refusal:
            status, headers = REFUSALS[self.refusal]
            return status, headers, b"<html>no</html>"
        assert self.directory is not None
        if path.startswith(f"/api/models/{MODEL}"):
            body = self._tree() if f"{MODEL}/tree/" in path else self._listing()
            return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()
        prefix = f"/{MODEL}/resolve/{COMMIT}/"
        file = self.directory / path.removeprefix(prefix)
        if not path.startswith(prefix) or not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        content = file.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, content

    def _files(self) -> dict[str, int]:
        assert self.directory is not None
        files = sorted(self.directory.iterdir())
        return {f.name: self.sizes.get(f.name, f.stat().st_size) for f in files}

    def _listing(self) -> dict[str, object]:
        entries = [{"rfilename": n, "size": s} for n, s in self._files().items()]
        return {"id": MODEL, "modelId": MODEL, "sha": COMMIT, "siblings": entries}

    def _tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": n, "size": s, "oid": f"{i:040x}"}
            for i, (n, s) in enumerate(self._files().items())
        ]


@contextlib.contextmanager
def running_hub(
    directory: Path | None, refusal: str = "", sizes: dict[str, int] | None = None
) -> Iterator[Hub]:
    """A hub that serves `directory` as MODEL, or refuses everything in one way."""
    hub = Hub(directory, refusal, sizes or {})

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path.partition("?")[0])
            if self.command == "GET":
                hub.fetched.append(self.path.rpartition("/")[2])
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
