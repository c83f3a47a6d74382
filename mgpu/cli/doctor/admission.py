"""Checks that the API server reaches and trusts the webhooks for pods and bindings. Pure."""

import base64
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from mgpu.cli.doctor.components import DECIDES
from mgpu.cli.doctor.installation import Finding, Installation, Level, Raw, webhooks_of
from mgpu.serving.callers import REFUSES
from mgpu.serving.certificates import CHAIN

REACHABLE, CERTIFICATES, BUNDLES, BINDINGS = "webhook", "certificates", "ca bundles", "bindings"
_REASONS = {CERTIFICATES, BUNDLES, DECIDES}
"""Checks whose failure explains why Bindings do not reach mgpu."""
_MUTATING, _VALIDATING = "mutatingwebhookconfigurations", "validatingwebhookconfigurations"
_SOON = timedelta(days=7)
_OURS = "mgpu.io"
_BEFORE_OTHERS = "0-"
"""The prefix of the configuration that the API server calls first: it calls them in the order of their names."""
_NO_RIGHT = "cannot create resource"
_PUBLISH = "manifests/certificates.sh puts the CA in (make deploy does too)"
_WHERE_ALLOWED = "doctor --try-in a namespace where you may (it is a dry run)"
_ELSEWHERE = "doctor --try-in another namespace"


def check_admission(installation: Installation) -> list[Finding]:
    """Make the checks of reachability, certificates and CA bundles. One fault shows in several; it is reported once."""
    by_files = [*_dates(installation), *_trusted(installation)]
    told = {finding.check for finding in by_files if finding.level is Level.FAILED}
    found = [*by_files, *(finding for finding in _of_trial(installation) if finding.check not in told)]
    bad = {finding.check for finding in found}
    asked = not told and REACHABLE not in bad  # otherwise the result of the dry run says nothing
    read = any(_chain(secret.files.get(CHAIN, b"")) for secret in installation.secrets.values())
    well = [REACHABLE] * asked + [CERTIFICATES, BUNDLES] * (asked or read)
    return [*found, *(_well(installation, check) for check in well if check not in bad)]


def _well(installation: Installation, check: str) -> Finding:
    """Report a check that passed: by what was read, or because the webhook answered the dry run."""
    if check == REACHABLE:
        return Finding(check, Level.OK, "the webhook denied a Pod that uses two vocabularies, as it must")
    certificates = {service: _chain(secret.files.get(CHAIN, b"")) for service, secret in installation.secrets.items()}
    if not any(certificates.values()):
        return Finding(check, Level.OK, "the API server trusts the webhook (you may not read the Secrets)")
    if check == BUNDLES:
        return Finding(check, Level.OK, "the webhook configurations trust the certificates that are served")
    until = (
        f"{n.removesuffix('-tls')} until {c[0].not_valid_after_utc:%Y-%m-%d}" for n, c in certificates.items() if c
    )
    return Finding(check, Level.OK, ", ".join(until))


def _of_trial(installation: Installation) -> Iterator[Finding]:
    status, message = installation.tried.status, installation.tried.message
    missing = [
        f"{kind.removesuffix('s')} {name}"
        for kind, name in _wanted(installation)
        if kind not in installation.hidden and not _named(installation, kind, name)
    ]
    if missing:
        text = f"there is no {' and no '.join(missing)}"
        remedy = "apply the overlay again as it was installed: make deploy, or kubectl apply --server-side -k"
        yield Finding(REACHABLE, Level.FAILED, text, remedy)
    elif "failed calling webhook" in message and _OURS in message:
        yield _failed_call(installation, message)
    elif "failed calling webhook" in message or not installation.tried.denied:
        yield _not_asked(status, message)


def check_bindings(installation: Installation, told: Collection[str]) -> Iterator[Finding]:
    """Check that Bindings reach mgpu. With failurePolicy Ignore they all pass if it cannot be reached.

    told: the checks that have failed; one of them can be the reason, which is not reported twice.
    """
    status, message = installation.bound.status, installation.bound.message
    own = installation.settings.scheduler
    if installation.bound.denied:
        yield Finding(BINDINGS, Level.OK, "mgpu refused the Binding of a Pod that does not exist, so Bindings reach it")
    elif status == 403 and _NO_RIGHT in message:
        text = f"unknown whether Bindings reach mgpu, because you may not create them here: {message}"
        yield Finding(BINDINGS, Level.WARNING, text, _WHERE_ALLOWED)
    elif status != 404 or 'pods "' not in message:
        text = f"unknown whether Bindings reach mgpu, because something else answered first: {status} {message}"
        yield Finding(BINDINGS, Level.WARNING, text, _ELSEWHERE)
    elif _REASONS.isdisjoint(told) and _named(installation, _MUTATING, own.configuration):
        text = "Bindings do not reach mgpu: GPU pods get their cards late, or fail if none fit"
        logs = f"{installation.kubectl} logs deployment/{own.service}"
        remedy = f"{logs}; check NetworkPolicies and the rules of {own.configuration}"
        yield Finding(BINDINGS, Level.FAILED, text, remedy)


