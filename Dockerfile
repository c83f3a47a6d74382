# One image for the three processes and the command line: `mgpu webhook`, `mgpu scheduler`, `mgpu deviceplugin`.
#
#   docker build -t mgpu:0.1.0 .
#
# Another base image that has Python 3.11 or newer and glibc (NVIDIA's driver library needs it): --build-arg BASE=…
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
WORKDIR /src
# Nothing is compiled: every library comes as a wheel.
RUN python -m venv /opt/mgpu
COPY pyproject.toml README.md ./
COPY mgpu mgpu
COPY webhook webhook
COPY scheduler scheduler
COPY deviceplugin deviceplugin
COPY playground playground
COPY proto proto
RUN /opt/mgpu/bin/pip install --no-cache-dir --disable-pip-version-check --only-binary :all: "setuptools>=77" wheel \
 && /opt/mgpu/bin/pip install --no-cache-dir --disable-pip-version-check --only-binary :all: --no-build-isolation . \
 && /opt/mgpu/bin/pip uninstall --yes --quiet setuptools wheel pip

FROM ${BASE}
COPY --from=build /opt/mgpu /opt/mgpu
# The root is read-only in a cluster: bytecode was written when it was installed.
ENV PATH=/opt/mgpu/bin:$PATH PYTHONDONTWRITEBYTECODE=1
# The agent alone runs as root, as its DaemonSet says.
USER 65532:65532
ENTRYPOINT ["mgpu"]
CMD ["--help"]
