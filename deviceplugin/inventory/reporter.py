"""Reports the node to the API server: its Device object, and the resources that mgpu itself writes to node status.

The kubelet sets extended resources to zero when it registers the node, and anybody may edit or delete a Device. Both
are watched (`deviceplugin.inventory.node_objects`) and written again on every change, never by polling. The functions
that make patches are pure; `Reporter` sends them from a thread of its own.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deviceplugin.inventory.node_objects import (
    DEVICES,
    PUBLISHED_ANNOTATION,
    NodeObjects,
    amount_of,
    published_resources,
)
from deviceplugin.inventory.offers import id_resources, status_amounts
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.model.cards import GPU, Card
from mgpu.model.device_checkpoints import CHECKPOINTS
from mgpu.model.device_object import DEVICE_API, MODEL_LABEL, WHOLE_CARDS_LABEL, read_device, write_device
from mgpu.model.errors import BadObject, RetryLater
from mgpu.model.pods import read_node
from mgpu.settings import Settings
from mgpu.version import AGENT, AgentSaid, Toolkit, own_version, write_agent

log = logging.getLogger(__name__)

Raw = dict[str, Any]
DRIVER_LABEL = "node.koordinator.sh/gpu-driver-version"
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 30.0


def device_patch(seen: Mapping[str, Any], wanted: Mapping[str, Any], given: str | None = None) -> Raw | None:
    """Return a merge patch that makes the Device `seen` say what `wanted` does; None if it does already.

    Devices of other types, other owners, labels and annotations stay. The resourceVersion is a precondition: a merge
    patch replaces the list of devices as a whole, so what another writer added meanwhile would be lost.

    Args:
        given: as in `NodeFacts`; with None the annotation stays as it is.
    """
    meta, patch = seen["metadata"], Raw()
    devices = (seen.get("spec") or {}).get("devices") or []
    others = [d for d in devices if d.get("type", d.get("deviceType")) != "gpu"]
    if devices != wanted["spec"]["devices"] + others:
        patch["spec"] = {"devices": wanted["spec"]["devices"] + others}
    owners = meta.get("ownerReferences") or []
    ours = wanted["metadata"].get("ownerReferences", [])
    if any(owner not in owners for owner in ours):
        kept = [owner for owner in owners if (owner.get("kind"), owner.get("name")) != ("Node", meta["name"])]
        patch["metadata"] = {"ownerReferences": [*kept, *ours]}
    if given is not None and given != (meta.get("annotations") or {}).get(CHECKPOINTS, ""):
        patch.setdefault("metadata", {})["annotations"] = {CHECKPOINTS: given or None}
    if not patch:
        return None
    patch.setdefault("metadata", {})["resourceVersion"] = meta["resourceVersion"]
    return patch


def capacity_patch(
    seen: Mapping[str, Any], cards: Sequence[Card], settings: Settings, held: Callable[[str], int]
) -> Raw | None:
    """Return a merge patch of node status for resources that have no device ids; None if it is up to date.

    Amounts are summed over healthy devices, but are never less than what pods hold: otherwise the kubelet would fail
    running pods. A resource that is no longer published (its dialect was disabled, or its last device was removed)
    is removed once no pod holds it, unless it is now served as device ids: then it belongs to the kubelet.

    Args:
        cards: devices of all types.
        held: returns how much of a resource pods hold.
    """
    capacity = (seen.get("status") or {}).get("capacity") or {}
    before = published_resources(dict(seen))
    by_kubelet = {resource.name for resource in id_resources((), settings)}
    wanted = {name: max(amount, held(name)) for name, amount in status_amounts(cards, settings).items()}
    dropped = before - {*wanted}
    leaving = sorted(dropped - by_kubelet)
    wanted |= {name: amount for name in leaving if (amount := held(name))}
    changed: dict[str, str | None] = {
        n: str(amount) for n, amount in wanted.items() if amount_of(capacity.get(n)) != amount
    }
    changed |= {name: None for name in leaving if name not in wanted and name in capacity}
    patch: Raw = {"status": {"capacity": changed}} if changed else {}
    still_held = {name for name in dropped & by_kubelet if held(name)}
    if (published := ",".join(sorted({*wanted, *still_held}))) != ",".join(sorted(before)):
        patch["metadata"] = {"annotations": {PUBLISHED_ANNOTATION: published or None}}
    return patch or None


def labels_patch(seen: Mapping[str, Any], cards: Sequence[Card], driver: str, server: str = "") -> Raw | None:
    """Return a merge patch with the labels of the Node (model of the first card, driver); None if it has them.

    Args:
        server: who serves whole cards on the node; "" leaves that label as it is.
    """
    labels = seen["metadata"].get("labels") or {}
    wanted = {
        MODEL_LABEL: _label_value(cards[0].model if cards else ""),
        DRIVER_LABEL: _label_value(driver),
        WHOLE_CARDS_LABEL: server,
    }
    changed = {name: value for name, value in wanted.items() if value and labels.get(name) != value}
    return {"metadata": {"labels": changed}} if changed else None


def agent_patch(seen: Mapping[str, Any], said: AgentSaid) -> Raw | None:
    """Return a merge patch of the Node with what its agent says of itself; None if it says so already."""
    text = write_agent(said)
    now = (seen["metadata"].get("annotations") or {}).get(AGENT)
    return None if now == text else {"metadata": {"annotations": {AGENT: text}}}


def _label_value(text: str) -> str:
    """Return the text as a valid label value: `NVIDIA A100-SXM4-80GB` becomes `NVIDIA-A100-SXM4-80GB`."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:63].strip("_.-")


