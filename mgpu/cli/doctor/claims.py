"""Checks that the cluster serves ResourceClaims of mgpu's driver, if the settings say so (docs/dra.md).

`read_claim_support` reads what the check needs, and `mgpu doctor` runs the check. Which feature gates the API server
has cannot be read. But it drops the fields of disabled gates from what it stores, and a dry run shows what it would
store. The gates of kube-scheduler and of the kubelets cannot be seen at all.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mgpu.cli.doctor.claim_instances import check_instances
from mgpu.cli.doctor.installation import ClaimSupport, DryRun, Finding, Installation, Level, Raw, webhooks_of
from mgpu.kube import Api, ApiError
from mgpu.kube.server_version import OLDEST_FOR_CLAIMS, PATH, minor_version
from mgpu.model.cards import Card
from mgpu.model.resource_claims import API, CLASSES, DRIVER, SLICES
from mgpu.model.resource_slices import CORDONED, PublishedCard, make_slice
from mgpu.presentation.plain_text import join_names
from mgpu.settings import Settings
from mgpu.version import read_agent_report

CLAIMS = "claims"
CONFIGURATION = "mgpu-claims"
"""The name of the webhook configuration of components/dra."""
ENVIRONMENT = "MGPU_DRA__ENABLED"
_PATH = "/claim-admission"
_MUTATING = "mutatingwebhookconfigurations"
_GATES = "the API server, kube-controller-manager, kube-scheduler and the kubelets"
_APPLY = "apply the overlay with components/dra again: make deploy, or kubectl apply --server-side -k"
_WHOLE_CARDS = "mgpu-whole"
_EXTENDED_RESOURCE = "nvidia.com/gpu"


def read_claim_support(
    api: Api, settings: Settings, environment: Mapping[str, str] | None, hooks: Sequence[Raw], read_if_allowed: Any
) -> ClaimSupport:
    """Return what the cluster has of Dynamic Resource Allocation. If mgpu serves no claims, nothing else is read.

    Args:
        environment: the environment variables of the scheduler's Deployment that override the settings; None if the
            Deployment cannot be read. Then a webhook for claims shows that mgpu serves them.
        hooks: the webhooks for claims.
        read_if_allowed: see `collection.read_installation`.
    """
    enabled = (environment or {}).get(ENVIRONMENT, str(settings.dra.enabled)).lower() in ("true", "1", "yes", "on")
    if not enabled and not (environment is None and hooks):
        return ClaimSupport()

    def listing(path: str) -> list[Raw]:
        return list(read_if_allowed(path.rpartition("/")[2], lambda: list(api.list(path)[0]), []))

    version: Raw = read_if_allowed("the version", partial[Raw](api.get, PATH), {})
    served = bool(read_if_allowed("resource.k8s.io", partial[Raw](api.get, f"/apis/{API}"), {}))
    return ClaimSupport(
        True,
        served,
        minor_version(version),
        *(_try_slice(api) if served else (DryRun(), {})),
        listing(SLICES) if served else (),
        listing(CLASSES) if served else (),
    )


def _try_slice(api: Api) -> tuple[DryRun, Raw]:
    """Create, as a dry run, a ResourceSlice as an agent does, and return the answer and what would be stored."""
    card = Card(0, "GPU-0", "", 1 << 30)
    wanted = make_slice("mgpu-doctor", "", [PublishedCard(card, card.core, card.memory, (CORDONED,))], 1, {})
    del wanted["metadata"]["ownerReferences"]
    try:
        return DryRun(201), api.create(SLICES, wanted, dryRun="All")
    except ApiError as error:
        return DryRun(error.status, error.message), {}


def check_claims(installation: Installation) -> Iterator[Finding]:
    """Check what ResourceClaims need of the cluster and of the installation."""
    support = installation.claims
    if support is None:
        return
    if not support.enabled:
        yield _disabled(installation)
        return
    found = [*_check_api(support)]
    if not any(finding.level is Level.FAILED for finding in found):
        found += (
            *_check_webhook(installation),
            *_check_classes(installation, support),
            *_check_slices(installation, support),
            *check_instances(installation, support),
        )
    yield from found
    if not found:
        publishing = len(_publishing(support))
        nodes = f"{publishing} node{'s' * (publishing != 1)}"
        text = f"the API server supports them, mgpu decides their cards, and the cards of {nodes} are published"
        yield Finding(CLAIMS, Level.OK, f"{text}; the feature gates of kube-scheduler and kubelets cannot be seen")


def _disabled(installation: Installation) -> Finding:
    if claim_hooks(installation.configurations):
        text = f"dra.enabled is false, but the webhook {CONFIGURATION} exists, so claims with mgpu's devices are denied"
        return Finding(CLAIMS, Level.FAILED, text, f"kubectl delete mutatingwebhookconfiguration {CONFIGURATION}")
    return Finding(CLAIMS, Level.OK, "ResourceClaims are not served (dra.enabled is false)")


def _check_api(support: ClaimSupport) -> Iterator[Finding]:
    version = ".".join(map(str, support.version)) if support.version else "unknown"
    upgrade = "ResourceClaims need Kubernetes 1.35 or newer: remove components/dra from the overlay, or upgrade"
    is_old = support.version is not None and support.version < OLDEST_FOR_CLAIMS
    if not support.served:
        text = f"the API server does not serve {API}; its version is {version}"
        remedy = "enable the API group in the API server (--runtime-config)"
        yield Finding(CLAIMS, Level.FAILED, text, upgrade if is_old or support.version is None else remedy)
        return
    if is_old:
        text = f"kube-scheduler {version} uses one card of each node, and ends at claims for more cards than a node has"
        yield Finding(CLAIMS, Level.FAILED, text, upgrade)
        return
    answer = support.slice_dry_run
    if answer.status == 403:
        text = "it is unknown which feature gates the API server has, because you may not create ResourceSlices"
        yield Finding(CLAIMS, Level.WARNING, text, "run doctor as an administrator; they are only dry runs")
    elif answer.status != 201:
        text = f"the API server refuses a ResourceSlice as the agents publish it: {answer.status} {answer.message}"
        yield Finding(CLAIMS, Level.FAILED, text, "read the message; an admission policy may refuse it")
    else:
        yield from _check_gates(support.slice_stored)


def _check_gates(stored: Raw) -> Iterator[Finding]:
    """Report the gates whose fields the API server drops."""
    devices: list[Raw] = (stored.get("spec") or {}).get("devices") or [{}]
    device = devices[0]
    policies = [row.get("requestPolicy") for row in (device.get("capacity") or {}).values()]
    if not device.get("allowMultipleAllocations") or not all(policies):
        text = "the feature gate DRAConsumableCapacity is off in the API server, so claims cannot share a card"
        yield Finding(CLAIMS, Level.FAILED, text, f"enable it in {_GATES} (on by default since Kubernetes 1.36)")
    if not device.get("taints"):
        text = "the feature gate DRADeviceTaints is off in the API server: kube-scheduler tries unhealthy cards, too"
        yield Finding(CLAIMS, Level.WARNING, text, f"enable it in {_GATES} (on by default since Kubernetes 1.36)")


def claim_hooks(configurations: Mapping[str, Sequence[Raw]]) -> list[Raw]:
    """Return mgpu's webhooks for claims.

    Args:
        configurations: the webhook configurations, by the plural name of their kind.
    """
    return [
        hook for raw in configurations.get(_MUTATING, ()) for hook in webhooks_of(raw) if _path(hook).endswith(_PATH)
    ]


def _path(hook: Raw) -> str:
    config = hook.get("clientConfig") or {}
    return str((config.get("service") or {}).get("path") or config.get("url") or "")


def _check_webhook(installation: Installation) -> Iterator[Finding]:
    if _MUTATING in installation.hidden:
        return
    hooks = claim_hooks(installation.configurations)
    if not hooks:
        text = "no webhook decides the cards of claims, so claims and other pods can get the same part of a card"
        yield Finding(CLAIMS, Level.FAILED, text, _APPLY)
    if any(hook.get("failurePolicy") != "Fail" for hook in hooks):
        text = "the webhook for claims fails open: while mgpu does not answer, claims can get full cards"
        yield Finding(CLAIMS, Level.FAILED, text, f"set its failurePolicy to Fail: {_APPLY}")
    trusted = {
        (hook["clientConfig"].get("caBundle") or "")
        for raw in installation.configurations.get(_MUTATING, ())
        if raw["metadata"]["name"] == installation.settings.scheduler.configuration
        for hook in webhooks_of(raw)
    }
    if trusted and any((hook["clientConfig"].get("caBundle") or "") not in trusted for hook in hooks):
        text = "the webhook for claims trusts another CA than that for Bindings, so no claim may get cards"
        remedy = "run manifests/certificates.sh (make deploy runs it), unless cert-manager sets the CA"
        yield Finding(CLAIMS, Level.FAILED, text, remedy)


def _check_classes(installation: Installation, support: ClaimSupport) -> Iterator[Finding]:
    if "deviceclasses" in installation.hidden:
        return
    if not any(DRIVER in _expressions(raw) for raw in support.classes):
        text = f"no DeviceClass selects the devices of {DRIVER}, so no claim can request them"
        yield Finding(CLAIMS, Level.FAILED, text, _APPLY)
    whole = [raw for raw in support.classes if raw["metadata"]["name"] == _WHOLE_CARDS]
    if whole and not any((raw.get("spec") or {}).get("extendedResourceName") for raw in whole):
        text = f"the DeviceClass {_WHOLE_CARDS} names no extended resource: the feature gate DRAExtendedResource is off"
        yield Finding(CLAIMS, Level.FAILED, text, f"enable it in {_GATES} (on by default since Kubernetes 1.36)")
    served = [node for node, agent in _agents(installation) if agent.whole_cards == "dra"]
    extended = {(raw.get("spec") or {}).get("extendedResourceName") for raw in support.classes}
    if served and not whole and _EXTENDED_RESOURCE not in extended:
        text = f"no DeviceClass serves {_EXTENDED_RESOURCE}, and no device plugin does on {join_names(served)}"
        yield Finding(CLAIMS, Level.FAILED, text, "add components/dra-whole-cards to the overlay")


def _expressions(device_class: Raw) -> str:
    rows = (device_class.get("spec") or {}).get("selectors") or ()
    return " ".join(str((row.get("cel") or {}).get("expression") or "") for row in rows)


def _check_slices(installation: Installation, support: ClaimSupport) -> Iterator[Finding]:
    if "resourceslices" in installation.hidden or "nodes" in installation.hidden:
        return
    missing = sorted({node for node, _ in _agents(installation)} - _publishing(support))
    if missing:
        text = f"the agents of {join_names(missing)} publish no ResourceSlice, so these nodes serve no claims"
        logs = f"{installation.kubectl} logs daemonset/mgpu-deviceplugin"
        remedy = f"{logs}; the mounts of components/dra are needed, and a kubelet of 1.35 or newer"
        yield Finding(CLAIMS, Level.FAILED, text, remedy)


def _agents(installation: Installation) -> Iterator[tuple[str, Any]]:
    for raw in installation.nodes:
        agent = read_agent_report(raw)
        if agent:
            yield raw["metadata"]["name"], agent


def _publishing(support: ClaimSupport) -> set[str]:
    specs = [raw.get("spec") or {} for raw in support.slices]
    return {str(spec.get("nodeName")) for spec in specs if spec.get("driver") == DRIVER}
