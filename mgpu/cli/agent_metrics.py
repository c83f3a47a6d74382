"""Asks the node agents what the containers on their nodes really use of the cards (`--usage`).

The agents serve it with their metrics. If the scheduler has answered what pods hold, it is asked for that too, since it
reaches the agents, and the user needs no further right. Otherwise the agents are asked through the API server's proxy
for Pods, with the rights of the user. An agent that does not answer, or must not be asked, makes the use of its node
unknown; this is never an error of the command. `mgpu.presentation.measured_use` reads the answers.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mgpu.cli.connection import NAMESPACE
from mgpu.cli.scheduler_source import SchedulerSource, Unavailable
from mgpu.cli.sources import FROM_SCHEDULER, Reading
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.agent_pods import (
    COMPONENT,
    COMPONENT_LABEL,
    NAME,
    NAME_LABEL,
    AgentPod,
    agent_pod,
    find_ready_agent,
    find_unready_agent,
)
from mgpu.model.errors import shorten
from mgpu.presentation.answers import MOST_NODES, ClusterAnswer
from mgpu.presentation.measured_use import (
    LARGEST_PAGE,
    NO_AGENT,
    ClusterUse,
    MeasuredUse,
    UnknownUse,
    describe_unknown,
    read_use,
)
from mgpu.presentation.plain_text import one_line
from mgpu.presentation.terminal import Terminal

_AT_ONCE = 16
"""How many agents are asked at the same time."""
_SECONDS = 3.0
"""How long an agent may take to begin its answer, and then to send it."""
_ALL_SECONDS = 60.0
"""The time after which no further agent is asked."""
_FEW = 8
"""The most nodes whose Pods are listed node by node. For more, all agents are listed at once."""
_MANY = 100
"""From this number of nodes on, a terminal is told how many agents are asked."""
ASKED_BY_DEFAULT = 100
"""The most nodes whose agents are asked if the user has not said whether he wants to see the use."""
_LONGEST_QUERY = 3000
"""The most letters of the names in one request, of which the server accepts 4,094 in total. A comma becomes three."""
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@dataclass(frozen=True, slots=True)
class ClusterWithUse:
    """The cluster as a command shows it. `use` is None if no agent was asked."""

    answer: ClusterAnswer
    use: ClusterUse | None = None


class UseReader:
    """Adds the measured use to what a command reads, and remembers both for `--watch`.

    Args:
        api: a connection with the rights of the user.
        scheduler: asked about the nodes of a reading that comes from it.
        wanted: whether the user wants to see the use. None means that the agents are asked if there are few nodes, and
            if the user may ask them; otherwise nothing is said about use.
        namespace: the namespace of the installation.
    """

    def __init__(
        self, api: Api, scheduler: SchedulerSource, *, wanted: bool | None, namespace: str = NAMESPACE
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._scheduler = scheduler
        self._wanted = wanted
        self._last: Reading[ClusterAnswer] | None = None
        self._use: ClusterUse | None = None
        self._has_told = False

    def read(self, found: Reading[ClusterAnswer] | None) -> Reading[ClusterWithUse] | None:
        """Return a reading with its use, or None if neither has changed.

        Args:
            found: None if the cluster has not changed since the last call.
        """
        reading = found or self._last
        assert reading is not None, "the first reading cannot be unchanged"
        nodes = [node.name for node in reading.value.overview.nodes if node.cards]
        use = self._ask(nodes, reading.origin)
        if found is None and use == self._use:
            return None
        self._last = reading
        self._use = use
        return Reading(ClusterWithUse(reading.value, use), reading.origin)

    def _ask(self, nodes: Sequence[str], origin: str) -> ClusterUse | None:
        if self._wanted is False or (self._wanted is None and len(nodes) > ASKED_BY_DEFAULT):
            return None
        self._tell(len(nodes))
        found = ask_scheduler(self._scheduler, nodes) if origin == FROM_SCHEDULER else None
        if found is None:
            agents = find_agents(self._api, nodes, self._namespace)
            if isinstance(agents, UnknownUse):
                return dict.fromkeys(nodes, agents) if self._wanted else None
            found = ask_agents(self._api, agents, nodes, namespace=self._namespace)
        # Without agents that could measure, a user who has not asked for the use need not read that it is unknown.
        return found if self._wanted or any(use != NO_AGENT for use in found.values()) else None

    def _tell(self, nodes: int) -> None:
        terminal = Terminal(stderr=True)
        if nodes >= _MANY and terminal.is_terminal and not self._has_told:
            terminal.print(f"Asking the agents of {nodes:,} nodes what is used of their cards", style="grey50")
            self._has_told = True


def ask_scheduler(scheduler: SchedulerSource, nodes: Sequence[str]) -> ClusterUse | None:
    """Return what the scheduler has learned from the agents of these nodes, or None if it does not answer."""
    found: dict[str, MeasuredUse] = {}
    for batch in _batches(nodes):
        try:
            answer = scheduler.use(batch)
        except Unavailable as error:
            if not found:
                return None
            late = UnknownUse(f"the scheduler does not answer: {error}")
            return found | {node: late for node in nodes if node not in found}
        for node in batch:
            page = answer.pages.get(node)
            reason = answer.unknown.get(node, "the scheduler has not answered for it")
            found[node] = UnknownUse(reason) if page is None else read_use(page.encode())
    return found


def _batches(nodes: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the nodes in parts that one request can name."""
    batch: list[str] = []
    for node in nodes:
        if len(batch) == MOST_NODES or len(node) + sum(len(name) + 3 for name in batch) > _LONGEST_QUERY:
            yield batch
            batch = []
        batch.append(node)
    if batch:
        yield batch


