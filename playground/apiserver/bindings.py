"""Binding a pod to a node: admission first, then one write of node, annotations, labels and condition."""

from playground.apiserver import schema
from playground.apiserver.admission import Admission
from playground.apiserver.attributes import Attributes
from playground.apiserver.errors import Cause, bad_request, conflict, not_found, plain, required, success
from playground.apiserver.objects import now, read_body
from playground.apiserver.routes import Call
from playground.apiserver.storage import Object, Storage

_KIND = ("", "v1", "Binding")


def _decode(call: Call, body: Object) -> Object:
    obj = schema.decode({"apiVersion": "v1", "kind": "Binding", "metadata": {}} | body, call.path.kind, "V1Binding").obj
    metadata = {k: v for k, v in (obj.get("metadata") or {}).items() if v is not None and k != "managedFields"}
    return obj | {"metadata": metadata, "target": obj.get("target") or {}}


def _attributes(call: Call, name: str, *, legacy: bool) -> Attributes:
    return Attributes(
        operation="CREATE",
        group="",
        version="v1",
        plural="bindings" if legacy else "pods",
        subresource="" if legacy else "binding",
        kind=_KIND,
        namespace=call.path.namespace,
        name=name,
        user=call.user,
        dry_run=call.dry_run,
        namespaced=True,
        options={"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"}
        | ({"dryRun": ["All"]} if call.dry_run else {}),
        warnings=call.warnings,
    )


def _problems(binding: Object) -> list[Cause]:
    target = binding["target"]
    found = []
    if target.get("kind", "") not in ("", "Node"):
        supported = 'supported values: "Node", "<empty>"'
        found.append(
            Cause("target.kind", f'Unsupported value: "{target["kind"]}": {supported}', "FieldValueNotSupported")
        )
    if not target.get("name"):
        found.append(required("target.name"))
    return found


def _bound(old: Object, binding: Object) -> Object:
    """The pod with what the Binding says. Raises a 409 for a pod that cannot be bound."""
    name, metadata, spec = old["metadata"]["name"], old["metadata"], old["spec"]
    why = ""
    if "deletionTimestamp" in metadata:
        why = f"pod {name} is being deleted, cannot be assigned to a host"
    elif spec.get("nodeName"):
        why = f'pod {name} is already assigned to node "{spec["nodeName"]}"'
    elif spec.get("schedulingGates"):
        why = f"pod {name} has non-empty .spec.schedulingGates"
    if why:
        raise conflict("", "pods/binding", name, why)
    for field in ("annotations", "labels"):
        if added := binding["metadata"].get(field):
            metadata = {**metadata, field: {**(metadata.get(field) or {}), **added}}
    status = old.get("status") or {}
    scheduled = {"type": "PodScheduled", "status": "True", "lastProbeTime": None, "lastTransitionTime": now()}
    conditions = [c for c in status.get("conditions") or [] if c["type"] != "PodScheduled"]
    status = {**status, "conditions": [*conditions, scheduled]}
    node = binding["target"]["name"]
    return {**old, "metadata": metadata, "spec": {**spec, "nodeName": node}, "status": status}


def _check_preconditions(metadata: Object, given: Object) -> None:
    """Raises a 409 where the Binding names another uid or resourceVersion than the pod has."""
    for field, word in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        if given.get(field) and given[field] != metadata[field]:
            why = (
                f"Precondition failed: {word} in precondition: {given[field]}, {word} in object meta: {metadata[field]}"
            )
            raise conflict("", "pods", metadata["name"], why)


class Binder:
    def __init__(self, storage: Storage, admission: Admission) -> None:
        self._storage, self._admission = storage, admission

    async def bind(self, call: Call, *, legacy: bool) -> Object:
        """POST of a Binding, to `pods/<name>/binding` or (`legacy`) to `bindings`, which ignores the uid given."""
        body = read_body(call)
        if not isinstance(body, dict):
            raise bad_request("the body is no Binding")
        binding = _decode(call, body)
        given = binding["metadata"]
        if given.setdefault("namespace", call.path.namespace) != call.path.namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        name = given.get("name", "") if legacy else call.path.name
        if not name:
            raise bad_request("Name parameter required.")
        if not legacy and given.get("name") != name:
            raise bad_request("name in URL does not match name in Binding object")
        if legacy:
            given.pop("uid", None)
        attrs = _attributes(call, name, legacy=legacy)
        binding = await self._admission.mutate(attrs, binding, None, lambda o: _decode(call, o))
        await self._admission.validate(attrs, binding, None)
        if problems := _problems(binding):
            raise plain(500, ", ".join(map(str, problems)))
        self._write(call, name, binding, legacy=legacy)
        return success(code=201)

    def _write(self, call: Call, name: str, binding: Object, *, legacy: bool) -> None:
        item = self._storage.get("pods", call.path.namespace, name)
        if item is None:
            raise not_found("", "pods", name)
        if not legacy:
            _check_preconditions(item.obj["metadata"], binding["metadata"])
        bound = _bound(item.obj, binding)
        if not call.dry_run:
            self._storage.replace("pods", item, bound)
