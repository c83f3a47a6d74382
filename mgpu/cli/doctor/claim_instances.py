"""Checks the nodes whose MIG instances ResourceClaims get (label `gpu.partitioning=mig-claims`, docs/dra.md).

`claims.check_claims` calls it, if mgpu serves claims at all. What the agents publish shows which cards are in MIG mode,
and their annotations show instances that keep their places from claims.
"""

from collections.abc import Iterator, Mapping, Sequence

from mgpu.cli.doctor.installation import ClaimSupport, Finding, Installation, Level, Raw
from mgpu.model.errors import BadObject
from mgpu.model.mig_attributes import MIG_TYPE
from mgpu.model.mig_devices import read_mig_device
from mgpu.model.node_slices import LABEL, read_slices
from mgpu.model.pods import read_node
from mgpu.model.resource_claims import DRIVER
from mgpu.model.resource_slices import NOT_IN_MIG_MODE
from mgpu.model.slice_names import MIG_CLAIMS, Slice
from mgpu.presentation.plain_text import join_names

CLAIMS = "claims"


def check_instances(installation: Installation, support: ClaimSupport) -> Iterator[Finding]:
    """Check that claims can get MIG instances on the nodes with the label."""
    if installation.hidden.keys() & {"nodes", "resourceslices"}:
        return
    labelled = [raw for raw in installation.nodes if _label(raw) == MIG_CLAIMS]
    if not labelled:
        return
    devices = {raw["metadata"]["name"]: _instances_on(raw["metadata"]["name"], support.slices) for raw in labelled}
    yield from _check_published(devices)
    yield from _check_mode(devices)
    yield from _check_foreign(labelled)
    if "deviceclasses" not in installation.hidden and not any(map(_selects_instances, support.classes)):
        text = f"no DeviceClass selects MIG instances, so no claim can request those of {join_names(sorted(devices))}"
        yield Finding(CLAIMS, Level.FAILED, text, "apply the DeviceClass mgpu-mig of components/dra")


def _label(node: Raw) -> str:
    return str((node["metadata"].get("labels") or {}).get(LABEL) or "")


def _instances_on(node: str, slices: Sequence[Raw]) -> list[Raw]:
    """Return the devices of a node that are MIG instances."""
    specs = [spec for raw in slices if (spec := raw.get("spec") or {}).get("nodeName") == node]
    devices = [row for spec in specs if spec.get("driver") == DRIVER for row in spec.get("devices") or ()]
    return [row for row in devices if read_mig_device(str(row.get("name"))) is not None]


def _check_published(devices: Mapping[str, Sequence[Raw]]) -> Iterator[Finding]:
    without = sorted(node for node, found in devices.items() if not found)
    if without:
        text = f"{join_names(without)} offer{'s' * (len(without) == 1)} no MIG instances, despite {LABEL}={MIG_CLAIMS}"
        remedy = (
            "they need cards that support MIG, dialects.slices.enabled, and the feature gate DRAPartitionableDevices "
            "(on by default since Kubernetes 1.36); the Events of the Node say what the agent misses"
        )
        yield Finding(CLAIMS, Level.FAILED, text, remedy)


def _check_mode(devices: Mapping[str, Sequence[Raw]]) -> Iterator[Finding]:
    found = {}
    for node, rows in sorted(devices.items()):
        cards = {
            device.card
            for row in rows
            if (device := read_mig_device(str(row.get("name")))) is not None
            and any(taint.get("key") == NOT_IN_MIG_MODE.key for taint in row.get("taints") or ())
        }
        if cards:
            found[node] = f"card{'s' * (len(cards) > 1)} {', '.join(map(str, sorted(cards)))} of {node}"
    if found:
        text = f"not in MIG mode, so claims get no instances of them: {join_names(list(found.values()))}"
        remedy = "end what uses these cards, and reset them or reboot the nodes; the Events of the Node have the reason"
        yield Finding(CLAIMS, Level.WARNING, text, remedy)


def _check_foreign(nodes: Sequence[Raw]) -> Iterator[Finding]:
    found = [f"{one.name} at {one.start} of card {one.card} of {name}" for name, one in sorted(_foreign(nodes))]
    if found:
        text = f"MIG instances that were not created for claims keep their places from them: {join_names(found)}"
        yield Finding(CLAIMS, Level.WARNING, text, "destroy them, for example with nvidia-smi mig -dci and -dgi")


def _foreign(nodes: Sequence[Raw]) -> Iterator[tuple[str, Slice]]:
    for raw in nodes:
        try:
            slices = read_slices(read_node(raw))
        except BadObject:
            continue  # The scheduler process reports it.
        yield from ((raw["metadata"]["name"], one) for one in slices.existing)


def _selects_instances(device_class: Raw) -> bool:
    rows = (device_class.get("spec") or {}).get("selectors") or ()
    text = " ".join(str((row.get("cel") or {}).get("expression") or "") for row in rows)
    return DRIVER in text and f'== "{MIG_TYPE}"' in text
