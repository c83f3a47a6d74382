"""Many equal pods at once on one node: nothing but their device ids tells them apart, and each gets its own."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from playground.nodes import make_nodes
from tests.e2e.bench import INDEX, Bench, share
from tests.e2e.clusters import patient
from tests.examples import SOAK
from tests.waiting import until

PODS, CARDS = (80, 16) if SOAK else (40, 8)
CREATORS = 4


@pytest.fixture
def crowded() -> Iterator[Bench]:
    with patient(make_nodes(1, CARDS), kubelet={"admission": "random"}) as cluster:
        bench = Bench(cluster)
        yield bench
        bench.close()


def test_many_equal_pods_at_once_each_get_the_cards_of_their_own_record(crowded: Bench) -> None:
    (kubelet,) = crowded.cluster.kubelets.values()
    with kubelet.holding(), ThreadPoolExecutor(CREATORS) as creators:
        list(creators.map(lambda i: crowded.create(share(f"p{i}", core=15, mib=2048)), range(PODS)))
        until(lambda: crowded.count_bound() == PODS, 120)
    until(lambda: sum(c.running for c in kubelet.runtime.containers()) == PODS, 120)
    records = {pod.metadata.name: int(pod.metadata.annotations[INDEX + "c"]) for pod in crowded.bound()}
    seen = {c.pod: c.env["NVIDIA_VISIBLE_DEVICES"] for c in kubelet.runtime.containers()}
    assert seen == {name: f"GPU-{kubelet.config.node}-{card}" for name, card in records.items()}
    assert len(kubelet.runtime.containers()) == PODS, "no container was started twice"
    assert len(Counter(records.values())) > CARDS // 2, "the pods are on many cards"
