"""manifests/components/dra-convert: which pods are sent to which webhook, and what the scheduler may write."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mgpu.model.converted_requests import CONVERTED, ConvertedRequest, ConvertedRequests, claim_template
from tests import builders as b
from tests.manifests import policy_evaluation
from tests.manifests.policy_evaluation import Raw, evaluated, policies
from tests.manifests.rendered import MANIFESTS, kustomization, named, rendered, running_mgpu
from tests.manifests.test_rendered import check, settings_of

FOLDER = MANIFESTS / "components/dra-convert"
(POLICY,) = policies(FOLDER / "policy.yaml").values()
SCHEDULER = "system:serviceaccount:mgpu-system:mgpu-scheduler"


def hooks(file: str) -> list[Any]:
    """Return the webhooks that a file adds to a configuration."""
    return [operation["value"] for operation in yaml.safe_load((FOLDER / file).read_text())]


(RESTORE,) = hooks("restore-webhook.yaml")
CONVERT = hooks("convert-webhooks.yaml")
(PROTECT,) = hooks("protect-webhook.yaml")


def is_asked(hook: Raw, new: Raw, old: Raw | None = None) -> bool:
    request = {"operation": "CREATE" if old is None else "UPDATE"}
    data = {"object": new, "oldObject": old, "request": request}
    return all(evaluated(condition["expression"], data) for condition in hook["matchConditions"])


def is_selected(selector: Raw, labels: dict[str, str]) -> bool:
    results = []
    for row in selector["matchExpressions"]:
        has = labels.get(row["key"]) in row["values"]
        results.append(has if row["operator"] == "In" else not has)
    return all(results)


@pytest.mark.parametrize("others", [(), ("second-scheduler",), ("cert-manager", "slices")])
def test_component_is_valid_with_others_and_keeps_the_order_of_webhooks(
    tmp_path: Path, others: tuple[str, ...]
) -> None:
    chosen = [MANIFESTS / "components" / name for name in ("dra", "dra-convert", *others)]
    documents = rendered(kustomization(tmp_path, MANIFESTS / "base", chosen))
    for document in documents:
        if "cert-manager" not in document["apiVersion"]:
            check(document)
    mutating = named(documents, "MutatingWebhookConfiguration", "mgpu-webhook")["webhooks"]
    names = [hook["name"] for hook in mutating]
    assert names[:4] == ["restore.mgpu.io", "convert-namespace.mgpu.io", "convert-pod.mgpu.io", "mutate.mgpu.io"]
    assert "mark-claims.mgpu.io" in names[4:]
    validating = named(documents, "ValidatingWebhookConfiguration", "mgpu-webhook")["webhooks"]
    assert validating[-1]["name"] == "protect-converted.mgpu.io"
    scheduler = named(documents, "Deployment", "mgpu-scheduler")
    assert running_mgpu(scheduler)
    dra = settings_of(documents, scheduler, tmp_path).dra
    assert (dra.enabled, dra.convert) == (True, True)


def test_webhooks_fail_closed_and_restore_is_called_once() -> None:
    paths = [hook["clientConfig"]["service"]["path"] for hook in (RESTORE, *CONVERT, PROTECT)]
    assert paths == ["/restore", "/convert", "/convert", "/validate"]
    assert {hook["failurePolicy"] for hook in (RESTORE, *CONVERT, PROTECT)} == {"Fail"}
    assert RESTORE["reinvocationPolicy"] == "Never"
    assert {hook["reinvocationPolicy"] for hook in CONVERT} == {"IfNeeded"}


def test_convert_is_asked_about_the_pods_that_mutate_is_asked_about() -> None:
    base = next(yaml.safe_load_all((MANIFESTS / "base/webhook.yaml").read_text()))["webhooks"][0]
    expression = base["matchConditions"][0]["expression"].partition(" || ")[0].strip()
    for hook in CONVERT:
        assert hook["matchConditions"][0]["expression"].strip() == expression
    assert is_asked(CONVERT[0], b.share())
    assert not is_asked(CONVERT[0], b.pod("p", {"name": "c"}))


@pytest.mark.parametrize(
    ("namespace", "pod", "expected"),
    [
        ({}, {}, False),
        ({"mgpu.io/dra": "convert"}, {}, True),
        ({"mgpu.io/dra": "convert"}, {"mgpu.io/dra": "keep"}, False),
        ({"mgpu.io/dra": "convert"}, {"mgpu.io/dra": "convert"}, True),
        ({}, {"mgpu.io/dra": "convert"}, True),
        ({"mgpu.io/dra": "keep"}, {"mgpu.io/dra": "convert"}, False),
        ({"mgpu.io/dra": "convert", "kubernetes.io/metadata.name": "mgpu-system"}, {}, False),
        ({"kubernetes.io/metadata.name": "mgpu-system"}, {"mgpu.io/dra": "convert"}, False),
    ],
)
def test_labels_select_the_pods_that_are_converted(
    namespace: dict[str, str], pod: dict[str, str], *, expected: bool
) -> None:
    asked = [
        is_selected(hook["namespaceSelector"], namespace) and is_selected(hook["objectSelector"], pod)
        for hook in CONVERT
    ]
    assert any(asked) == expected


def annotated(text: str | None, **more: str) -> Raw:
    return b.pod("p", {"name": "c"}, annotations={**more, **({} if text is None else {CONVERTED: text})})


def test_restore_and_protect_are_asked_about_the_annotation_only() -> None:
    bare: Raw = b.pod("p", {"name": "c"})
    del bare["metadata"]["annotations"]
    for raw in (bare, annotated(None, team="x")):
        assert not is_asked(RESTORE, raw)
        assert not is_asked(PROTECT, raw)
        assert not is_asked(PROTECT, raw, bare)
    assert is_asked(RESTORE, annotated("{}"))
    assert is_asked(PROTECT, annotated("{}"))
    assert not is_asked(PROTECT, annotated("{}", team="x"), annotated("{}"))
    for new, old in ((annotated("x"), annotated("{}")), (bare, annotated("{}")), (annotated("{}"), bare)):
        assert is_asked(PROTECT, new, old)


def template(**changes: Any) -> Raw:
    """Return a template of the scheduler, in which the fields of the first request are changed."""
    requests = (ConvertedRequest("a", 1, 30, b.GIB), ConvertedRequest("b", 2))
    raw = claim_template(ConvertedRequests(requests, {"card-models": "A100"}), "ml")
    raw["spec"]["spec"]["devices"]["requests"][0]["exactly"].update(changes)
    return raw


def denials(new: Raw | None, old: Raw | None, user: str = SCHEDULER) -> tuple[str, ...]:
    return policy_evaluation.denials(POLICY, new, old, user=user)


def test_policy_allows_what_the_controller_writes() -> None:
    assert denials(template(), None) == ()
    assert denials(None, template()) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"deviceClassName": "other"},
        {"adminAccess": True},
        {"selectors": [{"cel": {"expression": "true"}}]},
        {"tolerations": [{"operator": "Exists"}]},
    ],
)
def test_policy_denies_other_templates_of_the_scheduler(changes: Raw) -> None:
    assert denials(template(**changes), None)
    assert denials(template(**changes), None, user="alice") == ()


def test_policy_denies_templates_without_label_and_changes() -> None:
    bare = template()
    bare["metadata"]["labels"] = {}
    assert denials(bare, None)
    assert denials(None, bare)
    assert denials(template(), template())
    alternatives = template()
    request = alternatives["spec"]["spec"]["devices"]["requests"][0]
    request["firstAvailable"] = [{"name": "x", **request.pop("exactly")}]
    assert denials(alternatives, None)
