"""Reports the node to the API server: its Device object, labels, and the resources that mgpu writes to node status.

The kubelet sets extended resources to zero when it registers the node, and other clients may edit or delete a Device.
So both objects are watched (`inventory.node_objects`), and `Reporter` corrects them when they do not agree with the
facts. The functions that return patches are pure. `deviceplugin.agent` runs the `Reporter` while it serves the node,
and `deviceplugin.main` passes `known_indexes` to the source of real cards.
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
from mgpu.model.isolation import HAMI_CORE_LABEL, ISOLATION_LABEL
from mgpu.model.pods import read_node
from mgpu.model.usage_problems import UsageProblem
from mgpu.settings import Settings
from mgpu.version import (
    AGENT_ANNOTATION,
    AgentReport,
    IsolationReport,
    Toolkit,
    own_version,
    write_agent_report,
)

log = logging.getLogger(__name__)

Raw = dict[str, Any]
DRIVER_LABEL = "node.koordinator.sh/gpu-driver-version"
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 30.0


def device_patch(device: Mapping[str, Any], desired: Mapping[str, Any], given: str | None = None) -> Raw | None:
    """Return a merge patch that brings the Device to the desired state; None if it is in that state.

    The patch keeps devices of other types, other owners, labels and annotations. It contains the resourceVersion as a
    precondition: a merge patch replaces the whole list of devices, so devices that another client adds in the meantime
    would be lost.

    Args:
        device: The present Device.
        desired: The Device with the facts of this agent.
        given: The text of `NodeFacts.given`; None to keep the present annotation.
    """
    meta = device["metadata"]
    patch: Raw = {}
    metadata: Raw = {}
    devices = (device.get("spec") or {}).get("devices") or []
    others = [d for d in devices if d.get("type", d.get("deviceType")) != "gpu"]
    if devices != desired["spec"]["devices"] + others:
        patch["spec"] = {"devices": desired["spec"]["devices"] + others}
    owners = meta.get("ownerReferences") or []
    ours = desired["metadata"].get("ownerReferences", [])
    if any(owner not in owners for owner in ours):
        kept = [owner for owner in owners if (owner.get("kind"), owner.get("name")) != ("Node", meta["name"])]
        metadata["ownerReferences"] = [*kept, *ours]
    labels = desired["metadata"].get("labels", {})
    if labels.items() - (meta.get("labels") or {}).items():
        metadata["labels"] = labels
    if given is not None and given != (meta.get("annotations") or {}).get(CHECKPOINTS, ""):
        metadata["annotations"] = {CHECKPOINTS: given or None}
    if not patch and not metadata:
        return None
    return {**patch, "metadata": {**metadata, "resourceVersion": meta["resourceVersion"]}}


def capacity_patch(
    node: Mapping[str, Any],
    cards: Sequence[Card],
    settings: Settings,
    held_amount: Callable[[str], int],
    freed_amount: Callable[[str], int] = lambda _: 0,
) -> Raw | None:
    """Return a merge patch of the Node's status for resources that have no device ids; None if it is up to date.

    An amount is the sum over healthy devices and what resized pods have freed, but at least the amount that pods hold,
    because the kubelet would otherwise fail running pods. A published resource whose dialect was disabled, or whose
    last device was removed, is removed once no pod holds it. A published resource that is now offered as device ids is
    left to the kubelet.

    Args:
        cards: The devices of the node, of all types.
        held_amount: A function that returns how much of a resource the pods hold.
        freed_amount: A function that returns how much of it resized pods have freed (`inventory.freed_amounts`).
    """
    capacity = (node.get("status") or {}).get("capacity") or {}
    before = published_resources(dict(node))
    by_kubelet = {resource.name for resource in id_resources((), settings)}
    amounts = {name: amount + freed_amount(name) for name, amount in status_amounts(cards, settings).items()}
    desired = {name: max(amount, held_amount(name)) for name, amount in amounts.items()}
    dropped = before - {*desired}
    leaving = sorted(dropped - by_kubelet)
    desired |= {name: amount for name in leaving if (amount := held_amount(name))}
    changed: dict[str, str | None] = {
        n: str(amount) for n, amount in desired.items() if amount_of(capacity.get(n)) != amount
    }
    changed |= {name: None for name in leaving if name not in desired and name in capacity}
    patch: Raw = {"status": {"capacity": changed}} if changed else {}
    still_held = {name for name in dropped & by_kubelet if held_amount(name)}
    if (published := ",".join(sorted({*desired, *still_held}))) != ",".join(sorted(before)):
        patch["metadata"] = {"annotations": {PUBLISHED_ANNOTATION: published or None}}
    return patch or None


def labels_patch(
    node: Mapping[str, Any], cards: Sequence[Card], driver: str, server: str = "", *, hami_core: bool = False
) -> Raw | None:
    """Return a merge patch with the Node's labels; None if they are up to date.

    The labels are the model of the first card, the version of the driver, the plugin that serves whole cards, and
    whether pods can have HAMi-core. A Node that has never offered HAMi-core does not get the last label.

    Args:
        cards: The GPUs of the node.
        driver: The version of NVIDIA's driver; "" leaves that label as it is.
        server: The plugin that serves whole cards on the node; "" leaves that label as it is.
    """
    labels = node["metadata"].get("labels") or {}
    desired = {
        MODEL_LABEL: _label_value(cards[0].model if cards else ""),
        DRIVER_LABEL: _label_value(driver),
        WHOLE_CARDS_LABEL: server,
        HAMI_CORE_LABEL: "true" if hami_core else "false" if HAMI_CORE_LABEL in labels else "",
    }
    changed = {name: value for name, value in desired.items() if value and labels.get(name) != value}
    return {"metadata": {"labels": changed}} if changed else None


def agent_patch(node: Mapping[str, Any], report: AgentReport) -> Raw | None:
    """Return a merge patch of the Node with the agent's report; None if the Node has the same report."""
    text = write_agent_report(report)
    now = (node["metadata"].get("annotations") or {}).get(AGENT_ANNOTATION)
    return None if now == text else {"metadata": {"annotations": {AGENT_ANNOTATION: text}}}