def known_indexes(api: Api, node: str, seconds: float = 5.0) -> dict[str, int]:
    """Return UUID → index as in the node's Device; an empty mapping if it does not exist or cannot be read in time.

    NVML renumbers cards when one is removed. Records name indexes, so each card keeps the one that it had.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return {card.uuid: card.index for card in read_device(api.get(f"{DEVICES}/{node}")) if card.type == GPU}
        except (ApiError, Unreachable, BadObject) as error:
            if isinstance(error, ApiError) and error.status == 404:
                return {}
            log.warning("the previous indexes of the cards are not known: %s", error)
            if isinstance(error, BadObject) or time.monotonic() > deadline:
                return {}
            time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the agent knows of its node at one moment.

    cards: all GPUs.
    driver: the driver's version; "" if there is none.
    whole: the GPUs that are not partitioned.
    whole_cards_server: who serves whole cards.
    given: the annotation that says what another plugin gave out, "" for nothing; None if that is not known yet.
    has_cdi: whether the container runtime has CDI; None if it does not say.
    toolkit: which requests NVIDIA's container toolkit follows; None if that is not known.
    mps_unbounded: whether MPS directories that containers write to lie on the node's own file system.
    """

    cards: tuple[Card, ...]
    driver: str
    whole: tuple[Card, ...]
    whole_cards_server: str
    given: str | None
    has_cdi: bool | None = None
    toolkit: Toolkit | None = None
    mps_unbounded: bool = False


