"""The check of `mgpu doctor` for ResourceClaims."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from mgpu.cli.doctor.claims import check_claims, read_claim_support
from mgpu.cli.doctor.installation import ClaimSupport, DryRun, Finding, Installation
from mgpu.kube import Api, ApiError
from mgpu.model.resource_claims import CLASSES, SLICES
from mgpu.model.resource_slices import CORDONED, PublishedCard, make_slice
from mgpu.settings import load_settings
from mgpu.version import AGENT_ANNOTATION, AgentReport, write_agent_report
from playground.installation import MANIFESTS
from tests import builders as b
from tests.mgpu.cli.served import served

Raw = dict[str, Any]
ON = load_settings("dra: {enabled: true}")
FOLDER = MANIFESTS / "components"
CLASS: Raw = next(yaml.safe_load_all((FOLDER / "dra/device-class.yaml").read_text()))
WHOLE: Raw = yaml.safe_load((FOLDER / "dra-whole-cards/device-class.yaml").read_text())
WEBHOOK: Raw = yaml.safe_load((FOLDER / "dra/webhook.yaml").read_text())
BINDINGS: Raw = yaml.safe_load((MANIFESTS / "base/binding-webhook.yaml").read_text())


def slice_of(node: str) -> Raw:
    return make_slice(node, "uid", [PublishedCard(card, 1000, card.memory, (CORDONED,)) for card in b.cards(1)], 1, {})


def agent_on(name: str, whole_cards: str = "mgpu") -> Raw:
    raw = b.node(name)
    raw["metadata"]["annotations"][AGENT_ANNOTATION] = write_agent_report(AgentReport("1", True, 1, whole_cards))
    return raw


SUPPORT = ClaimSupport(True, True, (1, 36), DryRun(201), slice_of("doctor"), [slice_of("n1")], [CLASS])
INSTALLED = Installation(
    "mgpu-system",
    datetime(2026, 1, 1, tzinfo=UTC),
    "1",
    ON,
    configurations={"mutatingwebhookconfigurations": [WEBHOOK, BINDINGS]},
    nodes=[agent_on("n1"), b.node("without-an-agent")],
    claims=SUPPORT,
)


def finding_of(installation: Installation) -> Finding:
    (found,) = check_claims(installation)
    assert found.check == "claims"
    assert bool(found.remedy) is (found.level != "ok")
    return found


def with_support(**changes: Any) -> Installation:
    return replace(INSTALLED, claims=replace(SUPPORT, **changes))


def with_hook(change: Callable[[Raw], object]) -> Installation:
    changed = copy.deepcopy(WEBHOOK)
    change(changed["webhooks"][0])
    return replace(INSTALLED, configurations={"mutatingwebhookconfigurations": [changed, BINDINGS]})


def stored(change: Callable[[Raw], object]) -> Installation:
    """Return the installation on an API server that drops fields of devices."""
    changed = slice_of("doctor")
    change(changed["spec"]["devices"][0])
    return with_support(slice_stored=changed)


def test_claims_of_an_installation_without_faults_are_ok() -> None:
    assert finding_of(INSTALLED).level == "ok"
    assert "the cards of 1 node are published" in finding_of(INSTALLED).message
    assert "cannot be seen" in finding_of(INSTALLED).message
    whole = replace(INSTALLED, nodes=[agent_on("n1", "dra")])
    assert finding_of(replace(whole, claims=replace(SUPPORT, classes=[CLASS, WHOLE]))).level == "ok"


def test_claims_of_an_installation_that_does_not_serve_them_are_ok_unless_their_webhook_is_left() -> None:
    off = replace(INSTALLED, claims=ClaimSupport())
    assert (finding_of(off).level, finding_of(off).remedy[:28]) == ("failed", "kubectl delete mutatingwebho")
    assert finding_of(replace(off, configurations={})).message == "ResourceClaims are not served (dra.enabled is false)"


FAULTS: Mapping[str, tuple[Installation, str, str]] = {
    "without the API": (with_support(served=False, version=(1, 33)), "failed", "its version is 1.33"),
    "a kube-scheduler with faults": (with_support(version=(1, 34)), "failed", "kube-scheduler 1.34"),
    "API group off": (with_support(served=False), "failed", "does not serve resource.k8s.io/v1"),
    "not allowed": (with_support(slice_dry_run=DryRun(403, "no")), "warning", "you may not create ResourceSlices"),
    "refused": (with_support(slice_dry_run=DryRun(422, "odd")), "failed", "422 odd"),
    "no sharing": (stored(lambda d: d.pop("allowMultipleAllocations")), "failed", "DRAConsumableCapacity"),
    "no policy": (stored(lambda d: d["capacity"]["cores"].pop("requestPolicy")), "failed", "DRAConsumableCapacity"),
    "no taints": (stored(lambda d: d.pop("taints")), "warning", "DRADeviceTaints"),
    "no webhook": (replace(INSTALLED, configurations={}), "failed", "no webhook decides"),
    "fails open": (with_hook(lambda h: h.update(failurePolicy="Ignore")), "failed", "fails open"),
    "other CA": (with_hook(lambda h: h["clientConfig"].update(caBundle="b3RoZXI=")), "failed", "another CA"),
    "no class": (with_support(classes=[]), "failed", "no DeviceClass selects"),
    "no slice": (with_support(slices=[slice_of("n2")]), "failed", "the agents of n1 publish no ResourceSlice"),
    "extended resource off": (
        with_support(classes=[CLASS, {**WHOLE, "spec": {"selectors": WHOLE["spec"]["selectors"]}}]),
        "failed",
        "DRAExtendedResource is off",
    ),
    "nobody serves whole cards": (
        replace(INSTALLED, nodes=[agent_on("n1", "dra")]),
        "failed",
        "no DeviceClass serves nvidia.com/gpu",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_claims_is_found(fault: str) -> None:
    installation, level, message = FAULTS[fault]
    found = finding_of(installation)
    assert found.level == level
    assert message in found.message


def test_remedy_for_a_missing_api_depends_on_the_version() -> None:
    assert "--runtime-config" in finding_of(with_support(served=False)).remedy
    assert "need Kubernetes 1.35" in finding_of(with_support(served=False, version=(1, 33))).remedy
    assert "need Kubernetes 1.35" in finding_of(with_support(version=(1, 34))).remedy


def test_what_the_user_may_not_read_is_no_fault() -> None:
    hidden = dict.fromkeys(("mutatingwebhookconfigurations", "deviceclasses", "resourceslices"), "no")
    installed = with_support(slices=[], classes=[])
    assert finding_of(replace(installed, configurations={}, hidden=hidden)).level == "ok"


def read(api: Api, environment: Mapping[str, str] | None, hooks: Sequence[Raw] = ()) -> ClaimSupport:
    def read_if_allowed(_what: str, ask: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return ask()
        except ApiError:
            return otherwise

    return read_claim_support(api, load_settings(), environment, hooks, read_if_allowed)


def test_support_is_read_from_the_api_server_only_if_claims_are_enabled(tmp_path: Path) -> None:
    def fill(api: Api) -> None:
        api.create(CLASSES, CLASS)
        own = slice_of("n1")
        del own["metadata"]["ownerReferences"]
        api.create(SLICES, own)

    with served(tmp_path, fill) as kubeconfig:
        api = Api.connect(kubeconfig)
        assert read(api, {}, WEBHOOK["webhooks"]) == read(api, None) == ClaimSupport()
        # Without a Deployment, such as on the playground, the webhook shows it.
        assert read(api, None, WEBHOOK["webhooks"]).enabled
        found = read(api, {"MGPU_DRA__ENABLED": "true"})
        api.close()
    assert (found.enabled, found.served, found.slice_dry_run.status) == (True, True, 201)
    assert [raw["metadata"]["name"] for raw in (*found.slices, *found.classes)] == ["n1-gpu.mgpu.io", "mgpu"]
    nodes = [agent_on("n1")]
    assert finding_of(replace(INSTALLED, nodes=nodes, claims=found)).level == "ok"
