"""A server in a process of its own, and a client for it."""

import json
import os
import selectors
import signal
import socket
import ssl
import struct
import subprocess
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mgpu.serving.certificate_folder import CertificateFolder
from mgpu.serving.certificates import CA, CA_KEY
from tests import warm

DEADLINE = 60.0  # only a limit for processes that hang


class Server:
    """A process of Python with these arguments. It is ready when it has printed `serving …` for all `addresses`."""

    def __init__(self, *arguments: str, addresses: int = 1) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KUBERNETES_")}
        said, output = os.pipe()
        self.process = warm.fork(arguments, environment, output)
        os.close(output)
        self._stdout = open(said, "rb", buffering=0)  # noqa: SIM115, closed by `close`
        os.set_blocking(said, False)
        self._said = b""
        self.ports = [int(self.wait_for(b"serving ").rsplit(b":", 1)[1]) for _ in range(addresses)]

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_for(self, start: bytes) -> bytes:
        """Return the next line on stdout that starts like this."""
        ends = time.monotonic() + DEADLINE
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while time.monotonic() < ends:
                *lines, _ = self._said.split(b"\n")
                for line in lines:
                    self._said = self._said[len(line) + 1 :]
                    if line.startswith(start):
                        return line
                selector.select(1.0)
                self._said += self._stdout.read() or b""
                if self.process.poll() is not None and b"\n" not in self._said:
                    raise AssertionError(f"the server ended with {self.process.returncode}")
        raise AssertionError(f"nothing starting with {start!r} within {DEADLINE} s")

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def join(self) -> int:
        return self.process.wait(DEADLINE)

    def close(self) -> None:
        self.terminate()
        try:
            self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.kill()  # the kernel kills its workers too
            self.process.wait()
        self._stdout.close()


def sample(folder: CertificateFolder, *mode: str, addresses: int = 3) -> Server:
    """Start a server of `tests.mgpu.serving.sample`."""
    return Server("-m", "tests.mgpu.serving.sample", str(folder.path), *mode, addresses=addresses)


@dataclass
class Client:
    """A connection: over TLS with a CA bundle or a context, otherwise plain. source: the address of the client."""

    port: int
    ca: Path | None = None
    host: str = "127.0.0.1"
    context: ssl.SSLContext | None = None
    source: str = "127.0.0.1"
    wire: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        raw = socket.create_connection(("127.0.0.1", self.port), DEADLINE, (self.source, 0))
        if self.ca or self.context:
            context = self.context or ssl.create_default_context(cafile=str(self.ca))
            raw = context.wrap_socket(raw, server_hostname=self.host)
        self.wire = raw

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.wire.close()

    def send(
        self, body: bytes, path: str, content_type: str = "application/json", method: str = "POST", part: int = 0
    ) -> None:
        """Send a request, or only the first `part` bytes of its body."""
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: {content_type}\r\n"
        sent = body[:part] if part else body
        self.wire.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + sent)

    def receive(self) -> tuple[int, dict[str, str], bytes]:
        response = HTTPResponse(self.wire)
        try:
            response.begin()
            return response.status, dict(response.headers), response.read()
        finally:
            response.close()

    def request(self, tree: Any, path: str, **how: Any) -> tuple[int, Any]:
        """Send a request, and return the status and the decoded answer."""
        self.send(tree if isinstance(tree, bytes) else json.dumps(tree).encode(), path, **how)
        status, _, body = self.receive()
        return status, json.loads(body)

    def serial(self) -> str:
        """Return the serial number of the server's certificate."""
        assert isinstance(self.wire, ssl.SSLSocket)
        certificate: Any = self.wire.getpeercert()
        return str(certificate["serialNumber"])

    def data_segments(self) -> int:
        """Return the number of received segments with data (Linux `struct tcp_info`, tcpi_data_segs_in)."""
        info = self.wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        (count,) = struct.unpack_from("=I", info, 152)
        return int(count)


def client_certificate(folder: CertificateFolder, where: Path) -> Path:
    """Create a file with a client's certificate, signed by the CA of `folder`, and its key."""
    ca = x509.load_pem_x509_certificate((folder.path / CA).read_bytes())
    signer: Any = load_pem_private_key((folder.path / CA_KEY).read_bytes(), None)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-scheduler")])
    builder = x509.CertificateBuilder(ca.subject, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(hours=1))
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    made = builder.add_extension(usage, critical=False).sign(signer, hashes.SHA256())
    file = where / "client.pem"
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.write_bytes(made.public_bytes(Encoding.PEM) + secret)
    return file
