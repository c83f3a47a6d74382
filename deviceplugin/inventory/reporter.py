"""What the node says of itself: its `Device` object, and the resources that are numbers in node status.

The kubelet zeroes extended resources when it registers, and anybody can delete or edit a Device: both are watched and
asserted again, on every change and never by polling.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deviceplugin.inventory.offers import as_ids, in_status
from mgpu.kube import Api, ApiError, Unreachable
from mgpu.kube.reflector import Reflector
from mgpu.model.cards import GPU, Card
from mgpu.model.device_checkpoints import CHECKPOINTS
from mgpu.model.device_object import DEVICE_API, MODEL_LABEL, WHOLE_CARDS_LABEL, read_device, write_device
from mgpu.model.errors import BadObject
from mgpu.model.pods import read_node
from mgpu.model.quantities import QuantityError, whole_number
from mgpu.settings import Settings
from mgpu.version import AGENT, AgentSaid, Toolkit, own_version, write_agent

log = logging.getLogger(__name__)

Raw = dict[str, Any]
DRIVER_LABEL = "node.koordinator.sh/gpu-driver-version"
PUBLISHED_ANNOTATION = "mgpu.io/status-resources"
"""Of a Node: the resources in its status that are ours to change and to remove."""
DEVICES = f"/apis/{DEVICE_API}/devices"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 30.0
_PODS_UNKNOWN = "the pods of this node are not known yet"


def device_patch(seen: Mapping[str, Any], wanted: Mapping[str, Any], given: str | None = None) -> Raw | None:
    """A merge patch that makes `seen` say what `wanted` does; None where it does already.

    given: the annotation of what another plugin gave out, "" for none; None: not known, what stands there stays.
    Devices of other types, other owners, labels and annotations stay. With the resourceVersion it was made for: the
    list of devices is replaced as a whole, so what another wrote meanwhile must not be lost.
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
    """A merge patch of node status with the amounts that are no device ids; None where they are there already.

    cards: devices of all types. Summed over healthy ones, but never less than `held` of the resource: the kubelet would
    fail running pods. What was published before and is not any more (its dialect was disabled, its last device went)
    is removed once no pod holds it; what is served as ids now is the kubelet's, from then on too.
    """
    capacity = (seen.get("status") or {}).get("capacity") or {}
    said = ((seen.get("metadata") or {}).get("annotations") or {}).get(PUBLISHED_ANNOTATION, "")
    by_kubelet = {resource.name for resource in as_ids((), settings)}
    wanted = {name: max(amount, held(name)) for name, amount in in_status(cards, settings).items()}
    before = {*said.split(",")} - {"", *wanted}
    leaving = sorted(before - by_kubelet)
    wanted |= {name: amount for name in leaving if (amount := held(name))}
    changed: dict[str, str | None] = {
        n: str(amount) for n, amount in wanted.items() if _number(capacity.get(n)) != amount
    }
    changed |= {name: None for name in leaving if name not in wanted and name in capacity}
    patch: Raw = {"status": {"capacity": changed}} if changed else {}
    still = {name for name in before & by_kubelet if held(name)}
    if (published := ",".join(sorted({*wanted, *still}))) != said:
        patch["metadata"] = {"annotations": {PUBLISHED_ANNOTATION: published or None}}
    return patch or None


def _number(value: object) -> int | None:
    try:
        return None if value is None else whole_number(value)
    except QuantityError:
        return None


def labels_patch(seen: Mapping[str, Any], cards: Sequence[Card], driver: str, server: str = "") -> Raw | None:
    """A merge patch of the Node that says its cards' model (the first one's) and driver; None where it does already.

    server: who serves whole cards there; "": not known.
    """
    labels = seen["metadata"].get("labels") or {}
    wanted = {
        MODEL_LABEL: _label(cards[0].model if cards else ""),
        DRIVER_LABEL: _label(driver),
        WHOLE_CARDS_LABEL: server,
    }
    changed = {name: value for name, value in wanted.items() if value and labels.get(name) != value}
    return {"metadata": {"labels": changed}} if changed else None


def agent_patch(seen: Mapping[str, Any], said: AgentSaid) -> Raw | None:
    """A merge patch of the Node with what its agent says of itself; None where it says so already."""
    text = write_agent(said)
    now = (seen["metadata"].get("annotations") or {}).get(AGENT)
    return None if now == text else {"metadata": {"annotations": {AGENT: text}}}


