"""Generates what the Helm chart has in common with the kustomization, and the table of its values (`value_table`).

    python manifests/chart/generate.py            write the files
    python manifests/chart/generate.py --check    fail if a file differs from the generated one

The kustomize base and its components are the source of every object that the chart contains, except for the
workloads, the settings, the keys and the test, whose templates are written by hand. This program reads the sources and
writes templates from them: under a condition, in the namespace of the release, and with the labels of the chart.
`tests/manifests/test_chart.py` renders both and compares the objects.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import yaml
from value_table import CHART, ROOT, TABLE, Json, problems, table

MANIFESTS = ROOT / "manifests"
GENERATED = CHART / "templates" / "generated"
NAMESPACE = "mgpu-system"

Change = Callable[["Templates", Json], None]
"""Changes an object before it is written, by putting lines of template code into it."""

_OWN_LABELS = {"app.kubernetes.io/name", "app.kubernetes.io/part-of", "app.kubernetes.io/version"}
"""The labels that `mgpu.labels` (_helpers.tpl) writes."""
_OWN_CERTIFICATES = 'has .Values.certificates.mode (list "generate" "script")'
_CERT_MANAGER = 'eq .Values.certificates.mode "cert-manager"'


class Templates:
    """Lines of template code within YAML.

    An object cannot contain a line such as `{{- if … }}`. So it contains a placeholder, as an item of a list or as a
    key of a map, which is replaced after the object has been written as YAML.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []

    def item(self, code: str) -> str:
        """Return the placeholder of a line of code: an item of a list, or a key whose value is None."""
        self._lines.append(code)
        return f"@@{len(self._lines) - 1}@@"

    def when(self, condition: str, *items: object) -> list[object]:
        """Return items of a list that exist only under a condition."""
        return [self.item(f"{{{{- if {condition} }}}}"), *items, self.item("{{- end }}")]

    def fill(self, text: str) -> str:
        """Return the YAML with the lines of code in place of the placeholders."""
        return re.sub(r"^ *(?:- )?'@@(\d+)@@'(?:: null)?$", lambda m: self._lines[int(m[1])], text, flags=re.MULTILINE)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        return super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else ">" if len(text) > 90 else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def sources(path: str) -> list[Json]:
    """Return the objects of a file in manifests/."""
    return list(yaml.safe_load_all((MANIFESTS / path).read_text()))


def _label(templates: Templates, document: Json) -> None:
    metadata = document["metadata"]
    others = {name: value for name, value in metadata.get("labels", {}).items() if name not in _OWN_LABELS}
    include = templates.item('    {{- include "mgpu.labels" $ | nindent 4 }}')
    rest = {name: value for name, value in metadata.items() if name not in ("name", "namespace", "labels")}
    kept = {name: metadata[name] for name in ("name", "namespace") if name in metadata}
    document["metadata"] = {**kept, "labels": {include: None, **others}, **rest}


def _in_release(text: str) -> str:
    """Return the text with the namespace of the release in place of mgpu's."""
    text = re.sub(rf"((?:: |- )){NAMESPACE}$", r"\1{{ $.Release.Namespace | quote }}", text, flags=re.MULTILINE)
    return text.replace(NAMESPACE, "{{ $.Release.Namespace }}")


def _escaped(text: str) -> str:
    """Return a text that Helm's templates write as it is."""
    return re.sub(r"\{\{|\}\}", lambda m: f'{{{{ "{m[0]}" }}}}', text)


def document_text(document: Json, *, condition: str = "", change: Change | None = None) -> str:
    """Return the template of an object.

    Args:
        condition: the object exists only under this condition of a template; "" for always.
    """
    templates = Templates()
    document = deepcopy(document)
    _label(templates, document)
    if change:
        change(templates, document)
    dumped = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=116, allow_unicode=True)
    text = templates.fill(_in_release(_escaped(dumped)))
    return f"{{{{- if {condition} }}}}\n---\n{text}{{{{- end }}}}\n" if condition else f"---\n{text}"


def template_text(source: str, documents: Sequence[str], condition: str = "") -> str:
    """Return a file of templates.

    Args:
        source: where in manifests/ the objects come from, for the comment at the top.
        documents: the templates of the objects.
        condition: of all objects.
    """
    top = f"{{{{- /* Generated by manifests/chart/generate.py from {source}, where comments give the reasons. */}}}}\n"
    body = "".join(documents)
    return f"{top}{{{{- if {condition} }}}}\n{body}{{{{- end }}}}\n" if condition else top + body


def plain(source: str, condition: str = "", change: Change | None = None) -> str:
    """Return the template for all objects of a source."""
    return template_text(source, [document_text(d, change=change) for d in sources(source)], condition)


def _rbac() -> str:
    documents = [
        document_text(d, condition=_OWN_CERTIFICATES if d["metadata"]["name"].endswith("-certificate") else "")
        for d in sources("base/rbac.yaml")
    ]
    return template_text("base/rbac.yaml", documents)


