"""Cards from NVML, in all states of the driver and the cards."""

import threading
from pathlib import Path

import pynvml
import pytest

from deviceplugin.cards.nvml_cards import QUIET_SECONDS, RESTART_SECONDS, Host, NvmlCards
from mgpu.model.cards import Card
from mgpu.model.errors import RetryLater
from tests.clock import Clock
from tests.deviceplugin.cards.fake_nvml import GIB, FakeCard, FakeNvml


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml([FakeCard("GPU-a", minor=1), FakeCard("GPU-b", minor=0, bus="00000000:AF:00.0")])


@pytest.fixture
def host(tmp_path: Path) -> Host:
    for bus, numa in (("0000:3b:00.0", "1"), ("0000:af:00.0", "-1")):
        (tmp_path / "pci" / bus).mkdir(parents=True)
        (tmp_path / "pci" / bus / "numa_node").write_text(f"{numa}\n")
    (tmp_path / "gpus").mkdir()
    return Host(tmp_path / "gpus", tmp_path / "pci")


@pytest.fixture
def source(nvml: FakeNvml, host: Host, clock: Clock) -> NvmlCards:
    return NvmlCards(nvml, host, clock)


def health(source: NvmlCards) -> dict[str, bool]:
    return {card.uuid: card.healthy for card in source.read()}


def events(source: NvmlCards) -> None:
    source.wait(threading.Event())


def test_card_is_read_with_all_fields(source: NvmlCards) -> None:
    first, second = source.read()
    assert first == Card(0, "GPU-a", "NVIDIA A100-SXM4-80GB", 80 * GIB, numa=1, minor=1)
    assert (second.index, second.minor, second.numa) == (1, 0, None)


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_missing_driver_raises_retry_later(source: NvmlCards, nvml: FakeNvml, code: int) -> None:
    nvml.driver = code
    with pytest.raises(RetryLater, match="NVML"):
        source.read()
    nvml.driver = 0
    assert health(source) == {"GPU-a": True, "GPU-b": True}


def test_missing_nvml_library_raises_retry_later() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        with pytest.raises(RetryLater):
            NvmlCards().read()
    else:
        pytest.skip("this machine has NVML")


def test_cards_are_unhealthy_while_the_driver_is_gone(source: NvmlCards, nvml: FakeNvml) -> None:
    source.read()
    nvml.driver = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    assert health(source) == {"GPU-a": False, "GPU-b": False}
    nvml.driver = 0
    assert health(source) == {"GPU-a": True, "GPU-b": True}


def test_lost_card_is_unhealthy_until_it_answers_again(source: NvmlCards, nvml: FakeNvml) -> None:
    source.read()
    nvml.cards[0].lost = True
    assert health(source) == {"GPU-a": False, "GPU-b": True}
    nvml.cards[0].lost = False
    assert health(source) == {"GPU-a": True, "GPU-b": True}


def test_indexes_stay_when_a_card_is_pulled_out(source: NvmlCards, nvml: FakeNvml, clock: Clock) -> None:
    source.read()
    gone = nvml.cards.pop(0)
    assert [(c.index, c.uuid, c.healthy) for c in source.read()] == [(0, "GPU-a", False), (1, "GPU-b", True)]
    clock.now += RESTART_SECONDS
    nvml.cards.append(FakeCard("GPU-new"))
    found = [(c.index, c.uuid, c.healthy) for c in source.read()]
    assert found == [(0, "GPU-a", False), (1, "GPU-b", True), (2, "GPU-new", True)]
    nvml.cards.append(gone)
    clock.now += RESTART_SECONDS
    assert [(c.index, c.healthy) for c in source.read()] == [(0, True), (1, True), (2, True)]


def test_missing_card_restarts_nvml_only_now_and_then(source: NvmlCards, nvml: FakeNvml, clock: Clock) -> None:
    source.read()
    nvml.cards[0].lost = True
    for _ in range(5):
        source.read()
    assert nvml.starts == 1
    clock.now += RESTART_SECONDS
    source.read()
    assert nvml.starts == 2


def test_card_that_is_plugged_in_is_found(source: NvmlCards, nvml: FakeNvml, host: Host) -> None:
    source.read()
    nvml.cards.append(FakeCard("GPU-c"))
    assert len(source.read()) == 2
    (host.gpus / "0000:d8:00.0").mkdir()
    assert [card.index for card in source.read()] == [0, 1, 2]


