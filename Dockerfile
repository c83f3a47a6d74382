# One image for the three processes and the commands that ask a cluster: `mgpu webhook`, `mgpu scheduler`,
# `mgpu deviceplugin`, `mgpu inspect`, `mgpu doctor`. It has neither the playground nor the tests, nor their libraries.
#
#   make image IMAGE=mgpu:0.1.0
#
# Another base image that has Python 3.11 or newer, glibc (NVIDIA's driver library needs it) and libstdc++: BASE=…, with
# its digest (`docker buildx imagetools inspect NAME:TAG` shows it). A tag alone is refused: what it stands for changes,
# and with it what runs with mgpu's rights. Libraries come by the hashes of requirements/.
ARG BASE=python:3.13-slim@sha256:7c61056e61ac89e852de05f3dc6fa51a6dd2181797bceed46aa725dd7cb2cd3b

FROM ${BASE} AS build
ARG BASE
RUN case "${BASE}" in *@sha256:*) ;; *) echo "BASE must name its digest (NAME:TAG@sha256:...), not ${BASE}" >&2; exit 1 ;; esac
WORKDIR /src
# Nothing is compiled: every library comes as a wheel.
COPY requirements/build.txt requirements/
RUN python3 -m venv /opt/tools \
 && /opt/tools/bin/pip install --no-cache-dir --disable-pip-version-check --only-binary :all: --require-hashes \
      -r requirements/build.txt
ARG SOURCE_DATE_EPOCH=0
COPY requirements/runtime.txt requirements/
COPY image image
RUN /opt/tools/bin/python -m image.environment libraries /layers/libraries
COPY pyproject.toml setup.py README.md ./
COPY mgpu mgpu
COPY webhook webhook
COPY scheduler scheduler
COPY deviceplugin deviceplugin
COPY proto proto
ARG MGPU_COMMIT=unknown
RUN /opt/tools/bin/python -m image.environment mgpu /layers/mgpu \
 && /opt/tools/bin/python -m image.layers /layers/libraries /layers/mgpu
# Here, as in the image, all commands must start.
RUN cp -a /layers/libraries/. /layers/mgpu/. / \
 && for command in webhook scheduler deviceplugin inspect explain top doctor completion; do \
      /opt/mgpu/bin/mgpu "$command" --help >/dev/null || exit 1; done

FROM ${BASE}
ARG MGPU_COMMIT=unknown
LABEL org.opencontainers.image.revision=${MGPU_COMMIT}
COPY --from=build /layers/libraries/ /
COPY --from=build /layers/mgpu/ /
# The root is read-only in a cluster: bytecode was written when the image was built.
ENV PATH=/opt/mgpu/bin:$PATH PYTHONDONTWRITEBYTECODE=1
# The agent alone runs as root, as its DaemonSet says.
USER 65532:65532
ENTRYPOINT ["mgpu"]
CMD ["--help"]
