"""Evaluates the CEL selectors of ResourceClaims and DeviceClasses for devices, as kube-scheduler does.

`claim_decider` calls `Selectors`, because mgpu may give a claim only cards that kube-scheduler could have chosen. The
device of a card has the attributes that the agent publishes (`resource_slices.attributes`). Its capacity is that of the
whole card, whereas kube-scheduler sees what is published as free. The devices of MIG instances are published as they
are here (`mig_attributes`).

The library is that of the CEL project (cel-expr-python), which evaluates an expression in some microseconds. If it
cannot evaluate an expression that the API server has accepted, the result is `Unsupported`, and the caller keeps
kube-scheduler's choice.

Users write the expressions. The API server has checked their length and estimated their cost before it stored them, and
kube-scheduler has evaluated them with a limit. The library limits the depth of an expression and the number of its
iterations, and evaluates regular expressions in linear time. That permits 0.1 s for each of the 64 cards of a node and
each of 8,192 selectors of a claim, and a leak of 50 MB in each evaluation (`selector_functions`). So this module limits
what is cached, the time for the selectors of a claim (`Patience`), and the calls of functions that leak.
"""

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu.model.cards import Card
from mgpu.model.mig_attributes import mig_attributes
from mgpu.model.mig_devices import MigDevice, MigOffer
from mgpu.model.resource_claims import CORES, DRIVER, MEMORY, MILLI_PER_PERCENT
from mgpu.model.resource_slices import Attribute, attributes
from scheduler.engine.claim_placement import LONGEST_ATTRIBUTE

_LONGEST_EXPRESSION = 10 * 1024
"""As in the API server, `CELSelectorExpressionMaxLength`."""
_MAX_CHARACTERS = 128 * 1024
"""The characters of all cached expressions. A compiled expression takes up to 300 bytes for each of them."""
_MAX_RESULTS = 16_384
"""The results that are cached. Most selectors read only attributes that many cards have in common, so they have few
results. Without this cache, a long-running scheduler would lose memory (`selector_functions`)."""
_MAX_CALLS = 200_000
"""The calls of `selector_functions` until the process ends, each of which leaks 337 bytes or less. An expression makes
some calls for each kind of card, and only when its result is not cached."""
_PATIENCE_SECONDS = 0.2
_LONGEST_TEXT = 80
"""The characters of an expression or an error in a reason."""

_LITERAL = re.compile(r"\"([^\"\\]*)\"|'([^'\\]*)'|(?:attributes|capacity)\s*\.\s*\??([A-Za-z_]\w*)")
_USE_OF_WHOLE_MAP = re.compile(
    r"\bdevice\b(?!\s*\.\s*(?:driver|allowMultipleAllocations|attributes|capacity)\b)"
    r"|\b(?:attributes|capacity)\b(?!\s*(?:\[|\.\s*(?!(?:all|exists|exists_one|existsOne|filter|map|size)\s*\()))"
)
_TEXT = r"(?:\"[^\"\\]*\"|'[^'\\]*')"
_NAMED = rf"(?:\.\s*\??\s*([A-Za-z_]\w*)\b(?!\s*\()|\[\s*\??\s*({_TEXT})\s*\])"
_ACCESS = re.compile(
    r"\bdevice\s*\.\s*(?:(?:driver|allowMultipleAllocations)\b"
    rf"|(?:attributes|capacity)\s*\[\s*\??\s*{_TEXT}\s*\]\s*{_NAMED})"
)
_FUNCTION = re.compile(
    r"\b(?:quantity|isQuantity|semver|isSemver|compareTo|isGreaterThan|isLessThan|add|sub|isInteger|asInteger"
    r"|asApproximateFloat|sign|major|minor|patch)\b"
)
"""The functions of `selector_functions`."""
_LOOP = re.compile(r"\b(?:all|exists|exists_one|existsOne|filter|map)\b")
_MISSING_KEY = re.compile(r"Key not found in map : \"(.*)\"", re.DOTALL)
_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


Device = Card | MigOffer
"""What a DRA device of mgpu's driver stands for."""


