"""The agent's part for ResourceClaims as a whole: creates its parts, and connects them with the rest of the agent.

`deviceplugin.agent` creates one `ClaimDriver` if `dra.enabled` is true, and runs it while it serves the node. The
claims that hold cards are in `NodeState.claims`, because pods without claims depend on them, too.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deviceplugin.dra.claim_cleanup import ClaimCleanup, Runtime
from deviceplugin.dra.claim_preparation import ClaimPreparation, Surroundings
from deviceplugin.dra.claim_registration import ClaimRegistration
from deviceplugin.dra.claim_service import ClaimService
from deviceplugin.dra.claim_status import ClaimApi
from deviceplugin.dra.claim_users import ClaimPod
from deviceplugin.dra.kubelet_retries import KubeletRetries
from deviceplugin.dra.prepared_claims import PreparedClaims
from deviceplugin.dra.slice_content import published_cards
from deviceplugin.dra.slice_publisher import SlicePublisher
from deviceplugin.event_loop import Wakeup
from mgpu.kube import Api
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from mgpu.model.ledger import Holding
from mgpu.model.mig import Instance
from mgpu.model.mig_devices import cards_in, cards_of_instances, mig_card_states, offers_of, taken_instances
from mgpu.model.mig_resource_slices import PublishedMigCard
from mgpu.model.resource_slices import PublishedCard


@dataclass(frozen=True, slots=True)
class DriverParts:
    """What the driver uses of the agent.

    Attributes:
        surroundings: What the preparation of claims uses.
        held: A function that returns what pods without claims hold, and remnants. It is called on other threads.
        cards_changed: A signal that is sent when the cards have changed.
        node_uid: A function that returns the UID of the Node, or None.
        warn: A function that reports a problem of the node.
        warn_pod: A function that reports a problem of a pod that uses claims.
    """

    surroundings: Surroundings
    held: Callable[[], Sequence[Holding]]
    cards_changed: Wakeup
    runtime: Runtime
    node_uid: Callable[[], str | None]
    warn: Callable[[str], None]
    warn_pod: Callable[[ClaimPod, str], None]


class ClaimDriver:
    """The driver. Any thread may call `update` and the methods that return a reason."""

    def __init__(self, api: Api, claims: PreparedClaims, kubelet_dir: Path, parts: DriverParts) -> None:
        around = parts.surroundings
        claim_api = ClaimApi(api)
        self._parts = parts
        self._claims = claims
        self._preparation = ClaimPreparation(claim_api, claims, around)
        self._service = ClaimService(
            around.node,
            self._preparation,
            around.devices.gpus,
            parts.cards_changed,
            self._other_socket,
            instances=self._cards_of_instances,
        )
        kubelet_socket = kubelet_dir / "device-plugins" / "kubelet.sock"
        self._registration = ClaimRegistration(kubelet_dir, self._service, kubelet_socket)
        self._cleanup = ClaimCleanup(claims, claim_api, around.pods, around.users, parts.runtime)
        self._retries = KubeletRetries(api, around.node, claims, around.users, self._is_registered)
        self._publisher = SlicePublisher(
            api, around.node, self._published_cards, parts.node_uid, parts.warn, mig_cards=self._published_mig_cards
        )

    def start(self) -> None:
        """Start to publish the cards."""
        self._publisher.start()

    def stop(self) -> None:
        """Stop publishing. The slice stays."""
        self._publisher.stop()

    def update(self) -> None:
        """Compare the cards with what is published."""
        self._publisher.update()

    def recover(self) -> None:
        """Read which claims earlier agents have prepared. Call this before the agent serves the node."""
        self._claims.recover()
        if (instances := self._parts.surroundings.instances) is not None:
            instances.recover()

    def owned_instances(self) -> frozenset[tuple[str, Instance]]:
        """Return the places of the MIG instances that exist for claims, each with the UUID of its card. Thread-safe."""
        instances = self._parts.surroundings.instances
        return instances.owned() if instances is not None else frozenset()

    async def serve(self) -> None:
        """Keep the sockets for the kubelet open, until cancelled. The kubelet may call before `work` runs."""
        await self._registration.run()

    async def work(self) -> None:
        """Answer the kubelet until cancelled. After that, calls wait for the agent that takes over."""
        instances = self._parts.surroundings.instances
        try:
            async with self._service.serving(), asyncio.TaskGroup() as group:
                group.create_task(self._cleanup.run())
                group.create_task(self._retries.run())
                group.create_task(self._follow_problem())
                group.create_task(self._follow_users())
                if instances is not None:
                    group.create_task(instances.run())
        finally:
            if instances is not None:
                await instances.settle()

    def not_ready_reason(self) -> str | None:
        """Return what is missing until claims can be prepared on this node, or None."""
        reasons = [self._registration.problem, None if self._publisher.published else self._publisher.problem]
        return "; ".join(filter(None, reasons)) or None

    def unpublished_reason(self) -> str | None:
        """Return why the API server does not have the present slice, or None if it has."""
        return self._publisher.problem

    def _is_registered(self) -> bool:
        return self._registration.problem is None

    def _other_socket(self) -> Path | None:
        return self._registration.other_socket()

    async def _follow_problem(self) -> None:
        """Report once that the kubelet does not register the driver."""
        warned: str | None = None
        while True:
            await asyncio.sleep(5.0)
            problem = self._registration.problem
            if problem is not None and problem != warned:
                self._parts.warn(problem)
            warned = problem

    async def _follow_users(self) -> None:
        """Report once for each pod that its containers do not see exactly their cards."""
        warned: set[tuple[str, str]] = set()
        while True:
            found = {(user.uid, reason): user for user, reason in self._preparation.late_conflicts()}
            for (uid, reason), user in found.items():
                if (uid, reason) not in warned:
                    self._parts.warn_pod(user, reason)
            warned = {*found}
            await self._parts.surroundings.changed.wait()

    def _cards_of_instances(self) -> dict[str, Card]:
        """Return the cards of the MIG instances that claims can get or have, by the names of the instances."""
        devices = self._parts.surroundings.devices
        gpus = {card.index: card for card in devices.gpus()}
        offered = {offer.device.name: card for card in devices.mig_cards() for offer in offers_of(card)}
        delivered = (device for record in self._claims.all() for device in record.devices if device.instance)
        return {**offered, **{one.device: gpus[one.index] for one in delivered if one.index in gpus}}

    def _published_cards(self) -> tuple[PublishedCard, ...]:
        around = self._parts.surroundings
        whole = around.devices.whole()
        if not around.is_resumed():
            raise RetryLater("the pods and cards of this node have not been read yet")
        if whole is None:
            raise RetryLater("the partitions of the cards have not been read yet")
        of_instances = around.devices.mig_cards()
        cards = [card for card in around.devices.gpus() if card not in of_instances]
        # Claims that have MIG instances from before a change of the label hold the whole card.
        held = (*self._parts.held(), *filter(None, map(cards_of_instances, self._claims.holdings())))
        return published_cards(cards, whole, around.devices.devices(), held)

    def _published_mig_cards(self) -> tuple[PublishedMigCard, ...]:
        """Return the cards of which claims get MIG instances, with what these cannot have of them now.

        kube-scheduler counts the instances that claims have. It knows neither what pods still hold of the card, nor the
        shares that claims have from before the node got its label, nor instances that somebody else has created.
        """
        devices = self._parts.surroundings.devices
        shares = (replace(held, shares=cards_in(held)) for held in self._claims.holdings())
        others = (*self._parts.held(), *shares, *devices.foreign_instances())
        states = mig_card_states(devices.mig_cards(), others, devices.cards_in_mig_mode())
        return tuple(PublishedMigCard(s.card, taken_instances(s), in_mode=s.in_mode) for s in states)
