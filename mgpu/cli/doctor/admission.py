"""Checks that the API server reaches and trusts the webhooks for pods and bindings.

`mgpu doctor` runs these checks. `check_admission` must run before `check_bindings`, which gets the names of the failed
checks. A fault that several observations show must be reported only once.
"""

import base64
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from mgpu.cli.doctor.claims import CONFIGURATION
from mgpu.cli.doctor.components import SINGLE_SCHEDULER
from mgpu.cli.doctor.installation import Finding, Installation, Level, Raw, webhooks_of
from mgpu.serving.callers import REFUSES
from mgpu.serving.certificates import CHAIN

REACHABLE, CERTIFICATES, BUNDLES, BINDINGS = "webhook", "certificates", "ca bundles", "bindings"
_CAUSES = {CERTIFICATES, BUNDLES, SINGLE_SCHEDULER}
"""The checks whose failure explains why Bindings do not reach mgpu."""
_MUTATING, _VALIDATING = "mutatingwebhookconfigurations", "validatingwebhookconfigurations"
_SOON = timedelta(days=7)
_OURS = "mgpu.io"
_FIRST_PREFIX = "0-"
"""The prefix of the name of the configuration whose webhooks must be called first. The API server calls webhooks in the
order of the names of their configurations."""
_FORBIDDEN = "cannot create resource"
_PUBLISH_CA = "run manifests/certificates.sh (make deploy runs it), which writes the CA into the configurations"
_TRY_ALLOWED = "run doctor --try-in with a namespace where you may create them; they are only dry runs"
_TRY_OTHER = "run doctor --try-in with another namespace"


def check_admission(installation: Installation) -> list[Finding]:
    """Check that the API server reaches the webhook for pods, and check all certificates and CA bundles."""
    found = [*_check_dates(installation), *_check_bundles(installation)]
    failed = {finding.check for finding in found if finding.level is Level.FAILED}
    found += (finding for finding in _check_dry_run(installation) if finding.check not in failed)
    reported = {finding.check for finding in found}
    passed: list[str] = []
    # If this is false, the dry run does not show whether the API server reaches and trusts the webhook.
    has_answered = not failed and REACHABLE not in reported
    if has_answered:
        passed.append(REACHABLE)
    if has_answered or any(_chain(secret.files.get(CHAIN, b"")) for secret in installation.secrets.values()):
        passed += (CERTIFICATES, BUNDLES)
    return [*found, *(_passed(installation, check) for check in passed if check not in reported)]


def _passed(installation: Installation, check: str) -> Finding:
    """Return the finding of a check that passed. The message names the proof: the certificates, or the dry run."""
    if check == REACHABLE:
        return Finding(check, Level.OK, "the webhook denied a Pod that uses two vocabularies, as it must")
    certificates = {service: _chain(secret.files.get(CHAIN, b"")) for service, secret in installation.secrets.items()}
    if not any(certificates.values()):
        return Finding(check, Level.OK, "the API server trusts the webhook (you may not read the Secrets)")
    if check == BUNDLES:
        return Finding(check, Level.OK, "the webhook configurations trust the certificates that are served")
    expiries = (
        f"{n.removesuffix('-tls')} until {c[0].not_valid_after_utc:%Y-%m-%d}" for n, c in certificates.items() if c
    )
    return Finding(check, Level.OK, ", ".join(expiries))


def _check_dry_run(installation: Installation) -> Iterator[Finding]:
    """Report missing webhook configurations, or else the reason why mgpu did not deny the dry run of a Pod."""
    message = installation.pod_dry_run.message
    missing = [
        f"{kind.removesuffix('s')} {name}"
        for kind, name in _expected_configurations(installation)
        if kind not in installation.hidden and not _named(installation, kind, name)
    ]
    if missing:
        text = f"there is no {' and no '.join(missing)}"
        remedy = "apply the overlay again as it was installed: make deploy, or kubectl apply --server-side -k"
        yield Finding(REACHABLE, Level.FAILED, text, remedy)
    elif "failed calling webhook" in message and _OURS in message:
        yield _failed_call(installation, message)
    elif "failed calling webhook" in message or not installation.pod_dry_run.is_denied:
        yield _not_called(installation.pod_dry_run.status, message)


def check_bindings(installation: Installation, failed: Collection[str]) -> Iterator[Finding]:
    """Check that Bindings reach mgpu. If they do not, the API server admits them all, because failurePolicy is Ignore.

    Args:
        failed: the names of the checks that have failed. If one of them explains why Bindings do not reach mgpu, this
            check does not report a failure.
    """
    status, message = installation.binding_dry_run.status, installation.binding_dry_run.message
    own = installation.settings.scheduler
    if installation.binding_dry_run.is_denied:
        yield Finding(BINDINGS, Level.OK, "mgpu denied the Binding of a Pod that does not exist, so Bindings reach it")
    elif status == 403 and _FORBIDDEN in message:
        text = f"it is unknown whether Bindings reach mgpu, because you may not create them: {message}"
        yield Finding(BINDINGS, Level.WARNING, text, _TRY_ALLOWED)
    elif status != 404 or 'pods "' not in message:
        text = f"it is unknown whether Bindings reach mgpu, because something else answered first: {status} {message}"
        yield Finding(BINDINGS, Level.WARNING, text, _TRY_OTHER)
    elif _CAUSES.isdisjoint(failed) and _named(installation, _MUTATING, own.configuration):
        text = "Bindings do not reach mgpu: GPU pods get their cards late, or fail if none fit"
        logs = f"{installation.kubectl} logs deployment/{own.service}"
        remedy = f"{logs}; check NetworkPolicies and the rules of {own.configuration}"
        yield Finding(BINDINGS, Level.FAILED, text, remedy)


