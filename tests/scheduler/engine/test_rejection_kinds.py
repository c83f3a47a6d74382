import pytest

from scheduler.engine.rejection_kinds import ALL, kind_of


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("insufficient GPU (8 cards: 5 core 20 percent short, 3 unhealthy)", "core"),
        ("insufficient GPU (8 cards: 8 memory 4.0 GiB short)", "memory"),
        ("2 cards: 2 memory ratio 5 percent short", "memory"),
        ("1 card: 1 core 10 percent short and memory 512 MiB short", "core-and-memory"),
        ("insufficient GPU (8 cards: 6 core and memory short, 2 core short)", "core-and-memory"),
        ("insufficient GPU (8 cards: 8 core short)", "core"),
        ("8 cards: 8 unhealthy", "unhealthy"),
        ("8 cards: 8 in use, a whole card is asked for", "in-use"),
        ("8 cards: 8 in use by MtgpuPods", "mtgpupods"),
        ("8 cards: 8 holds 16 of 16 shares", "shares"),
        ("8 cards: 8 no share left", "shares"),
        ("the node has no cards", "no-device"),
        ("node n1 has no GPU cards (no Device)", "no-device"),
        ("container 'c' asks for 4 cards, the node has 2", "no-device"),
        ("container 'c' needs 4 cards, none can serve it (8 cards: 8 in use, a whole card is asked for)", "in-use"),
        ("8 cards: 8 model T4 excluded by exclude-card-models", "wish"),
        ("same-card-group g is on card 0 of n1", "wish"),
        ("each of the 2 GPU containers fits alone, but not all of them together", "not-together"),
        ("node label vke.volcengine.com/cards is not set, not mgpu", "node-label"),
        ("the node's cards are cut by mig, not into 4gb", "slices"),
        ("NVIDIA's plugin on this node could give out card 0, where pods of mgpu are", "nvidia-plugin"),
        ("insufficient rdma (2 rdma devices: 2 50 percent short)", "other-device"),
        ("the pod is bound to n2 already", "bound-already"),
        ("node n9 is not known to mgpu (yet)", "unknown-node"),
        ("something nobody has said before", "other"),
    ],
)
def test_the_first_reason_counts(text: str, kind: str) -> None:
    assert kind_of(text) == kind
    assert kind in ALL
