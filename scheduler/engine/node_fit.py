"""What is said of a pod on one node."""

from typing import NamedTuple


class Answer(NamedTuple):
    """reason "": it fits, and `points` is the node's score, 0..10. hopeless: no eviction there can help.

    recut: it fits once the node's cards are cut anew. proven: a longer search would say the same.
    """

    reason: str = ""
    hopeless: bool = False
    points: int = 0
    recut: bool = False
    proven: bool = True