class Reporter:
    """Writes on a thread of its own, from `start` to `stop`. Call `update` whenever facts may have changed.

    Args:
        facts: returns what is known now, or raises RetryLater if that is not enough to write anything: what pods hold
            must not be taken away before they are known. Called on the reporter's thread.
        held: returns how much of a resource pods hold that the kubelet has admitted.

    Attributes:
        problem: why the API server does not have everything; None if it has.
        reported: whether it has had everything at least once. A later failure does not change which containers can
            start, so it must not take the node away from the scheduler.
    """

    def __init__(
        self,
        api: Api,
        objects: NodeObjects,
        settings: Settings,
        facts: Callable[[], NodeFacts],
        held: Callable[[str], int],
    ) -> None:
        self._api = api
        self._objects = objects
        self._settings = settings
        self._facts = facts
        self._held = held
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self.problem: str | None = "nothing reported yet"
        self.reported = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write nothing more. Returns after two seconds if the API server hangs."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2)

    def update(self) -> None:
        """Make the thread compare the facts with the API objects soon. Thread-safe."""
        self._wake.set()

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stop.is_set():
            self._wake.wait(pause if self.problem else None)
            self._wake.clear()
            try:
                problem = self._report()
            except RetryLater as error:
                problem = str(error)
            except (ApiError, Unreachable) as error:
                problem = _describe(error)
            self._set_problem(problem)
            # After a failure the API server gets a pause even if the facts keep changing.
            self._stop.wait(_FIRST_PAUSE if problem else 0)
            pause = min(pause * 2, _LONGEST_PAUSE) if problem else _FIRST_PAUSE

    def _report(self) -> str | None:
        """Bring the Node and the Device up to date. Return what prevents it, or None."""
        facts = self._facts()
        node = self._objects.node
        device = self._objects.device
        if node is None:
            return f"node {self._objects.name} is not known yet"
        if not self._objects.devices_synced:
            return f"Devices cannot be listed yet (is the CRD, {DEVICE_API}, installed?)"
        # The Node before the Device: the scheduler decides about whole cards as soon as there is a Device, and must
        # know by then who serves them.
        self._report_node(node, device, facts)
        return self._report_device(device, write_device(read_node(node), node["metadata"]["uid"], facts.cards), facts)

    def _report_node(self, node: Raw, device: Raw | None, facts: NodeFacts) -> None:
        server = facts.whole_cards_server
        about = AgentSaid(own_version(), facts.has_cdi, len(facts.cards), server, facts.toolkit, facts.mps_unbounded)
        patch = _merged(
            capacity_patch(node, (*facts.whole, *_other_devices(device)), self._settings, self._held),
            labels_patch(node, facts.cards, facts.driver, server),
            agent_patch(node, about),
        )
        if patch:
            # The labels are written through the status subresource too: one request, and one RBAC permission.
            answer = self._api.patch(f"/api/v1/nodes/{self._objects.name}/status", patch)
            log.info("node updated", extra=patch)
            self._objects.wrote_node(node, answer)

    def _report_device(self, device: Raw | None, wanted: Raw, facts: NodeFacts) -> str | None:
        if device is None and facts.given is None:
            return "which cards another plugin gave out is not known yet"
        if device is None:
            wanted["metadata"]["annotations"] = {CHECKPOINTS: facts.given} if facts.given else {}
            self._objects.wrote_device(device, self._api.create(DEVICES, wanted))
            log.info("Device created", extra={"node": self._objects.name})
        elif patch := device_patch(device, wanted, facts.given):
            self._objects.wrote_device(device, self._api.patch(f"{DEVICES}/{self._objects.name}", patch))
            log.info("Device updated", extra={"node": self._objects.name})
        return None

    def _set_problem(self, problem: str | None) -> None:
        if problem != self.problem:
            self.problem = problem
            self.reported = self.reported or problem is None
            if problem:
                log.warning("node not reported: %s", problem, extra={"node": self._objects.name})


def _other_devices(device: Raw | None) -> tuple[Card, ...]:
    """Return the devices of other types, which others write; none if the object is invalid."""
    try:
        return tuple(card for card in read_device(device or {}) if card.type != GPU)
    except BadObject as error:
        log.warning("Ignoring invalid Device: %s", error)
        return ()


def _merged(*patches: Raw | None) -> Raw:
    """Join patches of a Node, which have nothing in common but `metadata` and its maps."""
    found: Raw = {}
    metadata: dict[str, Raw] = {}
    for patch in filter(None, patches):
        for key, values in patch.get("metadata", {}).items():
            metadata[key] = {**metadata.get(key, {}), **values}
        found |= patch
    return {**found, **({"metadata": metadata} if metadata else {})}


def _describe(error: ApiError | Unreachable) -> str:
    if isinstance(error, ApiError) and error.status == 404:
        return f"{error} (the object, or the CRD of {DEVICE_API}, has been removed)"
    return str(error)
