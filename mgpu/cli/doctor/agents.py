"""Checks each node with GPUs: its agent, its resources, CDI, isolation, and other device plugins.

`mgpu doctor` runs these checks. Each agent reports the configuration of its node in an annotation
(`mgpu.version.AgentReport`). If no agent serves a node, the only finding about the node is that its agent is missing.
"""

from collections.abc import Iterator, Mapping, Sequence

from mgpu import dialects
from mgpu.cli.doctor.installation import AGENT, Finding, Installation, Level, Raw, is_nvidia_plugin
from mgpu.dialects.protocol import SHARE
from mgpu.model.agent_pods import is_ready, not_ready_cause
from mgpu.model.cards import GPU, Card
from mgpu.model.device_object import WHOLE_CARDS_LABEL, read_device
from mgpu.model.errors import BadObject
from mgpu.model.isolation import NONE
from mgpu.model.node_slices import unpartitioned_cards
from mgpu.model.pods import read_node
from mgpu.model.quantities import QuantityError, whole_number
from mgpu.model.usage_problems import EXPLANATIONS, UsageProblem
from mgpu.presentation.overview import read_partitioning
from mgpu.presentation.plain_text import join_names
from mgpu.version import AgentReport, IsolationReport, read_agent_report

_LABELS = ("nvidia.com/gpu.present", "mgpu.io/gpu")
_WHOLE_CARDS = "nvidia.com/gpu"
_DAEMON_SET = "mgpu-deviceplugin"
_NOT_READY = "its Pod is not ready"


def check_nodes(installation: Installation) -> Iterator[Finding]:
    """Check all nodes that have GPUs and are Ready. A node that is not Ready may lack its agent.

    There is no finding if the user may not list nodes.
    """
    if "nodes" in installation.hidden:
        return
    nodes = [node for node in installation.nodes if _is_ready(node) and _has_gpus(installation, node)]
    if not nodes:
        text = "no Ready node has a Device with GPUs, or a label that marks it as a node with GPUs"
        yield Finding("agents", Level.WARNING, text, f"kubectl label node NODE {_LABELS[1]}=true for nodes with GPUs")
        return
    reasons = {_name(node): _not_served_reason(installation, node) for node in nodes}
    missing = {name: reason for name, reason in reasons.items() if reason is not None}
    yield from _check_agents(installation, missing, len(nodes))
    reports = [(node, agent) for node in nodes if _name(node) not in missing and (agent := read_agent_report(node))]
    yield from _check_resources(installation, reports)
    yield from _check_cdi(installation, reports)
    yield from _check_isolation(installation, reports)
    yield from _check_limits(reports)
    yield from _check_usage(reports)
    yield from _check_mps(installation, reports)
    yield from _check_nvidia_plugin(installation, reports)


def _check_agents(installation: Installation, missing: Mapping[str, str], count: int) -> Iterator[Finding]:
    """Report the nodes that no agent serves.

    Args:
        missing: the reason why no agent serves a node, by the name of the node.
        count: the number of all nodes with GPUs.
    """
    command = f"{installation.kubectl} get pods -o wide -l app.kubernetes.io/component={AGENT}"
    for reason in sorted(set(missing.values())):
        names = sorted(name for name in missing if missing[name] == reason)
        logs = f"the log of the Pod and the Events of the node say why: {installation.kubectl} logs POD"
        hint = logs if reason.startswith(_NOT_READY) else f"the node needs the label {' or '.join(_LABELS)}=true"
        remedy = f"{command}; {hint}"
        yield Finding("agents", Level.FAILED, f"no agent serves {join_names(names)}: {reason}", remedy)
    if not missing:
        nodes = "the node" if count == 1 else f"each of the {count} nodes"
        yield Finding("agents", Level.OK, f"one runs on {nodes} with GPUs")


def _not_served_reason(installation: Installation, node: Raw) -> str | None:
    """Return the reason why no agent serves the node, or None if an agent serves it.

    If there is no DaemonSet, the agent may have been started by hand. In that case, or if the user may not list Pods,
    the only criterion is whether the Node has an agent's report.
    """
    if _DAEMON_SET in installation.workloads and "pods" not in installation.hidden:
        pods = [pod for pod in installation.pods_of(AGENT) if pod["spec"].get("nodeName") == _name(node)]
        if not pods:
            return f"DaemonSet {_DAEMON_SET} has no Pod there"
        if not any(map(is_ready, pods)):
            return f"{_NOT_READY} ({not_ready_cause(pods[0])})"
    if read_agent_report(node) is None:
        return "no agent has reported itself there"
    return None


