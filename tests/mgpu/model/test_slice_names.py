"""The names and places of slices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu.model.slice_names import (
    Slice,
    count_slices,
    device_type,
    gigabytes,
    is_mps,
    is_slice,
    mode_of,
    place_of,
    read_name,
    resource_of,
    slice_of_resource,
)

NAMES = [
    ("nvidia.com/mig-2g.20gb", "2g.20gb", "mig-2g.20gb", "mig"),
    ("nvidia.com/mig-1g.10gb.me", "1g.10gb+me", "mig-1g.10gb.me", "mig"),
    ("nvidia.com/gpu-4gb", "4gb", "gpu-4gb", "mps"),
    ("nvidia.com/gpu-141gb", "141gb", "gpu-141gb", "mps"),
]


@pytest.mark.parametrize(("resource", "name", "type", "mode"), NAMES)
def test_a_slice_has_one_name_in_each_place(resource: str, name: str, type: str, mode: str) -> None:
    assert slice_of_resource(resource) == read_name(name) == name
    assert (device_type(name), resource_of(name), mode_of(name)) == (type, resource, mode)
    assert (is_slice(type), is_mps(type)) == (True, mode == "mps")


@pytest.mark.parametrize(
    "resource",
    [
        *("nvidia.com/gpu", "nvidia.com/gpu-0gb", "nvidia.com/gpu-04gb", "nvidia.com/gpu-4Gb", "nvidia.com/gpu-4g"),
        *("nvidia.com/mig-0g.5gb", "nvidia.com/mig-2g", "nvidia.com/mig-2g.20gb+me", "nvidia.com/mig-111g.1gb"),
        *("nvidia.com/mig-2g.20gb.more", "example.com/gpu-4gb", "nvidia.com/gpu-\u0664gb", ""),
    ],
)
def test_others_are_none(resource: str) -> None:
    assert slice_of_resource(resource) is None


@pytest.mark.parametrize("type", ["gpu", "rdma", "mig", "gpu-x", "mig-x"])
def test_devices_of_other_types_are_no_slices(type: str) -> None:
    assert (is_slice(type), is_mps(type)) == (False, False)


def test_names_in_annotations_are_read_in_either_spelling() -> None:
    assert (read_name("1g.10gb.me"), read_name("7g.79gb")) == ("1g.10gb+me", "7g.80gb")
    assert [read_name(name) for name in ("0gb", "4g", "2g.20gb+mee", "4gb+me", "0g.5gb")] == [None] * 5


@given(st.from_regex(r"\Anvidia\.com/(gpu-\d{1,6}gb|mig-\d{1,3}g\.\d{1,5}gb(\.me)?)\Z"))
def test_property_what_can_be_asked_for_can_be_written_in_annotations(resource: str) -> None:
    name = slice_of_resource(resource)
    if name is not None:
        assert read_name(name) is not None
        assert resource_of(name) == resource


def test_the_gibibytes_of_a_share() -> None:
    assert gigabytes("40gb") == 40


def test_a_place_is_an_index_of_a_device() -> None:
    one = Slice(3, 47, "4gb", "MIG-x", "uid")
    assert (one.index, place_of(one.index)) == (347, (3, 47))
    assert one.place == Slice(3, 47, "4gb")
    assert one.instance == (47, "4gb")


def test_counts() -> None:
    slices = [Slice(1, 0, "4gb"), Slice(0, 4, "2gb"), Slice(1, 1, "4gb", pod="u"), Slice(1, 2, "2gb")]
    assert count_slices(slices) == {0: {"2gb": 1}, 1: {"4gb": 2, "2gb": 1}}
