"""The container runtime: environments, CDI, mounts, logs, and the clients of simulated cards."""

import json
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.usage.cgroup_names import CgroupName
from deviceplugin.usage.process_owners import ProcessOwners, Unowned
from playground import nvml_state
from playground.container_runtime import USES_MEMORY, USES_SM, CreateError, GpuClients, RunOptions, Runtime
from playground.gpu_processes import on_device

VISIBLE = "NVIDIA_VISIBLE_DEVICES"


def pod(uid: str = "u", **container: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {"name": "c", "image": "cuda", **container}
    meta = {"namespace": "default", "name": "p", "uid": uid, "annotations": {"a": "b"}}
    return {"metadata": meta, "spec": {"nodeName": "n1", "containers": [own]}}, own


def spec(folder: Path, device: str, *env: str) -> None:
    devices = [{"name": device, "containerEdits": {"env": list(env), "deviceNodes": [{"path": "/dev/nvidia0"}]}}]
    text = json.dumps({"cdiVersion": "0.6.0", "kind": "example.com/gpu", "devices": devices})
    (folder / f"{device}.json").write_text(text)


def test_environment_precedence_is_image_plugins_pod_cdi(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path)
    spec(tmp_path, "x", f"{VISIBLE}=cdi")
    env = [{"name": VISIBLE, "value": "own"}]
    plugins, both = RunOptions(env=((VISIBLE, "plugin"),)), RunOptions(((VISIBLE, "plugin"),), ("example.com/gpu=x",))
    assert runtime.start(*pod(), RunOptions()).env[VISIBLE] == "all"
    assert runtime.start(*pod(), plugins).env[VISIBLE] == "plugin"
    assert runtime.start(*pod(env=env), plugins).env[VISIBLE] == "own"
    assert runtime.start(*pod(env=env), both).env[VISIBLE] == "cdi"


def test_environment_without_cuda_image_has_no_cards(tmp_path: Path) -> None:
    assert VISIBLE not in Runtime(tmp_path).start(*pod(image="busybox"), RunOptions()).env


def test_start_without_cdi_file_fails(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    without = [{"name": "x", "containerEdits": {"env": []}}]
    empty = json.dumps({"cdiVersion": "0.6.0", "kind": "example.com/gpu", "devices": without})
    (tmp_path / "empty.json").write_text(empty)
    with pytest.raises(CreateError, match=r"unresolvable CDI devices example\.com/gpu=x"):
        runtime.start(*pod(), RunOptions(cdi=("example.com/gpu=x",)))
    assert runtime.containers() == ()
    spec(tmp_path, "x", "A=1")
    assert runtime.start(*pod(), RunOptions(cdi=("example.com/gpu=x",))).nodes == ("/dev/nvidia0",)


def test_logs_show_the_environment_of_the_newest_container(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path)
    with pytest.raises(KeyError, match="waiting to start"):
        runtime.logs("default", "p")
    first = runtime.start(*pod(image="i"), RunOptions(env=(("B", "2"), ("A", "1"))))
    assert runtime.logs("default", "p", "c") == "A=1\nB=2\n"
    runtime.end(first, 1)
    runtime.start(*pod("another uid", image="i"), RunOptions(env=(("A", "3"),)))
    assert runtime.logs("default", "p") == "A=3\n"


def test_start_counts_attempts_and_resolves_field_refs(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path)
    env = [{"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['a']"}}}]
    runtime.end(runtime.start(*pod(), RunOptions()), 1)
    again = runtime.start(*pod(env=env), RunOptions())
    assert (again.attempt, again.env["N"]) == (1, "b")
    runtime.reboot()
    assert [c.exit_code for c in runtime.containers("u")] == [1, 255]


def mounting(folder: Path, **paths: Path) -> RunOptions:
    """Devices that each mount one path at /data."""
    for name, host in paths.items():
        edits = {"mounts": [{"hostPath": str(host), "containerPath": "/data", "options": ["rbind"]}]}
        text = {"cdiVersion": "0.6.0", "kind": "example.com/gpu", "devices": [{"name": name, "containerEdits": edits}]}
        (folder / f"{name}.json").write_text(json.dumps(text))
    return RunOptions(
        cdi=tuple(f"example.com/gpu={name}" for name in paths), mounts=(("/data", "/plugin"), ("/a", "/b"))
    )


def test_start_with_two_mounts_at_one_path_keeps_the_later(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    started = runtime.start(*pod(image="i"), mounting(tmp_path, x=first, y=second))
    assert started.mounts == (("/data", str(second)), ("/a", "/b"))
    assert runtime.logs("default", "p") == f"{second} → /data\n/b → /a\n"


def test_start_with_missing_mount_fails(tmp_path: Path) -> None:
    with pytest.raises(CreateError, match="failed to create mount: /no/such: no such file"):
        Runtime(tmp_path).start(*pod(), mounting(tmp_path, x=Path("/no/such")))


def test_running_container_is_a_client_of_its_cards_until_it_ends(tmp_path: Path) -> None:
    nvml = tmp_path / "cards.mig.json"
    runtime = Runtime(tmp_path, GpuClients(nvml))
    made = runtime.start(*pod(), RunOptions(env=((VISIBLE, "GPU-1,GPU-2"),)))
    assert nvml_state.clients(nvml, "GPU-2") == (made.pid,)
    runtime.end(made)
    assert nvml_state.clients(nvml, "GPU-2") == ()


def test_container_uses_what_its_variables_say_and_the_kernel_knows_its_process(tmp_path: Path) -> None:
    nvml = tmp_path / "cards.mig.json"
    runtime = Runtime(tmp_path, GpuClients(nvml))
    env = ((VISIBLE, "GPU-1"), (USES_MEMORY, "3Gi"), (USES_SM, "40"))
    uid = "2f9c8f1e-7d6a-4a57-9f3a-0c5c1d2e3f40"
    made = runtime.start(*pod(uid), RunOptions(env=env))
    (process,) = on_device(nvml, "GPU-1")
    assert (process.pid, process.memory, process.sm) == (made.pid, 3 << 30, 40)
    owners = ProcessOwners(nvml_state.proc_folder(nvml))
    assert owners.problem() is None
    assert owners.find([made.pid], owners.now()).by_pid == {made.pid: CgroupName(uid, made.id)}
    runtime.end(made)
    assert owners.find([made.pid], owners.now()).by_pid == {made.pid: Unowned.GONE}
    unreadable = runtime.start(*pod(), RunOptions(env=((VISIBLE, "GPU-1"), (USES_MEMORY, "much"))))
    assert [(one.pid, one.memory) for one in on_device(nvml, "GPU-1")] == [(unreadable.pid, 0)]


def test_start_with_missing_mig_device_fails(tmp_path: Path) -> None:
    nvml = tmp_path / "cards.mig.json"
    with nvml_state.changing(nvml) as found:
        found.cards["GPU-1"] = nvml_state.Mode(
            True, True, [nvml_state.Gpu(1, 1, "1g.10gb", 0, [nvml_state.Compute(0, 0, "MIG-a")])]
        )
    runtime = Runtime(tmp_path, GpuClients(nvml))
    runtime.start(*pod(), RunOptions(env=((VISIBLE, "MIG-a"),)))
    with pytest.raises(CreateError, match="MIG-b: unknown device"):
        runtime.start(*pod(), RunOptions(env=((VISIBLE, "MIG-a,MIG-b"),)))
    runtime.reboot()
    assert nvml_state.clients(nvml, "MIG-a") == ()
    assert nvml_state.read_state(nvml).cards["GPU-1"].instances == []
