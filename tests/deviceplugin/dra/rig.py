"""A node that prepares claims, without processes: the API server, pods and cards are in memory, the files are real."""

import asyncio
import copy
import re
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import orjson

from deviceplugin.delivery.cdi import CdiFiles
from deviceplugin.delivery.visibility import Exposure
from deviceplugin.dra.claim_cdi import ClaimCdiFiles
from deviceplugin.dra.claim_preparation import ClaimPreparation, Surroundings
from deviceplugin.dra.claim_records import ClaimRecord, ClaimRecords
from deviceplugin.dra.claim_status import ClaimApi
from deviceplugin.dra.claim_users import ClaimUsers
from deviceplugin.dra.prepared_claims import PreparedClaims
from deviceplugin.event_loop import Wakeup
from deviceplugin.isolation.isolation import Isolation
from deviceplugin.pods.capacity_check import Grants, read_delivered
from deviceplugin.pods.lingering_processes import LingeringProcesses
from deviceplugin.pods.node_pods import NodePods
from mgpu.kube import Api, ApiError
from mgpu.model.cards import Card
from mgpu.model.ledger import Holding
from mgpu.settings import load_settings
from tests.builders import cards
from tests.deviceplugin.dra.claims import uid_of

Json = dict[str, Any]
T = TypeVar("T")
_PATH = re.compile(r"/apis/resource\.k8s\.io/v1/namespaces/([^/]+)/resourceclaims/([^/]+)(/status)?")


