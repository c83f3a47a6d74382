import shlex
import sys
from typing import Any

import orjson
import pytest

from bench.peer import COMMAND, lists, peer, peer_pod

LISTENER = """
import json, sys, urllib.request, os
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"NodeNames": asked["NodeNames"][:1], "Error": ERROR}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(error: str) -> str:
    return f"{sys.executable} -c {shlex.quote(LISTENER.replace('ERROR', repr(error)))} {{port}}"


def amounts(pod: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = pod["spec"]["containers"][0]["resources"]["limits"]
    return found


def test_without_a_command_there_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMAND, raising=False)
    with peer(2) as found:
        assert found is None


def test_the_peer_listens_on_the_port_of_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND, command(""))
    with peer(2) as found:
        assert found
        took, cpu = found.filter(2, 20, 4096)
    assert took > 0
    assert cpu >= 0


def test_a_peer_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND, f"{sys.executable} -c 'raise SystemExit(\"no device config\")' {{port}}")
    with pytest.raises(RuntimeError, match=r"the peer ended with 1: .*no device config"), peer(2):
        pass


def test_the_pods_of_the_peer_hold_cards_that_its_nodes_registered() -> None:
    made = {path: [orjson.loads(item) for item in items] for path, items in lists(2).items()}
    cards = {
        card["id"]
        for node in made["/api/v1/nodes"]
        for card in orjson.loads(node["metadata"]["annotations"]["hami.io/node-nvidia-register"])
    }
    pods = made["/api/v1/pods"]
    held = [pod["metadata"]["annotations"]["hami.io/vgpu-devices-allocated"].split(",")[0] for pod in pods]
    assert (len(cards), len(pods)) == (16, 16)
    assert set(held) == cards


def test_a_pod_of_the_peer_requests_the_same_share() -> None:
    pod = peer_pod("p", 20, 4096)
    assert amounts(pod) == {"nvidia.com/gpu": "1", "nvidia.com/gpucores": "20", "nvidia.com/gpumem": "4096"}
    assert "hami.io/vgpu-node" not in (pod["metadata"].get("annotations") or {})
