"""The metrics of the webhook, over both of its workers."""

import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mgpu.version import own_version
from tests.builders import container, pod, share
from tests.mgpu.serving.process import Client, Server
from tests.mgpu.serving.reviews import review
from tests.waiting import until

RUN = "from mgpu.cli.main import main; main()"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = ("--host", "127.0.0.1", "--port", "0", "--metrics-port", "0")
    server = Server("-c", RUN, "webhook", *options, addresses=2)
    yield server
    server.close()


def scrape(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports[1]}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def authority(folder: Path) -> Path:
    """Return the CA of the certificate that the process has created."""
    (found,) = folder.glob("mgpu-*/ca.crt")
    return found


def counting(folder: Path) -> dict[int, Path]:
    """Return the file of each worker that has counted a review, by process id."""
    files = folder.glob("mgpu-metrics-*/counter_*.db")
    return {int(file.stem.partition("_")[2]): file for file in files if b"validate" in file.read_bytes()}


def ask_until_both_have_counted(server: Server, folder: Path) -> int:
    asked = 0

    def both() -> int | None:
        nonlocal asked
        asked += 1
        with Client(server.ports[0], authority(folder)) as client:  # one connection has one worker
            for raw in (share(), pod("p", container("c", 120))):
                client.request(review(raw), "/validate")
        return asked if len(counting(folder)) == 2 else None

    return until(both)


def test_counts_of_all_workers_are_served_by_each_and_outlive_a_worker(server: Server, tmp_path: Path) -> None:
    asked = ask_until_both_have_counted(server, tmp_path)
    wanted = {
        'mgpu_admission_reviews_total{kind="Pod",path="validate",result="allowed"}': asked,
        'mgpu_admission_reviews_total{kind="Pod",path="validate",result="denied"}': asked,
        'mgpu_admission_denials_total{path="validate",rule="whole-cards"}': asked,
        'mgpu_admission_seconds_count{path="validate"}': 2 * asked,
        f'mgpu_build_info{{part="webhook",version="{own_version()}"}}': 1,
    }
    for _ in range(6):  # any worker may answer
        found = scrape(server)
        assert {name: found[name] for name in wanted} == wanted
    gone, certificate = min(counting(tmp_path)), authority(tmp_path).read_bytes()
    os.kill(gone, signal.SIGTERM)
    until(lambda: not Path(f"/proc/{gone}").exists())
    for _ in range(6):
        found = scrape(server)
        assert {name: found[name] for name in wanted} == wanted
    assert authority(tmp_path).read_bytes() == certificate  # an ended worker must not remove the certificate
    assert len(list(tmp_path.glob("mgpu-*"))) == 2
    server.terminate()
    assert server.join() == 0
    assert not list(tmp_path.glob("mgpu-*"))
