"""A state machine of a node with faults: every container runs on exactly the cards of its record."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.builders import container, pod
from tests.deviceplugin.machine.agent import RESOURCES
from tests.deviceplugin.machine.world import World
from tests.examples import examples

GIB = 1 << 10
_MEMORY = Path("/dev/shm")


def small(name: str, **more: Any) -> dict[str, Any]:
    return container(name, 2, 30 * GIB, **more)


def requesting(name: str, **amounts: object) -> dict[str, Any]:
    """Return a container that requests these resources, by their names in `NAMES`."""
    named = {NAMES[key]: str(amount) for key, amount in amounts.items()}
    return {"name": name, "image": "cuda", "resources": {"requests": named, "limits": dict(named)}}


NAMES = {
    "core": "koordinator.sh/gpu-core",
    "ratio": "koordinator.sh/gpu-memory-ratio",
    "memory": "koordinator.sh/gpu-memory",
    "mem": "aliyun.com/gpu-mem",
    "gpu": "nvidia.com/gpu",
    "share": "mgpu.io/share",
    "mgpu": "vke.volcengine.com/mgpu-core",
    "mib": "vke.volcengine.com/mgpu-memory",
}
SHAPES: dict[str, dict[str, Any]] = {
    "one": {"app": [small("c")]},
    "big": {"app": [container("c", 2, 50 * GIB)]},
    "once": {"app": [small("c")], "restartPolicy": "Never"},
    "two": {"app": [small("c"), small("d")]},
    "plain beside": {"app": [{"name": "plain", "image": "busybox"}, container("d", 3, 20 * GIB)]},
    "init": {"init": [small("i")], "app": [small("c")]},
    "inits": {"init": [small("i"), container("j", 3, 20 * GIB)], "app": [small("c"), container("d", 1, 10 * GIB)]},
    "sidecar": {"init": [small("s", restartPolicy="Always"), container("i", 3, 10 * GIB)], "app": [small("c")]},
    "whole": {"app": [container("c", 100)]},
    "two ids": {"app": [requesting("c", core=3, ratio=30)]},
    "two ids beside one": {"app": [requesting("c", core=3, ratio=20), requesting("d", ratio=20)]},
    "one id, then two": {
        "init": [requesting("i", ratio=30), requesting("j", core=3, memory=20 << 30)],
        "app": [requesting("c", core=2, ratio=30), requesting("d", ratio=10)],
    },
    "two ids, then one": {"init": [requesting("i", mgpu=2, mib=20 * GIB, share=1)], "app": [small("c")]},
    "a share alone": {"app": [requesting("c", memory=30 << 30, share=1)]},
    "gpushare": {"init": [requesting("i", mem=3)], "app": [requesting("c", mem=2), requesting("d", mem=3)]},
    "whole card": {"app": [requesting("c", gpu=1)]},
}
shapes, places = st.sampled_from(sorted(SHAPES)), st.integers(0, 15)
names = st.sampled_from(["p", "q", "r", "s"])
happens = ["go", "go", "go", "late", "event", "sync", "decide", "another", "admit", "delete", "busy", "stale"]
fates = st.lists(st.sampled_from([*happens, "die", "restart", "killed"]), max_size=6)
soon = st.sampled_from([True, True, False])
numbers = st.integers(0, 7)


class NodeMachine(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 1 << 16), pods=st.lists(st.tuples(shapes, places), max_size=3), started=st.booleans()
    )
    def begin(self, seed: int, pods: list[tuple[str, int]], started: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="m", dir=_MEMORY if _MEMORY.is_dir() else None))
        self.world = World(self.folder, seed)
        self.created = 0
        self.world.recover()
        for name, (shape, where) in zip("pqr", pods, strict=False):
            self.create(name, shape, where, "bound")
        if started:
            self.all_pods_go_on([], soon=True)

    def create(self, name: str, shape: str, where: int, kind: str) -> None:
        raw, record = self.make(name, shape, where)
        self.world.create(raw, record, late=kind == "late", forged=kind == "forged")

    def make(self, name: str, shape: str, where: int) -> tuple[dict[str, Any], dict[str, int]]:
        self.created += 1
        spec = SHAPES[shape]
        raw = pod(name, *spec["app"], init=tuple(spec.get("init", ())), uid=f"{name}-{self.created}", node="n1")
        raw["spec"]["restartPolicy"] = spec.get("restartPolicy", "Always")
        raw["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:{self.created // 2:02}Z"
        requesting_gpus = [c["name"] for c in (*spec.get("init", ()), *spec["app"]) if c.get("resources")]
        return raw, {c: where >> i & 1 for i, c in enumerate(requesting_gpus)}

    @rule(
        name=names,
        shape=shapes,
        where=places,
        kind=st.sampled_from(["bound", "bound", "bound", "late", "forged"]),
    )
    def a_pod_is_bound(self, name: str, shape: str, where: int, kind: str) -> None:
        """Create a pod; replace the pod of this name if there is one."""
        if name in self.world.cluster.pods:
            self.world.delete(name, force=True)
        self.create(name, shape, where, kind)

    @rule()
    def a_late_record_is_written(self) -> None:
        self.world.decide()

    @precondition(lambda self: self.world.kubelet.waiting)
    @rule(position=numbers, fates=fates)
    def a_pod_is_admitted(self, position: int, fates: list[str]) -> None:
        with self.world.fated(fates):
            self.world.admit(position)

    @precondition(lambda self: self.world.kubelet.working())
    @rule(which=numbers, fates=fates)
    def a_pod_goes_on(self, which: int, fates: list[str]) -> None:
        """Start its containers, or end them if it is deleted."""
        working = self.world.kubelet.working()
        with self.world.fated(fates):
            self.world.work(working[which % len(working)])

    @rule(fates=fates, soon=soon)
    def all_pods_go_on(self, fates: list[str], soon: bool) -> None:
        """With `soon`, recover from faults before."""
        if soon:
            self.world.recover()
        with self.world.fated(fates):
            while self.world.kubelet.waiting:
                self.world.admit(0)
            for uid in self.world.kubelet.working():
                self.world.work(uid)

    @rule(which=numbers, exit_code=st.sampled_from([0, 1]))
    def a_container_ends(self, which: int, exit_code: int) -> None:
        running = [c for c in self.world.runtime.containers() if c.running]
        if running:
            self.world.runtime.end(running[which % len(running)], exit_code)

    @rule(name=names, force=st.booleans())
    def a_pod_is_deleted(self, name: str, force: bool) -> None:
        if name in self.world.cluster.pods:
            self.world.delete(name, force=force)

    @rule(count=st.integers(1, 3))
    def the_agent_sees_pods(self, count: int) -> None:
        self.world.agent.see(count)

    @rule(what=st.sampled_from(["killed", "back", "lists", "registers", "registers one"]), which=numbers)
    def the_agent_is(self, what: str, which: int) -> None:
        if what == "killed":
            self.world.kill_agent()
        elif what == "back":
            self.world.start_agent()
        elif what == "lists":
            self.world.sync_agent()
        elif what == "registers":
            self.world.register()
        else:
            self.world.register([RESOURCES[which % len(RESOURCES)]])

    @rule(
        what=st.sampled_from(["kubelet", "kubelet", "sick", "well", "reboot", "without checkpoint"]),
        index=st.integers(0, 1),
        soon=soon,
    )
    def a_fault(self, what: str, index: int, soon: bool) -> None:
        if what == "kubelet":
            self.world.restart_kubelet()
        elif what in ("sick", "well"):
            self.world.set_health(index, healthy=what == "well")
        else:
            self.world.reboot(keep_checkpoint=what == "reboot")
        if soon:
            self.world.recover()

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.finish()
        finally:
            self.world.close()
            shutil.rmtree(self.folder)

    def finish(self) -> None:
        """End all faults: pods run if they can. Delete all pods: all their data is removed, and all ids are free."""
        world = self.world
        world.settle()
        world.check_settled()
        for name in list(world.cluster.pods):
            world.delete(name, force=False)
        world.settle()
        assert not world.cluster.pods
        world.check_settled()
        raw, _ = self.make("last", "whole", 0)
        raw["spec"]["containers"] = [requesting(name, mgpu=100, share=16) for name in "cd"]
        world.create(raw, {"c": 0, "d": 1})
        world.settle()
        assert world.cluster.pods["last"]["status"]["phase"] == "Running", world.kubelet.failed


TestNode = NodeMachine.TestCase
TestNode.settings = examples(18, steps=30)
