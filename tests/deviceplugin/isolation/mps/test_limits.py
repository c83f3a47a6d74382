"""Which limits a container gets as a client of its card's MPS daemon."""

from fractions import Fraction
from pathlib import Path

import pytest

from deviceplugin.delivery.cdi import Edits, Mount
from deviceplugin.isolation.limits import Unenforceable, limits_of
from deviceplugin.isolation.mps.limits import (
    Client,
    client_edits,
    find_daemon,
    find_partition,
    share_client,
    slice_client,
    slice_client_of,
)
from mgpu.model.cards import Card
from mgpu.model.ledger import Share
from tests.builders import GIB, card, cards

FOLDER = Path("/run/mgpu/mps")
MIB = 1 << 20
TWO = cards(2)


def shared(on: object = 0, core: int = 500, mib: int = 1024, **more: object) -> Share:
    return Share("c", on, core, mib * MIB, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "memory", "limits"),
    [
        ("4gb", 80 * GIB, ("4G", 5)),
        ("8gb", 80 * GIB, ("8G", 10)),
        ("1gb", 80 * GIB, ("1G", 1)),  # 1.25 %
        ("1gb", 192 * GIB, ("1G", 1)),  # less than 1 %
        ("10gb", 79 * GIB + 700 * MIB, ("10G", 12)),  # the card counts in whole GiB: 79
        ("80gb", 80 * GIB, ("80G", 100)),
        ("90gb", 80 * GIB, ("90G", 100)),  # a card that came back smaller
    ],
)
def test_slice_has_its_gib_and_the_same_fraction_of_the_threads(
    name: str, memory: int, limits: tuple[str, int]
) -> None:
    client = slice_client(name, Card(0, "GPU-0", "A", memory))
    assert (client.card, client.memory, client.percent) == ("GPU-0", *limits)
    assert client.percent == max(1, int(100 * client.part))


@pytest.mark.parametrize(
    ("share", "limits"),
    [
        (shared(core=500, mib=1024), ("1024M", 50)),
        (shared(core=15, mib=300), ("300M", 1)),  # 1.5 %
        (shared(core=5, mib=300), ("300M", 1)),
        (shared(core=0, mib=4096), ("4096M", None)),  # gpushare
        (shared(core=1000, mib=1), ("1M", 100)),
        (Share("c", 0, 500, 1024 * MIB - 1), ("1023M", 50)),
        (Share("c", 0, 500, 5), ("1M", 50)),
        (Share("c", 0, 500, 0), (None, 50)),
        (Share("c", 0, 250, ratio=25), (f"{20 * 1024}M", 25)),  # koordinator, of 80 GiB
    ],
)
def test_share_is_limited_to_what_it_requests(share: Share, limits: tuple[str | None, int | None]) -> None:
    (limit,) = limits_of([share], [card()])
    client = share_client(limit)
    assert (client.card, client.memory, client.percent) == ("GPU-n1-0", *limits)


@pytest.mark.parametrize(
    ("share", "part"),
    [
        (shared(core=500, mib=1024), Fraction(1, 2)),
        (shared(core=0, mib=20 * 1024), Fraction(1, 4)),  # gpushare, of 80 GiB
        (shared(core=1000, mib=1), Fraction(1)),
    ],
)
def test_partition_is_as_large_as_the_compute_or_else_the_memory(share: Share, part: Fraction) -> None:
    (limit,) = limits_of([share], [card()])
    assert share_client(limit).part == part


def test_slice_is_a_client_of_its_card() -> None:
    piece = Share("c", 103, 1000, whole=True, type="gpu-4gb")
    assert slice_client_of([piece], TWO) == Client("GPU-n1-1", "4G", 5, Fraction(4, 80))
    assert slice_client_of([shared()], TWO) is None
    assert slice_client_of([Share("c", 3, 1000, whole=True, type="mig-2g.20gb")], TWO) is None


def test_slice_of_a_missing_card_is_no_client() -> None:
    assert slice_client_of([Share("c", 903, 1000, whole=True, type="gpu-4gb")], TWO) is None


@pytest.mark.parametrize(("cards_", "text"), [((0, 1), "2 shares of a card"), ((0, 100), "shares of 2 cards")])
def test_container_with_several_slices_is_unenforceable(cards_: tuple[int, int], text: str) -> None:
    with pytest.raises(Unenforceable, match=text):
        slice_client_of([Share("c", i, whole=True, type="gpu-4gb") for i in cards_], TWO)


def test_environment_and_mounts_of_a_client() -> None:
    pipe = "/run/mgpu/mps/GPU-n1-0/pipe"
    mounts = (Mount(pipe, pipe), Mount("/run/mgpu/mps/shm", "/dev/shm"))
    assert client_edits(Client("GPU-n1-0", "4G", 5), FOLDER) == Edits(
        {
            "CUDA_MPS_PIPE_DIRECTORY": pipe,
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4G",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "5",
        },
        mounts,
    )
    partitioned = client_edits(Client("GPU-n1-0", "4G", 5, partition="D/7/A"), FOLDER)
    assert partitioned.env["CUDA_MPS_SM_PARTITION"] == "GPU-n1-0/D/7/A"
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in partitioned.env
    assert find_partition(partitioned.env) == "D/7/A"
    assert client_edits(Client("GPU-n1-0"), FOLDER) == Edits({"CUDA_MPS_PIPE_DIRECTORY": pipe}, mounts)


def test_environment_names_the_card_of_the_daemon() -> None:
    env = dict(client_edits(Client("GPU-n1-0", "4G", 5), FOLDER).env)
    assert find_daemon(env, FOLDER) == "GPU-n1-0"
    assert find_daemon(env, Path("/elsewhere")) is None
    assert find_daemon({"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"}, FOLDER) is None
    assert find_daemon({}, FOLDER) is None
