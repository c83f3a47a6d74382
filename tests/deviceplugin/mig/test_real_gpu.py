"""Queries about MIG and MPS on a machine with an NVIDIA GPU. Nothing on the cards is changed."""

from collections.abc import Iterator

import pynvml
import pytest

from deviceplugin.mig import mig_nvml
from deviceplugin.mig.mig_driver import MigRefused, NvmlMig
from mgpu.model.errors import RetryLater
from mgpu.model.mig import layout_of


@pytest.fixture
def nvml() -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(f"no NVIDIA GPU: NVML says {error}")
    yield
    pynvml.nvmlShutdown()


@pytest.mark.usefixtures("nvml")
def test_built_in_layout_equals_the_cards_own() -> None:
    checked = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        card = pynvml.nvmlDeviceGetHandleByIndex(index)
        model = pynvml.nvmlDeviceGetName(card)
        built_in = layout_of(model, int(pynvml.nvmlDeviceGetMemoryInfo(card).total))
        if built_in is None:
            continue
        try:
            found = mig_nvml.list_profiles(pynvml, card)
        except pynvml.NVMLError as error:
            pytest.skip(f"{model} does not say into what it can be cut: {error}")
        checked.append(model)
        print(f"{model} ({built_in.name}):", *(known.profile for known in found.values()), sep="\n  ")
        said = {name: known.profile for name, known in found.items()}
        assert {p.name: said.get(p.name) for p in built_in.profiles} == {p.name: p for p in built_in.profiles}
    if not checked:
        pytest.skip("no card here can be cut by MIG")


@pytest.mark.usefixtures("nvml")
def test_driver_reads_every_card() -> None:
    try:
        cards = NvmlMig().read()
    except (MigRefused, RetryLater) as error:
        pytest.skip(str(error))
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    assert [card.uuid for card in cards] == [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    for card in cards:
        assert not card.instances or card.current


@pytest.mark.usefixtures("nvml")
def test_cards_answer_about_mps() -> None:
    for index in range(pynvml.nvmlDeviceGetCount()):
        card = pynvml.nvmlDeviceGetHandleByIndex(index)
        try:
            clients = pynvml.nvmlDeviceGetMPSComputeRunningProcesses(card)
        except pynvml.NVMLError as error:
            pytest.skip(f"{pynvml.nvmlDeviceGetName(card)} does not say which processes use MPS: {error}")
        assert isinstance(clients, list)
        assert pynvml.nvmlDeviceGetComputeMode(card) in range(pynvml.NVML_COMPUTEMODE_COUNT)
