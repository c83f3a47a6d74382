"""Who holds what, from the API's objects."""

from mgpu.cli.overview import nodes_json, overview
from mgpu.model.inventory import write_device
from mgpu.model.pods import read_node
from mgpu.settings import load_settings
from tests.builders import cards, container, node, pod, share

ON_CARD_1 = {"vke.volcengine.com/assumed": "true", "vke.volcengine.com/gpu-index-container-c": "1"}
DEVICE = write_device(read_node(node()), "", cards(2))


def test_a_recorded_pod_stands_on_its_card() -> None:
    found = overview([node()], [DEVICE], [share(node="n1", annotations=ON_CARD_1)], load_settings())
    first, second = nodes_json(found.nodes)["n1"]["cards"]
    assert (first["holders"], second["holders"]) == ([], ["default/p/c"])
    assert second["core"] == {"used": 50, "total": 100}
    assert not found.unclear


def test_pods_that_wait_that_ended_and_that_ask_for_nothing() -> None:
    plain = pod("plain", container())
    ended = share("ended", node="n1", annotations=ON_CARD_1, phase="Succeeded")
    found = overview([node()], [DEVICE], [share("waits"), ended, plain], load_settings())
    assert found.pending == ("default/waits",)
    assert all(not card.uses for card in found.nodes[0].cards)


def test_what_cannot_be_read_is_named_and_raises_nothing() -> None:
    odd = share("odd", node="n1", annotations={"vke.volcengine.com/gpu-index-container-c": "?"})
    broken = {"metadata": {"name": "n2"}, "spec": {"devices": 3}}
    found = overview([node(), node("n2")], [DEVICE, broken], [odd, share("new", node="n1")], load_settings())
    assert set(found.unclear) == {"Device n2", "Pod default/odd", "Pod default/new"}
    assert [card.holders for card in found.nodes[0].cards] == [["default/odd/c"], ["default/odd/c"]]


def test_a_pod_whose_ask_cannot_be_read_may_be_on_any_card() -> None:
    odd = pod("odd", container(core=120), node="n1", annotations=ON_CARD_1)
    found = overview([node()], [DEVICE], [odd], load_settings())
    assert [card.state.core_used for card in found.nodes[0].cards] == [1000, 1000]
