"""The kernel says in which container a process runs, unless the agent cannot see the processes of the host."""

import os
from pathlib import Path

import pytest

from deviceplugin.usage.cgroup_names import CgroupName
from deviceplugin.usage.process_owners import ProcessOwners, Unowned, ticks_since_boot
from mgpu.model.usage_problems import UsageProblem
from tests.deviceplugin.usage.proc import Proc, container_id, path_of, uid

NOW = 500


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


@pytest.fixture
def owners(proc: Proc) -> ProcessOwners:
    return ProcessOwners(proc.folder, lambda: NOW)


def test_owners_are_containers_and_processes_outside_of_pods(proc: Proc, owners: ProcessOwners) -> None:
    proc.run(41, pod=1, container=10)
    proc.run(42, pod=1, container=11)
    proc.write("43", "/system.slice/nvidia-persistenced.service")
    found = owners.find([41, 42, 43, 44], owners.now())
    assert found.problem is None
    assert found.by_pid == {
        41: CgroupName(uid(1), container_id(10)),
        42: CgroupName(uid(1), container_id(11)),
        43: Unowned.FOREIGN,
        44: Unowned.GONE,
    }


def test_process_that_started_after_the_listing_has_the_id_of_another_one(proc: Proc, owners: ProcessOwners) -> None:
    proc.run(41, pod=1, container=10, started=NOW)
    proc.run(42, pod=1, container=10, started=NOW + 1)
    found = owners.find([41, 42], NOW).by_pid
    assert found == {41: CgroupName(uid(1), container_id(10)), 42: Unowned.GONE}


@pytest.mark.parametrize(
    ("first", "own"),
    [
        pytest.param("/", "/", id="own name spaces of processes and cgroups"),
        pytest.param(path_of(1, 1), path_of(1, 1), id="own name space of processes"),
        pytest.param(f"/../cri-containerd-{container_id(2)}.scope", "/", id="the pod's name space of processes"),
    ],
)
def test_without_the_hosts_processes_nothing_is_found(proc: Proc, owners: ProcessOwners, first: str, own: str) -> None:
    proc.run(41, pod=1, container=10)
    proc.write("1", first)
    proc.write("self", own)
    found = owners.find([41], NOW)
    assert (found.by_pid, found.problem) == ({}, UsageProblem.NO_HOST_PIDS)


def test_hosts_processes_are_seen_from_a_cgroup_name_space_too(proc: Proc, owners: ProcessOwners) -> None:
    proc.write("1", "/../../../../init.scope")
    proc.write("self", "/")
    assert owners.find([], NOW).problem is None


def test_folder_without_processes_is_not_that_of_a_host(tmp_path: Path) -> None:
    assert ProcessOwners(tmp_path).problem() is UsageProblem.NO_HOST_PIDS


def test_denied_access_is_a_problem_and_not_a_process_that_has_ended(
    proc: Proc, owners: ProcessOwners, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc.run(41, pod=1, container=10)
    read = Path.read_text
    denied = proc.folder / "41/cgroup"

    def refuse(path: Path) -> str:
        if path == denied:
            raise PermissionError
        return read(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert owners.find([41], NOW).problem is UsageProblem.PROC_NOT_READABLE
    denied = proc.folder / "1/cgroup"
    assert owners.find([], NOW).problem is UsageProblem.PROC_NOT_READABLE


def test_this_process_has_started_before_now_in_the_units_of_proc() -> None:
    found = ProcessOwners()
    before = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    assert before <= found.now() == pytest.approx(ticks_since_boot(), abs=200)
    assert found._owner(os.getpid(), found.now()) is not Unowned.GONE
