"""requirements/licences.py and requirements/sbom.py: what they say of the libraries in the image."""

import json
from pathlib import Path

import pytest

from image.contents import UNUSED_LIBRARIES
from requirements import check, licences, sbom

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements/runtime.txt").read_text()


def test_all_libraries_in_the_image_have_an_allowed_licence() -> None:
    assert licences.problems(licences.read_libraries(LOCK, "3.13")) == []
    assert licences.main() == 0


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True),
        ("GPL-3.0-only", False),
        ("GPL-3.0-or-later", False),
        ("GPL-3.0-or-later WITH GCC-exception-3.1", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only AND MIT", False),
        ("MPL-2.0 AND (GPL-3.0-only OR MIT)", True),
        ("BSD", False),
        ("", False),
    ],
)
def test_licence_is_allowed_if_it_is_on_the_list(licence: str, allowed: bool) -> None:
    assert licences.is_allowed(licence) == allowed


def test_library_with_another_or_no_licence_is_named() -> None:
    one = licences.Library("one", "1", "AGPL-3.0-only", (), ())
    other = licences.Library("other", "2", "", (), ())
    first, second = licences.problems([one, other])
    assert "one 1: the licence AGPL-3.0-only is not" in first
    assert "other 2: the licence is unknown" in second


def test_licences_that_the_wheel_bundles_are_added() -> None:
    (numpy,) = (one for one in licences.read_libraries(LOCK, "3.13") if one.name == "numpy")
    assert numpy.licence.startswith("BSD-3-Clause AND ")
    assert "LGPL-2.1-or-later" in numpy.licence


def test_bill_of_materials_has_the_locked_libraries_but_those_that_the_image_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert sbom.main([str(tmp_path), "--python", "3.13"]) == 0
    text = (tmp_path / "mgpu.cdx.json").read_text()
    found = json.loads(text)
    pinned = {
        requirement.name: (version, set(hashes))
        for requirement, version, hashes in check.pins(LOCK)
        if requirement.marker is None or requirement.marker.evaluate({"python_full_version": "3.13.0"})
    }
    listed = {
        one["name"]: (one["version"], {row["content"] for row in one["externalReferences"][0]["hashes"]})
        for one in found["components"]
    }
    assert listed == {name: pin for name, pin in pinned.items() if name not in UNUSED_LIBRARIES}
    assert found["metadata"]["component"]["name"] == "mgpu"
    assert found["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    needed = {one["ref"]: one.get("dependsOn", []) for one in found["dependencies"]}
    assert any(ref.startswith("pkg:pypi/flask@") for ref in needed["mgpu"])
    (flask,) = (refs for ref, refs in needed.items() if ref.startswith("pkg:pypi/flask@"))
    assert any(ref.startswith("pkg:pypi/werkzeug@") for ref in flask)
    rows = (tmp_path / "licences.md").read_text().splitlines()
    assert len(rows) == 2 + len(listed)
    assert sbom.main([str(tmp_path), "--python", "3.13"]) == 0
    assert (tmp_path / "mgpu.cdx.json").read_text() == text
