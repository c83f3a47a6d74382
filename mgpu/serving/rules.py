"""The rule that a Problem is about, as one of few short names, by its text. Pure.

The names are for counting, and stay when a text is put into better words.
"""

import re

_RULES = (
    ("one-vocabulary", r"a pod uses one vocabulary$"),
    ("one-way-of-cutting", r"a node's cards are cut one way"),
    ("request-equals-limit", r"^must equal the request"),
    ("placement-is-ours", r"^records a placement"),
    (
        "ask-is-fixed",
        r"^is part of what the pod asks for|^is what (the card is chosen by|its Pod is made from)|^is copied",
    ),
    ("mtgpu-on-a-pod", r"^is for MtgpuPods"),
    ("share-resource", r"^stands for no card by itself"),
    ("wish-in-time", r"^is read when cards are decided"),
    ("wish-cannot-be-met", r"^is a wish for cards|^all containers of the group share|^names \d+ cards?, container"),
    (
        "wish-malformed",
        r"names no model$|excludes .* wants$|^must name at least one;|^entry \d+ is empty|^may name at most",
    ),
    ("wish-malformed", r"is the spread-group too|^must be a name of 1 to 63 letters"),
    ("policy", r"^must be one of "),
    ("quantity", r"is not a quantity such as|is larger than any quantity|only whole numbers are allowed"),
    ("quantity", r"^must be greater than 0"),
    ("too-much", r"is more than any (node|card) has|a container may hold at most|one slice of a card at most"),
    ("even-over-cards", r"^must be divisible by the number of cards"),
    ("whole-cards", r"^above 100 must be a multiple of 100"),
    ("at-most-a-card", r"^must be at most 100 per card"),
    ("memory-of-whole-cards", r"^must not be set for whole cards"),
    ("memory-minimum", r"^must be at least \d+( \(MiB\)|Mi per card)"),
    ("core-with-memory", r"^must be set where"),
    ("container-list", r"must be an integer of at least 0|^must have one entry per container|^gives \d+ to container"),
    ("container-name", r"characters long where the container asks for GPU|^'.*' is the name of"),
    (
        "resource-combination",
        r"cannot be asked for alone|cannot stand beside|^has no effect alone|^must be 1 or left out",
    ),
    ("resource-name", r"^is no resource of a GPU|^is no slice; ask for one|^is called .* here$"),
    ("mtgpu-incomplete", r"^is missing; "),
    (
        "mtgpu-malformed",
        r"^must be a decimal from 0 to 1|^must be above 0|, more than \S+, which is|^must be a whole number of",
    ),
    ("mtgpu-malformed", r"^must be 1 to 63 lower-case|^must be the name of a node|^is too long: with the GPUID"),
    ("mtgpu-asks-once", r"^asks for GPU a second time|^is set by mgpu to the card"),
    ("too-large", r"more than the [\d,]+ (that mgpu accepts|of one patch)|^entry \d+ has more than"),
    ("field-type", r"^must be (an object|a list|a string|an integer|a quantity), not"),
)
_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in _RULES)

OTHER = "other"
ALL = (*dict.fromkeys(name for name, _ in _RULES), OTHER)


def rule_of(message: str) -> str:
    """The name of the rule that a Problem's message tells of."""
    return next((name for name, pattern in _COMPILED if pattern.search(message)), OTHER)