class FakeClaims(Api):
    """The part of an API server that stores claims.

    Attributes:
        before_write: Called before each write of a status; it may change claims, or raise.
        after_write: Called after it.
        failing: The status of the error that every call gets; 0 for none.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Json] = {}
        self.version = 100
        self.before_write: Callable[[], None] = lambda: None
        self.after_write: Callable[[], None] = lambda: None
        self.failing = 0
        self.writes = 0

    def put(self, raw: Json) -> None:
        """Store a claim, whatever its version is."""
        self.version += 1
        meta = raw["metadata"] | {"resourceVersion": str(self.version)}
        self.objects[meta["namespace"], meta["name"]] = copy.deepcopy({**raw, "metadata": meta})

    def named(self, name: str) -> Json:
        return copy.deepcopy(self.objects["default", name])

    def remove(self, name: str) -> None:
        self.objects.pop(("default", name), None)

    def is_prepared(self, name: str) -> bool:
        rows = self.objects["default", name].get("status", {}).get("devices", ())
        return any(c["type"] == "Prepared" and c["status"] == "True" for row in rows for c in row["conditions"])

    def move(self, name: str, change: Callable[[Json], None]) -> bool:
        """Change a claim as the repair does, unless it is prepared."""
        if self.is_prepared(name):
            return False
        raw = self.named(name)
        change(raw)
        self.put(raw)
        return True

    def get(self, path: str, **query: object) -> Json:
        namespace, name, _ = self._parsed(path, query)
        if (namespace, name) not in self.objects:
            raise ApiError(404, "NotFound", name)
        return copy.deepcopy(self.objects[namespace, name])

    def replace(self, path: str, body: Mapping[str, Any], **query: object) -> Json:
        namespace, name, status = self._parsed(path, query)
        assert status
        self.before_write()
        present = self.objects.get((namespace, name))
        if present is None:
            raise ApiError(404, "NotFound", name)
        for key in ("uid", "resourceVersion"):
            if body["metadata"][key] != present["metadata"][key]:
                raise ApiError(409, "Conflict", f"{key} differs")
        self.writes += 1
        self.put({**present, "status": dict(body["status"])})
        self.after_write()
        return self.named(name)

    def _parsed(self, path: str, query: Mapping[str, object]) -> tuple[str, str, bool]:
        found = _PATH.fullmatch(path)
        assert found, path
        assert not query
        if self.failing:
            raise ApiError(self.failing, "Failing", "on purpose")
        return found[1], found[2], bool(found[3])


class ClaimNode:
    """The node `n1`. The agent can restart: the files and the API server stay.

    Attributes:
        partitioned: The indexes of the cards that are partitioned.
        foreign: What unrecorded pods hold.
        remnants: What remnants hold.
        step: Called before and after each write of a file; it may raise.
    """

    def __init__(self, folder: Path, exposure: Exposure | None = None) -> None:
        self.folder = folder
        self.api = FakeClaims()
        self.exposure = exposure or Exposure()
        self.cards: tuple[Card, ...] = cards(2)
        self.partitioned: set[int] = set()
        self.foreign: tuple[Holding, ...] = ()
        self.remnants: tuple[Holding, ...] = ()
        self.is_resumed = True
        self.lingering: LingeringProcesses | None = None
        self.step: Callable[[], None] = lambda: None
        self.pods_by_uid: dict[str, Json] = {}
        self.restart()

    def restart(self) -> None:
        """Replace all objects of the agent, as after its death."""
        self.changed = Wakeup()
        self.pods = NodePods(load_settings(), self.changed.wake)
        self.users = ClaimUsers(self.changed.wake)
        for raw in self.pods_by_uid.values():
            self._deliver(raw)
        self.cdi_files = CdiFiles(self.folder / "cdi")
        self.grants = Grants(read_delivered(self.cdi_files.environments()))
        records, files = _Records(self.folder / "claims", self), _Files(self.folder / "cdi", self)
        self.claims = PreparedClaims("n1", records, files, self.changed.wake, self.gpus)
        self.claims.recover()
        self.isolation = self.make_isolation()
        self.preparation = ClaimPreparation(ClaimApi(self.api), self.claims, self._surroundings())

    def make_isolation(self) -> Isolation | None:
        return None

    def _surroundings(self) -> Surroundings:
        remnants = _Holders(lambda: self.remnants)
        return Surroundings(
            "n1",
            self,
            self.pods,
            self.grants,
            _Holders(lambda: self.foreign),
            remnants,
            self.users,
            self.changed,
            lambda: self.is_resumed,
            self.isolation,
            self.exposure,
            self.lingering,
        )

    # The devices of the node

    def gpus(self) -> tuple[Card, ...]:
        return self.cards

    def devices(self) -> tuple[Card, ...]:
        return tuple(card for card in self.cards if card.index not in self.partitioned)

    def mig_cards(self) -> tuple[Card, ...]:
        return ()

    def cards_in_mig_mode(self) -> frozenset[int]:
        return frozenset(card.index for card in self.mig_cards())

    def foreign_instances(self) -> tuple[Holding, ...]:
        return ()

    def whole(self) -> tuple[Card, ...]:
        return self.devices()

    # Pods, and the kubelet's calls

    def take(self, *pods: Json) -> None:
        for raw in pods:
            self.pods_by_uid[raw["metadata"]["uid"]] = raw
            self._deliver(raw)

    def drop(self, raw: Json) -> None:
        self.pods_by_uid.pop(raw["metadata"]["uid"], None)
        self.users.drop(raw)
        self.pods.drop(raw)

    def _deliver(self, raw: Json) -> None:
        self.users.take(raw)
        self.pods.take(raw)

    def prepare(
        self, name: str = "a", *, uid: str = "", seconds: float = 60.0, meanwhile: Callable[[], None] = lambda: None
    ) -> ClaimRecord:
        """Have a claim prepared; `meanwhile` is called while the call waits."""

        async def call() -> ClaimRecord:
            deadline = asyncio.get_running_loop().time() + seconds
            return await self.preparation.prepare("default", name, uid or uid_of(name), deadline)

        return self.run(call, meanwhile)

    def unprepare(self, name: str = "a") -> None:
        self.preparation.unprepare(uid_of(name))

    def run(self, call: Callable[[], Coroutine[Any, Any, T]], meanwhile: Callable[[], None] = lambda: None) -> T:
        async def bound() -> T:
            self.changed.bind()
            asyncio.get_running_loop().call_later(0.05, meanwhile)
            try:
                return await call()
            finally:
                self.changed.unbind()

        return asyncio.run(bound())

    # What was written

    def record_files(self) -> set[str]:
        """Return the UIDs of the claims with a record."""
        return {file.stem for file in (self.folder / "claims").glob("*.json")}

    def spec(self, name: str = "a") -> Json | None:
        """Return the CDI spec of a claim."""
        file = self.folder / "cdi" / f"mgpu_{uid_of(name)}.json"
        found: Json | None = orjson.loads(file.read_bytes()) if file.exists() else None
        return found

    def env(self, record: ClaimRecord, reference: str = "") -> dict[str, str]:
        """Return the environment of a container with this reference, as the kubelet and the runtime make it."""
        env: dict[str, str] = {}
        for device in record.devices:
            if reference in ("", device.request):
                for name in device.cdi:
                    env |= dict(line.split("=", 1) for line in self.edits(record, name).get("env", ()))
        return env

    def edits(self, record: ClaimRecord, name: str) -> Json:
        spec = self.spec(record.name)
        assert spec is not None
        found = [row for row in spec["devices"] if f"{spec['kind']}={row['name']}" == name]
        (row,) = found
        edits: Json = row["containerEdits"]
        return edits


class _Holders:
    def __init__(self, found: Callable[[], tuple[Holding, ...]]) -> None:
        self._found = found

    def holdings(self) -> tuple[Holding, ...]:
        return self._found()


class _Records(ClaimRecords):
    """Records whose writes can be interrupted."""

    def __init__(self, folder: Path, node: ClaimNode) -> None:
        super().__init__(folder)
        self._node = node

    def write(self, record: ClaimRecord) -> None:
        self._node.step()
        super().write(record)
        self._node.step()

    def remove(self, uid: str) -> None:
        self._node.step()
        super().remove(uid)
        self._node.step()


class _Files(ClaimCdiFiles):
    """CDI files whose writes can be interrupted."""

    def __init__(self, folder: Path, node: ClaimNode) -> None:
        super().__init__(folder)
        self._node = node

    def write(self, uid: str, spec: Mapping[str, Any]) -> None:
        self._node.step()
        super().write(uid, spec)
        self._node.step()

    def remove(self, uid: str) -> None:
        self._node.step()
        super().remove(uid)
        self._node.step()