def _wanted(installation: Installation) -> Iterator[tuple[str, str]]:
    """Iterate over (kind, name) of mgpu's webhook configurations."""
    yield _MUTATING, installation.settings.webhook.configuration
    yield _MUTATING, f"{_BEFORE_OTHERS}{installation.settings.webhook.configuration}"
    yield _VALIDATING, installation.settings.webhook.configuration
    yield _MUTATING, installation.settings.scheduler.configuration


def _failed_call(installation: Installation, message: str) -> Finding:
    """Classify a failed call by its message, which comes from Go's TLS library, or in the playground from OpenSSL."""
    why = message.partition("failed to call webhook: ")[2] or message
    lower = why.lower()
    logs = f"{installation.kubectl} logs deployment/{installation.settings.webhook.service}"
    if REFUSES in why:
        remedy = "add that address to webhook.apiServers and scheduler.apiServers: API_SERVERS=… make deploy"
        return Finding(REACHABLE, Level.FAILED, f"the webhook refuses the API server: {why}", remedy)
    if "expired" in lower or "not yet valid" in lower:
        return Finding(CERTIFICATES, Level.FAILED, f"the webhook's certificate is not valid now: {why}", logs)
    if "x509" in lower or "certificate" in lower or "unable to load root" in lower:
        text = f"the API server does not trust the webhook's certificate: {why}"
        return Finding(BUNDLES, Level.FAILED, text, f"{_PUBLISH}, unless cert-manager does; {logs}")
    remedy = f"{installation.kubectl} get pods; {logs}; check NetworkPolicies"
    text = f"the API server does not reach the webhook, so no GPU pod is admitted: {why}"
    return Finding(REACHABLE, Level.FAILED, text, remedy)


def _not_asked(status: int, message: str) -> Finding:
    if status == 201:
        text = "a Pod that uses two vocabularies was admitted: the API server does not call the webhook"
        remedy = "compare its failurePolicy, namespaceSelector and matchConditions with manifests/base/webhook.yaml"
        return Finding(REACHABLE, Level.FAILED, text, remedy)
    if status == 403 and _NO_RIGHT in message:
        text = f"unknown whether the webhook is reached, because you may not create Pods here: {message}"
        return Finding(REACHABLE, Level.WARNING, text, _WHERE_ALLOWED)
    text = f"unknown whether the webhook is reached, because something else answered first: {status} {message}"
    return Finding(REACHABLE, Level.WARNING, text, _ELSEWHERE)


def _dates(installation: Installation) -> Iterator[Finding]:
    for service, secret in sorted(installation.secrets.items()):
        remedy = f"{installation.kubectl} logs deployment/{service} says why it is not renewed"
        if not secret.ours:
            remedy = f"check what renews Secret {secret.name}: {installation.kubectl} describe certificates"
        for certificate in _chain(secret.files.get(CHAIN, b""))[:1]:
            first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            ends = f"{last:%Y-%m-%d %H:%M} UTC"
            if installation.now > last:
                yield Finding(CERTIFICATES, Level.FAILED, f"that of Secret {secret.name} ended {ends}", remedy)
            elif installation.now < first:
                text = f"that of Secret {secret.name} begins {first:%Y-%m-%d %H:%M} UTC"
                yield Finding(CERTIFICATES, Level.FAILED, text, "check the clocks")
            elif last - installation.now < _SOON:
                yield Finding(CERTIFICATES, Level.WARNING, f"that of Secret {secret.name} ends {ends}", remedy)


def _trusted(installation: Installation) -> Iterator[Finding]:
    """Check that each CA bundle contains the issuer of the certificate that is served."""
    own = installation.settings
    for service, configuration in (
        (own.webhook.service, own.webhook.configuration),
        (own.webhook.service, f"{_BEFORE_OTHERS}{own.webhook.configuration}"),
        (own.scheduler.service, own.scheduler.configuration),
    ):
        secret = installation.secrets.get(service)
        chain = _chain(secret.files.get(CHAIN, b"")) if secret else ()
        if secret is None or not chain:
            continue
        remedy = _PUBLISH
        if not secret.ours:
            remedy = f"check what puts the CA into {configuration}; with cert-manager its cainjector does"
        for found in (
            *_named(installation, _MUTATING, configuration),
            *_named(installation, _VALIDATING, configuration),
        ):
            stale = [hook["name"] for hook in webhooks_of(found) if not _issued(chain, _bundle(hook))]
            if stale:
                text = f"{', '.join(stale)}: not the CA of the certificate in Secret {secret.name}"
                yield Finding(BUNDLES, Level.FAILED, text, remedy)


def _named(installation: Installation, kind: str, name: str) -> Sequence[Raw]:
    return [raw for raw in installation.configurations.get(kind, ()) if raw["metadata"]["name"] == name]


def _bundle(hook: Raw) -> bytes:
    return base64.b64decode(str(hook["clientConfig"].get("caBundle") or ""))


def _chain(pem: bytes) -> Sequence[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        return ()


def _issued(chain: Sequence[x509.Certificate], bundle: bytes) -> bool:
    """Whether a certificate of the bundle is in the chain, or issued one of it."""
    return any(one == ca or _by(one, ca) for one in chain for ca in _chain(bundle))


def _by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
