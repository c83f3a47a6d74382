"""The isolation back end `driver`: the driver limits the memory of each container's cgroup.

The hook of NVIDIA's container toolkit sets a limit before the first process of the container starts. Where the node has
no such hook, `DriverBackend` sets the limit as soon as the container runtime announces the container, a moment after
its start. In both cases it checks afterwards, and from time to time, that the limits are in force: a container that
starts again has a new cgroup, without a limit. docs/isolation.md describes what a program can do about the limits.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from deviceplugin.cards import NodeGpus
from deviceplugin.delivery.cdi import Edits
from deviceplugin.event_loop import Wakeup
from deviceplugin.isolation.backend import Ability, Key, Measured, Unable
from deviceplugin.isolation.driver.containers import Containers, RunningContainer
from deviceplugin.isolation.driver.enforcement import enforce, resize
from deviceplugin.isolation.driver.memory_limits import MemoryLimits
from deviceplugin.isolation.driver.toolkit_hook import ToolkitHook, find_hook, hook_edits, without_limit
from deviceplugin.isolation.limits import CardLimit, LimitedContainer, Unenforceable, limits_of
from deviceplugin.pods.container_runtime import ContainerRuntime
from deviceplugin.pods.gpu_pod import GpuPod, LimitedPod, kubelets_uid
from deviceplugin.pods.identity import Target
from deviceplugin.pods.node_pods import NodePods
from mgpu.model.errors import RetryLater
from mgpu.model.isolation import AUTO, DRIVER
from mgpu.settings import DevicePluginSettings

log = logging.getLogger(__name__)

CHECK_SECONDS = 10.0
"""The interval at which the limits are read again."""
_PROBE_SECONDS = 60.0
"""The interval at which the agent asks again whether the driver can limit memory."""
_FIRST_PROBE_SECONDS = 2.0
"""How long the agent waits for the first answer, so that no container starts before it is known."""
_CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
"""The folders in which container runtimes look for CDI specs by default."""


class Runtime(Protocol):
    """The part of `containers.Containers` that is used here."""

    async def running(self) -> Sequence[RunningContainer]:
        """Return the containers that run. Raises RetryLater."""

    async def follow(self, announced: Callable[[], None]) -> None:
        """Call `announced` whenever a container may have started, until cancelled."""


class Pods(Protocol):
    """The part of `NodePods` that is used here."""

    def by_uid(self, uid: str) -> GpuPod | None: ...
    def limited_pods(self) -> Sequence[LimitedPod]: ...


class NamedPod(Protocol):
    """A pod that requests GPUs in another way than a `GpuPod`: the Pod of an MtgpuPod, or a pod with ResourceClaims."""

    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def uid(self) -> str: ...


class ClaimLimits(Protocol):
    """The part of `deviceplugin.dra.claim_limits.ClaimLimits` that is used here."""

    def pod(self, uid: str) -> NamedPod | None:
        """Return the pod with this UID if it uses claims."""

    def limits_of(self, uid: str, container: str) -> Sequence[tuple[Key, Sequence[CardLimit]]]:
        """Return the limits of a container by the claims that it uses, each with the key of what was prepared."""


class NoClaims:
    """A node without ResourceClaims."""

    def pod(self, uid: str) -> None:
        """Return None."""

    def limits_of(self, uid: str, container: str) -> tuple[()]:  # noqa: ARG002
        return ()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What `DriverBackend` knows of the node.

    Attributes:
        cgroups: The root of the host's cgroups.
        hook: A function that returns the hook of NVIDIA's container toolkit, or None if the node has none.
        is_wanted: Whether the settings name this back end or `auto`. Then the agent waits for the first answer.
        is_chosen: A function that returns whether the back end is that of the node. Then it also limits the Pods of
            MtgpuPods, which get their cards without the agent.
        claims: What containers are limited to because of the ResourceClaims that they use.
    """

    cgroups: Path
    hook: Callable[[], ToolkitHook | None]
    is_wanted: bool = True
    is_chosen: Callable[[], bool] = lambda: False
    claims: ClaimLimits = field(default_factory=NoClaims)


class DriverEvents(NamedTuple):
    """Where the back end reports that a limit is not in force, and why: of a pod, and of a `NamedPod`."""

    unenforced: Callable[[GpuPod, str], None]
    unlimited: Callable[[NamedPod, str], None]


