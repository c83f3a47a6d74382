"""Pods with ResourceClaims get a resource with the amount 0, so that kube-scheduler asks mgpu about them."""

from typing import Any

import jsonpatch

from mgpu.model.resource_claims import MARK
from tests import builders as b
from webhook.claim_mark import mark


def marked(pod: dict[str, Any]) -> dict[str, Any]:
    result = jsonpatch.apply_patch(pod, list(mark(pod)))
    assert isinstance(result, dict)
    return result


def with_claim(**resources: Any) -> dict[str, Any]:
    pod = b.pod("p", {"name": "c", "image": "cuda", "resources": resources})
    pod["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "share"}]
    return pod


def test_mark_pod_with_claim_adds_amount_0_and_keeps_other_resources() -> None:
    pod = marked(with_claim(requests={"cpu": "1"}, claims=[{"name": "gpu"}]))
    assert pod["spec"]["containers"][0]["resources"] == {
        "requests": {"cpu": "1", MARK: "0"},
        "limits": {MARK: "0"},
        "claims": [{"name": "gpu"}],
    }


def test_mark_pod_without_resources_adds_them() -> None:
    pod = with_claim()
    del pod["spec"]["containers"][0]["resources"]
    assert marked(pod)["spec"]["containers"][0]["resources"] == {"requests": {MARK: "0"}, "limits": {MARK: "0"}}


def test_mark_twice_changes_nothing() -> None:
    pod = marked(with_claim())
    assert mark(pod) == ()


def test_mark_pod_without_claims_changes_nothing() -> None:
    assert mark(b.share()) == ()
    assert mark({"spec": {"resourceClaims": [{}], "containers": "wrong"}}) == ()
