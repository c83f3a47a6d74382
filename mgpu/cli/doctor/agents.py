"""Checks each node with GPUs: its agent, its resources, CDI, isolation, and other device plugins. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from mgpu import dialects
from mgpu.cli.doctor.installation import AGENT, Finding, Installation, Level, Raw, is_nvidia_plugin
from mgpu.dialects.protocol import SHARE
from mgpu.model.agent_pods import is_ready, not_ready_cause
from mgpu.model.cards import GPU, Card
from mgpu.model.device_object import WHOLE_CARDS_LABEL, read_device
from mgpu.model.errors import BadObject
from mgpu.model.node_slices import unpartitioned_cards
from mgpu.model.pods import read_node
from mgpu.model.quantities import QuantityError, whole_number
from mgpu.presentation.overview import read_partitioning
from mgpu.presentation.plain_text import join_names
from mgpu.version import AgentReport, read_agent_report

_LABELS = ("nvidia.com/gpu.present", "mgpu.io/gpu")
_WHOLE = "nvidia.com/gpu"
_SET = "mgpu-deviceplugin"


def check_nodes(installation: Installation) -> Iterator[Finding]:
    """Check all nodes that are up and have GPUs."""
    if "nodes" in installation.hidden:
        return
    nodes = [node for node in installation.nodes if _up(node) and _has_gpus(installation, node)]
    if not nodes:
        text = "no node has GPUs, by Devices and labels"
        yield Finding("agents", Level.WARNING, text, f"kubectl label node NODE {_LABELS[1]}=true, where GPUs are")
        return
    missing = {name: why for node in nodes if (why := _missing(installation, node)) for name in [_name(node)]}
    yield from _agents(installation, missing, len(nodes))
    served = [(node, said) for node in nodes if _name(node) not in missing and (said := read_agent_report(node))]
    yield from _resources(installation, served)
    yield from _cdi(installation, served)
    yield from _isolation(installation, served)
    yield from _mps(installation, served)
    yield from _others(installation, served)


def _agents(installation: Installation, missing: Mapping[str, str], count: int) -> Iterator[Finding]:
    look = f"{installation.kubectl} get pods -o wide -l app.kubernetes.io/component={AGENT}"
    for why in sorted(set(missing.values())):
        names = sorted(name for name, reason in missing.items() if reason == why)
        remedy = f"{look}; the node needs the label {' or '.join(_LABELS)}=true"
        yield Finding("agents", Level.FAILED, f"none serves {join_names(names)}: {why}", remedy)
    if not missing:
        text = f"one runs on {'each of the' if count > 1 else 'the'} {count} node{'s' * (count > 1)} with GPUs"
        yield Finding("agents", Level.OK, text)


def _missing(installation: Installation, node: Raw) -> str:
    """Return the reason why no agent runs on the node, or "". Without a DaemonSet it may have been started by hand."""
    if _SET in installation.workloads and "pods" not in installation.hidden:
        here = [pod for pod in installation.of_component(AGENT) if pod["spec"].get("nodeName") == _name(node)]
        if not here:
            return f"DaemonSet {_SET} has no Pod there"
        if not any(map(is_ready, here)):
            return f"its Pod is not ready ({not_ready_cause(here[0])})"
    if read_agent_report(node) is None:
        return "no agent has reported itself there"
    return ""


def _resources(installation: Installation, served: Sequence[tuple[Raw, AgentReport]]) -> Iterator[Finding]:
    check, problems = "node resources", dict[str, list[str]]()
    for node, said in served:
        name = _name(node)
        if name not in installation.devices:
            if "devices" in installation.served and "devices" not in installation.hidden and said.cards:
                problems.setdefault("it has no Device", []).append(name)
            continue
        try:
            cards = read_device(installation.devices[name])
        except BadObject as error:
            problems.setdefault(f"its Device cannot be read: {error}", []).append(name)
            continue
        capacity, can = ((node.get("status") or {}).get(key) or {} for key in ("capacity", "allocatable"))
        wanted = _wanted(installation, node, cards, said)
        lacking = [r for r in wanted if not (_amount(capacity.get(r)) and _amount(can.get(r)))]
        if lacking:
            problems.setdefault(f"nothing of {join_names(lacking)} in its status", []).append(name)
    for why, names in sorted(problems.items()):
        remedy = f"{installation.kubectl} logs the agent's Pod there: check its registration, and disabled dialects"
        yield Finding(check, Level.FAILED, f"{join_names(sorted(names))}: {why}", remedy)
    if not problems:
        yield Finding(check, Level.OK, "each node has the resources of its cards in its status")


def _wanted(installation: Installation, node: Raw, cards: Sequence[Card], said: AgentReport) -> list[str]:
    """Return the resources that the node must offer while it has a healthy undivided card."""
    gpus = [card for card in cards if card.type == GPU]
    sliced, _ = read_partitioning(read_node(node), cards)
    whole = [card for card in unpartitioned_cards(sliced.found, gpus) if card.healthy]
    if not whole:
        return []
    found = [SHARE]
    for dialect in dialects.enabled(installation.settings):
        found += [
            r.name for r in dialect.resources(whole, installation.settings) if any(amount for _, amount in r.amounts)
        ]
    return [name for name in dict.fromkeys(found) if name != _WHOLE or said.whole_cards == "mgpu"]


def _cdi(installation: Installation, served: Sequence[tuple[Raw, AgentReport]]) -> Iterator[Finding]:
    check, wanted = "cdi", installation.settings.deviceplugin.cdi
    without = sorted(_name(node) for node, said in served if said.cdi is False)
    unknown = sorted(_name(node) for node, said in served if said.cdi is None)
    enable = "containerd: enable_cdi = true of its CRI plugin, and restart it; or deviceplugin.cdi: false"
    if without and wanted:
        text = f"CDI is off in the container runtime of {join_names(without)}: containers with GPUs do not start there"
        yield Finding(check, Level.FAILED, text, enable)
    elif unknown and wanted:
        remedy = "set deviceplugin.criSocket to the runtime's socket, and mount it into the agent"
        yield Finding(
            check, Level.WARNING, f"unknown whether CDI is on in the container runtime of {join_names(unknown)}", remedy
        )
    elif not wanted:
        text = "off by deviceplugin.cdi: pods with different shares that start at the same moment can fail"
        yield Finding(check, Level.WARNING, text, "enable it in the runtime, then remove deviceplugin.cdi: false")
    elif served:
        yield Finding(check, Level.OK, "CDI is on in all container runtimes")


def _isolation(installation: Installation, served: Sequence[tuple[Raw, AgentReport]]) -> Iterator[Finding]:
    """Check that NVIDIA's toolkit shows cards to the right containers, where the agent can read its configuration."""
    check, by_mounts = "isolation", installation.settings.deviceplugin.device_list == "mounts"
    known = [(_name(node), said.toolkit) for node, said in served if said.toolkit is not None]
    none = sorted(name for name, heeds in known if not (heeds.variable or (by_mounts and heeds.mounts)))
    open_ = sorted(name for name, heeds in known if heeds.variable and name not in none)
    if none:
        text = f"NVIDIA's toolkit on {join_names(none)} ignores the cards of unprivileged containers, which see none"
        remedy = "make its config.toml and deviceplugin.deviceList agree (docs/nodes.md)"
        yield Finding(check, Level.FAILED, text, remedy)
    if open_:
        text = f"containers on {join_names(open_)} that set NVIDIA_VISIBLE_DEVICES (CUDA images do) see all cards"
        remedy = "deviceplugin.deviceList: mounts, then the toolkit's config.toml (docs/nodes.md)"
        yield Finding(check, Level.WARNING, text, remedy)
    if known and not none and not open_:
        yield Finding(check, Level.OK, "only containers with cards see cards, and only their own")


