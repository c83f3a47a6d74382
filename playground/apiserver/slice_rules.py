"""The API server's rules for ResourceSlices: defaults and validation.

Source: pkg/apis/resource/validation in Kubernetes.
"""

import re
import time
from collections.abc import Iterable, Iterator
from fractions import Fraction

from mgpu.model.quantities import parse_quantity
from playground.apiserver.api_errors import Cause, forbidden_field, invalid_value, required, too_long, too_many
from playground.apiserver.device_names import attribute_name, driver_name, pool_name, required_label, rows, taint
from playground.apiserver.names import dns_label, subdomain
from playground.apiserver.storage import Object

_MOST_DEVICES = 128
_MOST_ADVANCED_DEVICES = 64
_MOST_COUNTER_SETS = 8
_MOST_COUNTERS = 32
_MOST_CONSUMED_SETS = 2
_MOST_ATTRIBUTES = 32
_MOST_VALUES = 48
_MOST_TAINTS = 16
_MOST_OPTIONS = 10
_MOST_TEXT = 64
_PLACES = ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection")
_KINDS = ("bool", "int", "string", "version", "bools", "ints", "strings", "versions")
_PRERELEASE = r"(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)"
_SEMVER = re.compile(
    rf"(?:0|[1-9]\d*)\.(?:0|[1-9]\d*)\.(?:0|[1-9]\d*)(?:-{_PRERELEASE}(?:\.{_PRERELEASE})*)?"
    r"(?:\+[0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*)?",
    re.ASCII,
)


