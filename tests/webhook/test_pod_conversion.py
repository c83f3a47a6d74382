"""Shares of the vocabularies become requests of a ResourceClaim."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mgpu import dialects
from mgpu.model.claim_object import read_claim
from mgpu.model.converted_requests import CONVERTED, ConvertedRequest, claim_template, read_converted
from mgpu.model.errors import BadObject
from mgpu.model.gpu_requests import ContainerRequest
from mgpu.model.pods import Stage, read_pod
from mgpu.model.resource_claims import requests_before_allocation
from mgpu.settings import load_settings
from tests.arbitrary import JSON, PARTS
from tests.builders import CORE, GIB, MEMORY, container, pod, share
from tests.examples import examples
from tests.mgpu.serving.reviews import patch_of, patched, review
from webhook.admission import make_app
from webhook.pod_conversion import convert, converted_problems, restore
from webhook.pod_mutation import mutate
from webhook.pod_rules import validate_create, validate_update

SETTINGS = load_settings("dra: {enabled: true, convertCardMemory: 81920}")
WITHOUT_CARD_MEMORY = load_settings()
CLIENT = make_app(SETTINGS).test_client()
MULTIPLE = "vke.volcengine.com/container-multiple-gpu"
Raw = dict[str, Any]


def asking(name: str = "c", /, **amounts: object) -> Raw:
    """Return a container that requests these amounts, in requests and limits."""
    texts = {key: str(value) for key, value in amounts.items()}
    return {"name": name, "image": "cuda", "resources": {"requests": texts, "limits": dict(texts)}}


def converted(raw: Raw, settings: Any = SETTINGS) -> Raw:
    return patched(raw, convert(raw, settings).patch)


def requests_of(raw: Raw) -> tuple[ConvertedRequest, ...]:
    return read_converted(raw["metadata"]["annotations"][CONVERTED]).requests


def claims_of(raw: Raw, kind: str = "containers") -> list[Any]:
    return [item.get("resources", {}).get("claims") for item in raw["spec"][kind]]


@pytest.mark.parametrize(
    ("amounts", "annotations", "expected"),
    [
        ({CORE: 30, MEMORY: 8192}, {}, ConvertedRequest("c", 1, 30, 8 * GIB)),
        ({CORE: 200}, {}, ConvertedRequest("c", 2)),
        ({CORE: 60, MEMORY: 2048}, {MULTIPLE: "2"}, ConvertedRequest("c", 2, 30, GIB)),
        ({"aliyun.com/gpu-mem": 4}, {}, ConvertedRequest("c", 1, 0, 4 * GIB)),
        ({"aliyun.com/gpu-mem": 4, "aliyun.com/gpu-count": 1}, {}, ConvertedRequest("c", 1, 0, 4 * GIB)),
        (
            {"koordinator.sh/gpu-core": 25, "koordinator.sh/gpu-memory": "6Gi"},
            {},
            ConvertedRequest("c", 1, 25, 6 * GIB),
        ),
        ({"koordinator.sh/gpu-memory": 1_500_000_000}, {}, ConvertedRequest("c", 1, 0, 1_500_000_000)),
        ({"koordinator.sh/gpu": 50}, {}, ConvertedRequest("c", 1, 50, 40 * GIB)),
        ({"koordinator.sh/gpu": 200}, {}, ConvertedRequest("c", 2)),
        ({"koordinator.sh/gpu-memory-ratio": 25}, {}, ConvertedRequest("c", 1, 0, 20 * GIB)),
        (
            {"koordinator.sh/gpu.shared": 2, "koordinator.sh/gpu-core": 100, "koordinator.sh/gpu-memory": "16Gi"},
            {},
            ConvertedRequest("c", 2, 50, 8 * GIB),
        ),
        ({"nvidia.com/gpu": 2}, {}, ConvertedRequest("c", 2)),
    ],
)
def test_convert_share_of_a_vocabulary_becomes_a_request(
    amounts: dict[str, object], annotations: dict[str, str], expected: ConvertedRequest
) -> None:
    raw = converted(pod("p", asking(cpu=1, **amounts), annotations=annotations))
    assert requests_of(raw) == (expected,)
    (found,) = raw["spec"]["containers"]
    assert found["resources"] == {
        "requests": {"cpu": "1"},
        "limits": {"cpu": "1"},
        "claims": [{"name": "mgpu", "request": "c"}],
    }
    (claim,) = raw["spec"]["resourceClaims"]
    assert claim == {"name": "mgpu", "resourceClaimTemplateName": claim_template_of(raw)["metadata"]["name"]}


def test_convert_leaves_no_empty_table_and_so_agrees_with_what_the_api_server_stores() -> None:
    raw = converted(pod("p", container("c", 30, 8192)))
    assert raw["spec"]["containers"][0]["resources"] == {"claims": [{"name": "mgpu", "request": "c"}]}
    assert [*converted_problems(raw, SETTINGS)] == []


def claim_template_of(raw: Raw) -> Raw:
    return claim_template(read_converted(raw["metadata"]["annotations"][CONVERTED]), "default")


def test_template_requests_only_shares_of_the_class_and_keeps_constraints() -> None:
    annotations = {"mgpu.io/card-models": "A100, H100", "mgpu.io/same-card-group": "g", "team": "x"}
    template = claim_template_of(converted(pod("p", container("c", 30, 8192), annotations=annotations)))
    assert template["metadata"]["labels"] == {"mgpu.io/generated": "true"}
    assert template["spec"] == {
        "metadata": {"annotations": {"mgpu.io/card-models": "A100,H100", "mgpu.io/same-card-group": "g"}},
        "spec": {
            "devices": {
                "requests": [
                    {
                        "name": "c",
                        "exactly": {
                            "deviceClassName": "mgpu",
                            "allocationMode": "ExactCount",
                            "count": 1,
                            "capacity": {"requests": {"cores": "30", "memory": "8Gi"}},
                        },
                    }
                ]
            }
        },
    }


def test_template_of_several_cards_demands_different_ones() -> None:
    devices = claim_template_of(converted(pod("p", asking(**{"nvidia.com/gpu": 2}))))["spec"]["spec"]["devices"]
    assert devices["constraints"] == [{"requests": ["c"], "distinctAttribute": "gpu.mgpu.io/uuid"}]
    assert "capacity" not in devices["requests"][0]["exactly"]


def test_template_name_depends_on_requests_and_constraints_only() -> None:
    def name(*containers: Raw, **more: Any) -> str:
        return str(claim_template_of(converted(pod("p", *containers, **more)))["metadata"]["name"])

    one = name(asking(**{"koordinator.sh/gpu": 50}))
    assert one == name(
        asking(**{"koordinator.sh/gpu-core": 50, "koordinator.sh/gpu-memory": "40Gi"}), namespace="other"
    )
    assert one != name(asking(**{"koordinator.sh/gpu": 51}))
    assert one != name(asking(**{"koordinator.sh/gpu": 50}), annotations={"mgpu.io/card-models": "A100"})


def test_convert_pod_gets_one_claim_with_a_request_for_each_gpu_container() -> None:
    raw = converted(pod("p", container("a", 30, 1024), {"name": "plain"}, container("b", 100)))
    assert [request.name for request in requests_of(raw)] == ["a", "b"]
    assert claims_of(raw) == [[{"name": "mgpu", "request": "a"}], None, [{"name": "mgpu", "request": "b"}]]


def test_convert_keeps_the_pods_own_claims() -> None:
    before = share()
    before["spec"]["resourceClaims"] = [{"name": "net", "resourceClaimName": "nic"}]
    before["spec"]["containers"][0]["resources"]["claims"] = [{"name": "net"}]
    raw = converted(before)
    assert [claim["name"] for claim in raw["spec"]["resourceClaims"]] == ["net", "mgpu"]
    assert claims_of(raw) == [[{"name": "net"}, {"name": "mgpu", "request": "c"}]]


# Init containers


@pytest.mark.parametrize(
    ("init", "used"),
    [
        (container("i", 30, 1024), "c"),
        (container("i", 50, 4096), "c"),
        (container("i", 51, 1024), "i"),
        (container("i", 50, 4097), "i"),
        (container("i", 100), "i"),
    ],
)
def test_convert_init_container_uses_the_request_of_a_larger_app_container(init: Raw, used: str) -> None:
    raw = converted(pod("p", container("c", 50, 4096), init=(init,)))
    assert claims_of(raw, "initContainers") == [[{"name": "mgpu", "request": used}]]
    assert len(requests_of(raw)) == (1 if used == "c" else 2)


def test_convert_larger_init_container_warns_that_its_cards_are_held() -> None:
    raw = pod("p", container("c", 30, 1024), init=(container("i", 50, 1024), container("j", 40, 1024)))
    conversion = convert(raw, SETTINGS)
    assert [warning.partition(":")[0] for warning in conversion.warnings] == ["spec.initContainers[0].resources"]
    claims = claims_of(patched(raw, conversion.patch), "initContainers")
    assert claims == [[{"name": "mgpu", "request": "i"}]] * 2


def test_convert_init_container_never_uses_the_request_of_a_sidecar() -> None:
    sidecar = container("s", 50, 4096, restartPolicy="Always")
    raw = converted(pod("p", container("c", 10, 1024), init=(sidecar, container("i", 30, 1024))))
    assert [request.name for request in requests_of(raw)] == ["s", "i", "c"]


# What is left as it is, and what is denied


@pytest.mark.parametrize(
    "raw",
    [
        pod("p", {"name": "c"}),
        pod("p", container("c", 150, 1024)),
        pod("p", container("c", 30)),
        pod("p", container("a", 30, 1024), asking("b", **{"aliyun.com/gpu-mem": 4})),
        pod("p", container("c", 30, 1024), annotations={"mgpu.io/card-policy": "none"}),
        pod("p", container("c", 30, 1024), annotations={"lsalab.nthu/GPUID": "abcde"}),
        share(annotations={"mgpu.io/card-models": "A100", "mgpu.io/exclude-card-models": "A100"}),
    ],
    ids=["no GPU", "invalid", "without memory", "two vocabularies", "policy", "MtgpuPod", "contradiction"],
)
def test_convert_other_and_invalid_pods_are_left_as_they_are(raw: Raw) -> None:
    assert convert(raw, SETTINGS).patch == ()


def test_convert_disabled_vocabulary_is_left_as_it_is() -> None:
    settings = load_settings("dialects: {mgpu: {enabled: false}}")
    assert convert(share(), settings).patch == ()


def test_convert_pod_with_a_node_is_left_as_it_is_with_a_warning() -> None:
    conversion = convert(share(node="n1"), SETTINGS)
    assert conversion.patch == ()
    assert "no scheduler allocates" in conversion.warnings[0]


HAMI = pod("p", asking(**{"koordinator.sh/gpu": 50}))
HAMI["metadata"]["labels"] = {"koordinator.sh/gpu-isolation-provider": "HAMi-core"}
TAKEN = share()
TAKEN["spec"]["resourceClaims"] = [{"name": "mgpu", "resourceClaimName": "x"}]


@pytest.mark.parametrize(
    ("raw", "settings", "text"),
    [
        (pod("p", asking(**{"nvidia.com/mig-1g.10gb": 1})), SETTINGS, "requests mig-1g.10gb"),
        (pod("p", asking(**{"nvidia.com/gpu-4gb": 1})), SETTINGS, "requests gpu-4gb"),
        (pod("p", asking(**{"koordinator.sh/gpu": 50, "koordinator.sh/rdma": 100})), SETTINGS, "requests rdma"),
        (pod("p", asking(**{"koordinator.sh/gpu": 50})), WITHOUT_CARD_MEMORY, "dra.convertCardMemory"),
        (pod("p", *(asking(f"c{i}", **{"nvidia.com/gpu": 16}) for i in range(3))), SETTINGS, "request 48 cards"),
        (HAMI, SETTINGS, "asks for isolation"),
        (TAKEN, SETTINGS, "choose another"),
    ],
)
def test_convert_what_a_claim_cannot_express_is_denied(raw: Raw, settings: Any, text: str) -> None:
    if "mig" in text or "gpu-4gb" in text:
        settings = load_settings("dialects: {slices: {enabled: true}}")
    with pytest.raises(BadObject, match=text):
        convert(raw, settings)


# The order of webhooks


ALL = [
    share(),
    pod("p", asking(**{"koordinator.sh/gpu": 50})),
    pod("p", {"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": "4"}}}),
    pod("p", {**container("c", 30, 1024), "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "A"}]}),
    pod("p", asking(**{"koordinator.sh/gpu-memory": "4Gi", "mgpu.io/share": "3"})),
    share(annotations={"vke.volcengine.com/assumed": "true", "mgpu.io/seal": "x"}),
]


@pytest.mark.parametrize("raw", ALL)
@pytest.mark.parametrize(
    "settings", [SETTINGS, load_settings("webhook: {schedulerName: s}\ndra: {convertCardMemory: 81920}")]
)
def test_convert_before_or_after_mutate_gives_the_same_pod(raw: Raw, settings: Any) -> None:
    once = patched(raw, mutate(raw, settings).patch)
    after = patched(once, convert(once, settings).patch)
    before = patched(raw, convert(raw, settings).patch)
    before = patched(before, mutate(before, settings).patch)
    for one in (before, after):
        assert mutate(one, settings).patch == ()
        assert convert(one, settings).patch == ()
        assert not validate_create(one, settings)
        assert not [*converted_problems(one, settings)]
        assert "NVIDIA_VISIBLE_DEVICES" not in json.dumps(one)
        assert "mgpu.io/share" not in json.dumps(one["spec"])
    requests = [requests_of(one) for one in (before, after)]
    assert requests[0] == requests[1]
    # What was taken out may differ, because `/mutate` replaces equivalent resources.
    bare = [json.loads(json.dumps(one)) for one in (before, after)]
    for one in bare:
        del one["metadata"]["annotations"][CONVERTED]
        for c in one["spec"]["containers"]:
            c["resources"] = {k: v for k, v in c["resources"].items() if v}
    assert bare[0] == bare[1]


def test_convert_container_that_another_webhook_adds_afterwards_is_included() -> None:
    raw = converted(share())
    raw["spec"]["containers"].append(container("late", 20, 512))
    again = converted(raw)
    assert [request.name for request in requests_of(again)] == ["c", "late"]
    assert len(again["spec"]["resourceClaims"]) == 1
    assert claims_of(again) == [[{"name": "mgpu", "request": "c"}], [{"name": "mgpu", "request": "late"}]]


# Backups, exports and forged annotations


@pytest.mark.parametrize("raw", ALL)
def test_restore_gives_the_pod_before_its_conversion(raw: Raw) -> None:
    classic = patched(raw, mutate(raw, SETTINGS).patch)
    restored = patched(converted(classic), restore(converted(classic)).patch)
    assert patched(restored, mutate(restored, SETTINGS).patch) == classic


def test_restore_pod_without_the_annotation_changes_nothing() -> None:
    raw = share()
    raw["spec"]["resourceClaims"] = [{"name": "mgpu", "resourceClaimTemplateName": "mgpu-1"}]
    assert restore(raw).patch == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"requests":[]}',
        '{"requests":[{"name":"c"}]}',
        '{"requests":[{"name":"C","cards":1}]}',
        '{"requests":[{"name":"c","cards":1,"cores":101,"memory":1}]}',
        '{"requests":[{"name":"c","cards":1,"cores":1}]}',
        '{"requests":[{"name":"c","cards":1},{"name":"c","cards":1}]}',
        '{"requests":[{"name":"c","cards":20},{"name":"d","cards":20}]}',
        '{"requests":[{"name":"c","cards":1}],"constraints":{"seal":"x"}}',
        '{"requests":[{"name":"c","cards":1}],"original":{"c":{"requests":{"a":1}}}}',
        '{"requests":[{"name":"c","cards":1}],"original":{"c":{"claims":{}}}}',
    ],
)
def test_forged_annotation_that_cannot_be_read_is_removed_or_denied(text: str) -> None:
    with pytest.raises(BadObject):
        read_converted(text)
    raw = pod("p", {"name": "c"}, annotations={CONVERTED: text})
    assert patched(raw, restore(raw).patch)["metadata"]["annotations"] == {}
    assert [problem.field for problem in converted_problems(raw, SETTINGS)] == [f"metadata.annotations[{CONVERTED}]"]


def forged(**original: str) -> Raw:
    """A pod that looks converted. Its claim is for a whole card, and it says that it has requested `original`."""
    content = {"requests": [{"name": "c", "cards": 1}], "original": {"c": {"requests": original, "limits": original}}}
    raw = pod("p", {"name": "c", "resources": {"claims": [{"name": "mgpu", "request": "c"}]}})
    text = json.dumps(content)
    raw["metadata"]["annotations"][CONVERTED] = text
    raw["spec"]["resourceClaims"] = [{"name": "mgpu", "resourceClaimTemplateName": read_converted(text).template_name}]
    return raw


def test_forged_annotation_gives_what_its_resources_request() -> None:
    raw = forged(**{CORE: "30", MEMORY: "1024"})
    assert [*converted_problems(raw, SETTINGS)]
    assert requests_of(converted(raw)) == (ConvertedRequest("c", 1, 30, GIB),)
    assert patched(raw, restore(raw).patch)["spec"] == pod("p", {"name": "c", **_resources(30, 1024)})["spec"]


def _resources(core: int, mib: int) -> Raw:
    return {"resources": container("c", core, mib)["resources"]}


def test_forged_annotation_without_resources_gives_nothing() -> None:
    raw = forged()
    assert [*converted_problems(raw, SETTINGS)]
    assert "resourceClaims" not in converted(raw)["spec"]


def test_forged_annotation_with_a_share_below_the_minimum_is_denied_by_validation() -> None:
    raw = forged(**{CORE: "1", MEMORY: "1"})
    classic = converted(raw)
    assert CONVERTED not in classic["metadata"]["annotations"]
    assert validate_create(classic, SETTINGS)


def test_forged_original_resources_of_no_vocabulary_are_dropped() -> None:
    raw = forged(**{CORE: "30", MEMORY: "1024", "cpu": "100", "example.com/nic": "1"})
    restored = patched(raw, restore(raw).patch)
    assert restored["spec"]["containers"][0]["resources"]["requests"] == {CORE: "30", MEMORY: "1024"}


@pytest.mark.parametrize("user", ["alice", "system:serviceaccount:mgpu-system:mgpu-scheduler"])
def test_update_of_the_annotation_is_denied(user: str) -> None:
    raw = converted(share())
    for text in (None, raw["metadata"]["annotations"][CONVERTED].replace("50", "51")):
        changed = json.loads(json.dumps(raw))
        changed["metadata"]["annotations"] = {} if text is None else {CONVERTED: text}
        (problem,) = validate_update(changed, raw, user, SETTINGS)
        assert problem.field == f"metadata.annotations[{CONVERTED}]"
    assert validate_update(raw, raw, user, SETTINGS) == []


def answer(path: str, raw: Raw) -> Raw:
    reply: Any = CLIENT.post(path, json=review(raw)).json
    return {"response": reply["response"]}


def test_admission_serves_convert_and_restore_and_denies_forged_pods() -> None:
    raw = patched(share(), patch_of(answer("/convert", share())))
    assert requests_of(raw)
    assert answer("/validate", raw)["response"]["allowed"]
    assert not answer("/validate", forged())["response"]["allowed"]
    assert patched(raw, patch_of(answer("/restore", raw)))["spec"] == share()["spec"]
    denied = answer("/convert", HAMI)["response"]
    assert (denied["allowed"], denied["status"]["code"]) == (False, 422)


# Properties


def _amounts(core: int, mib: int, way: int) -> Raw:
    return (
        {CORE: core, MEMORY: mib},
        {CORE: 100 * (1 + core % 2)},
        {"koordinator.sh/gpu-core": core, "koordinator.sh/gpu-memory": mib << 20},
        {"koordinator.sh/gpu": core},
        {"koordinator.sh/gpu-memory": mib << 20},
        {"koordinator.sh/gpu.shared": 2, "koordinator.sh/gpu-core": 2 * core, "koordinator.sh/gpu-memory": mib << 20},
        {"nvidia.com/gpu": 1 + core % 3},
        {"aliyun.com/gpu-mem": 1 + mib // 1024},
    )[way]


WAYS = st.sampled_from([(0, 1), (2, 3, 4, 5, 6), (7,)])
SIZES = st.tuples(st.integers(1, 99), st.integers(256, 40_000), st.integers(0, 9))


@st.composite
def pods(draw: st.DrawFn) -> Raw:
    ways = draw(WAYS)

    def containers(prefix: str, most: int, least: int = 0) -> list[Raw]:
        sizes = draw(st.lists(SIZES, min_size=least, max_size=most))
        return [
            asking(f"{prefix}{i}", **_amounts(core, mib, ways[way % len(ways)]))
            for i, (core, mib, way) in enumerate(sizes)
        ]

    sidecars = [{**item, "restartPolicy": "Always"} for item in containers("s", 1)]
    return pod("p", *containers("c", 3, 1), init=(*containers("i", 2), *sidecars))


def _total(requests: Any) -> tuple[int, int, int]:
    whole = sum(one.cards for one in requests if one.whole)
    shares = [one for one in requests if not one.whole]
    core = sum(one.cards * one.core for one in shares)
    memory = sum(one.cards * (one.memory or (one.ratio or 0) * 80 * GIB // 100 >> 20 << 20) for one in shares)
    return whole, core, memory


@given(pods())
@examples(200)
def test_property_claim_requests_what_the_containers_request(raw: Raw) -> None:
    before = dialects.read_request(read_pod(raw), SETTINGS)
    assert before is not None
    after = converted(raw)
    template = claim_template_of(after)
    claim = read_claim({"metadata": template["metadata"], "spec": template["spec"]["spec"]})
    names = {one.name for one in claim.requests}
    requested = requests_before_allocation(claim, names).containers
    counted = [one for one in before.containers if one.container in names]
    assert _total(requested) == _total(counted)
    # Only init containers may use the requests of others, and these are at least as large.
    assert {one.container for one in before.containers if one.stage is not Stage.INIT} <= names
    by_name = {one.container: one for one in requested}
    for kind in ("initContainers", "containers"):
        for item in after["spec"].get(kind, ()):
            (row,) = item["resources"]["claims"]
            own = next(one for one in before.containers if one.container == item["name"])
            assert _is_as_large(by_name[row["request"]], own)
            assert not any(map(dialects.registry.vocabulary_of, {**item["resources"].get("requests", {})}))


def _is_as_large(given: ContainerRequest, wanted: ContainerRequest) -> bool:
    if given.cards != wanted.cards:
        return False
    if given.whole or wanted.whole:
        return given.whole
    return given.core >= wanted.core and _total([given])[2] >= _total([wanted])[2]


@given(pods())
@examples(100)
def test_property_second_conversion_changes_nothing_and_restore_undoes_it(raw: Raw) -> None:
    classic = patched(raw, mutate(raw, SETTINGS).patch)
    once = converted(classic)
    assert convert(once, SETTINGS).patch == ()
    assert not [*converted_problems(once, SETTINGS)]
    restored = patched(once, restore(once).patch)
    assert patched(restored, mutate(restored, SETTINGS).patch) == classic


def test_convert_pod_of_another_namespace_refers_to_the_same_template() -> None:
    assert converted(share(namespace="a"))["spec"] == converted(share(namespace="b"))["spec"]


PARTLY_CONVERTED = st.builds(
    lambda parts, text: {
        **forged(**{CORE: "30", MEMORY: "1024"}),
        **parts,
        "metadata": {"annotations": {CONVERTED: text}},
    },
    PARTS,
    st.just(forged(**{CORE: "30", MEMORY: "1024"})["metadata"]["annotations"][CONVERTED]) | JSON,
)


@given(st.sampled_from(["/restore", "/convert", "/validate"]), JSON | PARTS | PARTLY_CONVERTED)
@example("/restore", {**forged(), "spec": {"containers": {"c": 1}, "resourceClaims": 1}})
@examples(150)
def test_property_any_object_gets_an_answer(path: str, raw: Any) -> None:
    reply = CLIENT.post(path, data=orjson.dumps(review(raw)), content_type="application/json")
    assert reply.status_code in (200, 400)
    if reply.status_code == 200 and path != "/validate" and isinstance(raw, dict):
        patched(raw, patch_of(reply.json))
