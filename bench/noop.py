"""The playground's cluster with a no-op webhook and scheduler, as a baseline for `endtoend` and `admission`."""

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from flask import Flask, Response, jsonify, request

from mgpu.serving.app import new_app, serve_probe, serve_probes, serve_reviews
from mgpu.serving.certificate_folder import CertificateFolder
from mgpu.serving.certificates import ensure_certificate
from mgpu.serving.review import allow
from mgpu.serving.server import Listen, serve
from playground.cluster import Cluster


class NoOp(Cluster):
    """A cluster whose webhook and scheduler answer every call at once and decide nothing.

    They have as many processes and threads as the real ones.
    """

    def commands(self, ports: Mapping[str, int]) -> dict[str, list[str]]:
        run = [sys.executable, "-c", "from bench.noop import serve_nothing; serve_nothing()"]
        own = {service: str(folder) for service, folder in self.certificates.items()}
        return {
            "webhook": [*run, "webhook", own["mgpu-webhook"], str(ports["webhook"])],
            "scheduler": [*run, "scheduler", own["mgpu-scheduler"], str(ports["scheduler"]), str(ports["extender"])],
        }


def serve_nothing() -> None:
    """Run the no-op webhook or the no-op scheduler: allow every review, and let every node pass the filter.

    The arguments of the command line are the name of the process, a folder with a CA, a port, and for the scheduler the
    port of the extender.
    """
    process, certificates, port, *extender_port = sys.argv[1:]
    app = new_app()
    serve_probes(app)
    serve_probe(app, "/leads", lambda: None)
    for path, kind in (("/mutate", "Pod"), ("/validate", "Pod"), ("/bind-admission", "Binding")):
        serve_reviews(app, path, allow, kinds=(kind,))
    _add_extender(app)
    folder = CertificateFolder(Path(certificates))
    ensure_certificate(folder, {"127.0.0.1"}, datetime.now(UTC))
    listen = [Listen("127.0.0.1", int(port), app.wsgi_app)]
    listen += [Listen("127.0.0.1", int(p), app.wsgi_app, tls=False) for p in extender_port]
    # The real webhook has two workers, and the real scheduler has one.
    serve(listen, certificate=(folder.chain, folder.key), workers=1 if process == "scheduler" else 2)


def _add_extender(app: Flask) -> None:
    def filter_all() -> Response:
        return jsonify({"NodeNames": request.get_json()["NodeNames"], "FailedNodes": {}})

    def score_none() -> Response:
        return jsonify([{"Host": name, "Score": 0} for name in request.get_json()["NodeNames"]])

    app.add_url_rule("/filter", "filter", filter_all, methods=["POST"])
    app.add_url_rule("/prioritize", "prioritize", score_none, methods=["POST"])
