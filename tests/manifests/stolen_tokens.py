"""What a stolen token of each process can do, from the roles in manifests: the tables of docs/security.md.

`python -m tests.manifests.stolen_tokens` writes them into the page.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/security.md"
END = "<!-- end -->"
BASE, COMPONENT = "manifests/base/rbac.yaml", "manifests/components/second-scheduler/rbac.yaml"
CLAIMS, TEMPLATES = "manifests/components/dra/rbac.yaml", "manifests/components/dra-convert/rbac.yaml"
STARTS = {
    BASE: "<!-- stolen tokens: tests/manifests/stolen_tokens.py -->",
    COMPONENT: "<!-- stolen tokens of the second scheduler: tests/manifests/stolen_tokens.py -->",
    CLAIMS: "<!-- stolen tokens and claims: tests/manifests/stolen_tokens.py -->",
    TEMPLATES: "<!-- stolen tokens and converted pods: tests/manifests/stolen_tokens.py -->",
}
"""Where the table of each file begins on the page."""
_READS = frozenset({"get", "list", "watch"})


class Right(NamedTuple):
    """One resource in one rule. namespace None: everywhere. names: the objects that the rule names; (): all."""

    account: str
    role: str
    namespace: str | None
    resource: str
    names: tuple[str, ...]
    verbs: tuple[str, ...]


class Key(NamedTuple):
    """What a consequence depends on. writes: the verbs that change something."""

    account: str
    resource: str
    namespace: str | None
    named: bool
    writes: frozenset[str]


def _key(account: str, resource: str, *writes: str, namespace: str | None = None, named: bool = False) -> Key:
    return Key(account, resource, namespace, named, frozenset(writes))


_SYSTEM, _KUBE = "mgpu-system", "kube-system"
_AGENT, _SCHEDULER, _WEBHOOK = "mgpu-deviceplugin", "mgpu-scheduler", "mgpu-webhook"
_KUBE_SCHEDULER = "mgpu-kube-scheduler"
_OWN_NODE = "but by `agent-policy.yaml` only for its own node"
CONSEQUENCES: dict[Key, str] = {
    _key(_WEBHOOK, "secrets", "update", namespace=_SYSTEM, named=True): (
        "pose as the webhook to the API server, if the thief can divert the API server's connections; replace its "
        "certificate (`certificate-policy.yaml` prevents other changes of the Secret)"
    ),
    _key(_WEBHOOK, "mtgpupods"): "read all MtgpuPods",
    _key(_SCHEDULER, "secrets", "update", namespace=_SYSTEM, named=True): (
        "pose as the binding admission to the API server, if the thief can divert the API server's connections; "
        "replace its certificate (`certificate-policy.yaml` prevents other changes of the Secret)"
    ),
    _key(_SCHEDULER, "nodes", "patch"): (
        "read all nodes; change mgpu's plans and announcements on them (`scheduler-policy.yaml` prevents other changes)"
    ),
    _key(_SCHEDULER, "pods", "patch"): (
        "read all pods; write the allocation record of any pod (`scheduler-policy.yaml` prevents other changes, for "
        "example of images)"
    ),
    _key(_SCHEDULER, "pods/status", "patch"): (
        "set the phase of any pod to Failed; suggest a node to the scheduler of any pod (`scheduler-policy.yaml` "
        "prevents other changes)"
    ),
    _key(_SCHEDULER, "pods/binding", "create"): (
        "bind any waiting pod to any node (`scheduler-policy.yaml` denies annotations other than those of its cards)"
    ),
    _key(_SCHEDULER, "events", "create"): "write misleading Events (`scheduler-policy.yaml` limits their size)",
    _key(_SCHEDULER, "devices"): "read which cards there are",
    _key(_SCHEDULER, "poddisruptionbudgets"): "read them",
    _key(_SCHEDULER, "podgroups"): "read them",
    _key(_SCHEDULER, "tokenreviews", "create"): "find out whose a token is that the thief already has",
    _key(_SCHEDULER, "mtgpupods", "patch"): (
        "read all MtgpuPods; remove and add mgpu's finalizer (`scheduler-policy.yaml` prevents other changes)"
    ),
    _key(_SCHEDULER, "mtgpupods/status", "patch"): (
        "report wrong states of MtgpuPods; name any card for an MtgpuPod without one, which then holds what it "
        "requests of that card (`scheduler-policy.yaml` prevents a change of the card of an MtgpuPod that has one)"
    ),
    _key(_SCHEDULER, "mtgpupods/finalizers", "update"): "nothing by itself",
    _key(_SCHEDULER, "pods", "create", "delete"): (
        "create the Pods of MtgpuPods that have a card, with the content that their tenants gave them "
        "(`mtgpu-webhook.yaml`); run any image in kube-system without a token, volumes, variables and privileges, as "
        "an occupy pod; delete these Pods. `scheduler-policy.yaml` denies all other Pods. If `dialects.mtgpu.enabled` "
        "is false, the scheduler does not need this right: delete the binding `mgpu-scheduler-mtgpupods`"
    ),
    _key(_SCHEDULER, "leases", "create", namespace=_SYSTEM): (
        "create its own Lease after somebody has deleted it (`scheduler-policy.yaml` denies other Leases)"
    ),
    _key(_SCHEDULER, "leases", "update", namespace=_SYSTEM, named=True): "keep the scheduler from deciding",
    _key(_SCHEDULER, "configmaps", "patch", namespace=_SYSTEM, named=True): (
        "change how nodes share cards under MPS (`scheduler-policy.yaml` prevents changes of the metadata)"
    ),
    _key(_SCHEDULER, "configmaps", namespace=_KUBE): "read all ConfigMaps of kube-system",
    _key(_AGENT, "pods", "patch"): f"read all pods; change records of cards, {_OWN_NODE}",
    _key(_AGENT, "nodes", "patch"): f"read all nodes; lie about its cards, {_OWN_NODE}",
    _key(_AGENT, "nodes/status", "patch"): f"lie about how much of mgpu's resources there is, {_OWN_NODE}",
    _key(_AGENT, "events", "create"): f"write Events that mislead, {_OWN_NODE}",
    _key(_AGENT, "devices", "create", "patch", "delete"): f"lie about its cards, {_OWN_NODE}",
    _key(_AGENT, "configmaps", namespace=_SYSTEM, named=True): "read how nodes share cards under MPS",
    _key(_SCHEDULER, "resourceclaims", "patch"): (
        "read all ResourceClaims; write the annotation `mgpu.io/repair`, after which the agent delivers no cards to "
        "the claim (`policy.yaml` prevents other changes)"
    ),
    _key(_SCHEDULER, "resourceclaims/status", "update"): "nothing without the next right",
    _key(_SCHEDULER, "resourceclaims/binding", "update"): (
        "take an allocation with devices of mgpu's driver away from a claim whose cards are not delivered yet; give a "
        "claim without an allocation any devices, if one of them is a card of mgpu (`policy.yaml` prevents other "
        "changes of allocations)"
    ),
    _key(_SCHEDULER, "deviceclasses"): "read them",
    _key(_SCHEDULER, "resourceslices", "patch"): (
        "make kube-scheduler try waiting pods again and again (`policy.yaml` prevents changes other than that of one "
        "annotation)"
    ),
    _key(_SCHEDULER, "resourceclaimtemplates", "create", "delete"): (
        "create ResourceClaimTemplates of the class `mgpu` and delete those with mgpu's label, so that pods that were "
        "converted wait (`policy.yaml` of the component denies others)"
    ),
    _key(_AGENT, "resourceslices", "create", "update", "delete"): (
        "read which devices all nodes publish; lie about the cards of its node, but by `policy.yaml` only in its own "
        "ResourceSlice and of mgpu's driver"
    ),
    _key(_AGENT, "resourceclaims"): "read all ResourceClaims whose names the thief knows",
    _key(_AGENT, "resourceclaims/status", "update"): "nothing without the next right",
    _key(_AGENT, "resourceclaims/driver", "associated-node:update", named=True): (
        "say of claims of its node that their cards were delivered, or were not (the API server and `policy.yaml` deny "
        "it for claims of other nodes, and `policy.yaml` denies changes of allocations)"
    ),
    _key(_SCHEDULER, "leases", namespace=_SYSTEM, named=True): "read which kube-scheduler leads",
    _key(_KUBE_SCHEDULER, "leases", "update", namespace=_SYSTEM, named=True): (
        "keep the scheduler from deciding, in every replica"
    ),
    _key(_KUBE_SCHEDULER, "configmaps", namespace=_KUBE, named=True): "read them: certificate authorities, no keys",
}
"""A right that is not here fails the test: its author says what it costs when the token is stolen."""
KUBERNETES_ROLES: dict[str, str] = {
    "system:kube-scheduler": (
        "read all pods, nodes, namespaces, Services, volumes and claims; bind any pod that waits; write its conditions "
        "and nomination; **delete any pod** but those of system-node-critical; allocate the devices of ResourceClaims "
        "of every tenant, or take an allocation away; write Events. `scheduler-policy.yaml` and the component's "
        "`policy.yaml` prevent other writes, such as to Leases of others, phases, addresses, annotations and labels"
    ),
    "system:volume-scheduler": (
        "**give a PersistentVolume without a claim to any claim**, after which it is that tenant's, or to one that is "
        "not there, after which its reclaim policy applies (`Delete` deletes it); name the node of a claim that has no "
        "volume. `policy.yaml` prevents other changes: a volume that has a claim keeps it"
    ),
}
"""Roles that Kubernetes defines. Their rules depend on its version; what the policies leave of them is said as one."""
_READER = "extension-apiserver-authentication-reader"
_ITS_CONFIGMAP = Right("", _READER, None, "configmaps", (_READER.removesuffix("-reader"),), ("get", "list", "watch"))


def documents(file: str) -> list[dict[str, Any]]:
    return [document for document in yaml.load_all((ROOT / file).read_text(), yaml.CSafeLoader) if document]


def rights(file: str) -> Iterator[Right]:
    """Yield every right of the service accounts, in the order of the file; one for a role that Kubernetes defines."""
    found = documents(file)
    roles = {(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]): d for d in found}
    for binding in (d for d in found if d["kind"].endswith("RoleBinding")):
        namespace = binding["metadata"].get("namespace")
        ref = binding["roleRef"]
        for subject in binding["subjects"]:
            account, name = subject["name"], ref["name"]
            if name == _READER:
                yield _ITS_CONFIGMAP._replace(account=account, namespace=namespace)
                continue
            if name in KUBERNETES_ROLES:
                yield Right(account, name, namespace, "", (), ())
                continue
            for rule in roles[ref["kind"], namespace if ref["kind"] == "Role" else None, name]["rules"]:
                for resource in rule["resources"]:
                    names = tuple(rule.get("resourceNames", ()))
                    yield Right(account, name, namespace, resource, names, tuple(rule["verbs"]))


def key_of(right: Right) -> Key:
    writes = frozenset(right.verbs) - _READS
    return Key(right.account, right.resource, right.namespace, bool(right.names), writes)


def table(file: str) -> str:
    """Raises KeyError for a right whose consequences are not listed."""
    lines = ["| identity | right | where | if its token is stolen |", "|---|---|---|---|"]
    for right in rights(file):
        where = right.namespace or "everywhere"
        if right.role in KUBERNETES_ROLES:
            what, cost = f"Kubernetes' role `{right.role}`", KUBERNETES_ROLES[right.role]
        else:
            objects = f" {', '.join(f'`{name}`' for name in right.names)}" if right.names else ""
            what, cost = f"{right.resource}{objects}: {', '.join(right.verbs)}", CONSEQUENCES[key_of(right)]
        lines.append(f"| `{right.account}` | {what} | {where} | {cost} |")
    return "\n".join(lines)


def page() -> str:
    """Return the page with the tables of both files. Raises ValueError where it has no place for one."""
    text = PAGE.read_text()
    for file, start in STARTS.items():
        if start not in text:
            raise ValueError(f"{PAGE.name} has no line {start!r}: add it, and {END!r} after it")
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(END)
        text = f"{before}{start}\n\n{table(file)}\n\n{END}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
