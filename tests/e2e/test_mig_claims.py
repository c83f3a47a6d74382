"""Claims for MIG instances, from the claim to the container: instances exist only as long as their claims."""

from collections.abc import Iterator

import pytest

from mgpu.model.mig import Instance
from mgpu.model.resource_claims import SLICES
from mgpu.model.slice_names import MIG_CLAIMS
from playground.cluster import Cluster
from playground.kubelet.dra import DraConfig
from playground.nodes import MGPU, NodeSpec
from playground.nvml_state import read_state
from tests.e2e.bench import Bench, Json, share
from tests.e2e.claimed import Claimed
from tests.e2e.clusters import patient
from tests.waiting import until

pytestmark = pytest.mark.kubernetes(1, 35)

A100 = {"model": "NVIDIA A100-SXM4-80GB", "memory": "80Gi"}
L40S = {"model": "L40S", "memory": "46068Mi"}
NODES = [NodeSpec("m1", [A100, L40S], dict(MGPU), partitioning=MIG_CLAIMS)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # A kubelet tries to prepare the claims of a pod again only after 60 to 90 seconds.
    kubelet = {"retry_seconds": 0.2, "dra": DraConfig(prepare_retry_seconds=0.5)}
    with patient(NODES, components=("dra",), kubelet=kubelet) as made:
        yield made


@pytest.fixture
def claimed(bench: Bench) -> Iterator[Claimed]:
    found = Claimed(bench)
    yield found
    found.clear()
    until(lambda: not existing(bench))


def mig(profile: str, count: int = 1) -> Json:
    selector = {"cel": {"expression": f'device.attributes["gpu.mgpu.io"].profile == "{profile}"'}}
    return {"name": "gpu", "exactly": {"deviceClassName": "mgpu-mig", "selectors": [selector], "count": count}}


def existing(bench: Bench) -> dict[Instance, str]:
    """Return the instances of the only card that has MIG, with the UUIDs of their MIG devices."""
    cards = read_state(bench.cluster.nvml_state("m1")).cards
    return {
        Instance(gpu.start, gpu.profile): gpu.compute[0].uuid
        for mode in cards.values()
        for gpu in mode.instances
        if gpu.compute
    }


def visible(bench: Bench, name: str) -> str:
    runtime = bench.cluster.kubelets["m1"].runtime
    (container,) = [c for c in runtime.containers(bench.raw(name)["metadata"]["uid"]) if c.running]
    return str(container.env["NVIDIA_VISIBLE_DEVICES"])


def test_pods_get_instances_that_exist_only_as_long_as_their_claims(claimed: Claimed) -> None:
    bench = claimed.bench
    assert existing(bench) == {}
    claimed.template("two", mig("2g.20gb"))
    claimed.template("three", mig("3g.40gb"))
    for name, template in (("a", "two"), ("b", "three")):
        claimed.pod(name, template=template)
        bench.runs(name)
    found = existing(bench)
    assert {profile for _, profile in found} == {"2g.20gb", "3g.40gb"}
    assert {visible(bench, "a"), visible(bench, "b")} == {*found.values()}
    bench.delete("b")
    until(lambda: {profile for _, profile in existing(bench)} == {"2g.20gb"})


def test_claims_wait_for_a_full_card_and_follow_when_it_is_free(claimed: Claimed) -> None:
    bench = claimed.bench
    claimed.template("all", mig("7g.80gb"))
    claimed.pod("first", template="all")
    bench.runs("first")
    claimed.pod("second", template="all")
    until(lambda: bench.raw("second").get("status", {}).get("conditions"))
    bench.delete("first")
    bench.runs("second")
    assert visible(bench, "second") in existing(bench).values()


def test_card_without_mig_is_shared_as_on_other_nodes(claimed: Claimed) -> None:
    bench = claimed.bench
    bench.create(share("classic", core=40, mib=10 << 10))
    bench.runs("classic")
    devices = [row["name"] for one in bench.cluster.api.list(SLICES)[0] for row in one["spec"].get("devices", ())]
    assert "card-1" in devices
    assert "card-0" not in devices
    assert "card-0-mig-7g-80gb-0" in devices


def test_inspect_shows_the_instance_with_its_claim(claimed: Claimed) -> None:
    bench = claimed.bench
    claimed.template("two", mig("2g.20gb"))
    claimed.pod("a", template="two")
    bench.runs("a")
    (claim,) = claimed.of("a")
    (result,) = claim.results
    assert result.device.startswith("card-0-mig-2g-20gb-")
    (view,) = bench.samples.overview().nodes
    (instance,) = view.cards[0].slices
    assert instance.slice.name == "2g.20gb"
    assert instance.holder.startswith("claim default/a")
