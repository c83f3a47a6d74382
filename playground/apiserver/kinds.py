"""Defines the kinds that the API server serves: built-in ones, and those that CustomResourceDefinitions add.

`api_server` has a `Registry`, in which `calls` finds the kind of each request. To serve another built-in kind, add a
row to `BUILT_IN`. The schema of a built-in kind is a class of the Kubernetes Python client. `deletions` adds and
removes the kinds of CustomResourceDefinitions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from playground.apiserver.storage import Object

_METADATA = ("metadata.name", "metadata.namespace")


@dataclass(frozen=True)
class Kind:
    """One version of a resource that is served.

    Attributes:
        group: The API group, which is "" for the core group.
        version: The version, such as `v1`.
        kind: The kind of the objects, such as `Pod`.
        plural: The name of the resource in URLs, such as `pods`.
        namespaced: Whether the objects are in namespaces.
        short: The short names for kubectl.
        subresources: The names of the subresources, such as `status`.
        categories: The categories for kubectl, such as `all`.
        fields: The fields that a field selector may name, each with the path of the field in the object.
        model: The name of the class of the Kubernetes Python client that is the schema of a built-in kind, or "" for a
            custom resource.
        generation: Whether a change outside of the metadata and the status raises `metadata.generation`.
        schema: The OpenAPI schema of a custom resource.
        columns: The additional printer columns of a custom resource.
        singular: The singular name of the resource.
        list_kind: The kind of a list of the objects.
    """

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool
    short: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    fields: Mapping[str, str] = field(default_factory=lambda: {f: f for f in _METADATA})
    model: str = ""
    generation: bool = False
    schema: Mapping[str, Any] | None = None
    columns: tuple[Mapping[str, Any], ...] = ()
    singular: str = ""
    list_kind: str = ""

    @property
    def api_version(self) -> str:
        """The `apiVersion` of the objects: `v1` or `apps/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """The name of the resource in the storage and in error messages: `pods` or `deployments.apps`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def qualified_kind(self) -> str:
        """The name of the kind in error messages: `Pod` or `Deployment.apps`."""
        return f"{self.kind}.{self.group}" if self.group else self.kind

    @property
    def custom(self) -> bool:
        """Whether the kind comes from a CustomResourceDefinition."""
        return not self.model


def _kind(
    api_version: str,
    kind: str,
    plural: str,
    *,
    cluster: bool = False,
    short: str = "",
    sub: str = "",
    fields: str = "",
    model: str = "",
    generation: bool = False,
    category: str = "",
) -> Kind:
    """Return a built-in kind. `short`, `sub`, `fields` and `category` list names that are separated by spaces."""
    group, _, version = api_version.rpartition("/")
    selectable = {f: f for f in (*_METADATA, *fields.split())}
    return Kind(
        group, version, kind, plural, not cluster, tuple(short.split()), tuple(sub.split()), tuple(category.split()),
        selectable, model or f"V1{kind}", generation, singular=kind.lower(), list_kind=f"{kind}List",
    )  # fmt: skip


_POD_FIELDS = (
    "spec.nodeName spec.restartPolicy spec.schedulerName spec.serviceAccountName spec.hostNetwork status.phase "
    "status.podIP status.nominatedNodeName"
)
_EVENT_FIELDS = (
    "involvedObject.kind involvedObject.namespace involvedObject.name involvedObject.uid involvedObject.apiVersion "
    "involvedObject.resourceVersion involvedObject.fieldPath reason reportingComponent source type"
)
_RBAC, _ADMISSION = "rbac.authorization.k8s.io/v1", "admissionregistration.k8s.io/v1"
_RESOURCE = "resource.k8s.io/v1"

BUILT_IN = (
    _kind("v1", "ConfigMap", "configmaps", short="cm"),
    _kind("v1", "Endpoints", "endpoints", short="ep"),
    _kind("v1", "Event", "events", short="ev", fields=_EVENT_FIELDS, model="CoreV1Event"),
    _kind("v1", "LimitRange", "limitranges", short="limits"),
    _kind("v1", "Namespace", "namespaces", cluster=True, short="ns", sub="status", fields="status.phase"),
    _kind("v1", "Node", "nodes", cluster=True, short="no", sub="status", fields="spec.unschedulable"),
    _kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims", short="pvc", sub="status"),
    _kind("v1", "PersistentVolume", "persistentvolumes", cluster=True, short="pv", sub="status"),
    _kind("v1", "Pod", "pods", short="po", sub="status binding eviction log", fields=_POD_FIELDS, generation=True,
          category="all"),
    _kind("v1", "ReplicationController", "replicationcontrollers", short="rc", sub="status", generation=True),
    _kind("v1", "ResourceQuota", "resourcequotas", short="quota", sub="status"),
    _kind("v1", "Secret", "secrets", fields="type"),
    _kind("v1", "ServiceAccount", "serviceaccounts", short="sa"),
    _kind("v1", "Service", "services", short="svc", sub="status", fields="spec.clusterIP spec.type", category="all"),
    _kind(_ADMISSION, "MutatingWebhookConfiguration", "mutatingwebhookconfigurations", cluster=True, generation=True,
          category="api-extensions"),
    _kind(_ADMISSION, "ValidatingWebhookConfiguration", "validatingwebhookconfigurations", cluster=True,
          generation=True, category="api-extensions"),
    _kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", cluster=True,
          short="crd crds", sub="status", generation=True, category="api-extensions"),
    _kind("apps/v1", "DaemonSet", "daemonsets", short="ds", sub="status", generation=True, category="all"),
    _kind("apps/v1", "Deployment", "deployments", short="deploy", sub="status", generation=True, category="all"),
    _kind("apps/v1", "ReplicaSet", "replicasets", short="rs", sub="status", generation=True, category="all"),
    _kind("apps/v1", "StatefulSet", "statefulsets", short="sts", sub="status", generation=True, category="all"),
    _kind("batch/v1", "CronJob", "cronjobs", short="cj", sub="status", generation=True, category="all"),
    _kind("batch/v1", "Job", "jobs", sub="status", generation=True, fields="status.successful", category="all"),
    _kind("coordination.k8s.io/v1", "Lease", "leases"),
    _kind("discovery.k8s.io/v1", "EndpointSlice", "endpointslices"),
    _kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies", short="netpol", generation=True),
    _kind("node.k8s.io/v1", "RuntimeClass", "runtimeclasses", cluster=True),
    _kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", short="pdb", sub="status", generation=True),
    _kind(_RBAC, "ClusterRoleBinding", "clusterrolebindings", cluster=True),
    _kind(_RBAC, "ClusterRole", "clusterroles", cluster=True),
    _kind(_RBAC, "RoleBinding", "rolebindings"),
    _kind(_RBAC, "Role", "roles"),
    _kind(_RESOURCE, "DeviceClass", "deviceclasses", cluster=True, generation=True),
    _kind(_RESOURCE, "ResourceClaim", "resourceclaims", sub="status", model="ResourceV1ResourceClaim"),
    _kind(_RESOURCE, "ResourceClaimTemplate", "resourceclaimtemplates"),
    _kind(_RESOURCE, "ResourceSlice", "resourceslices", cluster=True, fields="spec.driver spec.nodeName",
          generation=True),
    _kind("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses", cluster=True, short="pc", generation=True),
    _kind("storage.k8s.io/v1", "CSIDriver", "csidrivers", cluster=True),
    _kind("storage.k8s.io/v1", "CSINode", "csinodes", cluster=True),
    _kind("storage.k8s.io/v1", "CSIStorageCapacity", "csistoragecapacities"),
    _kind("storage.k8s.io/v1", "StorageClass", "storageclasses", cluster=True, short="sc"),
    _kind("storage.k8s.io/v1", "VolumeAttachment", "volumeattachments", cluster=True, sub="status"),
)  # fmt: skip


def from_definition(crd: Object) -> list[Kind]:
    """Return the kinds of a CustomResourceDefinition, one for each served version."""
    found = []
    spec = crd["spec"]
    names = spec["names"]
    for version in spec["versions"]:
        if not version.get("served"):
            continue
        subresources = version.get("subresources") or {}
        selectable = [s["jsonPath"].lstrip(".") for s in version.get("selectableFields") or []]
        kind = Kind(
            spec["group"], version["name"], names["kind"], names["plural"], spec["scope"] == "Namespaced",
            tuple(names.get("shortNames") or ()), ("status",) if "status" in subresources else (),
            tuple(names.get("categories") or ()), {f: f for f in (*_METADATA, *selectable)},
            generation=True, schema=(version.get("schema") or {}).get("openAPIV3Schema") or {},
            columns=tuple(version.get("additionalPrinterColumns") or ()),
            singular=names.get("singular") or names["kind"].lower(),
            list_kind=names.get("listKind") or f"{names['kind']}List",
        )  # fmt: skip
        found.append(kind)
    return found


class Registry:
    """The kinds that are served at present."""

    def __init__(self) -> None:
        self._kinds = {(k.group, k.version, k.plural): k for k in BUILT_IN}

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._kinds[key] for key in sorted(self._kinds))

    def find(self, group: str, version: str, plural: str) -> Kind | None:
        """Return the kind that is served under these names, or None."""
        return self._kinds.get((group, version, plural))

    def of(self, resource: str) -> Kind:
        """Return the kind of a resource such as `deployments.apps`, which must be served.

        If several versions are served, return the one that is first in alphabetical order.
        """
        return next(k for k in self if k.resource == resource)

    def define(self, crd: Object) -> None:
        """Serve the kinds of a CustomResourceDefinition, in place of the kinds of its earlier state."""
        self.undefine(crd)
        for kind in from_definition(crd):
            self._kinds[(kind.group, kind.version, kind.plural)] = kind

    def undefine(self, crd: Object) -> None:
        """Stop serving the kinds of a CustomResourceDefinition."""
        group, plural = crd["spec"]["group"], crd["spec"]["names"]["plural"]
        for key in [k for k in self._kinds if (k[0], k[2]) == (group, plural)]:
            del self._kinds[key]
