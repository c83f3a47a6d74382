"""Connects the driver for ResourceClaims (`deviceplugin.dra`) with the state of the node.

`deviceplugin.agent` calls both functions when it is created.
"""

from functools import partial
from pathlib import Path

from deviceplugin.delivery.visibility import make_exposure
from deviceplugin.dra.claim_driver import ClaimDriver, DriverParts
from deviceplugin.dra.claim_preparation import Surroundings
from deviceplugin.dra.mig_instances import MigInstances
from deviceplugin.dra.mig_ownership import FOLDER, MigOwnership
from deviceplugin.dra.prepared_claims import plugin_folder
from deviceplugin.dra.slice_publisher import SliceRemoval
from deviceplugin.isolation.isolation import Isolation
from deviceplugin.mig.mig_driver import MigDriver
from deviceplugin.node_state import NodeState
from deviceplugin.pods.lingering_processes import LingeringProcesses
from mgpu.kube import Api

REASON = "MgpuDra"
"""The reason of the Events about what keeps the node from serving claims, or a pod from using them as it should."""


def make_claim_driver(
    state: NodeState, api: Api, isolation: Isolation, lingering: LingeringProcesses | None, driver: MigDriver
) -> ClaimDriver | None:
    """Return the driver, or None if `dra.enabled` is false."""
    own = state.settings.deviceplugin
    if not state.settings.dra.enabled:
        return None
    surroundings = Surroundings(
        node=state.node,
        devices=state.devices,
        pods=state.pods,
        grants=state.grants,
        unrecorded=state.whole_cards,
        remnants=state.remnants,
        users=state.claim_users,
        changed=state.pods_changed,
        is_resumed=lambda: state.remnants.is_resumed,
        isolation=isolation,
        exposure=make_exposure(own),
        lingering=lingering,
        instances=MigInstances(
            MigOwnership(plugin_folder(Path(own.kubelet_dir)) / FOLDER), driver, state.claims, state.pods_changed
        ),
    )
    parts = DriverParts(
        surroundings=surroundings,
        held=state.pod_holdings,
        cards_changed=state.cards_changed,
        runtime=state.runtime,
        node_uid=partial(_node_uid, state),
        warn=partial(state.events.warn_node, reason=REASON),
        warn_pod=partial(state.events.warn_named_pod, reason=REASON),
    )
    return ClaimDriver(api, state.claims, Path(own.kubelet_dir), parts)


def make_slice_removal(state: NodeState, api: Api) -> SliceRemoval | None:
    """Return the part that deletes the ResourceSlice; None if `dra.enabled` is true, or has never been on this node."""
    was_enabled = plugin_folder(Path(state.settings.deviceplugin.kubelet_dir)).exists()
    return SliceRemoval(api, state.node) if was_enabled and not state.settings.dra.enabled else None


def _node_uid(state: NodeState) -> str | None:
    node = state.objects.node
    return str(node["metadata"]["uid"]) if node is not None else None
