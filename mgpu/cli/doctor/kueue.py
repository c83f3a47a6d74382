"""Checks that Kueue counts the GPUs of a Job's template and of a Pod that mgpu's webhook has completed alike.

Kueue counts a Job by its template, and a Pod of its own or of a Deployment by what it requests after admission. The
webhook completes only Pods: it replaces `koordinator.sh/gpu`, and adds `mgpu.io/share`. Without the configuration of
docs/batch.md, a quota covers one kind of workload and blocks the other. `collection` reads the configuration, and `mgpu
doctor` runs the check.
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import yaml

from mgpu import dialects
from mgpu.cli.doctor.installation import Finding, Installation, Level, Raw
from mgpu.dialects import gpushare, koordinator
from mgpu.dialects.protocol import SHARE, Amounts
from mgpu.model.pods import Container
from mgpu.model.quantities import QuantityError, parse_quantity
from mgpu.model.raw_objects import table_at
from mgpu.presentation.plain_text import join_names
from mgpu.settings import Settings

GROUP = "/apis/kueue.x-k8s.io"
CONFIG_MAP = "kueue-manager-config"
CONFIG_MAP_PATH = f"/api/v1/namespaces/kueue-system/configmaps/{CONFIG_MAP}"
KEY = "controller_manager_config.yaml"
HIDDEN = f"configmap {CONFIG_MAP}"
_CHECK = "kueue"
# For "deployment" Kueue enables "pod" by itself. It counts StatefulSets and LeaderWorkerSets by their templates.
_COUNTED_BY_POD = ("pod", "deployment")
_REMEDY = (
    f"add examples/kueue/resources.yaml (docs/batch.md) to {KEY} of the ConfigMap {CONFIG_MAP} in kueue-system, and "
    "restart Kueue"
)


def check_kueue(installation: Installation) -> Iterator[Finding]:
    """Check Kueue's configuration. There is no finding if the cluster has no Kueue, or if the user may not read it."""
    if installation.kueue is None or HIDDEN in installation.hidden:
        return
    if not installation.kueue:
        text = f"Kueue is installed, but there is no ConfigMap {CONFIG_MAP} with {KEY} in kueue-system"
        yield Finding(_CHECK, Level.WARNING, text, "compare Kueue's configuration with docs/batch.md")
        return
    try:
        configuration = yaml.safe_load(installation.kueue)
        differences = [*_differences(configuration, installation.settings)]
    except (yaml.YAMLError, QuantityError) as error:
        yield Finding(_CHECK, Level.WARNING, f"{KEY} of Kueue cannot be read: {error}", "correct it")
        return
    if differences:
        text = f"Kueue counts a Pod otherwise than a Job that requests the same: {join_names(differences)}"
        yield Finding(_CHECK, Level.WARNING, text, _REMEDY)
    else:
        yield Finding(_CHECK, Level.OK, "Kueue counts the GPUs of Pods and of templates alike")


def _differences(configuration: object, settings: Settings) -> Iterator[str]:
    """Yield a text for each request that Kueue counts in two ways. Raises QuantityError."""
    frameworks = table_at(configuration, "integrations").get("frameworks")
    enabled = frameworks if isinstance(frameworks, list) else ()
    if not any(name in enabled for name in _COUNTED_BY_POD):
        return  # Kueue counts templates only.
    resources = table_at(configuration, "resources")
    for template, admitted in _completions(settings):
        if count(template, resources) != count(admitted, resources):
            yield f"{' and '.join(sorted(template))} of a Pod becomes {' and '.join(sorted(admitted))}"


def _completions(settings: Settings) -> Iterator[tuple[Amounts, Amounts]]:
    """Yield requests that the webhook changes under these settings, each as in a template and as in an admitted Pod."""
    if koordinator.enabled(settings):
        template = {koordinator.GPU: "100"}
        yield template, koordinator.normalized(template, template)[0]
    for dialect, name in ((koordinator, koordinator.MEMORY), (gpushare, gpushare.MEMORY)):
        template = {name: "1024"}
        if dialect.enabled(settings) and dialects.carrier(Container("c", requests=template), settings) is None:
            yield template, {**template, SHARE: "1"}


def count(requests: Amounts, resources: Mapping[str, Any]) -> dict[str, Fraction]:
    """Return what Kueue counts for requests, under the block `resources` of its configuration.

    The function does what Kueue's pkg/workload/workload.go does (`dropExcludedResources`,
    `applyResourceTransformations`). It assumes that with `quotaCheckStrategy: IgnoreUndeclared` no queue covers
    `mgpu.io/share`. Raises QuantityError for an invalid quantity.
    """
    prefixes = tuple(map(str, resources.get("excludeResourcePrefixes") or ()))
    if resources.get("quotaCheckStrategy") == "IgnoreUndeclared":
        prefixes = (*prefixes, SHARE)
    left = {name: parse_quantity(amount) for name, amount in requests.items() if not name.startswith(prefixes)}
    transformations = {row.get("input"): row for row in resources.get("transformations") or () if isinstance(row, dict)}
    counted: dict[str, Fraction] = {}
    for name, amount in left.items():
        row: Raw = transformations.get(name, {})
        if row.get("strategy") != "Replace":
            counted[name] = counted.get(name, Fraction(0)) + amount
        factor = left.get(str(row.get("multiplyBy")), Fraction(1))
        for output, each in (row.get("outputs") or {}).items():
            counted[output] = counted.get(output, Fraction(0)) + amount * factor * parse_quantity(each)
    return counted
