"""The audit of the dependencies, against a service of our own: what is found turns it red, silence does not."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

AUDIT = Path(__file__).parent.parent / ".ci" / "audit.py"
KNOWN = {
    "id": "GHSA-test-test-test",
    "modified": "2026-01-01T00:00:00Z",
    "summary": "for one",
    "affected": [{"package": {"name": "zarr", "ecosystem": "PyPI"}, "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.1"}]}]}],
}  # fmt: skip


class Service(BaseHTTPRequestHandler):
    vulnerable = ""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {"vulns": [KNOWN]} if asked["package"]["name"] == self.vulnerable else {}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/query"
    server.shutdown()
    server.server_close()


def audit(url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, AUDIT, "--osv-url", url], capture_output=True, text=True)


def test_the_audit(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = len([line for line in (AUDIT.parent.parent / "constraints.txt").read_text().splitlines() if "==" in line])
    done = audit(service)
    assert (done.returncode, done.stdout) == (
        0,
        f"{pinned} of {pinned} pinned packages audited, 0 known vulnerabilities\n",
    )
    monkeypatch.setattr(Service, "vulnerable", "zarr")
    done = audit(service)
    assert done.returncode == 1
    first, last = done.stdout.splitlines()
    assert "zarr" in first
    assert first.endswith("GHSA-test-test-test, mended in 99.1")
    assert last.endswith("1 known vulnerabilities")
    done = audit("http://127.0.0.1:9/v1/query")
    assert done.returncode == 0
    assert done.stdout.startswith("NOT AUDITED: ")
    assert len(done.stdout.splitlines()) == 1
    done = subprocess.run([sys.executable, AUDIT, "--no-such-flag"], capture_output=True, text=True)
    assert (done.returncode, done.stdout[:27]) == (1, "NOT AUDITED: pip-audit fail")
