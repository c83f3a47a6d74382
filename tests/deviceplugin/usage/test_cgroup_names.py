"""The pod and the container of a process are found in the name of its cgroup, in every form that runtimes write."""

import pytest

from deviceplugin.usage.cgroup_names import CgroupName, find_container, names_container

UID = "2f9c8f1e-7d6a-4a57-9f3a-0c5c1d2e3f40"
SYSTEMD = UID.replace("-", "_")
STATIC = "0123456789abcdef0123456789abcdef"
ID = "c0ffee" + "0" * 58
FOUND = CgroupName(UID, ID)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        pytest.param(f"/kubepods/burstable/pod{UID}/{ID}", FOUND, id="cgroupfs"),
        pytest.param(f"/kubepods/pod{UID}/{ID}", FOUND, id="cgroupfs, Guaranteed"),
        pytest.param(f"/kubepods/besteffort/pod{UID}/crio-{ID}", FOUND, id="cgroupfs, CRI-O"),
        pytest.param(
            f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope",
            FOUND,
            id="systemd, containerd",
        ),
        pytest.param(
            f"/kubepods.slice/kubepods-pod{SYSTEMD}.slice/crio-{ID}.scope/container", FOUND, id="systemd, CRI-O, crun"
        ),
        pytest.param(
            f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope",
            FOUND,
            id="kind",
        ),
        pytest.param(
            f"/kubepods.slice/kubepods-pod{SYSTEMD}.slice/docker-{ID}.scope/init.scope", FOUND, id="systemd in it"
        ),
        pytest.param(
            f"/system.slice/containerd.service/kubepods-burstable-pod{SYSTEMD}.slice:cri-containerd:{ID}",
            FOUND,
            id="kubelet and containerd with different drivers",
        ),
        pytest.param(f"/../../kubepods-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope", FOUND, id="another name space"),
        pytest.param(
            f"/kubepods/burstable/pod{UID}/{ID}/kubepods/pod{'0' * 8}-0000-0000-0000-{'0' * 12}/{'1' * 64}",
            FOUND,
            id="a container that calls its own cgroups like a pod",
        ),
        pytest.param(f"/kubepods/burstable/pod{STATIC}/{ID}", CgroupName(STATIC, ID), id="static pod"),
        pytest.param(f"/kubepods/burstable/pod{UID}", CgroupName(UID, ""), id="the pod itself"),
        pytest.param(f"/kubepods/burstable/pod{UID}/crio-conmon-{ID}", CgroupName(UID, ""), id="not a container"),
        pytest.param("/system.slice/nvidia-persistenced.service", None, id="a service"),
        pytest.param("/user.slice/user-1000.slice/podman-1.scope", None, id="no pod"),
        pytest.param(f"/docker/{ID}", None, id="a container without a pod"),
        pytest.param("/", None, id="the root"),
        pytest.param("/../../..", None, id="the root, from a name space"),
    ],
)
def test_container_is_found_in_the_path(path: str, expected: CgroupName | None) -> None:
    assert find_container(f"0::{path}\n") == expected
    v1 = f"12:memory:{path}\n3:cpu,cpuacct:{path}\n1:name=systemd:{path}\n0::/\n"
    assert find_container(v1) == expected


def test_text_that_is_no_cgroup_names_nothing() -> None:
    for text in ("", "\n", "garbage", "0:", f"pod{UID}/{ID}"):
        assert find_container(text) is None
        assert not names_container(text)


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        pytest.param(f"/kubepods/pod{UID}/{ID}", True, id="a container of a pod"),
        pytest.param(f"/../cri-containerd-{ID}.scope", True, id="another container of the reader's pod"),
        pytest.param("/../../../../init.scope", False, id="systemd of the host"),
        pytest.param("/../../../..", False, id="the root"),
        pytest.param(f"/docker/{ID}/init.scope", False, id="a node that is a container"),
    ],
)
def test_first_process_of_a_host_is_in_no_container(path: str, *, inside: bool) -> None:
    assert names_container(f"0::{path}\n") is inside
