"""The device manager, fact by fact (docs/design/kubernetes.md, "Device manager")."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from playground.kubelet.device_checkpoint import FILE
from playground.kubelet.device_manager import AdmissionError, DeviceManager, PluginError
from playground.kubelet.status import Json
from proto import deviceplugin_pb2 as api

CORE, MEM = "example.com/core", "example.com/mem"


class FakePlugin:
    """Answers with a variable that contains the number of the call, or refuses with the message `refuse`."""

    def __init__(self, *, pre_start_required: bool = True) -> None:
        self.pre_start_required = pre_start_required
        self.allocated: list[tuple[str, ...]] = []
        self.started: list[tuple[str, ...]] = []
        self.refuse = ""

    def allocate(self, ids: Any) -> api.ContainerAllocateResponse:
        if self.refuse:
            raise PluginError(self.refuse)
        self.allocated.append(tuple(ids))
        number = len(self.allocated)
        return api.ContainerAllocateResponse(
            envs={"ANSWER": str(number)}, cdi_devices=[api.CDIDevice(name=f"example.com/gpu={number}")]
        )

    def pre_start(self, ids: Any) -> None:
        self.started.append(tuple(ids))


class Manager:
    """A device manager with one plugin, which can be restarted."""

    def __init__(self, folder: Path, ids: int = 4, seed: int = 0) -> None:
        self.folder, self.seed, self.clock = folder, seed, 0.0
        self.active: set[str] = set()
        self.plugin = FakePlugin()
        self.manager = self.restart()
        self.register(CORE, ids)

    def restart(self) -> DeviceManager:
        rng = random.Random(self.seed)
        self.manager = DeviceManager(
            self.folder / FILE, lambda: self.active, rng=rng, grace=300, clock=lambda: self.clock
        )
        return self.manager

    def register(self, resource: str, ids: int) -> None:
        self.manager.connected(resource, self.plugin)
        self.manager.update(resource, {f"{resource[-3:]}-{i}": True for i in range(ids)})

    def admit(self, pod: Json, *, running: bool = False) -> None:
        for container in [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]:
            self.manager.allocate(pod, container, running=running)
        self.active.add(pod["metadata"]["uid"])

    def ids(self, uid: str, container: str = "c") -> set[str]:
        return set(self.manager.ids(uid, container).get(CORE, ()))


def container(name: str = "c", core: int = 1, **more: Any) -> Json:
    return {"name": name, "resources": {"limits": {CORE: str(core)}}, **more}


def pod(uid: str, *containers: Json, init: tuple[Json, ...] = ()) -> Json:
    return {
        "metadata": {"uid": uid, "name": uid},
        "spec": {"containers": list(containers) or [container()], "initContainers": list(init)},
    }


@pytest.fixture
def devices(tmp_path: Path) -> Manager:
    return Manager(tmp_path)


def test_allocate_gives_pods_different_ids_until_they_end(devices: Manager) -> None:
    devices.admit(pod("a", container(core=2)))
    devices.admit(pod("b", container(core=2)))
    assert not devices.ids("a") & devices.ids("b")
    with pytest.raises(AdmissionError, match=r"Requested: 1, Available: 0"):
        devices.admit(pod("c"))
    devices.active.discard("a")
    devices.admit(pod("d", container(core=2)))
    assert devices.ids("d") == {"ore-0", "ore-1", "ore-2", "ore-3"} - devices.ids("b")


def test_allocate_refused_by_plugin_takes_no_id(devices: Manager) -> None:
    devices.plugin.refuse = "not now"
    with pytest.raises(AdmissionError, match="not now"):
        devices.admit(pod("a", container(core=4)))
    devices.plugin.refuse = ""
    devices.admit(pod("b", container(core=4)))


def test_init_containers_hand_on_their_ids_and_sidecars_keep_theirs(devices: Manager) -> None:
    init = (container("sidecar", restartPolicy="Always"), container("init", core=2))
    devices.admit(pod("a", container(core=2), init=init))
    assert devices.ids("a") == devices.ids("a", "init")
    assert not devices.ids("a", "sidecar") & devices.ids("a")


def test_ids_of_an_init_container_serve_each_app_container_once(devices: Manager) -> None:
    devices.admit(pod("a", container("c1"), container("c2"), init=(container("init", core=2),)))
    assert devices.ids("a", "c1") | devices.ids("a", "c2") == devices.ids("a", "init")
    assert devices.ids("a", "c1") != devices.ids("a", "c2")


def test_allocate_chooses_ids_and_order_of_resources_at_random(tmp_path: Path) -> None:
    seen_ids, seen_orders = set(), set()
    for seed in range(20):
        (folder := tmp_path / str(seed)).mkdir()
        devices = Manager(folder, seed=seed)
        devices.register(MEM, 4)
        both = {"name": "c", "resources": {"limits": {CORE: "2", MEM: "2"}}}
        devices.admit(pod("a", both))
        seen_ids.add(frozenset(devices.ids("a")))
        seen_orders.add(devices.plugin.allocated[0][0][:3])
    assert len(seen_ids) > 1
    assert seen_orders == {"ore", "mem"}


def test_run_options_with_conflicting_variables_choose_at_random(tmp_path: Path) -> None:
    devices = Manager(tmp_path)
    devices.register(MEM, 4)
    a_pod = pod("a", {"name": "c", "resources": {"limits": {CORE: "1", MEM: "1"}}})
    devices.admit(a_pod)
    options = [devices.manager.run_options(a_pod, a_pod["spec"]["containers"][0]) for _ in range(20)]
    assert {dict(o.env)["ANSWER"] for o in options} == {"1", "2"}
    assert {frozenset(o.cdi) for o in options} == {frozenset({"example.com/gpu=1", "example.com/gpu=2"})}


def test_allocate_answer_survives_a_restart(devices: Manager) -> None:
    a_pod = pod("a")
    devices.admit(a_pod)
    devices.restart()
    devices.register(CORE, 4)
    devices.admit(a_pod)
    options = devices.manager.run_options(a_pod, container())
    assert (dict(options.env), options.cdi) == ({"ANSWER": "1"}, ("example.com/gpu=1",))
    assert len(devices.plugin.allocated) == 1


def test_pre_start_after_restart_is_skipped_until_the_plugin_registers(
    devices: Manager,
) -> None:
    a_pod = pod("a")
    devices.admit(a_pod)
    devices.manager.run_options(a_pod, container())
    assert devices.plugin.started == devices.plugin.allocated
    devices.restart()
    devices.manager.run_options(a_pod, container())
    assert len(devices.plugin.started) == 1
    devices.register(CORE, 4)
    devices.manager.run_options(a_pod, container())
    assert len(devices.plugin.started) == 2


def test_pre_start_not_required_is_not_called(devices: Manager) -> None:
    devices.plugin.pre_start_required = False
    a_pod = pod("a")
    devices.admit(a_pod)
    devices.manager.run_options(a_pod, container())
    assert devices.plugin.started == []


def test_allocate_after_restart_fails_until_the_plugin_registers(devices: Manager) -> None:
    a_pod = pod("a")
    devices.admit(a_pod)
    devices.restart()
    devices.admit(a_pod, running=True)
    with pytest.raises(AdmissionError, match="no healthy devices present"):
        devices.admit(a_pod)


def test_readmission_with_unhealthy_id_is_refused(devices: Manager) -> None:
    a_pod = pod("a")
    devices.admit(a_pod)
    (held,) = devices.ids("a")
    devices.manager.update(CORE, {f"ore-{i}": f"ore-{i}" != held for i in range(4)})
    assert devices.manager.health(CORE, held) == "Unhealthy"
    with pytest.raises(AdmissionError, match="no longer healthy"):
        devices.admit(a_pod)


def test_capacity_counts_unhealthy_ids_and_allocatable_does_not(devices: Manager) -> None:
    devices.manager.update(CORE, {"a": True, "b": False})
    assert devices.manager.capacity() == ({CORE: 2}, {CORE: 1}, set())


def test_disconnected_plugin_leaves_capacity_until_the_grace_period_ends(devices: Manager) -> None:
    devices.manager.disconnected(CORE)
    assert devices.manager.capacity() == ({CORE: 4}, {CORE: 0}, set())
    devices.clock = 301
    assert devices.manager.capacity() == ({}, {}, {CORE})


def test_allocate_ignores_unregistered_resources(devices: Manager) -> None:
    a_pod = pod("a", {"name": "c", "resources": {"limits": {"example.com/other": "1"}}})
    devices.admit(a_pod)
    assert devices.manager.run_options(a_pod, a_pod["spec"]["containers"][0]).env == ()
    assert devices.plugin.allocated == devices.plugin.started == []


def test_plugin_registered_after_the_pod_fails_its_next_start(devices: Manager) -> None:
    other = {"name": "c", "resources": {"limits": {MEM: "1"}}}
    devices.admit(pod("a", other))
    devices.register(MEM, 4)
    with pytest.raises(PluginError, match="no devices found allocated"):
        devices.manager.run_options(pod("a", other), other)


def test_allocate_for_a_changed_request_is_refused(devices: Manager) -> None:
    devices.admit(pod("a"))
    with pytest.raises(AdmissionError, match="changed request"):
        devices.admit(pod("a", container(core=2)))


def test_checkpoint_lists_init_containers_before_any_start(devices: Manager) -> None:
    devices.admit(pod("a", container(core=2), init=(container("init"),)))
    whole = json.loads((devices.folder / FILE).read_text())
    rows = {row["ContainerName"]: row for row in whole["Data"]["PodDeviceEntries"]}
    assert set(rows) == {"init", "c"}
    assert rows["c"]["PodUID"] == "a"
    assert rows["c"]["ResourceName"] == CORE
    assert set(rows["c"]["DeviceIDs"]["-1"]) == devices.ids("a")
    assert sorted(whole["Data"]["RegisteredDevices"][CORE]) == ["ore-0", "ore-1", "ore-2", "ore-3"]


def test_device_list_rewrites_the_checkpoint(devices: Manager) -> None:
    devices.admit(pod("a"))
    (devices.folder / FILE).unlink()
    devices.register(CORE, 4)
    rows = json.loads((devices.folder / FILE).read_text())["Data"]["PodDeviceEntries"]
    assert [row["PodUID"] for row in rows] == ["a"]


def test_damaged_checkpoint_is_refused(devices: Manager) -> None:
    devices.admit(pod("a"))
    file = devices.folder / FILE
    file.write_text(file.read_text().replace('"PodUID": "a"', '"PodUID": "b"'))
    with pytest.raises(ValueError, match="corrupt"):
        devices.restart()
