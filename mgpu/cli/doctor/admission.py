"""Whether the API server reaches and trusts what admits pods and bindings. Pure."""

import base64
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from mgpu.cli.doctor.parts import DECIDES
from mgpu.cli.doctor.seen import Finding, Level, Raw, Seen, hooks
from mgpu.serving.callers import REFUSES
from mgpu.serving.certificates import CHAIN

REACHABLE, CERTIFICATES, BUNDLES, BINDINGS = "webhook", "certificates", "ca bundles", "bindings"
_REASONS = {CERTIFICATES, BUNDLES, DECIDES}
"""Of which mgpu is not asked about Bindings, where these fail."""
_MUTATING, _VALIDATING = "mutatingwebhookconfigurations", "validatingwebhookconfigurations"
_SOON = timedelta(days=7)
_OURS = "mgpu.io"
_BEFORE_OTHERS = "0-"
"""Begins the name of the webhook configuration that the API server calls before all others."""
_NO_RIGHT = "cannot create resource"
_PUBLISH = "manifests/certificates.sh puts the CA in (make deploy does too)"
_WHERE_ALLOWED = "doctor --try-in a namespace where you may (it is a dry run)"
_ELSEWHERE = "doctor --try-in another namespace"


def admission(seen: Seen) -> list[Finding]:
    """The three checks together: one thing that is wrong shows in several places, and is named once."""
    by_files = [*_dates(seen), *_trusted(seen)]
    told = {finding.check for finding in by_files if finding.level is Level.FAILED}
    found = [*by_files, *(finding for finding in _of_trial(seen) if finding.check not in told)]
    bad = {finding.check for finding in found}
    asked = not told and REACHABLE not in bad  # else it is not known whether it would be
    read = any(_chain(secret.files.get(CHAIN, b"")) for secret in seen.secrets.values())
    well = [REACHABLE] * asked + [CERTIFICATES, BUNDLES] * (asked or read)
    return [*found, *(_well(seen, check) for check in well if check not in bad)]


def _well(seen: Seen, check: str) -> Finding:
    """Of what was read, or of what follows from the webhook's answer: that the API server has reached and trusts it."""
    if check == REACHABLE:
        return Finding(check, Level.OK, "a Pod that asks in two vocabularies at once was denied, as it must be")
    certificates = {service: _chain(secret.files.get(CHAIN, b"")) for service, secret in seen.secrets.items()}
    if not any(certificates.values()):
        return Finding(check, Level.OK, "the API server trusts the webhook; the Secrets are not to be seen here")
    if check == BUNDLES:
        return Finding(check, Level.OK, "the webhook configurations trust the certificates that are served")
    until = (
        f"{n.removesuffix('-tls')} until {c[0].not_valid_after_utc:%Y-%m-%d}" for n, c in certificates.items() if c
    )
    return Finding(check, Level.OK, ", ".join(until))


def _of_trial(seen: Seen) -> Iterator[Finding]:
    status, message = seen.tried.status, seen.tried.message
    missing = [
        f"{kind.removesuffix('s')} {name}"
        for kind, name in _wanted(seen)
        if kind not in seen.hidden and not _named(seen, kind, name)
    ]
    if missing:
        text = f"there is no {' and no '.join(missing)}"
        remedy = "apply the overlay again as it was installed: make deploy, or kubectl apply --server-side -k"
        yield Finding(REACHABLE, Level.FAILED, text, remedy)
    elif "failed calling webhook" in message and _OURS in message:
        yield _failed_call(seen, message)
    elif "failed calling webhook" in message or not seen.tried.denied:
        yield _not_asked(status, message)


def bindings(seen: Seen, told: Collection[str]) -> Iterator[Finding]:
    """Whether mgpu is asked about Bindings: where it cannot be reached each of them passes (failurePolicy Ignore).

    told: the checks that have failed, and so may name the reason.
    """
    status, message = seen.bound.status, seen.bound.message
    own = seen.settings.scheduler
    if seen.bound.denied:
        yield Finding(BINDINGS, Level.OK, "mgpu refused one of a Pod that is not there, so it is asked about each")
    elif status == 403 and _NO_RIGHT in message:
        text = f"whether mgpu is asked about them is not known, you may not create any here: {message}"
        yield Finding(BINDINGS, Level.WARNING, text, _WHERE_ALLOWED)
    elif status != 404 or 'pods "' not in message:
        text = f"whether mgpu is asked about them is not known, something else answered first: {status} {message}"
        yield Finding(BINDINGS, Level.WARNING, text, _ELSEWHERE)
    elif _REASONS.isdisjoint(told) and _named(seen, _MUTATING, own.configuration):
        text = "mgpu is not asked about them, or not reached: GPU pods get their cards late, or fail where none fit"
        logs = f"kubectl -n {seen.namespace} logs deployment/{own.service}"
        remedy = f"{logs}; does a NetworkPolicy keep the API server from it, do the rules of {own.configuration} stand?"
        yield Finding(BINDINGS, Level.FAILED, text, remedy)


