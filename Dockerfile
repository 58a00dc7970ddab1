# The images: `operator`, which has no torch, and `agent`. See docs/images.md.
#
#   docker build --target operator --tag weightsync/operator:dev .
#   docker build --target agent --tag weightsync/agent:dev .
#
# What is installed is pinned with hashes in images/*.lock. No stage installs Debian packages.

# To build: Python with venv and pip, its headers, and a C compiler.
ARG BUILD_IMAGE=python:3.11-bookworm
# To run: the same Python at the same place, 3.11 or newer. What it has of pip is removed.
ARG BASE_IMAGE=python:3.11-slim-bookworm

# --- build ------------------------------------------------------------------------------------------------------------

# pip and the build backend, in an environment that no image keeps.
FROM ${BUILD_IMAGE} AS tools
ARG PIP_INDEX_URL=
COPY images/build.lock /opt/
RUN python3 -m venv /opt/tools \
    && /opt/tools/bin/python -m pip install --quiet --no-cache-dir --require-hashes -r /opt/build.lock
# Where a stage comes from the cache, buildah 1.28 mounts it as it was before its last instruction: here that is this one.
WORKDIR /opt

# WeightSync alone, where the images have it.
FROM tools AS weightsync
COPY pyproject.toml README.md /src/
COPY crds /src/crds
COPY operator /src/operator
COPY agent /src/agent
RUN python3 -m venv --without-pip /opt/venv \
    && /opt/tools/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /opt/wheel /src \
    && /opt/tools/bin/python -m pip --python /opt/venv/bin/python install --quiet --no-deps --no-index /opt/wheel/*.whl

# --- what both images have --------------------------------------------------------------------------------------------

FROM ${BASE_IMAGE} AS base
# PYTHON..: the root file system may be read-only, and a line of a log should be there when it is written. HOME: /tmp is
# what a container can write. USER: torch asks for a name, and the user may be any number.
ENV PATH=/opt/venv/bin:$PATH LANG=C.UTF-8 HOME=/tmp USER=weightsync PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
COPY images/without_pip.py /tmp/
RUN python3 /tmp/without_pip.py && rm /tmp/without_pip.py \
    && echo "weightsync:x:65532:65532::/tmp:/usr/sbin/nologin" >> /etc/passwd \
    && echo "weightsync:x:65532:" >> /etc/group \
    && python3 -m venv --without-pip /opt/venv

# --- operator ---------------------------------------------------------------------------------------------------------

FROM base AS operator-packages
ARG PIP_INDEX_URL=
COPY images/operator.lock /opt/packages.lock
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    /opt/tools/bin/python -m pip --python /opt/venv/bin/python install --quiet --no-cache-dir --no-deps \
    --require-hashes -r /opt/packages.lock

FROM operator-packages AS operator
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="WeightSync operator" \
    org.opencontainers.image.description="Brings the WeightSyncs of a Kubernetes cluster to what their specs say" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
COPY --from=weightsync /opt/venv /opt/venv
USER 65532:65532
RUN weightsync-operator --help >/dev/null
EXPOSE 8081
ENTRYPOINT ["weightsync-operator"]

# --- agent ------------------------------------------------------------------------------------------------------------

# torch's is by far the largest layer. It is installed where it stays, as copying it from a stage would double its cost,
# and what it is made from is its lock file alone, so that it is made once a lock file.
FROM base AS agent-packages
# Another torch: `make lock` says how. PIP_EXTRA_INDEX_URL: where it is.
ARG AGENT_LOCK=images/agent.lock
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
COPY ${AGENT_LOCK} /opt/packages.lock
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    /opt/tools/bin/python -m pip --python /opt/venv/bin/python install --quiet --no-cache-dir --no-deps \
    --require-hashes -r /opt/packages.lock

# NVIDIA_..: what the container runtime adds where a pod has a GPU: CUDA, and what memory is measured with. (This is also
# the last instruction of a stage that is mounted, as above.)
ENV CC=/opt/launcher/cc NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Triton compiles one C file at its first use, the same one each time. So that the image needs no compiler, it is done
# here, and `cc` hands it over.
FROM tools AS triton-launcher
ARG AGENT_LOCK=images/agent.lock
COPY ${AGENT_LOCK} images/cc images/prebuild-triton /opt/launcher/
RUN --mount=type=bind,from=agent-packages,source=/opt/venv,target=/opt/venv \
    sh /opt/launcher/prebuild-triton /opt/venv /opt/launcher/out

FROM agent-packages AS agent
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="WeightSync agent" \
    org.opencontainers.image.description="Sends or receives the weights of a model, as a WeightSync says" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
COPY --from=triton-launcher /opt/launcher/out /opt/launcher
COPY --from=weightsync /opt/venv /opt/venv
USER 65532:65532
RUN weightsync-agent --help >/dev/null
ENTRYPOINT ["weightsync-agent"]
