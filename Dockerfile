# The exporter in a container: 25 MB more than Python itself, no compiler, no pip, no root.
#
#   docker build -t mps-exporter .
#   docker run --rm --gpus all --pid host -p 9400:9400 mps-exporter
#   docker run --rm -p 9400:9400 mps-exporter demo --web.listen-address=:9400   # without a GPU
#
# The NVIDIA library and nvidia-cuda-mps-control come from the host: NVIDIA's container runtime
# mounts them, as the two NVIDIA_ variables below ask it to. docs/deployment.md says which further
# rights and mounts buy which metrics.
#
# The digest is that of the index of all platforms. Dependabot proposes the next one.
ARG PYTHON_IMAGE=python:3.12.14-slim-trixie@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1
WORKDIR /src

# Locked, hashed, wheels only: nothing is compiled, and no package's setup code runs.
COPY requirements.lock requirements-dev.lock ./
RUN python -m venv --without-pip /opt/mps-exporter \
 && pip --python /opt/mps-exporter/bin/python install \
      --require-hashes --only-binary :all: --no-deps -r requirements.lock \
 && awk '/^[a-z]/ { keep = /^(hatchling|packaging|pathspec|pluggy|tomlkit|trove-classifiers)==/ } keep' \
      requirements-dev.lock >build.lock \
 && pip install --require-hashes --only-binary :all: -r build.lock

COPY pyproject.toml README.md LICENSE ./
COPY exporter exporter
# The manual, and the programs that end jobs: the wheel has them, too.
COPY docs docs
COPY prometheus/runbooks prometheus/runbooks
COPY deploy/jobs deploy/jobs
COPY deploy/image/sbom.py sbom.py
RUN pip wheel --no-build-isolation --no-deps --wheel-dir /wheels . \
 && pip --python /opt/mps-exporter/bin/python install --no-index --no-deps /wheels/*.whl

FROM ${PYTHON_IMAGE}
ARG VERSION=0.0.0
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
LABEL org.opencontainers.image.title="mps-exporter" \
      org.opencontainers.image.description="Prometheus exporter for NVIDIA MPS" \
      org.opencontainers.image.source="https://github.com/mps-exporter/mps-exporter" \
      org.opencontainers.image.documentation="https://github.com/mps-exporter/mps-exporter/blob/main/docs/deployment.md" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      io.github.mps-exporter.sbom="/opt/mps-exporter/sbom.cdx.json"

COPY --from=build /opt/mps-exporter /opt/mps-exporter
COPY --chmod=755 deploy/image/entrypoint.sh /opt/mps-exporter/bin/entrypoint
# setpriv with the three file capabilities lets the entrypoint hand on, as a user that is not root,
# what `--cap-add` granted; where nothing was granted it can hand on nothing.
RUN --mount=type=bind,from=build,source=/src/sbom.py,target=/tmp/sbom.py \
    python -m pip uninstall --yes --quiet --root-user-action=ignore pip \
 && rm -rf /usr/local/lib/python3*/ensurepip /root/.cache \
 && mkdir /opt/mps-exporter/libexec \
 && cp /usr/bin/setpriv /opt/mps-exporter/libexec/setpriv \
 && python -c 'import os, struct; os.setxattr("/opt/mps-exporter/libexec/setpriv", "security.capability", struct.pack("<5I", 0x02000000, 1 << 2 | 1 << 19, 0, 1 << 34 - 32, 0))' \
 && /opt/mps-exporter/bin/python /tmp/sbom.py >/opt/mps-exporter/sbom.cdx.json

ENV PATH=/opt/mps-exporter/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    MPS_EXPORTER_BUILD_REVISION=${REVISION} \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=utility,compute
USER 64730:64730
EXPOSE 9400
# Says whether the program runs, not whether GPUs or MPS are well: that is for alerts.
HEALTHCHECK --interval=30s --timeout=5s --start-period=15s --retries=3 \
  CMD ["/opt/mps-exporter/bin/python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9400/-/healthy', timeout=4)"]
ENTRYPOINT ["/opt/mps-exporter/bin/entrypoint"]
CMD ["serve"]
