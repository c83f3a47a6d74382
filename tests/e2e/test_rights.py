"""manifests/base/rbac.yaml against what the three processes do: it has no right that is never used.

That it has every right that is used is what all other tests of this folder say: they run with these (conftest).
"""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from deviceplugin.inventory.node_objects import DEVICES
from deviceplugin.inventory.reporter import known_indexes
from mgpu.kube.events import Recorder, node_reference
from mgpu.kube.leader import Leader
from mgpu.kube.secrets import SecretStore
from mgpu.model.slice_names import MPS
from playground.apiserver.authorization import Request, allows
from playground.cluster import OURS, Cluster
from playground.installation import manifests
from playground.nodes import MGPU, NodeSpec
from tests.e2e.bench import Bench, asking, share
from tests.e2e.clusters import patient
from tests.e2e.mtgpu_bench import A100, Named
from tests.e2e.mtgpu_bench import OURS as NODE
from tests.waiting import until

PLUGIN = "never called, but asked for by the admission plugin OwnerReferencesPermissionEnforcement where "
RARE = {
    ("mgpu-deviceplugin", "get", "nodes"): "where two write the annotations of its Node at once, it is read again",
    ("mgpu-deviceplugin", "delete", "devices"): PLUGIN + "a Device that is there gets its Node as owner",
    ("mgpu-scheduler", "list", "podgroups"): "where the cluster has PodGroups",
    ("mgpu-scheduler", "watch", "podgroups"): "where the cluster has PodGroups",
    ("mgpu-scheduler", "create", "tokenreviews"): "where a command asks the scheduler",
    ("mgpu-scheduler", "update", "mtgpupods/finalizers"): PLUGIN + "a Pod is made that blocks its MtgpuPod's deletion",
}
"""Who, verb, resource: rights that this story need not use, and what they are for."""
MPS_NODE = NodeSpec("mps-1", [A100], dict(MGPU), partitioning=MPS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with patient([NODE, MPS_NODE]) as made:
        yield made


def granted() -> Iterator[tuple[Request, dict[str, Any]]]:
    """Yield each right of the three processes as a request that it permits, with its rule.

    A request without a namespace is for all namespaces.
    """
    found = {(m["kind"], m["metadata"].get("namespace", ""), m["metadata"]["name"]): m for m in manifests()}
    for (kind, namespace, _), binding in found.items():
        if not kind.endswith("RoleBinding"):
            continue
        role = found[binding["roleRef"]["kind"], namespace, binding["roleRef"]["name"]]
        for subject in binding["subjects"]:
            user = f"system:serviceaccount:{subject['namespace']}:{subject['name']}"
            for rule in role["rules"]:
                for verb, group, resource in (
                    (v, g, r) for v in rule["verbs"] for g in rule["apiGroups"] for r in rule["resources"]
                ):
                    yield Request(user, verb, group, resource, namespace), rule


def used(right: Request, requests: frozenset[Request]) -> bool:
    """A right of a namespace is for that alone; one for everywhere is for what no namespace's role has."""
    return any(
        (asked.user, asked.verb, asked.group, asked.resource) == (right.user, right.verb, right.group, right.resource)
        and right.namespace in ("", asked.namespace)
        for asked in requests
    )


def account(right: Request) -> str:
    return right.user.rpartition(":")[2]


def test_every_right_is_used_but_for_the_rare_ones(bench: Bench) -> None:
    cluster = bench.cluster
    bound_by_the_extender(bench)
    decided_late(bench)
    an_mtgpupod_comes_and_goes(Named(bench))
    shares_under_mps(bench)
    cluster.api.patch(f"{DEVICES}/{NODE.name}", {"spec": {"devices": []}})
    until(lambda: cluster.api.get(f"{DEVICES}/{NODE.name}")["spec"]["devices"])
    in_a_cluster_of_replicas(cluster)

    requests = cluster.requests()
    assert {(account(r), r.verb, r.resource) for r, _ in granted() if not used(r, requests)} - {*RARE} == set()


def test_what_is_rare_stands_in_the_roles() -> None:
    assert {*RARE} - {(account(right), right.verb, right.resource) for right, _ in granted()} == set()


def test_no_right_is_given_twice_or_by_a_wildcard() -> None:
    rights = [right for right, _ in granted()]
    assert len(rights) == len({*rights})
    assert not any("*" in (right.verb, right.group, right.resource) for right in rights)
    everywhere = {(r.user, r.verb, r.group, r.resource) for r, rule in granted() if not r.namespace}
    assert not [r for r in rights if r.namespace and (r.user, r.verb, r.group, r.resource) in everywhere]


def test_users_may_edit_mtgpupods_but_never_their_status() -> None:
    roles = {m["metadata"]["name"]: m for m in manifests() if m["kind"] == "ClusterRole"}
    labelled = {name for name, role in roles.items() if role["metadata"].get("labels")}
    assert labelled == {"mgpu-view", "mgpu-edit"}
    for name in labelled:
        for resource, verb in (("mtgpupods/status", "update"), ("mtgpupods/status", "patch"), ("devices", "patch")):
            group = "lsalab.nthu" if resource.startswith("mtgpupods") else "scheduling.koordinator.sh"
            asked = Request("somebody", verb, group, resource, "default", "m")
            assert not any(allows(rule, asked) for rule in roles[name]["rules"])
    assert {*OURS} == {right.user for right, _ in granted()}


def bound_by_the_extender(bench: Bench) -> None:
    """Also a gpushare pod, whose record says that its card was given out."""
    pod = bench.create({**(p := asking("p", gpu_mem=2)), "spec": {**p["spec"], "schedulerName": "one-that-asks"}})
    asked = {"PodName": "p", "PodNamespace": "default", "PodUID": pod.metadata.uid, "Node": NODE.name}
    request = urllib.request.Request(f"{bench.cluster.extender_url}/bind", json.dumps(asked).encode())
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert not json.load(answer)["Error"]
    bench.exact("p")


def decided_late(bench: Bench) -> None:
    bench.create(share("late", nodeName=NODE.name))
    bench.create(share("large", mib=100 << 10, nodeName=NODE.name))  # more than a card, less than both
    bench.exact("late")
    until(lambda: bench.pod("large").status.phase == "Failed" and bench.events("large", "MgpuNoCards"))


def an_mtgpupod_comes_and_goes(named: Named) -> None:
    named.create("m", "zxcvb", "0.2")
    named.runs("m")
    named.delete("m")


def shares_under_mps(bench: Bench) -> None:
    """The second one changes what the ConfigMap says."""
    for name, slice_ in (("one", "gpu-4gb"), ("two", "gpu-20gb")):
        own = {"name": "c", "image": "cuda", "resources": {"limits": {f"nvidia.com/{slice_}": "1"}}}
        bench.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [own]}})
        bench.runs(name)


def in_a_cluster_of_replicas(cluster: Cluster) -> None:
    """What one process of each kind beside a cluster, with simulated cards that are well, does not do."""
    scheduler, webhook, agent = (cluster.connect(name) for name in ("scheduler", "webhook", "deviceplugin"))
    leader = Leader(scheduler, "mgpu-system", "mgpu-scheduler", "another")
    leader.round()
    leader.round()
    assert leader.leading
    leader.release()
    for api, name in ((scheduler, "mgpu-scheduler-tls"), (webhook, "mgpu-webhook-tls")):
        cluster.api.create("/api/v1/namespaces/mgpu-system/secrets", {"metadata": {"name": name}})
        store = SecretStore(api, "mgpu-system", name)
        assert store.write({"tls.crt": b"chain", "tls.key": b"key"}, store.read()[1])
    assert set(known_indexes(agent, NODE.name).values()) == {0, 1}
    Recorder(agent, "mgpu-deviceplugin", NODE.name).warn(node_reference(NODE.name), "MgpuCards", "a card is lost")
    until(lambda: cluster.api.list("/api/v1/events", fieldSelector="reason=MgpuCards")[0])
    for api in (scheduler, webhook, agent):
        api.close()
