"""What a stolen token of each process can do, from manifests/base/rbac.yaml: the table of docs/security.md.

`python -m tests.manifests.stolen_tokens` writes it into the page.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/security.md"
START, END = "<!-- stolen tokens: tests/manifests/stolen_tokens.py -->", "<!-- end -->"
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
_OWN_NODE = "held to its own node by `agent-policy.yaml`"
CONSEQUENCES: dict[Key, str] = {
    _key(_WEBHOOK, "secrets", "update", namespace=_SYSTEM, named=True): (
        "pose as the webhook towards the API server, where it can divert its connections; replace its certificate, and "
        "no more of the Secret by `certificate-policy.yaml`"
    ),
    _key(_WEBHOOK, "mtgpupods"): "read all MtgpuPods",
    _key(_SCHEDULER, "secrets", "update", namespace=_SYSTEM, named=True): (
        "pose as the binding admission towards the API server, where it can divert its connections; replace its "
        "certificate, and no more of the Secret by `certificate-policy.yaml`"
    ),
    _key(_SCHEDULER, "nodes", "patch"): (
        "read all nodes; change mgpu's plans and announcements on them, held to these by `scheduler-policy.yaml`"
    ),
    _key(_SCHEDULER, "pods", "patch"): (
        "read all pods; write records of cards on any, held to these by `scheduler-policy.yaml`, which also keeps it "
        "from changing images"
    ),
    _key(
        _SCHEDULER, "pods/status", "patch"
    ): "fail any pod, write its conditions and nomination, and no more by `scheduler-policy.yaml`",
    _key(_SCHEDULER, "pods/binding", "create"): (
        "bind any pod that waits to any node, with annotations of its cards alone by `scheduler-policy.yaml`"
    ),
    _key(_SCHEDULER, "events", "create"): "write Events that mislead, of a size bounded by `scheduler-policy.yaml`",
    _key(_SCHEDULER, "devices"): "read which cards there are",
    _key(_SCHEDULER, "poddisruptionbudgets"): "read them",
    _key(_SCHEDULER, "mtgpupods", "patch"): (
        "read all MtgpuPods; remove and add mgpu's finalizer, held to it by `scheduler-policy.yaml`"
    ),
    _key(_SCHEDULER, "mtgpupods/status", "patch"): (
        "misreport MtgpuPods; name a card for one that has none, where that holds its own request; change no card that "
        "one has, by `scheduler-policy.yaml`"
    ),
    _key(_SCHEDULER, "mtgpupods/finalizers", "update"): "nothing by itself",
    _key(_SCHEDULER, "pods", "create", "delete"): (
        "create the Pods of MtgpuPods that have a card, with the content that their tenants gave them "
        "(`mtgpu-webhook.yaml`); run any image in kube-system without a token, volumes, variables and privileges, as "
        "an occupy pod; delete these Pods. Held to these by `scheduler-policy.yaml`. Delete the binding "
        "`mgpu-scheduler-mtgpupods` where `dialects.mtgpu.enabled` is false"
    ),
    _key(_SCHEDULER, "leases", "create", namespace=_SYSTEM): (
        "make Leases there that confuse elections, without metadata of its own by `scheduler-policy.yaml`"
    ),
    _key(_SCHEDULER, "leases", "update", namespace=_SYSTEM, named=True): "keep the scheduler from deciding",
    _key(_SCHEDULER, "configmaps", "patch", namespace=_SYSTEM, named=True): (
        "change how nodes share cards under MPS, and no metadata by `scheduler-policy.yaml`"
    ),
    _key(_SCHEDULER, "configmaps", namespace=_KUBE): "read all ConfigMaps of kube-system",
    _key(_AGENT, "pods", "patch"): f"read all pods; change records of cards, {_OWN_NODE}",
    _key(_AGENT, "nodes", "patch"): f"read all nodes; lie about its cards, {_OWN_NODE}",
    _key(_AGENT, "nodes/status", "patch"): f"lie about how much of mgpu's resources there is, {_OWN_NODE}",
    _key(_AGENT, "events", "create"): f"write Events that mislead, {_OWN_NODE}",
    _key(_AGENT, "devices", "create", "patch", "delete"): f"lie about its cards, {_OWN_NODE}",
    _key(_AGENT, "configmaps", namespace=_SYSTEM, named=True): "read how nodes share cards under MPS",
}
"""A right that is not here fails the test: its author says what it costs when the token is stolen."""


def documents() -> list[dict[str, Any]]:
    text = (ROOT / "manifests/base/rbac.yaml").read_text()
    return [document for document in yaml.safe_load_all(text) if document]


def rights() -> Iterator[Right]:
    """Every right of the service accounts, in the order of the file."""
    found = documents()
    roles = {(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]): d for d in found}
    for binding in (d for d in found if d["kind"].endswith("RoleBinding") or d["kind"] == "RoleBinding"):
        namespace = binding["metadata"].get("namespace")
        ref = binding["roleRef"]
        role = roles[ref["kind"], namespace if ref["kind"] == "Role" else None, ref["name"]]
        for subject in binding["subjects"]:
            for rule in role["rules"]:
                for resource in rule["resources"]:
                    names = tuple(rule.get("resourceNames", ()))
                    yield Right(subject["name"], ref["name"], namespace, resource, names, tuple(rule["verbs"]))


def key_of(right: Right) -> Key:
    writes = frozenset(right.verbs) - _READS
    return Key(right.account, right.resource, right.namespace, bool(right.names), writes)


def table() -> str:
    """Raises KeyError for a right of which nobody has said what it costs."""
    lines = ["| identity | right | where | if its token is stolen |", "|---|---|---|---|"]
    for right in rights():
        where = right.namespace or "everywhere"
        objects = f" {', '.join(f'`{name}`' for name in right.names)}" if right.names else ""
        what = f"{right.resource}{objects}: {', '.join(right.verbs)}"
        lines.append(f"| `{right.account}` | {what} | {where} | {CONSEQUENCES[key_of(right)]} |")
    return "\n".join(lines)


def page_with(text: str) -> str:
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{text}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with(table()))
