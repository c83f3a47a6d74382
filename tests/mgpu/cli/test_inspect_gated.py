"""`mgpu inspect` tells pods with scheduling gates from pods that wait for cards."""

from io import StringIO

from mgpu.cli.inspect import overview_json, render_overview
from mgpu.presentation.overview import make_overview
from mgpu.presentation.terminal import Terminal
from mgpu.settings import load_settings
from tests.builders import node, share


def test_inspect_lists_gated_pods_with_their_gates_apart_from_pods_that_wait_for_cards() -> None:
    gated = share("gated")
    gated["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}, {"name": "team/quota"}]
    cluster = make_overview([node()], [], [gated, share("waits")], load_settings())
    shown = StringIO()
    Terminal(file=shown, width=200).print(render_overview(cluster))
    assert "Waiting for cards: default/waits\n" in shown.getvalue()
    text = (
        "default/gated (kueue.x-k8s.io/admission (Kueue has not admitted it; its Workload has the reason), team/quota)"
    )
    assert f"Waiting for scheduling gates: {text}\n" in shown.getvalue()
    answer = overview_json(cluster)
    assert answer["pending"] == ["default/gated", "default/waits"]
    assert answer["gated"] == {"default/gated": ["kueue.x-k8s.io/admission", "team/quota"]}