Agents = Mapping[str, Sequence[AgentPod]]
"""The Pods of the agents, by node."""


def find_agents(api: Api, nodes: Sequence[str], namespace: str = NAMESPACE) -> Agents | UnknownUse:
    """Return the agents of at least these nodes, or why none can be asked. No error of the API server is raised."""
    refusal = _refusal(api, namespace) if nodes else None
    if refusal is not None:
        return refusal
    try:
        agents = _list_agents(api, nodes, namespace)
    except (ApiError, Unreachable) as error:
        return UnknownUse(f"the Pods of the agents cannot be listed: {_text(error)}")
    return agents or NO_AGENT


def ask_agents(
    api: Api,
    agents: Agents,
    nodes: Sequence[str],
    clock: Callable[[], float] = time.monotonic,
    namespace: str = NAMESPACE,
) -> ClusterUse:
    """Return what the agents of these nodes have measured. No error of the API server is raised."""
    until = clock() + _ALL_SECONDS

    def ask(node: str) -> MeasuredUse:
        if clock() > until:
            return UnknownUse(f"the agent was not asked, since the other agents took more than {_ALL_SECONDS:.0f} s")
        return _ask(api, agents.get(node, ()), namespace)

    with ThreadPoolExecutor(_AT_ONCE, "agents") as pool:
        return dict(zip(nodes, pool.map(ask, nodes), strict=True))


def _refusal(api: Api, namespace: str) -> UnknownUse | None:
    """Return that the user may not ask the agents, or None.

    The right is reviewed before, because a refusal in the answer for one node may come from that node.
    """
    wanted = {"namespace": namespace, "verb": "get", "resource": "pods", "subresource": "proxy"}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    try:
        status = api.create(_REVIEWS, {**review, "spec": {"resourceAttributes": wanted}}).get("status") or {}
    except (ApiError, Unreachable) as error:
        return UnknownUse(f"your right to ask the agents cannot be reviewed: {_text(error)}")
    return None if status.get("allowed") else UnknownUse(f"you may not get pods/proxy in {namespace}")


def _list_agents(api: Api, nodes: Sequence[str], namespace: str) -> dict[str, list[AgentPod]]:
    """Return the Pods of the agents by node, at least for these nodes. Raises ApiError or Unreachable."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    labels = f"{NAME_LABEL}={NAME},{COMPONENT_LABEL}={COMPONENT}"
    fields = [f"spec.nodeName={node}" for node in nodes] if len(nodes) <= _FEW else [""]
    found: dict[str, list[AgentPod]] = {}
    for field in fields:
        for raw in api.list(path, labelSelector=labels, fieldSelector=field)[0]:
            pod = agent_pod(raw, namespace)
            if pod is not None:
                found.setdefault(pod.node, []).append(pod)
    return found


def _ask(api: Api, pods: Sequence[AgentPod], namespace: str) -> MeasuredUse:
    """Ask one of the agents that run on a node."""
    unready = find_unready_agent(pods)
    pod = find_ready_agent(pods)
    if pod is None:
        return UnknownUse(f"the agent is not ready ({unready.problem})") if unready else NO_AGENT
    if pod.port is None:
        return UnknownUse(f"Pod {pod.name} has no port for metrics")
    path = f"/api/v1/namespaces/{namespace}/pods/{pod.name}:{pod.port}/proxy/metrics"
    try:
        return read_use(api.fetch_within(path, seconds=_SECONDS, most=LARGEST_PAGE))
    except ApiError as error:
        return UnknownUse(f"the agent does not answer: {_text(error)}")
    except Unreachable:
        return UnknownUse(f"the agent has sent no answer of at most {LARGEST_PAGE >> 20} MiB within {_SECONDS:.0f} s")


def _text(error: ApiError | Unreachable) -> str:
    """Return a short line. Its text may come from a node."""
    return shorten(one_line((error.message if isinstance(error, ApiError) else "") or str(error)))


def unknown_lines(use: ClusterUse) -> list[str]:
    """Return a line for each reason why the use of nodes is unknown, such as `n1, n2: use unknown: …`."""
    nodes: dict[str, list[str]] = {}
    for node, found in use.items():
        if text := describe_unknown(found):
            nodes.setdefault(text, []).append(node)
    rows = sorted(nodes.items(), key=lambda row: (-len(row[1]), row[0]))
    return [f"{_listed(sorted(names))}: {text}" for text, names in rows]


def _listed(names: Sequence[str]) -> str:
    if len(names) <= _FEW:
        return ", ".join(names)
    return f"{len(names):,} nodes"