def defaults(obj: Object) -> None:
    """Set the defaults of a ResourceSlice in place: the time of each new taint."""
    spec = obj["spec"] = obj.get("spec") or {}
    spec["pool"] = spec.get("pool") or {}
    for device in spec.get("devices") or []:
        for row in device.get("taints") or []:
            if row.get("timeAdded") is None:
                row["timeAdded"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def validate(obj: Object) -> Iterator[Cause]:
    """Yield the problems of a ResourceSlice."""
    spec = obj["spec"]
    yield from driver_name(spec.get("driver") or "", "spec.driver")
    yield from _check_pool(spec["pool"])
    yield from _check_place(spec)
    devices = spec.get("devices")
    counters = spec.get("sharedCounters")
    if devices is not None and counters is not None:
        yield invalid_value("spec", "", "only one of `sharedCounters` or `devices` is allowed")
    advanced = any(_is_advanced(device) for device in devices or [])
    most = _MOST_ADVANCED_DEVICES if advanced else _MOST_DEVICES

    def check(device: Object, field: str) -> Iterable[Cause]:
        return _check_device(device, field, own_place=bool(spec.get("perDeviceNodeSelection")))

    yield from rows(devices or [], most, "spec.devices", check, lambda device: device.get("name") or "")
    path = "spec.sharedCounters"
    yield from rows(counters or [], _MOST_COUNTER_SETS, path, _check_counter_set, lambda row: row.get("name") or "")


def validate_update(new: Object, old: Object) -> Iterator[Cause]:
    """Yield the problems of an update that changes the driver, the pool or the node of a ResourceSlice."""
    now = new["spec"]
    was = old["spec"]
    for field, value, before in (
        ("spec.pool.name", now["pool"].get("name"), was["pool"].get("name")),
        ("spec.driver", now.get("driver"), was.get("driver")),
        ("spec.nodeName", now.get("nodeName"), was.get("nodeName")),
    ):
        if value != before:
            yield invalid_value(field, value, "field is immutable")


def _check_pool(pool: Object) -> Iterator[Cause]:
    yield from pool_name(pool.get("name") or "", "spec.pool.name")
    count = pool.get("resourceSliceCount") or 0
    generation = pool.get("generation") or 0
    if count <= 0:
        yield invalid_value("spec.pool.resourceSliceCount", count, "must be greater than zero")
    if generation < 0:
        yield invalid_value("spec.pool.generation", generation, "must be greater than or equal to zero")


def _check_place(spec: Object) -> Iterator[Cause]:
    """Yield the problems of the fields that select the nodes of a slice."""
    named = [key for key in _PLACES if spec.get(key) is not None]
    if spec.get("nodeName"):
        yield from subdomain(spec["nodeName"], "spec.nodeName")
    for key in named:
        if spec[key] == "":
            yield invalid_value(f"spec.{key}", "", "must be either unset or set to a non-empty string")
        elif spec[key] is False:
            yield invalid_value(f"spec.{key}", "false", "must be either unset or set to true")
    terms = (spec.get("nodeSelector") or {}).get("nodeSelectorTerms") or []
    if "nodeSelector" in named and len(terms) != 1:
        yield invalid_value("spec.nodeSelector.nodeSelectorTerms", terms, "must have exactly one node selector term")
    chosen = [f"`{key}`" for key in named if spec[key]]
    rule = f"exactly one of {', '.join(f'`{key}`' for key in _PLACES)} is required"
    if not chosen:
        yield required("spec", rule)
    elif len(chosen) > 1:
        yield invalid_value("spec", f"{{{', '.join(chosen)}}}", f"{rule}, but multiple fields are set")


def _is_advanced(device: Object) -> bool:
    lists = (
        set(value) & {"bools", "ints", "strings", "versions"} for value in (device.get("attributes") or {}).values()
    )
    return bool(device.get("taints") or device.get("consumesCounters") or any(lists))


def _check_device(device: Object, field: str, *, own_place: bool) -> Iterator[Cause]:
    yield from dns_label(device.get("name") or "", f"{field}.name")
    attributes = device.get("attributes") or {}
    capacity = device.get("capacity") or {}
    total = len(attributes) + len(capacity)
    if total > _MOST_ATTRIBUTES:
        detail = f"the total number of attributes and capacities must not exceed {_MOST_ATTRIBUTES}"
        yield invalid_value(field, total, detail)
    values = sum(len(v) if isinstance(v, list) else 1 for row in attributes.values() for v in row.values())
    if values > _MOST_VALUES:
        yield invalid_value(field, values, f"the total number of attribute values must not exceed {_MOST_VALUES}")
    for name, value in attributes.items():
        yield from attribute_name(name, f"{field}.attributes")
        yield from _check_attribute(value, f"{field}.attributes[{name}]")
    for name, value in capacity.items():
        yield from attribute_name(name, f"{field}.capacity")
        policy = value.get("requestPolicy")
        where = f"{field}.capacity[{name}].requestPolicy"
        if policy is not None and not device.get("allowMultipleAllocations"):
            yield forbidden_field(where, "allowMultipleAllocations must be true")
        elif policy is not None:
            yield from _check_policy(value.get("value", "0"), policy, where)
    yield from rows(device.get("taints") or [], _MOST_TAINTS, f"{field}.taints", taint)
    consumed = device.get("consumesCounters") or []
    path = f"{field}.consumesCounters"
    yield from rows(consumed, _MOST_CONSUMED_SETS, path, _check_consumed, lambda row: row.get("counterSet") or "")
    chosen = [key for key in ("nodeName", "nodeSelector", "allNodes") if device.get(key)]
    if own_place and len(chosen) != 1:
        rule = "exactly one of `nodeName`, `nodeSelector`, or `allNodes` is required when `perDeviceNodeSelection`"
        yield required(field, f"{rule} is set to true in the ResourceSlice spec")
    elif chosen and not own_place:
        rule = "`nodeName`, `nodeSelector` and `allNodes` can only be set if `perDeviceNodeSelection` is set to true"
        yield invalid_value(field, None, f"{rule} in the ResourceSlice spec")


def _check_attribute(value: Object, field: str) -> Iterator[Cause]:
    given = [kind for kind in _KINDS if value.get(kind) is not None]
    if len(given) != 1:
        yield invalid_value(field, "", "exactly one value must be specified")
    for kind in given:
        texts = value[kind] if isinstance(value[kind], list) else [value[kind]]
        if not texts:
            yield invalid_value(f"{field}.{kind}", texts, "must not be empty if specified")
        for text in (text for text in texts if isinstance(text, str)):
            if kind.startswith("version") and not _SEMVER.fullmatch(text):
                detail = "must be a string compatible with semver.org spec 2.0.0"
                yield invalid_value(f"{field}.{kind}", text, detail)
            if len(text.encode()) > _MOST_TEXT:
                yield too_long(f"{field}.{kind}", _MOST_TEXT)


def _check_policy(capacity: str, policy: Object, field: str) -> Iterator[Cause]:
    """Yield the problems of the requestPolicy of a capacity.

    A policy with only a default is not checked, so the capacity may then have any value.
    """
    options = policy.get("validValues") or []
    bounds = policy.get("validRange")
    default = policy.get("default")
    kind = "validValues" if options else "validRange"
    if options and bounds is not None:
        detail = 'exactly one policy can be specified, cannot specify "validValues" and "validRange" at the same time'
        yield forbidden_field(field, detail)
    elif (options or bounds is not None) and default is None:
        yield required(f"{field}.default", f"required when {kind} is defined")
    elif options:
        yield from _check_options(capacity, str(default), options, f"{field}.validValues")
    elif bounds is not None:
        yield from _check_range(capacity, str(default), bounds, f"{field}.validRange")


def _check_options(capacity: str, default: str, options: list[str], field: str) -> Iterator[Cause]:
    amounts = [parse_quantity(option) for option in options]
    for i in range(1, len(amounts)):
        if amounts[i - 1] > amounts[i]:
            yield invalid_value(f"{field}[{i}]", options[i], "values must be sorted in ascending order")
    if len(options) > _MOST_OPTIONS:
        yield too_many(field, len(options), _MOST_OPTIONS)
    for i, amount in enumerate(amounts):
        if amount > parse_quantity(capacity):
            yield invalid_value(f"{field}[{i}]", options[i], f"option is larger than capacity value: {capacity}")
    if parse_quantity(default) not in amounts:
        yield invalid_value(field, default, "default value is not valid according to the requestPolicy")


def _check_range(capacity: str, default: str, bounds: Object, field: str) -> Iterator[Cause]:
    low = bounds.get("min")
    high = bounds.get("max")
    step = bounds.get("step")
    if low is None:
        yield required(f"{field}.min", "required when validRange is defined")
        return
    least = parse_quantity(low)
    most = parse_quantity(capacity)
    usual = parse_quantity(default)
    if least > most:
        yield invalid_value(f"{field}.min", low, f"min is larger than capacity value: {capacity}")
    if usual < least:
        yield invalid_value(f"{field}.min", default, f"default is less than min: {low}")
    if high is not None:
        if least > parse_quantity(high):
            yield invalid_value(f"{field}.max", low, f"min is larger than max: {high}")
        if parse_quantity(high) > most:
            yield invalid_value(f"{field}.max", high, f"max is larger than capacity value: {capacity}")
        if usual > parse_quantity(high):
            yield invalid_value(f"{field}.max", default, f"default is more than max: {high}")
    if step is not None:
        yield from _check_step(capacity, (low, step), [default, *([high] if high is not None else [])], f"{field}.step")


def _check_step(capacity: str, bounds: tuple[str, str], values: list[str], field: str) -> Iterator[Cause]:
    low, step = bounds
    width = parse_quantity(step)
    if width <= 0:
        # kube-apiserver 1.36 divides by zero, and closes the connection without an answer.
        yield invalid_value(field, step, "must be greater than zero")
        return
    added = parse_quantity(low) + width
    if added > parse_quantity(capacity):
        yield invalid_value(field, step, f"one step {_shown(added)} is larger than capacity value: {capacity}")
    for value in values:
        if (parse_quantity(value) - parse_quantity(low)) % width:
            yield invalid_value(field, value, f"value is not a multiple of a given step ({step}) from ({low})")


def _shown(amount: Fraction) -> str:
    return str(int(amount)) if amount.denominator == 1 else str(float(amount))


def _check_counter_set(row: Object, field: str) -> Iterator[Cause]:
    yield from required_label(row.get("name") or "", f"{field}.name")
    yield from _check_counters(row.get("counters") or {}, f"{field}.counters")


def _check_consumed(row: Object, field: str) -> Iterator[Cause]:
    yield from required_label(row.get("counterSet") or "", f"{field}.counterSet")
    yield from _check_counters(row.get("counters") or {}, f"{field}.counters")


def _check_counters(counters: Object, field: str) -> Iterator[Cause]:
    if not counters:
        yield required(field)
    if len(counters) > _MOST_COUNTERS:
        yield too_many(field, len(counters), _MOST_COUNTERS)
    for name in counters:
        yield from required_label(name, field)
