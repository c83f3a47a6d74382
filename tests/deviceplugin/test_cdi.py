"""CDI spec files."""

import json
from pathlib import Path

from deviceplugin.cdi import CdiFiles, new_name
from playground.cdi import resolve


def test_the_runtime_finds_the_environment_under_the_name(tmp_path: Path) -> None:
    name = new_name()
    CdiFiles(tmp_path / "cdi").write(name, "uid-1", {"B": "2", "A": "x=y"})
    assert resolve([name], tmp_path / "cdi").env == {"A": "x=y", "B": "2"}
    (file,) = (tmp_path / "cdi").iterdir()
    spec = json.loads(file.read_text())
    assert (spec["cdiVersion"], spec["kind"]) == ("0.5.0", "mgpu.io/card")
    assert new_name() != name


def test_files_go_with_their_pods_and_only_theirs(tmp_path: Path) -> None:
    files = CdiFiles(tmp_path)
    for uid in ("a", "b", "b", "c"):
        files.write(new_name(), uid, {"A": "1"})
    (tmp_path / "nvidia.json").write_text("{}")
    files.remove("a")
    files.keep_only({"c"})
    names = sorted(file.name for file in tmp_path.iterdir())
    assert len(names) == 2
    assert names[0].startswith("mgpu_c_")
    assert names[1] == "nvidia.json"


def test_a_folder_that_is_not_there_has_nothing_to_remove(tmp_path: Path) -> None:
    CdiFiles(tmp_path / "none").keep_only(set())
    CdiFiles(tmp_path / "none").remove("a")
