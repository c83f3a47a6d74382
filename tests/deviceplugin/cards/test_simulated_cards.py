"""Simulated cards from a file."""

from pathlib import Path

import pytest

from deviceplugin.cards import simulated_cards
from deviceplugin.cards.simulated_cards import SimulatedCards, simulated_mig
from deviceplugin.mig.mig_driver import MigRefused
from mgpu.model.errors import BadObject, RetryLater


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cards.yaml"


def test_yaml_and_json_are_read_and_read_again_when_they_change(file: Path) -> None:
    source = SimulatedCards(file, "n1")
    file.write_text("- {memory: 80Gi, count: 2}\n")
    assert [card.uuid for card in source.read()] == ["GPU-n1-0", "GPU-n1-1"]
    file.write_text('[{"memory": "80Gi", "uuid": "GPU-x", "healthy": false}]')
    assert [(card.uuid, card.healthy) for card in source.read()] == [("GPU-x", False)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cards.yaml: must be a list of cards"),
        ("[{", "cards.yaml: is not YAML"),
        ("[{memory: 1Gi, uuid: a}, {memory: 1Gi, uuid: a}]", "two cards have the UUID a"),
        ("[{memory: 1Gi, index: 0}, {memory: 1Gi, index: 0}]", "two cards have the index 0"),
        ("[{memory: -1}]", r"cards.yaml\[0\].memory: must be greater than 0"),
        ("[{memory: 1Gi, color: red}]", r"cards.yaml\[0\].color: unknown"),
    ],
)
def test_invalid_card_list_is_refused_with_its_path(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(BadObject, match=message):
        SimulatedCards(file, "n1").read()


def test_missing_or_binary_file_is_refused(file: Path) -> None:
    with pytest.raises(BadObject, match="cannot be read: No such file"):
        SimulatedCards(file, "n1").read()
    file.write_bytes(b"\x80\x81")
    with pytest.raises(BadObject, match="is not YAML"):
        SimulatedCards(file, "n1").read()


def test_cards_without_an_installed_simulator_have_no_mig(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The production image names the entry point in its metadata and does not contain the playground."""
    file.write_text("[{memory: 80Gi, model: A100-SXM4-80GB}]")
    assert [card.capable for card in simulated_mig(file, "n1").read()] == [True]
    monkeypatch.setattr(simulated_cards, "find_spec", lambda _: None)
    driver = simulated_mig(file, "n1")
    assert [(card.uuid, card.capable, card.busy) for card in driver.read()] == [("GPU-n1-0", False, False)]
    with pytest.raises(MigRefused, match="needs the Python package `playground`"):
        driver.set_mode("GPU-n1-0", on=True)
    file.write_text("[{")
    with pytest.raises(RetryLater, match="is not YAML"):
        driver.read()