def _check_resources(installation: Installation, reports: Sequence[tuple[Raw, AgentReport]]) -> Iterator[Finding]:
    check = "node resources"
    problems: dict[str, list[str]] = {}
    for node, agent in reports:
        name = _name(node)
        if name not in installation.devices:
            if "devices" in installation.served and "devices" not in installation.hidden and agent.cards:
                problems.setdefault("it has no Device", []).append(name)
            continue
        try:
            cards = read_device(installation.devices[name])
        except BadObject as error:
            problems.setdefault(f"its Device cannot be read: {error}", []).append(name)
            continue
        capacity, allocatable = ((node.get("status") or {}).get(key) or {} for key in ("capacity", "allocatable"))
        expected = _expected_resources(installation, node, cards, agent)
        lacking = [name for name in expected if not (_amount(capacity.get(name)) and _amount(allocatable.get(name)))]
        if lacking:
            problems.setdefault(f"no {join_names(lacking)} in its status", []).append(name)
    for problem, names in sorted(problems.items()):
        log = f"the log of the agent's Pod there ({installation.kubectl} logs POD)"
        remedy = f"check in {log} whether it has registered with the kubelet; check which vocabularies are disabled"
        yield Finding(check, Level.FAILED, f"{join_names(sorted(names))}: {problem}", remedy)
    if not problems:
        yield Finding(check, Level.OK, "each node has the resources of its cards in its status")


def _expected_resources(installation: Installation, node: Raw, cards: Sequence[Card], agent: AgentReport) -> list[str]:
    """Return the names of the resources that the node must have; [] if no healthy card is unpartitioned."""
    gpus = [card for card in cards if card.type == GPU]
    partitions, _ = read_partitioning(read_node(node), cards)
    whole = [card for card in unpartitioned_cards(partitions.slices, gpus) if card.healthy]
    if not whole:
        return []
    names = [SHARE]
    for dialect in dialects.enabled(installation.settings):
        resources = dialect.resources(whole, installation.settings)
        names += [resource.name for resource in resources if any(amount for _, amount in resource.amounts)]
    return [name for name in dict.fromkeys(names) if name != _WHOLE_CARDS or agent.whole_cards == "mgpu"]


def _check_cdi(installation: Installation, reports: Sequence[tuple[Raw, AgentReport]]) -> Iterator[Finding]:
    check = "cdi"
    is_required = installation.settings.deviceplugin.cdi
    without = sorted(_name(node) for node, agent in reports if agent.cdi is False)
    unknown = sorted(_name(node) for node, agent in reports if agent.cdi is None)
    enable = "set enable_cdi = true of containerd's CRI plugin and restart containerd, or set deviceplugin.cdi: false"
    if without and is_required:
        text = f"CDI is off in the container runtime of {join_names(without)}: containers with GPUs do not start there"
        yield Finding(check, Level.FAILED, text, enable)
    elif unknown and is_required:
        text = f"it is unknown whether CDI is on in the container runtime of {join_names(unknown)}"
        remedy = "set deviceplugin.criSocket to the runtime's socket, and mount it into the agent"
        yield Finding(check, Level.WARNING, text, remedy)
    elif not is_required:
        text = "deviceplugin.cdi turns CDI off: pods with different shares that start at the same moment can fail"
        yield Finding(check, Level.WARNING, text, "enable CDI in the runtime, then remove deviceplugin.cdi: false")
    elif reports:
        yield Finding(check, Level.OK, "CDI is on in all container runtimes")


def _check_isolation(installation: Installation, reports: Sequence[tuple[Raw, AgentReport]]) -> Iterator[Finding]:
    """Check that NVIDIA's container toolkit shows each container only the container's own cards.

    Nodes whose agent cannot read the toolkit's configuration are left out.
    """
    check = "isolation"
    by_mounts = installation.settings.deviceplugin.device_list == "mounts"
    toolkits = {_name(node): agent.toolkit for node, agent in reports if agent.toolkit is not None}
    blind = sorted(name for name, kit in toolkits.items() if not (kit.variable or (by_mounts and kit.mounts)))
    exposed = sorted(name for name, kit in toolkits.items() if kit.variable and name not in blind)
    if blind:
        text = f"NVIDIA's toolkit on {join_names(blind)} ignores the cards of unprivileged containers, which see none"
        remedy = "make its config.toml and deviceplugin.deviceList agree (docs/nodes.md)"
        yield Finding(check, Level.FAILED, text, remedy)
    if exposed:
        text = f"containers on {join_names(exposed)} that set NVIDIA_VISIBLE_DEVICES (CUDA images do) see all cards"
        remedy = "set deviceplugin.deviceList: mounts, then change the toolkit's config.toml (docs/nodes.md)"
        yield Finding(check, Level.WARNING, text, remedy)
    if toolkits and not blind and not exposed:
        yield Finding(check, Level.OK, "only containers with cards see cards, and only their own")


