"""The pure parts of the one-machine cluster: nodes, manifests, managed resources."""

from mgpu.model.gpu_requests import ContainerRequest, GpuRequest, whole_cards
from mgpu.model.mig import LAYOUTS
from mgpu.model.pods import Stage
from mgpu.model.slice_names import resource_of
from mgpu.presentation import request_text
from mgpu.settings import load_settings
from playground.installation import located, manifests
from playground.managed_resources import MANAGED
from playground.nodes import make_nodes, slice_nodes
from tests.builders import GIB

SHARE = ContainerRequest("c", core=300, memory=4 * GIB)


def test_make_nodes_several_give_the_last_the_multi_gpu_policy() -> None:
    policies = [node.labels.get("vke.volcengine.com/mgpu-compute-policy") for node in make_nodes(3, 2)]
    assert policies == [None, None, "native-burst-share"]
    assert "vke.volcengine.com/mgpu-compute-policy" not in make_nodes(1, 2)[0].labels


def test_managed_resources_include_every_possible_slice() -> None:
    names = {resource_of(profile.name) for layout in LAYOUTS for profile in layout.profiles}
    names |= {f"nvidia.com/gpu-{gigabytes}gb" for gigabytes in (1, 4, 80, 180)}
    assert {name for name in names if MANAGED.get(name) is not True} == set()


def test_slice_nodes_keep_their_cards_from_other_pods() -> None:
    mig, mps = slice_nodes()
    assert (mig.whole_cards(), mig.all_labels) == ((), {"gpu.partitioning": "mig"})
    assert len(mps.whole_cards()) == 1


def test_located_webhooks_change_only_their_client_config() -> None:
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


def test_asked_names_every_container_of_a_request() -> None:
    init = ContainerRequest("i", core=100, memory=GIB, stage=Stage.INIT)
    wide = ContainerRequest("w", cards=2, core=500, memory=GIB)
    request = GpuRequest("mgpu", (init, SHARE, wide, whole_cards("all", 2)))
    assert request_text.describe_request(request) == (
        "init i: 10% and 1.0 GiB of one card; c: 30% and 4.0 GiB of one card; "
        "w: 50% and 1.0 GiB of each of 2 cards; all: 2 cards, whole"
    )


def test_choice_for_whole_cards_names_no_policy() -> None:
    settings = load_settings("cardPolicy: spread")
    assert "idle" in request_text.describe_policy(GpuRequest("mgpu", (whole_cards("c", 1),)), settings)
    assert "spread" in request_text.describe_policy(GpuRequest("mgpu", (SHARE,)), settings)
