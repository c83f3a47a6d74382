"""Writing, reading and removing CDI spec files."""

import json
from pathlib import Path

import pytest

from deviceplugin.delivery.cdi import CdiFiles, Edits, Hook, Mount, new_name
from playground.container_runtime import Unresolvable, resolve


def test_written_device_resolves_to_its_environment(tmp_path: Path) -> None:
    name = new_name()
    CdiFiles(tmp_path / "cdi").write(name, "uid-1", "c", Edits({"B": "2", "A": "x=y"}))
    assert resolve([name], tmp_path / "cdi").env == {"A": "x=y", "B": "2"}
    (file,) = (tmp_path / "cdi").iterdir()
    spec = json.loads(file.read_text())
    assert (spec["cdiVersion"], spec["kind"]) == ("0.5.0", "mgpu.io/card")
    assert new_name() != name


def test_keep_only_removes_files_of_other_pods_only(tmp_path: Path) -> None:
    files = CdiFiles(tmp_path)
    for uid in ("a", "b", "b", "c"):
        files.write(new_name(), uid, "main", Edits({"A": "1"}))
    (tmp_path / "nvidia.json").write_text("{}")
    (tmp_path / "mgpu_a_main_0.new").write_text("an agent was killed here")
    files.keep_only({"c"})
    names = sorted(file.name for file in tmp_path.iterdir())
    assert len(names) == 2
    assert names[0].startswith("mgpu_c_main_")
    assert names[1] == "nvidia.json"


def test_remove_deletes_one_device_of_a_container(tmp_path: Path) -> None:
    name, other = new_name(), new_name()
    files = CdiFiles(tmp_path)
    for device in (name, other):
        files.write(device, "a", "main", Edits({"A": "1"}))
    files.remove(name, "a", "main")
    assert resolve([other], tmp_path).env == {"A": "1"}
    with pytest.raises(Unresolvable):
        resolve([name], tmp_path)


def test_missing_folder_has_no_files(tmp_path: Path) -> None:
    files = CdiFiles(tmp_path / "none")
    files.keep_only(set())
    files.remove(new_name(), "a", "main")
    assert not files.environments()


def test_mounts_are_part_of_the_device(tmp_path: Path) -> None:
    name = new_name()
    files = CdiFiles(tmp_path)
    mounts = (Mount("/run/x", "/run/x"), Mount("/run/shm", "/dev/shm", read_only=True))
    files.write(name, "a", "main", Edits({"A": "1"}, mounts))
    assert resolve([name], tmp_path).mounts == (("/run/x", "/run/x"), ("/dev/shm", "/run/shm"))
    (file,) = tmp_path.iterdir()
    (mount, read_only) = json.loads(file.read_text())["devices"][0]["containerEdits"]["mounts"]
    assert read_only["options"] == ["rbind", "ro", "nosuid", "nodev"]
    assert mount == {
        "hostPath": "/run/x",
        "containerPath": "/run/x",
        "options": ["rbind", "rw", "nosuid", "nodev"],
    }


def test_hooks_are_part_of_the_device(tmp_path: Path) -> None:
    hook = Hook("createContainer", "/usr/bin/hook", ("hook", "limit"), ("A=1",))
    CdiFiles(tmp_path).write(new_name(), "a", "main", Edits({"A": "1"}, hooks=(hook,)))
    (file,) = tmp_path.iterdir()
    (found,) = json.loads(file.read_text())["devices"][0]["containerEdits"]["hooks"]
    assert found == {
        "hookName": "createContainer",
        "path": "/usr/bin/hook",
        "args": ["hook", "limit"],
        "env": ["A=1"],
    }


def test_later_variables_win_and_everything_else_is_added() -> None:
    first = Edits({"A": "1", "B": "1"}, (Mount("/x", "/x"),), ("/dev/a",), (Hook("poststop", "/h"),))
    second = Edits({"B": "2"}, (Mount("/y", "/y"),), ("/dev/b",), (Hook("prestart", "/i"),))
    assert (first | second) == Edits(
        {"A": "1", "B": "2"},
        (Mount("/x", "/x"), Mount("/y", "/y")),
        ("/dev/a", "/dev/b"),
        (Hook("poststop", "/h"), Hook("prestart", "/i")),
    )
    assert dict((first | second).env) == {"A": "1", "B": "2"}


def test_spec_without_mounts_has_only_the_environment(tmp_path: Path) -> None:
    CdiFiles(tmp_path).write(new_name(), "a", "main", Edits({"A": "1"}))
    (file,) = tmp_path.iterdir()
    assert list(json.loads(file.read_text())["devices"][0]["containerEdits"]) == ["env"]


def test_environments_are_read_from_valid_files_only(tmp_path: Path) -> None:
    files = CdiFiles(tmp_path)
    files.write(new_name(), "a", "main", Edits({"X": "a=b", "Y": ""}))
    for i, text in enumerate(("{", "[]", '{"devices": [{"containerEdits": {"env": ["X"]}}]}', '{"devices": [3]}')):
        (tmp_path / f"mgpu_b_main_{i}.json").write_text(text)
    assert files.environments() == {("a", "main"): {"X": "a=b", "Y": ""}}


@pytest.mark.parametrize("name", ["mgpu_b_main_0_1.json", "mgpu_b_main_0_1_2.json", "mgpu___.json", "mgpu____.json"])
def test_file_with_an_unexpected_name_is_ignored(tmp_path: Path, name: str) -> None:
    """Such a file must not keep an agent from starting."""
    files = CdiFiles(tmp_path)
    files.write("mgpu.io/card=0", "a", "main", Edits({"X": "1"}))
    (tmp_path / name).write_bytes((tmp_path / "mgpu_a_main_0.json").read_bytes())
    assert files.environments() == {("a", "main"): {"X": "1"}}
