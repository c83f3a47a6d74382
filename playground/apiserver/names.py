"""Checks names, labels and annotations as kube-apiserver does, and generates names.

`objects` and `pod_rules` call this module.
"""

import random
import re

from playground.apiserver.api_errors import Cause, invalid_value, required
from playground.apiserver.storage import Object

_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", re.ASCII)
_PATH_NAMES = ("clusterroles", "clusterrolebindings", "roles", "rolebindings")

_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    r"'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_LABEL_RULE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with "
    "an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
_KEY_RULE = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    "character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)
_VALUE_RULE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)
_MAX_ANNOTATIONS = 256 * 1024


def generate(prefix: str) -> str:
    """Return a name for `generateName`: the prefix, cut to 58 characters, and five random characters.

    As in Kubernetes, no random character is a vowel, so that names contain no words by chance.
    """
    return prefix[:58] + "".join(random.choices(_ALPHABET, k=5))


def dns_label(value: str, field: str) -> list[Cause]:
    """Return a list with one problem if the value is not a DNS label, or an empty list.

    Args:
        field: The path of the field that contains the value.
    """
    if len(value) > 63 or not _LABEL.fullmatch(value):
        return [invalid_value(field, value, _LABEL_RULE)]
    return []


def subdomain(value: str, field: str) -> list[Cause]:
    """Return a list with one problem if the value is not a DNS subdomain, or an empty list."""
    if len(value) > 253 or not _SUBDOMAIN.fullmatch(value):
        return [invalid_value(field, value, _SUBDOMAIN_RULE)]
    return []


def qualified_name(value: str, field: str) -> list[Cause]:
    """Return a list with one problem if the value is not a qualified name, or an empty list.

    The keys of labels and the names of resources are qualified names. They have the form `name` or `prefix/name`, and
    the prefix is a DNS subdomain.
    """
    prefix, slash, name = value.rpartition("/")
    if (slash and not _SUBDOMAIN.fullmatch(prefix)) or len(name) > 63 or not _QUALIFIED.fullmatch(name):
        return [invalid_value(field, value, _KEY_RULE)]
    return []


def check_metadata(metadata: Object, plural: str) -> list[Cause]:
    """Return the problems of the name, the labels and the annotations of an object.

    The plural of the kind matters, because the names of namespaces are DNS labels, and roles and their bindings may
    have any name.
    """
    problems: list[Cause] = []
    name = metadata.get("name", "")
    if not name:
        problems.append(required("metadata.name", "name or generateName is required"))
    elif plural == "namespaces":
        problems += dns_label(name, "metadata.name")
    elif plural not in _PATH_NAMES and (len(name) > 253 or not _SUBDOMAIN.fullmatch(name)):
        problems.append(invalid_value("metadata.name", name, _SUBDOMAIN_RULE))
    for key, value in (metadata.get("labels") or {}).items():
        problems += qualified_name(key, "metadata.labels")
        if value and (len(value) > 63 or not _QUALIFIED.fullmatch(value)):
            problems.append(invalid_value("metadata.labels", value, _VALUE_RULE))
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        problems += qualified_name(key.lower(), "metadata.annotations")
    if sum(len(k) + len(v) for k, v in annotations.items()) > _MAX_ANNOTATIONS:
        detail = f"Too long: may not be more than {_MAX_ANNOTATIONS} bytes"
        problems.append(Cause("metadata.annotations", detail, "FieldValueTooLong"))
    return problems