class Patience:
    """The time that the selectors of one claim may take together. Not thread-safe.

    Attributes:
        left: The remaining seconds of CPU time. It is exceeded by at most one compilation or evaluation.
    """

    def __init__(self, seconds: float = _PATIENCE_SECONDS) -> None:
        self.left = seconds


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The answer that mgpu cannot evaluate a selector, although kube-scheduler can."""

    reason: str


_TOO_SLOW = Unsupported("mgpu does not evaluate all selectors of this claim, because that takes too long")


@dataclass(frozen=True, slots=True)
class _Selector:
    """A compiled expression.

    Attributes:
        number: The number that stands for the expression in the cache of results.
        text: The expression as messages show it.
        domains: The domains for which the expression may look up attributes.
        calls: The most calls of functions that leak in one evaluation.
        attributes: The names of all attributes that the result depends on; None if it may depend on any.
    """

    number: int
    text: str
    program: Any
    calls: int
    domains: frozenset[str]
    attributes: tuple[str, ...] | None

    def key(self, device: Device) -> Hashable:
        """Return a value that is equal for devices for which the expression has the same result."""
        if self.attributes is None:
            return self.number, device
        found = _attributes_of(device)
        is_card = isinstance(device, Card)
        return self.number, is_card, device.core, device.memory, tuple(found.get(name) for name in self.attributes)


class Selectors:
    """Evaluates selectors. Thread-safe: one thread evaluates at a time, since the library holds Python's lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._environment: Any = None
        self._compiled: OrderedDict[str, _Selector | Unsupported] = OrderedDict()
        self._characters = 0
        self._numbers = 0
        self._calls = 0
        self._results: OrderedDict[Hashable, str | Unsupported | None] = OrderedDict()

    def excluded(
        self, expressions: Sequence[str], cards: Sequence[Card], patience: Patience | None = None
    ) -> Mapping[int, str] | Unsupported:
        """Return the indexes of the cards for which an expression is not true, each with the reason.

        An expression whose evaluation fails for a card excludes it, because kube-scheduler would not take it either.

        Args:
            patience: The time that is left for the selectors of the claim.
        """
        reasons = self._reasons(expressions, cards, patience or Patience())
        if isinstance(reasons, Unsupported):
            return reasons
        pairs = zip(cards, reasons, strict=True)
        return {card.index: reason for card, reason in pairs if reason is not None}

    def excluded_instances(
        self, expressions: Sequence[str], offers: Sequence[MigOffer], patience: Patience | None = None
    ) -> Mapping[MigDevice, str] | Unsupported:
        """Return the MIG instances for which an expression is not true, each with the reason, as `excluded` does."""
        reasons = self._reasons(expressions, offers, patience or Patience())
        if isinstance(reasons, Unsupported):
            return reasons
        pairs = zip(offers, reasons, strict=True)
        return {offer.device: reason for offer, reason in pairs if reason is not None}

    def _reasons(
        self, expressions: Sequence[str], devices: Sequence[Device], patience: Patience
    ) -> list[str | None] | Unsupported:
        """Return for each device why it is excluded, or None if it is not."""
        with self._lock:
            began = time.thread_time()
            try:
                return self._reasons_until(expressions, devices, began + patience.left)
            finally:
                patience.left -= time.thread_time() - began

    def _reasons_until(
        self, expressions: Sequence[str], devices: Sequence[Device], end: float
    ) -> list[str | None] | Unsupported:
        selectors: list[_Selector] = []
        for expression in dict.fromkeys(expressions):
            if time.thread_time() > end:
                return _TOO_SLOW
            selector = self._selector(expression)
            if isinstance(selector, Unsupported):
                return selector
            selectors.append(selector)
        found: list[str | None] = []
        for device in devices:
            reason = self._reason_against(device, selectors, end)
            if isinstance(reason, Unsupported):
                return reason
            found.append(reason)
        return found

    def _selector(self, expression: str) -> _Selector | Unsupported:
        if expression in self._compiled:
            self._compiled.move_to_end(expression)
            return self._compiled[expression]
        if len(expression) > _LONGEST_EXPRESSION:
            return Unsupported(f"the selector {_shortened(expression)} is too long")
        selector = self._compiled[expression] = self._compile(expression)
        self._characters += len(expression)
        while self._characters > _MAX_CHARACTERS:
            oldest, _ = self._compiled.popitem(last=False)
            self._characters -= len(oldest)
        return selector

    def _compile(self, expression: str) -> _Selector | Unsupported:
        if self._environment is None:
            # The import is here, because most clusters have no selectors, and the library takes 25 MB of memory.
            from scheduler.decisions import selector_functions

            self._functions = selector_functions
            self._environment = selector_functions.environment()
        text = _shortened(expression)
        calls = len(_FUNCTION.findall(expression))
        if calls and _LOOP.search(expression):
            return Unsupported(
                f"the selector {text} has functions for quantities or versions beside a loop over a list"
            )
        try:
            program = self._environment.compile(expression)
        except (RuntimeError, ValueError) as error:
            return Unsupported(f"mgpu cannot compile the selector {text}: {_cause(str(error))}")
        self._numbers += 1
        return _Selector(self._numbers, text, program, calls, _domains(expression), _attributes(expression))

    def _reason_against(self, device: Device, selectors: Sequence[_Selector], end: float) -> str | Unsupported | None:
        for selector in selectors:
            if time.thread_time() > end:
                return _TOO_SLOW
            key = selector.key(device)
            if key in self._results:
                self._results.move_to_end(key)
            else:
                self._results[key] = self._evaluate(selector, device)
                if len(self._results) > _MAX_RESULTS:
                    self._results.popitem(last=False)
            if self._results[key] is not None:
                return self._results[key]
        return None

    def _evaluate(self, selector: _Selector, device: Device) -> str | Unsupported | None:
        self._calls += selector.calls
        if selector.calls and self._calls > _MAX_CALLS:
            text = "mgpu evaluates no more selectors with quantities or versions until its scheduler starts again"
            return Unsupported(text)
        try:
            result = selector.program.eval(data={"device": self._device(device, selector.domains)})
        except (RuntimeError, ValueError) as error:
            return Unsupported(f"mgpu cannot evaluate the selector {selector.text}: {_cause(str(error))}")
        value = self._functions.boolean(result)
        if value is not None:
            return None if value else f"selector {selector.text} is false"
        cause = str(result)
        missing = _MISSING_KEY.search(cause)
        if missing is not None and not _ATTRIBUTE.fullmatch(missing[1]):
            # A domain without attributes is an empty map for kube-scheduler, see `_domains`.
            return Unsupported(f"mgpu cannot evaluate the selector {selector.text}: {_cause(cause)}")
        return f"selector {selector.text} fails: {_cause(cause)}"

    def _device(self, device: Device, domains: frozenset[str]) -> dict[str, Any]:
        """Return the variable `device`."""
        found: dict[str, dict[str, Any]] = {domain: {} for domain in domains}
        found[DRIVER] = {
            name: value[:LONGEST_ATTRIBUTE] if isinstance(value, str) else value
            for name, value in _attributes_of(device).items()
        }
        capacity: dict[str, dict[str, Any]] = {domain: {} for domain in domains}
        capacity[DRIVER] = {
            CORES: self._functions.amount(device.core // MILLI_PER_PERCENT),
            MEMORY: self._functions.amount(device.memory),
        }
        return {
            "driver": DRIVER,
            "allowMultipleAllocations": isinstance(device, Card),
            "attributes": found,
            "capacity": capacity,
        }


def _attributes_of(device: Device) -> Mapping[str, Attribute]:
    return attributes(device) if isinstance(device, Card) else mig_attributes(device)


def _domains(expression: str) -> frozenset[str]:
    """Return the domains that a device must have as empty maps.

    For kube-scheduler, `device.attributes["other.domain"]` is an empty map if the device has no such attributes, but
    `"other.domain" in device.attributes` is false. CEL's maps have no default, so each text that may be looked up
    becomes an empty map. Where the expression uses the map as a whole, as in the second example, there are none; if it
    also looks up a domain that is missing, the evaluation fails and the selector is unsupported.
    """
    if _USE_OF_WHOLE_MAP.search(expression):
        return frozenset()
    return frozenset(text for row in _LITERAL.findall(expression) for text in row if text and text != DRIVER)


def _attributes(expression: str) -> tuple[str, ...] | None:
    """Return the names of the attributes that an expression reads, or None if it may read any.

    The only variable is `device`. If each use of it names one attribute or capacity, such as
    `device.attributes["gpu.mgpu.io"].model`, the result depends on nothing else.
    """
    if re.search(r"\bdevice\b", _ACCESS.sub(" ", expression)):
        return None
    found = (identifier or text[1:-1] for identifier, text in _ACCESS.findall(expression))
    return tuple(sorted({name for name in found if name}))


def _shortened(text: str) -> str:
    """Return a text on one line for a reason.

    It has no percent sign, because kube-scheduler uses reasons as formats (`engine.rejections`).
    """
    line = " ".join(text.replace("%", " mod ").split())
    return line if len(line) <= _LONGEST_TEXT else f"{line[:_LONGEST_TEXT]}…"


def _cause(error: str) -> str:
    """Return the first line of an error of the library without its status code."""
    first = error.partition("\n")[0]
    return _shortened(re.sub(r"^(?:[A-Z_]+: )+", "", first))