def _expected_configurations(installation: Installation) -> Iterator[tuple[str, str]]:
    """Yield the kind and the name of each of mgpu's webhook configurations."""
    yield _MUTATING, installation.settings.webhook.configuration
    yield _MUTATING, f"{_FIRST_PREFIX}{installation.settings.webhook.configuration}"
    yield _VALIDATING, installation.settings.webhook.configuration
    yield _MUTATING, installation.settings.scheduler.configuration


def _failed_call(installation: Installation, message: str) -> Finding:
    """Return the finding that follows from the error message of Go's TLS library or, in the playground, of OpenSSL."""
    cause = message.partition("failed to call webhook: ")[2] or message
    lower = cause.lower()
    logs = f"{installation.kubectl} logs deployment/{installation.settings.webhook.service}"
    if REFUSES in cause:
        remedy = "add that address: API_SERVERS=… make deploy, or with Helm the value apiServers.addresses"
        return Finding(REACHABLE, Level.FAILED, f"the webhook rejects the API server: {cause}", remedy)
    if "expired" in lower or "not yet valid" in lower:
        return Finding(CERTIFICATES, Level.FAILED, f"the webhook's certificate is not valid now: {cause}", logs)
    if "x509" in lower or "certificate" in lower or "unable to load root" in lower:
        text = f"the API server does not trust the webhook's certificate: {cause}"
        return Finding(BUNDLES, Level.FAILED, text, f"{_PUBLISH_CA}, unless cert-manager does that; {logs}")
    remedy = f"{installation.kubectl} get pods; {logs}; check NetworkPolicies"
    text = f"the API server does not reach the webhook, so no GPU pod is admitted: {cause}"
    return Finding(REACHABLE, Level.FAILED, text, remedy)


def _not_called(status: int, message: str) -> Finding:
    if status == 201:
        text = "a Pod that uses two vocabularies was admitted: the API server does not call the webhook"
        remedy = "compare its failurePolicy, namespaceSelector and matchConditions with manifests/base/webhook.yaml"
        return Finding(REACHABLE, Level.FAILED, text, remedy)
    if status == 403 and _FORBIDDEN in message:
        text = f"it is unknown whether the API server reaches the webhook, because you may not create Pods: {message}"
        return Finding(REACHABLE, Level.WARNING, text, _TRY_ALLOWED)
    unknown = "it is unknown whether the API server reaches the webhook"
    text = f"{unknown}, because something else answered first: {status} {message}"
    return Finding(REACHABLE, Level.WARNING, text, _TRY_OTHER)


def _check_dates(installation: Installation) -> Iterator[Finding]:
    for service, secret in sorted(installation.secrets.items()):
        remedy = f"{installation.kubectl} logs deployment/{service} shows why it is not renewed"
        if not secret.is_renewed_by_mgpu:
            remedy = f"check what renews Secret {secret.name}: {installation.kubectl} describe certificates"
        name = f"the certificate in Secret {secret.name}"
        for certificate in _chain(secret.files.get(CHAIN, b""))[:1]:
            first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            expiry = f"{last:%Y-%m-%d %H:%M} UTC"
            if installation.now > last:
                yield Finding(CERTIFICATES, Level.FAILED, f"{name} expired {expiry}", remedy)
            elif installation.now < first:
                text = f"{name} is valid from {first:%Y-%m-%d %H:%M} UTC on"
                yield Finding(CERTIFICATES, Level.FAILED, text, "check the clocks")
            elif last - installation.now < _SOON:
                yield Finding(CERTIFICATES, Level.WARNING, f"{name} expires {expiry}", remedy)


def _check_bundles(installation: Installation) -> Iterator[Finding]:
    """Check that each CA bundle contains a certificate of the served chain, or the issuer of one."""
    own = installation.settings
    for service, configuration in (
        (own.webhook.service, own.webhook.configuration),
        (own.webhook.service, f"{_FIRST_PREFIX}{own.webhook.configuration}"),
        (own.scheduler.service, own.scheduler.configuration),
        (own.scheduler.service, CONFIGURATION),
    ):
        secret = installation.secrets.get(service)
        chain = _chain(secret.files.get(CHAIN, b"")) if secret else ()
        if secret is None or not chain:
            continue
        remedy = _PUBLISH_CA
        if not secret.is_renewed_by_mgpu:
            remedy = f"check what puts the CA into {configuration}; with cert-manager its cainjector does"
        for raw in (
            *_named(installation, _MUTATING, configuration),
            *_named(installation, _VALIDATING, configuration),
        ):
            stale = [hook["name"] for hook in webhooks_of(raw) if not _is_trusted(chain, _bundle(hook))]
            if stale:
                text = f"{', '.join(stale)}: the CA bundle does not fit the certificate in Secret {secret.name}"
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


def _is_trusted(chain: Sequence[x509.Certificate], bundle: bytes) -> bool:
    """Return whether a certificate of the bundle is in the chain, or has issued a certificate in it."""
    return any(cert == ca or _is_issued_by(cert, ca) for cert in chain for ca in _chain(bundle))


def _is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
