"""The pure parts of the one-machine cluster, and its child processes."""

import sys
from pathlib import Path

import pytest

from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, whole_cards
from mgpu.model.mig import LAYOUTS
from mgpu.model.pods import Stage
from mgpu.model.slices import resource_of
from mgpu.presentation import request_text
from mgpu.settings import load_settings
from playground.cluster import MANAGED
from playground.installation import located, manifests
from playground.nodes import make_nodes, slice_nodes
from playground.processes import Process, StartError
from tests.builders import GIB
from tests.waiting import until

SHARE = ContainerRequest("c", core=300, memory=4 * GIB)


def test_the_last_of_several_nodes_takes_multi_gpu_pods() -> None:
    policies = [node.labels.get("vke.volcengine.com/mgpu-compute-policy") for node in make_nodes(3, 2)]
    assert policies == [None, None, "native-burst-share"]
    assert "vke.volcengine.com/mgpu-compute-policy" not in make_nodes(1, 2)[0].labels


def test_every_slice_that_there_can_be_is_the_extenders_business() -> None:
    names = {resource_of(profile.name) for layout in LAYOUTS for profile in layout.profiles}
    names |= {f"nvidia.com/gpu-{gigabytes}gb" for gigabytes in (1, 4, 80, 180)}
    assert {name for name in names if MANAGED.get(name) is not True} == set()


def test_cards_that_are_for_slices_are_nobody_elses() -> None:
    mig, mps = slice_nodes()
    assert (mig.whole_cards(), mig.all_labels) == ((), {"gpu.partitioning": "mig"})
    assert len(mps.whole_cards()) == 1


def test_webhooks_lead_to_this_machine_and_nothing_else_of_them_changes() -> None:
    ports = {"mgpu-webhook": 1, "mgpu-scheduler": 2}
    bundles = {"mgpu-webhook": b"one", "mgpu-scheduler": b"two"}
    urls = [
        webhook["clientConfig"]["url"]
        for manifest in manifests()
        for webhook in located(manifest, ports, bundles).get("webhooks") or ()
    ]
    served = [f"https://127.0.0.1:1/{path}" for path in ("rebuild", "mutate", "validate", "validate")]
    assert urls == ["https://127.0.0.1:2/bind-admission", *served]
    original = next(m for m in manifests() if m.get("webhooks"))
    moved = located(original, ports, bundles)
    assert moved["webhooks"][0]["clientConfig"]["caBundle"] == "dHdv"
    assert original["webhooks"][0]["rules"] == moved["webhooks"][0]["rules"]
    assert "service" in original["webhooks"][0]["clientConfig"]


def test_what_is_asked_in_words() -> None:
    init = ContainerRequest("i", core=100, memory=GIB, stage=Stage.INIT)
    wide = ContainerRequest("w", cards=2, core=500, memory=GIB)
    request = GpuRequest("mgpu", (init, SHARE, wide, whole_cards("all", 2)))
    assert request_text.asked(request) == (
        "init i: 10% and 1.0 GiB of one card; c: 30% and 4.0 GiB of one card; "
        "w: 50% and 1.0 GiB of each of 2 cards; all: 2 cards, whole"
    )


def test_a_whole_card_is_chosen_by_no_policy() -> None:
    settings = load_settings("cardPolicy: spread")
    assert "idle" in request_text.choice(GpuRequest("mgpu", (whole_cards("c", 1),)), settings)
    assert "spread" in request_text.choice(GpuRequest("mgpu", (SHARE,)), settings)


def test_a_process_that_ends_shows_its_log(tmp_path: Path) -> None:
    code = "import sys; print('no card'); sys.exit(3)"
    process = Process("p", [sys.executable, "-c", code], tmp_path / "log", {})
    process.start()
    with pytest.raises(StartError, match="p: ready: the process ended\nno card"):
        process.wait("ready", lambda: False, 20)


def test_a_process_that_ignores_sigterm_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("playground.processes._STOP_SECONDS", 0.1)
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork();"
        "open(f'{os.getpid()}.pid', 'w').close(); time.sleep(60)"
    )
    process = Process(
        "p", [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {code}"], tmp_path / "l", {}
    )
    process.start()
    process.wait("forked", lambda: len(list(tmp_path.glob("*.pid"))) == 2, 20)
    process.stop()
    assert not process.running
    until(lambda: not any(map(_alive, tmp_path.glob("*.pid"))))


def _alive(path: Path) -> bool:
    stat = Path(f"/proc/{path.stem}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