def _label_value(text: str) -> str:
    """Return the text as a valid label value: `NVIDIA A100-SXM4-80GB` becomes `NVIDIA-A100-SXM4-80GB`."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:63].strip("_.-")


def known_indexes(api: Api, node: str, seconds: float = 5.0) -> dict[str, int]:
    """Return the indexes of the cards by UUID, as the node's Device lists them.

    The result is empty if the Device does not exist, is invalid, or cannot be read within `seconds`. NVML renumbers the
    cards when one is removed. Allocation records name cards by index, so each card keeps the index that it had.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return {card.uuid: card.index for card in read_device(api.get(f"{DEVICES}/{node}")) if card.type == GPU}
        except (ApiError, Unreachable, BadObject) as error:
            if isinstance(error, ApiError) and error.status == 404:
                return {}
            log.warning("cannot read the previous indexes of the cards: %s", error)
            if isinstance(error, BadObject) or time.monotonic() > deadline:
                return {}
            time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts about the node that the agent reports.

    Attributes:
        cards: All GPUs of the node.
        driver: The version of NVIDIA's driver; "" if there is none.
        whole: The GPUs that are not reserved for slices (`NodePartitions.whole`).
        whole_cards_server: The plugin that serves whole cards, for the Node's label `mgpu.io/whole-cards`.
        given: The text of the Device's annotation that lists the cards of unrecorded pods and of remnants; "" if there
            are none, None if they are not known yet.
        has_cdi: Whether the container runtime has CDI; None if it does not report that.
        toolkit: The requests that NVIDIA's container toolkit accepts; None if its configuration cannot be read.
        mps_unbounded: Whether containers can write to MPS directories whose size is not limited.
        isolation: What holds containers to their shares; None if it is not known.
        usage_problem: Why it is not known what containers use of the cards; None if nothing is missing.
    """

    cards: tuple[Card, ...]
    driver: str
    whole: tuple[Card, ...]
    whole_cards_server: str
    given: str | None
    has_cdi: bool | None = None
    toolkit: Toolkit | None = None
    mps_unbounded: bool = False
    isolation: IsolationReport | None = None
    usage_problem: UsageProblem | None = None


class Reporter:
    """A thread that writes the Node and the Device, from `start` to `stop`.

    Call `update` whenever facts may have changed.

    Args:
        facts: A function that returns the present facts. The reporter's thread calls it. It raises RetryLater while
            too little has been read: a capacity that is written before all pods are listed could be less than what
            pods hold.
        held_amount: A function that returns how much of a resource the admitted pods hold.
        freed_amount: A function that returns how much of it resized pods have freed.

    Attributes:
        problem: The reason why the API server does not have the present facts; None if it has them.
        reported: Whether the API server has had all facts at least once. A later failure does not change which
            containers can start, so it must not make the agent unready.
    """

    def __init__(
        self,
        api: Api,
        objects: NodeObjects,
        settings: Settings,
        facts: Callable[[], NodeFacts],
        held_amount: Callable[[str], int],
        freed_amount: Callable[[str], int] = lambda _: 0,
    ) -> None:
        self._api = api
        self._objects = objects
        self._settings = settings
        self._facts = facts
        self._held_amount = held_amount
        self._freed_amount = freed_amount
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self.problem: str | None = "the cards have not been reported to the API server yet"
        self.reported = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Wait at most two seconds for a write in progress."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2)

    def update(self) -> None:
        """Let the thread compare the facts with the API objects. Thread-safe."""
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
            # After a failure the thread pauses even if the facts keep changing, to spare the API server.
            self._stop.wait(_FIRST_PAUSE if problem else 0)
            pause = min(pause * 2, _LONGEST_PAUSE) if problem else _FIRST_PAUSE

    def _report(self) -> str | None:
        """Write the Node and the Device if they are out of date. Return why that is not possible yet, or None."""
        facts = self._facts()
        node = self._objects.node
        device = self._objects.device
        if node is None:
            return f"node {self._objects.name} has not been listed yet"
        if not self._objects.devices_synced:
            return f"Devices cannot be listed yet (is the CRD, {DEVICE_API}, installed?)"
        # The Node is written first: as soon as there is a Device, the scheduler places pods on the node, and then it
        # must know which plugin serves whole cards.
        self._report_node(node, device, facts)
        desired = write_device(read_node(node), node["metadata"]["uid"], facts.cards)
        if facts.isolation is not None:
            desired["metadata"]["labels"] = {ISOLATION_LABEL: facts.isolation.backend}
        return self._report_device(device, desired, facts)

    def _report_node(self, node: Raw, device: Raw | None, facts: NodeFacts) -> None:
        server = facts.whole_cards_server
        about = AgentReport(
            own_version(),
            facts.has_cdi,
            len(facts.cards),
            server,
            facts.toolkit,
            facts.mps_unbounded,
            facts.isolation,
            facts.usage_problem,
        )
        hami_core = facts.isolation is not None and facts.isolation.hami_core
        cards = (*facts.whole, *_other_devices(device))
        patch = _merged(
            capacity_patch(node, cards, self._settings, self._held_amount, self._freed_amount),
            labels_patch(node, facts.cards, facts.driver, server, hami_core=hami_core),
            agent_patch(node, about),
        )
        if patch:
            # Labels can be written through the status subresource too, which saves a request and a permission.
            answer = self._api.patch(f"/api/v1/nodes/{self._objects.name}/status", patch)
            log.info("node updated", extra=patch)
            self._objects.wrote_node(node, answer)

    def _report_device(self, device: Raw | None, desired: Raw, facts: NodeFacts) -> str | None:
        if device is None and facts.given is None:
            return "the cards that another plugin gave out have not been read yet"
        if device is None:
            desired["metadata"]["annotations"] = {CHECKPOINTS: facts.given} if facts.given else {}
            self._objects.wrote_device(device, self._api.create(DEVICES, desired))
            log.info("Device created", extra={"node": self._objects.name})
        elif patch := device_patch(device, desired, facts.given):
            self._objects.wrote_device(device, self._api.patch(f"{DEVICES}/{self._objects.name}", patch))
            log.info("Device updated", extra={"node": self._objects.name})
        return None

    def _set_problem(self, problem: str | None) -> None:
        if problem != self.problem:
            self.problem = problem
            self.reported = self.reported or problem is None
            if problem:
                log.warning("cannot report the node: %s", problem, extra={"node": self._objects.name})


def _other_devices(device: Raw | None) -> tuple[Card, ...]:
    """Return the devices of other types, which other clients write; empty if the Device is invalid."""
    try:
        return tuple(card for card in read_device(device or {}) if card.type != GPU)
    except BadObject as error:
        log.warning("Ignoring invalid Device: %s", error)
        return ()


def _merged(*patches: Raw | None) -> Raw:
    """Merge patches of a Node. They may all have `metadata`; their other keys differ."""
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