class DriverBackend:
    """The back end. Use it on one event loop, except for `ability` and `measure`, which are thread-safe.

    Args:
        changed: A signal that wakes coroutines when pods change.
    """

    name = DRIVER

    def __init__(
        self,
        limits: MemoryLimits,
        runtime: Runtime,
        pods: Pods,
        node: NodeGpus,
        surroundings: Surroundings,
        changed: Wakeup,
        events: DriverEvents,
    ) -> None:
        self._limits = limits
        self._runtime = runtime
        self._pods = pods
        self._node = node
        self._surroundings = surroundings
        self._changed = changed
        self._events = events
        self._keys: set[Key] = set()
        self._reported: set[tuple[str, str]] = set()
        self._measured: tuple[Measured, ...] = ()
        # A check that has read an older record must not undo a resize that the scheduler already counts on.
        self._limiting = asyncio.Lock()
        self._announced = asyncio.Event()
        self._used = asyncio.Event()
        self._ability: Ability | Unable = Unable("NVML has not answered yet")
        first = threading.Thread(target=self._probe, name="memory limits", daemon=True)
        first.start()
        first.join(_FIRST_PROBE_SECONDS if surroundings.is_wanted else 0)

    def ability(self) -> Ability | Unable:
        return self._ability

    async def prepare(self, containers: Sequence[LimitedContainer], deadline: float) -> Mapping[Key, Edits]:  # noqa: ARG002
        self._keys |= {container.target.key for container in containers}
        self._used.set()
        hook = await asyncio.to_thread(self._surroundings.hook)
        found = {c.target.key: hook_edits(hook, c.limits) if hook else None for c in containers}
        return {key: edits or Edits() for key, edits in found.items()}

    def lift(self, variables: Iterable[str]) -> Mapping[str, str]:
        """Return 0 for the limit, which only the hook of the toolkit reads. Limits themselves are those of cgroups."""
        return without_limit(variables)

    def mark_started(self, keys: Iterable[Key]) -> None:
        if self._keys & {*keys}:
            self._announced.set()

    def release(self, keys: Collection[Key]) -> None:
        self._keys -= {*keys}

    def keep_only(self, uids: Collection[str]) -> None:
        self._keys = {key for key in self._keys if key[0] in uids}

    def recover(self, environments: Mapping[Key, Mapping[str, str]]) -> None:
        self._keys |= environments.keys()
        if self._keys:
            self._used.set()

    async def run(self) -> None:
        """Keep the limits in force, and find out from time to time whether the driver can limit memory."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._probe_again())
            group.create_task(self._follow_pods())
            await self._used.wait()
            group.create_task(self._runtime.follow(self._announced.set))
            while True:
                self._announced.clear()
                await self.check()
                try:
                    async with asyncio.timeout(CHECK_SECONDS):
                        await self._announced.wait()
                except TimeoutError:
                    pass  # It is time for the next check.

    async def resize(self, container: LimitedContainer) -> Unable | None:
        try:
            running = [c for c in await self._runtime.running() if (c.uid, c.name) == container.target.key]
        except RetryLater as error:
            return Unable(str(error))
        if not running:
            return Unable(f"{container.target} does not run")
        wanted = [(one, limit) for one in running for limit in container.limits if limit.memory is not None]
        async with self._limiting:
            for one, limit in wanted:
                if problem := await asyncio.to_thread(resize, self._limits, one, limit):
                    return Unable(f"{container.target}: {problem}")
        return None

    def measure(self) -> Sequence[Measured]:
        return self._measured

    # The state of the driver

    async def _probe_again(self) -> None:
        while True:
            await asyncio.sleep(_PROBE_SECONDS)
            await asyncio.to_thread(self._probe)

    def _probe(self) -> None:
        before, self._ability = self._ability, self._found_ability()
        if before != self._ability:
            log.info("memory limits of the driver", extra={"ability": str(self._ability)})

    def _found_ability(self) -> Ability | Unable:
        root = self._surroundings.cgroups
        if not (root / "cgroup.controllers").exists():
            return Unable(f"{root} is not the root of cgroups of version 2")
        if reason := self._limits.unable_reason(root):
            return Unable(reason)
        caution = "managed memory is not limited"
        if self._surroundings.hook() is None:
            caution += ", and a container runs for a moment before its limit is set: the node has no hook for it"
        return Ability(memory=True, compute=False, several_cards=True, resizable=True, caution=caution)

    # The limits that should be in force

    async def _follow_pods(self) -> None:
        """Check the limits when records change, since a change of a share changes the limit."""
        while True:
            if self._surroundings.is_chosen() and self._pods.limited_pods():
                self._used.set()
            self._announced.set()
            await self._changed.wait()

    def _wanted(self, container: RunningContainer) -> tuple[CardLimit, ...]:
        """Return the limits of a container, or () if this back end does not limit it."""
        if (container.uid, container.name) in self._keys:
            gpu_pod = self._pods.by_uid(container.uid)
            if gpu_pod is None or gpu_pod.pod.ended:
                return ()
            try:
                return limits_of(Target(gpu_pod, container.name).limited_shares, self._node.gpus)
            except Unenforceable:
                return ()  # The facade has reported it when the container started.
        claims = self._surroundings.claims.limits_of(container.uid, container.name)
        if claims:
            return _together(limit for key, limits in claims if key in self._keys for limit in limits)
        if not self._surroundings.is_chosen():
            return ()
        pods = [pod for pod in self._pods.limited_pods() if pod.uid == container.uid and pod.memory]
        return tuple(CardLimit(c, pod.memory, None) for pod in pods for c in self._node.gpus if c.uuid == pod.card)

    async def check(self) -> None:
        """Set the limits that are missing, and measure what the containers use."""
        try:
            running = await self._runtime.running()
        except RetryLater as error:
            log.warning("cannot check the limits of containers: %s", error)
            return
        async with self._limiting:
            wanted = [(c, limit) for c in running for limit in self._wanted(c) if limit.memory is not None]
            results = await asyncio.to_thread(lambda: [enforce(self._limits, c, limit) for c, limit in wanted])
        self._measured = tuple(result.measured for result in results if result.measured is not None)
        self._reported &= {(container.id, limit.card.uuid) for container, limit in wanted}
        ended = await self._ended(container.id for (container, _), r in zip(wanted, results, strict=True) if r.problem)
        for (container, limit), result in zip(wanted, results, strict=True):
            if container.id not in ended:
                is_held = result.measured is not None and self._is_within_share(container, result.measured)
                self._report(container, limit, "" if is_held else result.problem)

    async def _ended(self, ids: Iterable[str]) -> Collection[str]:
        """Return which of these containers have ended by now: the cgroup of a container is gone when it ends."""
        suspects = {*ids}
        if not suspects:
            return ()
        try:
            return suspects - {container.id for container in await self._runtime.running()}
        except RetryLater:
            return suspects  # The next check reports them.

    def _is_within_share(self, container: RunningContainer, found: Measured) -> bool:
        """Return whether a limit is in force that is not above the container's share.

        While a share becomes smaller, the limit of before may still be in force (`isolation.resizing` reports that).
        """
        gpu_pod = self._pods.by_uid(container.uid)
        shares = Target(gpu_pod, container.name).shares if gpu_pod else ()
        cards = [card for card in self._node.gpus if card.uuid == found.card]
        most = [share.amount(card).memory for card in cards for share in shares if share.is_on(card)]
        return found.memory_limit is not None and bool(most) and found.memory_limit <= most[0]

    def _report(self, container: RunningContainer, limit: CardLimit, problem: str) -> None:
        """Report once for each container and card that the limit is not in force, until it is again."""
        place = (container.id, limit.card.uuid)
        if not problem:
            self._reported.discard(place)
            return
        if place in self._reported:
            return
        self._reported.add(place)
        text = f"the memory of container {container.name} on card {limit.card.index} is not limited: {problem}"
        log.warning("%s", text, extra={"pod": container.uid})
        gpu_pod = self._pods.by_uid(container.uid)
        if gpu_pod is not None:
            self._events.unenforced(gpu_pod, text)
            return
        named = self._surroundings.claims.pod(container.uid)
        others: list[NamedPod] = [pod for pod in self._pods.limited_pods() if pod.uid == container.uid]
        for other in [*others, *([named] if named is not None else ())]:
            self._events.unlimited(other, text)


def _together(limits: Iterable[CardLimit]) -> tuple[CardLimit, ...]:
    """Return the limits of a container that uses several claims, with the sum of those on one card."""
    found: dict[str, CardLimit] = {}
    for limit in limits:
        before = found.get(limit.card.uuid, CardLimit(limit.card, 0, 0))
        memory, compute = (before.memory or 0) + (limit.memory or 0), (before.compute or 0) + (limit.compute or 0)
        found[limit.card.uuid] = CardLimit(limit.card, memory, compute)
    return tuple(CardLimit(one.card, one.memory or None, one.compute or None) for one in found.values())


class NodeParts(NamedTuple):
    """The parts of the agent that the back end uses; for the last two see `Surroundings`."""

    runtime: ContainerRuntime
    pods: NodePods
    cards: NodeGpus
    changed: Wakeup
    is_driver_chosen: Callable[[], bool]
    claims: ClaimLimits = NoClaims()
    claim_pods: Callable[[], Collection[str]] = tuple


def make_driver(
    settings: DevicePluginSettings, limits: MemoryLimits, parts: NodeParts, events: DriverEvents
) -> DriverBackend:
    cgroups = Path(settings.cgroup_dir)
    folders = (Path(settings.cdi_dir), *_CDI_FOLDERS)
    is_wanted = settings.isolation in (DRIVER, AUTO)
    hook = partial(find_hook, settings.memory_limit_hook, folders)

    def api_uids() -> Mapping[str, str]:
        pods = parts.pods
        by_kubelet = {kubelets_uid(p.pod.annotations, p.pod.uid): p.pod.uid for p in pods.all()}
        others = {pod.uid: pod.uid for pod in pods.limited_pods()} | {uid: uid for uid in parts.claim_pods()}
        return others | by_kubelet

    return DriverBackend(
        limits,
        Containers(parts.runtime, cgroups, api_uids),
        parts.pods,
        parts.cards,
        Surroundings(cgroups, hook, is_wanted, parts.is_driver_chosen, parts.claims),
        parts.changed,
        events,
    )