def _label(text: str) -> str:
    """As a label's value may be: `NVIDIA A100-SXM4-80GB` is `NVIDIA-A100-SXM4-80GB`."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:63].strip("_.-")


def known_indexes(api: Api, node: str, seconds: float = 5.0) -> dict[str, int]:
    """UUID → index, as the node's Device says; none where it does not exist, or nobody answers within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return {card.uuid: card.index for card in read_device(api.get(f"{DEVICES}/{node}")) if card.type == GPU}
        except (ApiError, Unreachable, BadObject) as error:
            if isinstance(error, ApiError) and error.status == 404:
                return {}
            log.warning("the indexes that the cards had are not known: %s", error)
            if isinstance(error, BadObject) or time.monotonic() > deadline:
                return {}
            time.sleep(0.2)


class Reporter:
    """Works on a thread of its own. `update` after every change of the cards or of what pods hold.

    pods_known: whether all pods of the node are known. held: how much of a resource they hold, of those that are.
    whole: who serves whole cards ("": not known), and the annotation of what another plugin gave out (None: not known).
    undivided: of all cards those that are not cut into slices; None: not known. changed: hears that the Node has.
    cdi: whether the container runtime has it; None: not known. toolkit: what NVIDIA's heeds; None: not known.
    mps_unbounded: whether MPS folders that containers write lie on the node's own file system.
    """

    def __init__(
        self,
        api: Api,
        node: str,
        settings: Settings,
        pods_known: Callable[[], bool],
        held: Callable[[str], int],
        whole: Callable[[], tuple[str, str | None]],
        undivided: Callable[[tuple[Card, ...]], tuple[Card, ...] | None] = lambda cards: cards,
        changed: Callable[[], None] = lambda: None,
        cdi: Callable[[], bool | None] = lambda: None,
        toolkit: Callable[[], Toolkit | None] = lambda: None,
        mps_unbounded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._api, self._node_name, self._settings = api, node, settings
        self._pods_known, self._held, self._whole = pods_known, held, whole
        self._undivided, self._changed, self._cdi, self._toolkit = undivided, changed, cdi, toolkit
        self._mps_unbounded = mps_unbounded
        self._cards: tuple[Card, ...] | None = None
        self._driver = ""
        self._node: Raw | None = None
        self._device: Raw | None = None
        self._lock = threading.Lock()
        self._wake, self._stop, self._seen = threading.Event(), threading.Event(), threading.Event()
        query = {"fieldSelector": f"metadata.name={node}"}
        self._nodes = Reflector(api, "/api/v1/nodes", self._take_node, lambda _: self._take_node(None), query)
        self._devices = Reflector(api, DEVICES, self._take_device, lambda _: self._take_device(None), query)
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self.problem = "nothing reported yet"
        self._reported = False

    def watch(self) -> None:
        """Follow the Node and its Device; nothing is written yet."""
        self._nodes.start()
        self._devices.start()

    def start(self) -> None:
        """Write from now on, after `watch`."""
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        self._nodes.stop()
        self._devices.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout=2)

    def update(self, cards: tuple[Card, ...] | None = None, driver: str = "") -> None:
        if cards is not None:
            with self._lock:
                self._cards, self._driver = cards, driver
        self._wake.set()

    @property
    def reported(self) -> bool:
        """Whether the API server has been told of the cards at least once. What fails later changes nothing about
        which containers can start: it must not take the node away from the scheduler.
        """
        return self._reported

    @property
    def node(self) -> Raw | None:
        """The Node as the API has it; None: not known yet, or gone."""
        with self._lock:
            return self._node

    def await_node(self, seconds: float) -> Raw | None:
        """The Node once it is known, for the first time; None: not within so many seconds."""
        self._seen.wait(seconds)
        return self.node

    def saw_node(self, before: Raw, after: Raw) -> None:
        """Somebody else here has written it."""
        self._saw(node=(before, after))
        self._wake.set()

    def capacity(self, resource: str) -> int | None:
        """What the Node has of it now; None: the Node is not known yet."""
        with self._lock:
            node = self._node
        return None if node is None else _number(((node.get("status") or {}).get("capacity") or {}).get(resource, 0))

    def undrained(self, resource: str) -> str:
        """Why the resource cannot be served as ids yet, "" where it can: its publisher changes on a drained node only.

        What is offered as ids in other units than before would be less than running pods hold.
        """
        with self._lock:
            node = self._node
        if node is None:
            return f"node {self._node_name} is not known yet"
        said = (node["metadata"].get("annotations") or {}).get(PUBLISHED_ANNOTATION, "")
        if resource not in said.split(","):
            return ""
        if not self._pods_known():
            return _PODS_UNKNOWN
        if self._held(resource):
            return f"pods hold {resource} as it was published before; it changes when they have ended"
        return ""

    def _take_node(self, raw: Raw | None) -> None:
        with self._lock:
            if raw is None or self._node is None or not _older(raw, self._node):
                self._node = raw
        self._seen.set()
        self._wake.set()
        self._changed()

    def _take_device(self, raw: Raw | None) -> None:
        with self._lock:
            self._device = raw
        self._wake.set()

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stop.is_set():
            self._wake.wait(pause if self.problem else None)
            self._wake.clear()
            try:
                problem = self._report()
            except (ApiError, Unreachable) as error:
                problem = _explain(error)
            self._say(problem)
            # Also where changes come in one after the other, a failing API server is not asked without pause.
            self._stop.wait(_FIRST_PAUSE if problem else 0)
            pause = min(pause * 2, _LONGEST_PAUSE) if problem else _FIRST_PAUSE

    def _report(self) -> str:
        """Make the API say what is so; what is still missing for that, "" where nothing."""
        with self._lock:
            cards, driver, node, device = self._cards, self._driver, self._node, self._device
        if cards is None:
            return "the cards are not known yet"
        if node is None:
            return f"node {self._node_name} is not known yet"
        if not self._pods_known():
            return _PODS_UNKNOWN  # what they hold is not taken away
        if not self._devices.synced:
            return f"Devices cannot be listed yet (is the CRD, {DEVICE_API}, installed?)"
        server, given = self._whole()
        if not server:
            return "who serves whole cards is not known yet"
        undivided = self._undivided(cards)
        if undivided is None:
            return "which cards are cut into slices is not known yet"
        # First who serves whole cards: once there is a Device, the scheduler decides about them where we do.
        devices = (*undivided, *_others(device))
        if patch := _merged(
            capacity_patch(node, devices, self._settings, self._held),
            labels_patch(node, cards, driver, server),
            agent_patch(node, self._said(len(cards), server)),
        ):
            # A node's labels can be written through its status too: one write, one right.
            answer = self._api.patch(f"/api/v1/nodes/{self._node_name}/status", patch)
            log.info("node updated", extra=patch)
            self._saw(node=(node, answer))
        return self._report_device(device, write_device(read_node(node), node["metadata"]["uid"], cards), given)

    def _said(self, cards: int, server: str) -> AgentSaid:
        return AgentSaid(own_version(), self._cdi(), cards, server, self._toolkit(), self._mps_unbounded())

    def _report_device(self, device: Raw | None, wanted: Raw, given: str | None) -> str:
        if device is None and given is None:
            return "which cards another plugin gave out is not known yet"
        if device is None:
            wanted["metadata"]["annotations"] = {CHECKPOINTS: given} if given else {}
            created = self._api.create(DEVICES, wanted)
            log.info("Device created", extra={"node": self._node_name})
            self._saw(device=(device, created))
        elif patch := device_patch(device, wanted, given):
            patched = self._api.patch(f"{DEVICES}/{self._node_name}", patch)
            log.info("Device updated", extra={"node": self._node_name})
            self._saw(device=(device, patched))
        return ""

    def _saw(self, node: tuple[Raw, Raw] | None = None, device: tuple[Raw | None, Raw] | None = None) -> None:
        """(before, after) of an own write: known at once, unless the watch has already brought something newer."""
        with self._lock:
            if node and self._node is node[0]:
                self._node = node[1]
            if device and self._device is device[0]:
                self._device = device[1]

    def _say(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self._reported = self._reported or not problem
            if problem:
                log.warning("not reported yet: %s", problem)


def _older(told: Raw, known: Raw) -> bool:
    """Whether the watch tells what was before an own write."""
    one, other = told["metadata"], known["metadata"]
    versions = [str(meta.get("resourceVersion", "")) for meta in (one, other)]
    return (
        one.get("uid") == other.get("uid") and all(map(str.isdecimal, versions)) and int(versions[0]) < int(versions[1])
    )


def _others(device: Raw | None) -> tuple[Card, ...]:
    """The devices of other types, which others wrote: an object that is damaged has none."""
    try:
        return tuple(card for card in read_device(device or {}) if card.type != GPU)
    except BadObject as error:
        log.warning("the Device is not readable: %s", error)
        return ()


def _merged(*patches: Raw | None) -> Raw:
    """Patches of a Node as one; they have nothing in common but `metadata` and its maps."""
    found: Raw = {}
    metadata: dict[str, Raw] = {}
    for patch in filter(None, patches):
        for key, values in patch.get("metadata", {}).items():
            metadata[key] = {**metadata.get(key, {}), **values}
        found |= patch
    return {**found, **({"metadata": metadata} if metadata else {})}


def _explain(error: ApiError | Unreachable) -> str:
    if isinstance(error, ApiError) and error.status == 404:
        return f"{error} (removed meanwhile, or the CRD of {DEVICE_API} was)"
    return str(error)