def _services() -> str:
    def change(templates: Templates, service: Json) -> None:
        if service["metadata"]["name"] != "mgpu-scheduler":
            return
        for value, component in (("existingScheduler", "existing-scheduler"), ("volcano", "volcano")):
            (port,) = (
                operation["value"]
                for operation in _patches(component, "Service")
                if operation["path"] == "/spec/ports/-"
            )
            service["spec"]["ports"] += templates.when(f".Values.{value}.enabled", port)

    return plain("base/services.yaml", change=change)


def _patches(component: str, kind: str) -> Iterator[Json]:
    """Yield the operations with which the kustomization of a component patches the objects of a kind."""
    (kustomization,) = sources(f"components/{component}/kustomization.yaml")
    for patch in kustomization["patches"]:
        if patch["target"]["kind"] == kind:
            yield from yaml.safe_load(patch["patch"])


def _operations(path: str) -> list[Json]:
    """Return the operations of a file with a JSON patch."""
    return list(yaml.safe_load((MANIFESTS / path).read_text()))


def _network() -> str:
    def change(templates: Templates, policy: Json) -> None:
        name = policy["metadata"]["name"]
        if name in ("mgpu-webhook", "mgpu-scheduler"):
            (rule,) = policy["spec"]["ingress"]
            rule[templates.item('      {{- include "mgpu.narrowNetwork" $ | nindent 6 }}')] = None
        elif name == "mgpu-volcano":
            (peer,) = policy["spec"]["ingress"][0]["from"]
            labels = peer["namespaceSelector"]["matchLabels"]
            labels["kubernetes.io/metadata.name"] = "@namespace@"

    documents = [document_text(d, change=change) for d in sources("base/network.yaml")]
    for value, component in (("existingScheduler", "existing-scheduler"), ("volcano", "volcano")):
        documents += [
            document_text(d, condition=f".Values.{value}.enabled", change=change).replace(
                "'@namespace@'", "{{ .Values.volcano.namespace | quote }}"
            )
            for d in sources(f"components/{component}/network.yaml")
        ]
    return template_text("the files network.yaml of base/ and components/", documents, ".Values.networkPolicy.enabled")


def _webhooks() -> str:
    """Return the webhook configurations, with the webhooks that components add to them.

    The order of the webhooks is the order of the calls, so the operations of the components are applied one by one.
    """
    documents = [
        *sources("base/webhook.yaml"),
        *sources("base/mtgpu-webhook.yaml"),
        *sources("base/binding-webhook.yaml"),
    ]
    added = {
        ("MutatingWebhookConfiguration", "mgpu-webhook"): (
            (".Values.dra.enabled", "dra/mark-webhook.yaml"),
            (".Values.dra.convert", "dra-convert/restore-webhook.yaml"),
            (".Values.dra.convert", "dra-convert/convert-webhooks.yaml"),
        ),
        ("ValidatingWebhookConfiguration", "mgpu-webhook"): (
            (".Values.dra.convert", "dra-convert/protect-webhook.yaml"),
        ),
    }

    def change(templates: Templates, configuration: Json) -> None:
        hooks: list[tuple[str, Json]] = [("", hook) for hook in configuration["webhooks"]]
        for condition, path in added.get((configuration["kind"], configuration["metadata"]["name"]), ()):
            for operation in _operations(f"components/{path}"):
                at = operation["path"].removeprefix("/webhooks/")
                hooks.insert(len(hooks) if at == "-" else int(at), (condition, operation["value"]))
        (process,) = {hook["clientConfig"]["service"]["name"] for _, hook in hooks}
        for _, hook in hooks:
            hook["clientConfig"][
                templates.item(f'      {{{{- include "mgpu.caBundle" (list $ "{process}") | nindent 6 }}}}')
            ] = None
        configuration["webhooks"] = [
            item for condition, hook in hooks for item in (templates.when(condition, hook) if condition else [hook])
        ]
        if "annotations" not in configuration["metadata"]:
            configuration["metadata"][
                templates.item(f'  {{{{- include "mgpu.injection" (list $ "{process}") | nindent 2 }}}}')
            ] = None

    written = [document_text(d, change=change) for d in documents]
    written += [
        document_text(d, condition=".Values.dra.enabled", change=change) for d in sources("components/dra/webhook.yaml")
    ]
    return template_text("the webhooks of base/ and components/dra-…", written)