def _wanted(seen: Seen) -> Iterator[tuple[str, str]]:
    """(kind, name) of the webhook configurations that the suite has."""
    yield _MUTATING, seen.settings.webhook.configuration
    yield _MUTATING, f"{_BEFORE_OTHERS}{seen.settings.webhook.configuration}"
    yield _VALIDATING, seen.settings.webhook.configuration
    yield _MUTATING, seen.settings.scheduler.configuration


def _failed_call(seen: Seen, message: str) -> Finding:
    """In the words of Go's TLS, or of OpenSSL."""
    why = message.partition("failed to call webhook: ")[2] or message
    lower = why.lower()
    logs = f"kubectl -n {seen.namespace} logs deployment/{seen.settings.webhook.service}"
    if REFUSES in why:
        remedy = "add that address to webhook.apiServers and scheduler.apiServers: API_SERVERS=… make deploy"
        return Finding(REACHABLE, Level.FAILED, f"the webhook refuses the API server: {why}", remedy)
    if "expired" in lower or "not yet valid" in lower:
        return Finding(CERTIFICATES, Level.FAILED, f"the webhook's certificate is not valid now: {why}", logs)
    if "x509" in lower or "certificate" in lower or "unable to load root" in lower:
        text = f"the API server does not trust the webhook's certificate: {why}"
        return Finding(BUNDLES, Level.FAILED, text, f"{_PUBLISH}, unless cert-manager does; {logs}")
    remedy = f"kubectl -n {seen.namespace} get pods; {logs}; does a NetworkPolicy keep the API server from it?"
    text = f"the API server does not reach it, so no GPU pod is admitted: {why}"
    return Finding(REACHABLE, Level.FAILED, text, remedy)


def _not_asked(status: int, message: str) -> Finding:
    if status == 201:
        text = "a Pod that asks in two vocabularies at once was admitted: the webhook is not asked about it"
        remedy = "do its failurePolicy, namespaceSelector and matchConditions stand as in manifests/base/webhook.yaml?"
        return Finding(REACHABLE, Level.FAILED, text, remedy)
    if status == 403 and _NO_RIGHT in message:
        text = f"whether it is reached is not known, you may not create Pods here: {message}"
        return Finding(REACHABLE, Level.WARNING, text, _WHERE_ALLOWED)
    text = f"whether it is reached is not known, something else answered first: {status} {message}"
    return Finding(REACHABLE, Level.WARNING, text, _ELSEWHERE)


def _dates(seen: Seen) -> Iterator[Finding]:
    for service, secret in sorted(seen.secrets.items()):
        remedy = f"kubectl -n {seen.namespace} logs deployment/{service} says why it is not renewed"
        if not secret.ours:
            remedy = f"who renews Secret {secret.name}? kubectl -n {seen.namespace} describe certificates"
        for certificate in _chain(secret.files.get(CHAIN, b""))[:1]:
            first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            ends = f"{last:%Y-%m-%d %H:%M} UTC"
            if seen.now > last:
                yield Finding(CERTIFICATES, Level.FAILED, f"that of Secret {secret.name} ended {ends}", remedy)
            elif seen.now < first:
                text = f"that of Secret {secret.name} begins {first:%Y-%m-%d %H:%M} UTC"
                yield Finding(CERTIFICATES, Level.FAILED, text, "are the clocks right?")
            elif last - seen.now < _SOON:
                yield Finding(CERTIFICATES, Level.WARNING, f"that of Secret {secret.name} ends {ends}", remedy)


def _trusted(seen: Seen) -> Iterator[Finding]:
    """Whether each bundle has the issuer of what is served."""
    own = seen.settings
    for service, configuration in (
        (own.webhook.service, own.webhook.configuration),
        (own.webhook.service, f"{_BEFORE_OTHERS}{own.webhook.configuration}"),
        (own.scheduler.service, own.scheduler.configuration),
    ):
        secret = seen.secrets.get(service)
        chain = _chain(secret.files.get(CHAIN, b"")) if secret else ()
        if secret is None or not chain:
            continue
        remedy = _PUBLISH
        if not secret.ours:
            remedy = f"who puts the CA into {configuration}? With cert-manager its cainjector does"
        for found in (*_named(seen, _MUTATING, configuration), *_named(seen, _VALIDATING, configuration)):
            stale = [hook["name"] for hook in hooks(found) if not _issued(chain, _bundle(hook))]
            if stale:
                text = f"{', '.join(stale)}: not the CA of the certificate in Secret {secret.name}"
                yield Finding(BUNDLES, Level.FAILED, text, remedy)


def _named(seen: Seen, kind: str, name: str) -> Sequence[Raw]:
    return [raw for raw in seen.configurations.get(kind, ()) if raw["metadata"]["name"] == name]


def _bundle(hook: Raw) -> bytes:
    return base64.b64decode(str(hook["clientConfig"].get("caBundle") or ""))


def _chain(pem: bytes) -> Sequence[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        return ()


def _issued(chain: Sequence[x509.Certificate], bundle: bytes) -> bool:
    """Whether one of the bundle is, or issued, one of the chain."""
    return any(one == ca or _by(one, ca) for one in chain for ca in _chain(bundle))


def _by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
