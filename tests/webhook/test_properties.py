"""Properties over arbitrary pods and arbitrary JSON."""

from typing import Any

import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from mgpu.dialects import is_placement_annotation
from mgpu.settings import load_settings
from tests.arbitrary import JSON, PARTS
from tests.builders import CORE, MEMORY, pod
from tests.examples import examples
from tests.mgpu.serving.reviews import patched, review
from webhook.admission import make_app
from webhook.pod_mutation import mutate
from webhook.pod_rules import validate_create, validate_update

SETTINGS = load_settings()
CLIENT = make_app(SETTINGS).test_client()

AMOUNTS = st.dictionaries(
    st.sampled_from(
        [CORE, MEMORY, "cpu", "aliyun.com/gpu-mem", "nvidia.com/gpu", "nvidia.com/gpu-4gb", "mgpu.io/share"]
        + ["nvidia.com/mig-1g.10gb", "nvidia.com/mig-x"]
        + [f"koordinator.sh/{name}" for name in ("gpu", "gpu-core", "gpu-memory", "rdma")]
    ),
    st.sampled_from(["0", "1", "50", "100", "120", "200", "512", "6k", "500m", "-1", "x", ""]),
    max_size=3,
)
ENV = st.lists(st.sampled_from(["A", "NVIDIA_VISIBLE_DEVICES"]).map(lambda n: {"name": n, "value": "all"}), max_size=4)
CONTAINERS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "resources": st.none() | st.fixed_dictionaries({}, optional={"requests": AMOUNTS, "limits": AMOUNTS}),
            "env": ENV,
            "restartPolicy": st.just("Always"),
        },
    ),
    max_size=3,
)
ANNOTATIONS = st.dictionaries(
    st.sampled_from(
        [
            "vke.volcengine.com/container-multiple-gpu",
            "vke.volcengine.com/mgpu-compute-policy",
            "vke.volcengine.com/assumed",
            "mgpu.io/slices-given",
            "vke.volcengine.com/gpu-index-container-a/b~c",
            "lsalab.nthu/GPUID",
            "mgpu.io/card-models",
            "mgpu.io/same-card-group",
            "mgpu.io/card-model",
            "team",
        ]
    ),
    st.sampled_from(["", "2", "1,0", "-1", "true", "native-burst-share"]),
)


def build(app: Any, init: Any, annotations: Any) -> dict[str, Any]:
    named = [{**c, "name": f"c{i}"} for i, c in enumerate([*app, *init])]
    return pod("p", *named[: len(app)], init=tuple(named[len(app) :]), annotations=annotations)


PODS = st.builds(build, CONTAINERS, CONTAINERS, ANNOTATIONS)
OBJECTS = JSON | PARTS | st.builds(lambda good, parts: {**good, **parts}, PODS, PARTS)


@given(PODS)
@examples(30)
def test_property_second_mutation_changes_nothing(raw: dict[str, Any]) -> None:
    once = patched(raw, mutate(raw, SETTINGS).patch)
    again = mutate(once, SETTINGS)
    assert again.patch == ()
    assert all("mgpu does not add it" in warning for warning in again.warnings)


@given(PODS)
@examples(30)
def test_property_mutation_changes_only_problems_of_records(raw: dict[str, Any]) -> None:
    once = patched(raw, mutate(raw, SETTINGS).patch)
    records = sum(map(is_placement_annotation, raw["metadata"]["annotations"]))
    assert len(validate_create(raw, SETTINGS)) - records == len(validate_create(once, SETTINGS))


@given(PODS, PODS)
@examples(20)
def test_property_update_without_changed_annotation_is_admitted(old: Any, new: Any) -> None:
    new = {**new, "metadata": old["metadata"]}
    assert validate_update(new, old, "alice", SETTINGS) == []


@given(
    st.sampled_from(["/mutate", "/validate"]),
    st.sampled_from([("Pod", "pods"), ("MtgpuPod", "mtgpupods")]),
    OBJECTS,
    OBJECTS,
    st.sampled_from(["CREATE", "UPDATE", "DELETE"]),
)
@example("/validate", ("MtgpuPod", "mtgpupods"), {"metadata": True}, None, "CREATE")
@examples(30)
def test_property_any_object_gets_an_answer(
    path: str, names: tuple[str, str], obj: Any, old: Any, operation: str
) -> None:
    what = {"kind": {"kind": names[0]}, "resource": {"resource": names[1]}}
    body = orjson.dumps(review(obj, operation, old=old, **what))
    answer = CLIENT.post(path, data=body, content_type="application/json")
    assert answer.status_code in (200, 400)
    assert answer.is_json


@given(st.sampled_from(["/mutate", "/validate"]), JSON.map(orjson.dumps) | st.binary(max_size=200))
@examples(30)
def test_property_any_body_gets_an_answer(path: str, body: bytes) -> None:
    answer = CLIENT.post(path, data=body, content_type="application/json")
    assert answer.status_code in (200, 400)
    assert answer.is_json