def _mps(installation: Installation, served: Sequence[tuple[Raw, AgentReport]]) -> Iterator[Finding]:
    """Report nodes where a container can fill the node's own /run through the MPS folders."""
    unbounded = sorted(_name(node) for node, said in served if said.mps_unbounded)
    if unbounded:
        where = f"on {join_names(unbounded)}"
        text = f"{where} containers write folders of deviceplugin.mpsDir that are not mounts of their own"
        remedy = (
            "apply the agent's manifest of manifests/components/slices and replace the agent's Pod on a drained node; "
            f"{installation.kubectl} logs the agent's Pod there names the folder (docs/mps.md)"
        )
        yield Finding("mps", Level.FAILED, text, remedy)


def _others(installation: Installation, served: Sequence[tuple[Raw, AgentReport]]) -> Iterator[Finding]:
    """Check that NVIDIA's device plugin runs only where it serves whole cards."""
    check = "nvidia plugin"
    running = {pod["spec"].get("nodeName") for pod in installation.pods if is_nvidia_plugin(pod) and _runs(pod)}
    both = sorted(_name(node) for node, said in served if said.whole_cards == "mgpu" and _name(node) in running)
    many = sorted(
        _name(node)
        for node, said in served
        if said.whole_cards == "mgpu" and _name(node) not in both and _too_many(node, said)
    )
    remedy = "keep its DaemonSet off these nodes, or drain them and set deviceplugin.wholeCards: nvidia"
    if both:
        text = f"it runs on {join_names(both)}, where mgpu serves {_WHOLE} too: a card could be allocated twice"
        yield Finding(check, Level.FAILED, text, remedy)
    if many:
        text = f"{join_names(many)} has more {_WHOLE} than cards: another plugin serves it, perhaps with time-slicing"
        yield Finding(check, Level.FAILED, text, remedy)
    if not both and not many:
        left = sum(said.whole_cards == "nvidia" for _, said in served)
        text = (
            f"whole cards are left to it on {left} node{'s' * (left != 1)}" if left else "it serves none of these nodes"
        )
        yield Finding(check, Level.OK, text)


def _too_many(node: Raw, said: AgentReport) -> bool:
    return _amount(((node.get("status") or {}).get("capacity") or {}).get(_WHOLE)) > said.cards


def _runs(pod: Raw) -> bool:
    return (pod.get("status") or {}).get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")


def _has_gpus(installation: Installation, node: Raw) -> bool:
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(label) == "true" for label in _LABELS) or WHOLE_CARDS_LABEL in labels:
        return True
    device = installation.devices.get(_name(node))
    try:
        return any(card.type == GPU for card in read_device(device or {}))
    except BadObject:
        return True


def _up(node: Raw) -> bool:
    """Whether the node is Ready. On one that is not, a missing agent is not the fault to report."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return not any(row.get("type") == "Ready" and row.get("status") != "True" for row in conditions)


def _name(node: Raw) -> str:
    return str(node["metadata"]["name"])


def _amount(value: object) -> int:
    try:
        return 0 if value is None else whole_number(value)
    except QuantityError:
        return 0