def _check_limits(reports: Sequence[tuple[Raw, AgentReport]]) -> Iterator[Finding]:
    """Report what holds containers to their shares on each node, and the nodes on which it does not work."""
    check = "limits"
    by_report: dict[IsolationReport, list[str]] = {}
    for node, agent in reports:
        if agent.isolation is not None:
            by_report.setdefault(agent.isolation._replace(hami_core=False), []).append(_name(node))
    for report, names in sorted(by_report.items()):
        nodes = join_names(sorted(names))
        if report.problem:
            remedy = "pods there run without limits, and get the Event MgpuNotEnforced (docs/isolation.md)"
            yield Finding(check, Level.FAILED, f"isolation {report.backend} on {nodes}: {report.problem}", remedy)
        elif report.backend != NONE:
            caution = f"; {report.caution}" if report.caution else ""
            yield Finding(check, Level.OK, f"isolation {report.backend} holds shares on {nodes}{caution}")


def _check_usage(reports: Sequence[tuple[Raw, AgentReport]]) -> Iterator[Finding]:
    """Report the nodes on which it is not known what containers use of the cards.

    An agent without the rights to see that is not at fault: the manifests give them only to those who want to measure.
    """
    by_problem: dict[UsageProblem, list[str]] = {}
    for node, agent in reports:
        if agent.usage_problem is not None:
            by_problem.setdefault(agent.usage_problem, []).append(_name(node))
    for problem, names in sorted(by_problem.items()):
        text = f"on {join_names(sorted(names))} {EXPLANATIONS[problem]}"
        if problem is UsageProblem.NO_HOST_PIDS:
            yield Finding("usage", Level.OK, f"{text} (manifests/components/usage changes that)")
        else:
            remedy = "docs/usage.md says what measuring needs; deviceplugin.usageSeconds: 0 turns it off"
            yield Finding("usage", Level.WARNING, text, remedy)


def _check_mps(installation: Installation, reports: Sequence[tuple[Raw, AgentReport]]) -> Iterator[Finding]:
    """Report the nodes on which a container can fill the node's own /run through the MPS folders."""
    names = sorted(_name(node) for node, agent in reports if agent.mps_unbounded)
    if names:
        text = f"on {join_names(names)} containers write to folders of deviceplugin.mpsDir that are not separate mounts"
        remedy = (
            "apply the agent's manifest of manifests/components/slices and replace the agent's Pod on a drained node; "
            f"the log of the agent's Pod there ({installation.kubectl} logs POD) names the folder (docs/mps.md)"
        )
        yield Finding("mps", Level.FAILED, text, remedy)


def _check_nvidia_plugin(installation: Installation, reports: Sequence[tuple[Raw, AgentReport]]) -> Iterator[Finding]:
    """Check that mgpu and NVIDIA's device plugin do not both serve the whole cards of a node."""
    check = "nvidia plugin"
    running = {pod["spec"].get("nodeName") for pod in installation.pods if is_nvidia_plugin(pod) and _is_running(pod)}
    own = [(node, agent) for node, agent in reports if agent.whole_cards == "mgpu"]
    both = sorted(_name(node) for node, _ in own if _name(node) in running)
    many = sorted(_name(node) for node, agent in own if _name(node) not in both and _has_too_many(node, agent))
    remedy = "keep the plugin's DaemonSet off these nodes, or drain them and set deviceplugin.wholeCards: nvidia"
    if both:
        text = f"it runs on {join_names(both)}, where mgpu serves {_WHOLE_CARDS} too: a card could be allocated twice"
        yield Finding(check, Level.FAILED, text, remedy)
    if many:
        more = f"the capacity for {_WHOLE_CARDS} is larger than the number of cards on {join_names(many)}"
        text = f"{more}: another plugin serves the resource too, perhaps with time-slicing"
        yield Finding(check, Level.FAILED, text, remedy)
    if not both and not many:
        count = sum(agent.whole_cards == "nvidia" for _, agent in reports)
        text = "it serves none of these nodes"
        if count:
            text = f"it serves the whole cards of {count} node{'' if count == 1 else 's'}"
        yield Finding(check, Level.OK, text)


def _has_too_many(node: Raw, agent: AgentReport) -> bool:
    return _amount(((node.get("status") or {}).get("capacity") or {}).get(_WHOLE_CARDS)) > agent.cards


def _is_running(pod: Raw) -> bool:
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


def _is_ready(node: Raw) -> bool:
    """Return whether the node is Ready. A node without this condition counts as Ready."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return not any(row.get("type") == "Ready" and row.get("status") != "True" for row in conditions)


def _name(node: Raw) -> str:
    return str(node["metadata"]["name"])


def _amount(value: object) -> int:
    try:
        return 0 if value is None else whole_number(value)
    except QuantityError:
        return 0
