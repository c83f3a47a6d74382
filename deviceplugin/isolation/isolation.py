"""Chooses the isolation back end of each container, and lets the container start once its limits are in place.

The allocator calls `Isolation.ready` before a container starts, and `Isolation.mark_started` when it may start. A
container keeps its back end until it ends, whatever the settings say by then: its CDI file contains the variable
`VARIABLE`, by which the next agent finds it.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deviceplugin.cards import NodeGpus
from deviceplugin.delivery.cdi import Edits
from deviceplugin.isolation.backend import Ability, Backend, Key, Measured, Unable
from deviceplugin.isolation.choice import MISSING, Choice, choose, holds_anything, not_held
from deviceplugin.isolation.limits import LimitedContainer, Unenforceable, limits_of
from deviceplugin.isolation.mps.limits import PIPE
from deviceplugin.pods.gpu_pod import GpuPod
from deviceplugin.pods.identity import Refused, Target
from mgpu.model.isolation import HAMI_CORE, MPS, NONE
from mgpu.model.resizing import is_resizable

VARIABLE = "MGPU_ISOLATION"
"""The environment variable of a container that names its isolation back end."""


class DeliveredEnvironments(Protocol):
    """The part of `CdiFiles` that is used here. The keys may also be views of claims (`dra.prepared_claims`)."""

    def environments(self) -> Mapping[Key, Mapping[str, str]]: ...


class SliceClients(Protocol):
    """The part of `deviceplugin.isolation.mps.clients.Mps` that lets containers with MPS slices start."""

    async def ready_slices(self, targets: Sequence[Target], deadline: float) -> Mapping[Key, Edits]:
        """Wait for the daemons of the containers with MPS slices, and return the edits of these. Raises Refused."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What administrators have decided about isolation.

    Attributes:
        setting: The setting `deviceplugin.isolation`.
        required: The setting `deviceplugin.isolationRequired`: whether a container starts only if all of its limits
            are in force.
        label: A function that returns the value of the Node's label `mgpu.io/isolation`, or None.
    """

    setting: str = NONE
    required: bool = False
    label: Callable[[], str | None] = lambda: None


class Isolation:
    """The isolation back ends of this node. Use it on one event loop, except for the methods marked as thread-safe.

    Args:
        backends: The back ends by name.
        slices: The clients of MPS daemons. Containers with MPS slices are limited whatever the policy is.
        files: What CDI files contain, in which the containers of an earlier agent are found.
        unenforced: A function that reports that limits of a pod are not enforced, and the reason.
    """

    def __init__(
        self,
        backends: Mapping[str, Backend],
        slices: SliceClients,
        policy: Policy,
        files: DeliveredEnvironments,
        node: NodeGpus,
        unenforced: Callable[[GpuPod, str], None],
    ) -> None:
        self._backends = dict(sorted(backends.items()))
        self._slices = slices
        self._policy = policy
        self._files = files
        self._node = node
        self._unenforced = unenforced
        self._limited: dict[Key, str] = {}
        self.recover()

    def recover(self) -> None:
        """Find the containers of an earlier agent in the CDI files."""
        found = {key: (_backend_in(env), env) for key, env in self._files.environments().items()}
        self._limited = {key: name for key, (name, _) in found.items() if name in self._backends}
        for name, backend in self._backends.items():
            backend.recover({key: env for key, (of, env) in found.items() if of == name})

    def chosen(self) -> Choice:
        """Return the back end for pods that name none. Thread-safe."""
        abilities = {name: backend.ability() for name, backend in self._backends.items()}
        return choose(self._policy.setting, self._policy.label(), abilities)

    def cautions(self) -> tuple[str, ...]:
        """Return what users of the chosen back end should know. Thread-safe."""
        ability = self._ability(self.chosen().name)
        return (ability.caution,) if isinstance(ability, Ability) and ability.caution else ()

    def offers_hami_core(self) -> bool:
        """Return whether a pod that names HAMi-core can have it on this node. Thread-safe."""
        return isinstance(self._ability(HAMI_CORE), Ability)

    async def ready(self, targets: Sequence[Target], deadline: float) -> Mapping[Key, Edits]:
        """Wait until the limits of these containers are in place, and return what the runtime must add to them.

        Raises:
            Refused: The limits are not in place before the deadline, a time of the event loop's clock, or cannot be
                held although they must be (`Policy.required`).
        """
        edits = {key: _marked(e, MPS) for key, e in (await self._slices.ready_slices(targets, deadline)).items()}
        by_backend: dict[str, list[LimitedContainer]] = {}
        for target in targets:
            if target.key not in edits and (found := self._assign(target)) is not None:
                name, container = found
                by_backend.setdefault(name, []).append(container)
        for name, containers in sorted(by_backend.items()):
            made = await self._backends[name].prepare(containers, deadline)
            edits |= {key: _marked(e, name) for key, e in made.items()}
        self._record({target.key for target in targets}, edits)
        return edits

    def without_others(self, own: Edits, others: Iterable[Edits]) -> Edits:
        """Return `own` for a container that also gets `others`, the edits of other containers, which come before.

        Without this, what `own` does not limit would have the limits of others, and those for other cards.
        """
        env: dict[str, str] = {}
        for edits in others:
            name = edits.env.get(VARIABLE, NONE)
            if name in self._backends:
                env |= {**self._backends[name].lift(edits.env.keys() - {VARIABLE}), VARIABLE: NONE}
        return Edits(env) | own

    def mark_started(self, keys: Iterable[Key]) -> None:
        """Record that these containers may start."""
        started = {*keys}
        for backend in self._backends.values():
            backend.mark_started(started)

    def keep_only(self, uids: Collection[str]) -> None:
        self._limited = {key: name for key, name in self._limited.items() if key[0] in uids}
        for backend in self._backends.values():
            backend.keep_only(uids)

    async def run(self) -> None:
        """Run the back ends until cancelled. Call this after all pods of the node have been read."""
        async with asyncio.TaskGroup() as group:
            for backend in self._backends.values():
                group.create_task(backend.run())

    def backend_of(self, key: Key) -> str:
        """Return the back end that limits the container, or `none`. Thread-safe."""
        return self._limited.get(key, NONE)

    def unresizable(self, target: Target) -> Unable | None:
        """Return why the limits of this container cannot be changed while it runs, or None if they can."""
        if not target.shares or not all(map(is_resizable, target.shares)):
            return Unable("it has no share of a card that can be resized")
        try:
            limits_of(target.limited_shares, self._node.gpus)
        except Unenforceable as error:
            return Unable(str(error))
        name = self.backend_of(target.key)
        ability = self._ability(name)
        if name == NONE or (isinstance(ability, Ability) and ability.resizable):
            return None  # If nothing limits the container, only its share changes.
        reason = ability.reason if isinstance(ability, Unable) else "it limits a container only at its start"
        return Unable(f"isolation back end {name}: {reason}")

    async def resize(self, target: Target) -> Unable | None:
        """Bring the limits of a running container to those of its pod's record. Return why that is impossible."""
        name = self.backend_of(target.key)
        if (unable := self.unresizable(target)) is not None or name == NONE:
            return unable
        limits = limits_of(target.limited_shares, self._node.gpus)
        return await self._backends[name].resize(LimitedContainer(target, limits))

    def measure(self) -> tuple[Measured, ...]:
        """Return what the back ends measure. It may block; call it on a thread."""
        return tuple(row for backend in self._backends.values() for row in backend.measure())

    def _record(self, keys: Collection[Key], edits: Mapping[Key, Edits]) -> None:
        """Record which back end limits each of these containers, and release them from all others."""
        for name, backend in self._backends.items():
            backend.release([key for key in sorted(keys) if key not in edits or edits[key].env[VARIABLE] != name])
        kept = {key: name for key, name in self._limited.items() if key not in keys}
        self._limited = kept | {key: found.env[VARIABLE] for key, found in edits.items()}

    def _assign(self, target: Target) -> tuple[str, LimitedContainer] | None:
        """Return the container with the name of its back end, or None if nothing limits it. Report what is not held.

        Raises Refused if limits are required that the back end cannot hold.
        """
        named = target.gpu_pod.request.isolation if target.gpu_pod.request else ""
        choice = Choice(named) if named else self.chosen()
        try:
            limits = limits_of(target.limited_shares, self._node.gpus)
        except Unenforceable as error:
            if choice.name != NONE or choice.problem:
                self._report(target, (str(error),))
            return None
        if not limits or (choice.name == NONE and not choice.problem):
            return None
        ability = self._ability(choice.name)
        if isinstance(ability, Unable):
            is_none = choice.name == NONE
            self._report(
                target, (choice.problem if is_none else f"isolation back end {choice.name}: {ability.reason}",)
            )
            return None
        is_shared = target.is_shared
        if missing := not_held(ability, limits, is_shared=is_shared):
            self._report(target, (*missing, f"isolation back end {choice.name}"))
        is_limited = holds_anything(ability, limits, is_shared=is_shared)
        return (choice.name, LimitedContainer(target, limits)) if is_limited else None

    def _ability(self, name: str) -> Ability | Unable:
        backend = self._backends.get(name)
        return MISSING if backend is None else backend.ability()

    def _report(self, target: Target, reasons: Sequence[str]) -> None:
        """Report limits that are not held. Raises Refused if they are required."""
        text = f"the share of {target.subject} is not enforced: {'; '.join(reasons)}"
        if self._policy.required:
            raise Refused(f"{target}: {text} (deviceplugin.isolationRequired)", target.gpu_pod.pod.uid)
        self._unenforced(target.gpu_pod, text)


def _marked(edits: Edits, name: str) -> Edits:
    return edits | Edits({VARIABLE: name})


def _backend_in(env: Mapping[str, str]) -> str:
    """Return the back end of a container with this environment. Earlier agents wrote only the variables of MPS."""
    return env.get(VARIABLE) or (MPS if PIPE in env else NONE)
