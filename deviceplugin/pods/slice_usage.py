"""Finds out which pod uses which slice, from allocation records, CDI files and the kubelet's checkpoint.

`partitioning.partition_worker` combines the three sources, so that it never destroys a slice in use. The checkpoint
overrides CDI files. CDI files override records, which users with the right to edit pods can change. `pods.identity`
writes the variable `PLACES_VARIABLE` into CDI files, and `pods.capacity_check` also reads environments with `names_in`.
All functions are pure. A *place* is a slice without its UUID and its pod (`Slice.place`).
"""

from collections.abc import Callable, Collection, Iterable, Mapping

from deviceplugin.pods.gpu_pod import GpuPod
from mgpu.model.ledger import Share
from mgpu.model.node_slices import UNKNOWN_POD
from mgpu.model.slice_names import MPS, RESOURCE_PREFIX, Slice, mode_of, place_of, read_name, slice_of_resource

PLACES_VARIABLE = "MGPU_PLACES"
"""The variable that contains the card and the start of each slice in MGPU_SLICES, such as `0:4,0:2`. It is needed for
MPS shares, for which NVIDIA_VISIBLE_DEVICES contains only the UUID of their card."""
_NAMES_VARIABLE, _VISIBLE = "MGPU_SLICES", "NVIDIA_VISIBLE_DEVICES"

Users = dict[Slice, str]
"""The UID of the pod that uses a place, by place."""
Environments = Mapping[tuple[str, str], Mapping[str, str]]
"""The environment in a container's CDI files, by pod UID and container."""


def place_at(type_: str, index: int) -> Slice | None:
    """Return the place of the device of this type and index; None if the device is not a slice."""
    name = slice_of_resource(RESOURCE_PREFIX + type_)
    return None if name is None else Slice(*place_of(index), name)


def places_of(shares: Iterable[Share]) -> tuple[Slice, ...]:
    found = (place_at(share.type, share.card) for share in shares if isinstance(share.card, int))
    return tuple(place for place in found if place)


def places_in(env: Mapping[str, str]) -> tuple[Slice, ...]:
    """Return the places that the environment of a container names; () if it names no slices or is malformed."""
    names = [read_name(name) for name in env.get(_NAMES_VARIABLE, "").split(",")]
    places = [place.split(":") for place in env.get(PLACES_VARIABLE, "").split(",")]
    if len(names) != len(places) or any(len(p) != 2 or not all(map(str.isdecimal, p)) for p in places):
        return ()
    return tuple(Slice(int(card), int(start), n) for n, (card, start) in zip(names, places, strict=True) if n)


def visible_cards(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs of the cards that the environment of a container names; () if it names slices."""
    return () if _NAMES_VARIABLE in env else tuple(filter(None, env.get(_VISIBLE, "").split(",")))


def names_in(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs of the cards or slices in a container's environment.

    The UUID of an MPS share must have the same form as in `mgpu.model.node_slices.slice_devices`.
    """
    visible = tuple(filter(None, env.get(_VISIBLE, "").split(",")))
    shares = [place for place in places_in(env) if mode_of(place.name) == MPS]
    return tuple(f"{visible[0]}/{s.name}/{s.start}" for s in shares) if shares and visible else visible


def users_by_records(pods: Iterable[GpuPod]) -> Users:
    """Return the users according to the records of pods that have not ended.

    If several records name one place, its user is the first of these pods in the order of `pods`.
    """
    found: Users = {}
    for gpu_pod in pods:
        for place in places_of(gpu_pod.shares or ()) if not gpu_pod.pod.ended else ():
            found.setdefault(place, gpu_pod.pod.uid)
    return found


def users_by_cdi_files(environments: Environments, made: Iterable[Slice], alive: Callable[[str], bool]) -> Users:
    """Return the users according to CDI files, which name places or the UUIDs of MIG devices.

    Args:
        made: The slices that exist on the node.
        alive: A function that returns whether the pod with this UID may still run.
    """
    by_uuid = {s.uuid: s.place for s in made if s.uuid}
    found: Users = {}
    for (uid, _), env in sorted(environments.items()):
        by_name = (by_uuid[uuid] for uuid in env.get(_VISIBLE, "").split(",") if uuid in by_uuid)
        for place in places_in(env) or by_name if alive(uid) else ():
            found.setdefault(place, uid)
    return found


def users_by_checkpoint(rows: Iterable[tuple[str, Collection[str]]], made: Iterable[Slice]) -> Users:
    """Return the users of MIG devices that another plugin gave out. Its device ids are the UUIDs of MIG devices.

    Args:
        rows: The UID and the device ids of each pod that may still run.
        made: The slices that exist on the node.
    """
    by_uuid = {s.uuid: s.place for s in made if s.uuid}
    return {by_uuid[name]: uid for uid, ids in sorted(rows) for name in ids if name in by_uuid}


def with_users(made: Iterable[Slice], users: Mapping[Slice, str], busy: Iterable[Slice]) -> tuple[Slice, ...]:
    """Return the slices, each with the pod that uses it.

    Args:
        busy: The places where processes run. If no source names the pod of such a slice, its pod is `UNKNOWN_POD`.
    """
    somebody = dict.fromkeys(busy, UNKNOWN_POD)
    return tuple(
        sorted(Slice(s.card, s.start, s.name, s.uuid, users.get(s.place, somebody.get(s.place, ""))) for s in made)
    )