def test_card_is_unhealthy_for_a_while_after_an_error_event(source: NvmlCards, nvml: FakeNvml, clock: Clock) -> None:
    source.read()
    nvml.events.put(("GPU-b", 79))
    events(source)
    assert health(source) == {"GPU-a": True, "GPU-b": False}
    clock.now += QUIET_SECONDS - 1
    assert not health(source)["GPU-b"]
    nvml.events.put(("GPU-b", 48))
    events(source)
    clock.now += QUIET_SECONDS - 1
    assert not health(source)["GPU-b"]
    clock.now += 1
    assert health(source)["GPU-b"]


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68, 109])
def test_error_of_an_application_leaves_the_card_healthy(source: NvmlCards, nvml: FakeNvml, xid: int) -> None:
    source.read()
    nvml.events.put(("GPU-a", xid))
    events(source)
    assert health(source) == {"GPU-a": True, "GPU-b": True}


def test_event_of_an_unknown_card_makes_all_cards_unhealthy(source: NvmlCards, nvml: FakeNvml) -> None:
    source.read()
    nvml.cards[0].lost = True
    nvml.events.put(("GPU-a", 79))
    events(source)
    assert health(source) == {"GPU-a": False, "GPU-b": False}


def test_wait_ends_after_stop(source: NvmlCards) -> None:
    stop = threading.Event()
    stop.set()
    source.wait(stop)
    source.read()
    source.wait(stop)
    source.close()


def test_card_in_mig_mode_is_left_out(source: NvmlCards, nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    nvml.cards[0].mig = pynvml.NVML_DEVICE_MIG_ENABLE
    nvml.cards[1].mig = pynvml.NVML_DEVICE_MIG_DISABLE
    for _ in range(2):
        assert [(card.index, card.uuid) for card in source.read()] == [(1, "GPU-b")]
    assert caplog.messages == ["ignoring card GPU-a, which is in MIG mode"]
    nvml.cards[0].mig = pynvml.NVML_DEVICE_MIG_DISABLE
    assert [card.index for card in source.read()] == [0, 1]


def test_card_that_is_put_into_mig_mode_becomes_unhealthy(source: NvmlCards, nvml: FakeNvml, clock: Clock) -> None:
    source.read()
    nvml.cards[0].mig = pynvml.NVML_DEVICE_MIG_ENABLE
    clock.now += RESTART_SECONDS
    assert health(source) == {"GPU-a": False, "GPU-b": True}
    source.read()
    assert nvml.starts == 1, "the card is not missing"


def test_card_in_mig_mode_is_kept_on_a_mig_node(nvml: FakeNvml, host: Host, clock: Clock) -> None:
    mode = "mig"
    source = NvmlCards(nvml, host, clock, partition_mode=lambda: mode)
    nvml.cards[0].mig = pynvml.NVML_DEVICE_MIG_ENABLE
    assert health(source) == {"GPU-a": True, "GPU-b": True}
    mode = ""
    assert health(source) == {"GPU-a": False, "GPU-b": True}, "its index stays reserved"
    mode = "mig"
    assert health(source) == {"GPU-a": True, "GPU-b": True}


def test_card_in_mig_mode_is_unhealthy_on_an_mps_node(nvml: FakeNvml, host: Host, clock: Clock) -> None:
    source = NvmlCards(nvml, host, clock, partition_mode=lambda: "mps")
    nvml.cards[0].mig = pynvml.NVML_DEVICE_MIG_ENABLE
    assert health(source) == {"GPU-a": False, "GPU-b": True}, "the mode manager must see the card, to switch MIG off"
    nvml.cards[0].mig = pynvml.NVML_DEVICE_MIG_DISABLE
    assert health(source) == {"GPU-a": True, "GPU-b": True}


def test_driver_older_than_mig_has_cards(source: NvmlCards, nvml: FakeNvml) -> None:
    nvml.no_mig = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    assert health(source) == {"GPU-a": True, "GPU-b": True}


def test_indexes_of_an_earlier_agent_stay(nvml: FakeNvml, host: Host, clock: Clock) -> None:
    """A card was replaced while no agent ran."""
    before = {"GPU-gone": 0, "GPU-b": 1, "GPU-a": 2}
    nvml.cards.append(FakeCard("GPU-new"))
    found = NvmlCards(nvml, host, clock, lambda: before).read()
    assert [(card.index, card.uuid) for card in found] == [(1, "GPU-b"), (2, "GPU-a"), (3, "GPU-new")]


def test_driver_version_is_read(source: NvmlCards) -> None:
    source.read()
    assert source.driver == "570.86.15"