def _crds() -> str:
    def keep(templates: Templates, crd: Json) -> None:  # noqa: ARG001
        crd["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}

    documents = []
    for name, condition in (("mtgpupod", ""), ("device", 'eq (include "mgpu.ownsDevices" $) "true"')):
        documents += [document_text(d, condition=condition, change=keep) for d in sources(f"crds/{name}.yaml")]
    return template_text("crds/", documents, ".Values.crds.install")


def _certificates() -> str:
    """Return cert-manager's objects. The issuer of the values replaces the self-signed CA."""

    def change(templates: Templates, document: Json) -> None:
        if document["kind"] != "Certificate" or document["metadata"]["name"] == "mgpu-ca":
            return
        document["spec"]["issuerRef"] = {
            templates.item('    {{- include "mgpu.issuer" $ | nindent 4 }}'): None,
        }

    documents = []
    for d in sources("components/cert-manager/certificates.yaml"):
        own = d["kind"] == "Issuer" or d["metadata"]["name"] == "mgpu-ca"
        documents.append(
            document_text(d, condition="not .Values.certificates.certManager.issuerRef" if own else "", change=change)
        )
    return template_text("components/cert-manager/certificates.yaml", documents, _CERT_MANAGER)


def _claims() -> str:
    documents = []
    for condition, paths in (
        (".Values.dra.enabled", ("dra/device-class.yaml", "dra/rbac.yaml", "dra/policy.yaml")),
        (".Values.dra.wholeCards", ("dra-whole-cards/device-class.yaml",)),
        (".Values.dra.convert", ("dra-convert/rbac.yaml", "dra-convert/policy.yaml")),
    ):
        for path in paths:
            documents += [document_text(d, condition=condition) for d in sources(f"components/{path}")]
    return template_text("components/dra and components/dra-…", documents)


def _monitoring() -> str:
    def pod_monitor(templates: Templates, document: Json) -> None:
        document["metadata"]["labels"][
            templates.item("    {{- with .Values.monitoring.podMonitor.labels }}{{ toYaml . | nindent 4 }}{{ end }}")
        ] = None
        (endpoint,) = document["spec"]["podMetricsEndpoints"]
        endpoint["interval"] = "@interval@"

    def rules(templates: Templates, document: Json) -> None:
        document["metadata"]["labels"][
            templates.item("    {{- with .Values.monitoring.rules.labels }}{{ toYaml . | nindent 4 }}{{ end }}")
        ] = None

    documents = [
        document_text(d, condition=".Values.monitoring.podMonitor.enabled", change=pod_monitor).replace(
            "'@interval@'", "{{ .Values.monitoring.podMonitor.interval }}"
        )
        for d in sources("monitoring/pod-monitor.yaml")
    ]
    documents += [
        document_text(d, condition=".Values.monitoring.rules.enabled", change=rules)
        for d in sources("monitoring/prometheus-rule.yaml")
    ]
    return template_text("monitoring/", documents)


def chart_files() -> dict[Path, str]:
    """Return the content of all generated templates and files of the chart."""
    texts = {
        "rbac": _rbac(),
        "resource-quota": plain("base/quota.yaml", ".Values.resourceQuota.enabled"),
        "mps-config": plain("base/mps-config.yaml"),
        "agent-policy": plain("base/agent-policy.yaml"),
        "scheduler-policy": plain("base/scheduler-policy.yaml"),
        "certificate-policy": plain("base/certificate-policy.yaml"),
        "priority-classes": plain("base/priority-classes.yaml"),
        "services": _services(),
        "disruption": plain("base/disruption.yaml", ".Values.podDisruptionBudget.enabled"),
        "network": _network(),
        "webhooks": _webhooks(),
        "crds": _crds(),
        "cert-manager": _certificates(),
        "second-scheduler-rbac": plain("components/second-scheduler/rbac.yaml", ".Values.secondScheduler.enabled"),
        "second-scheduler-policy": plain("components/second-scheduler/policy.yaml", ".Values.secondScheduler.enabled"),
        "claims": _claims(),
        "monitoring": _monitoring(),
    }
    files = {GENERATED / f"{name}.yaml": text for name, text in texts.items()}
    # Helm reads no files outside of the chart.
    files[CHART / "files" / "kube-scheduler.yaml"] = (
        MANIFESTS / "components/second-scheduler/kube-scheduler.yaml"
    ).read_text()
    files[CHART / "files" / "grafana.json"] = (MANIFESTS / "monitoring/grafana.json").read_text()
    return files


def files() -> Mapping[Path, str]:
    """Return the content of all generated files."""
    return {**chart_files(), TABLE: table()}


def main(arguments: Sequence[str]) -> int | str:
    """Return what the process exits with."""
    if arguments not in ([], ["--check"]):
        return "usage: python manifests/chart/generate.py [--check]"
    if found := problems():
        return "error: " + "\n".join(found)
    generated = files()
    obsolete = [path for path in GENERATED.glob("*") if path not in generated]
    if not arguments:
        for path in obsolete:
            path.unlink()
        for path, text in generated.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return 0
    stale = [path for path, text in generated.items() if not path.exists() or path.read_text() != text] + obsolete
    names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
    return f"error: generated files are out of date, run `make chart`: {names}" if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
