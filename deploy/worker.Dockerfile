# The worker. Target `cpu` (the last, so the default) has CPU builds of torch and the native kernels;
# target `cuda` has CUDA builds of torch, Triton, and the C compiler that Triton calls at run time.
ARG BASE_IMAGE=python:3.11-slim-bookworm

# ------------------------------------------------------------------- what both targets build on
FROM ${BASE_IMAGE} AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
WORKDIR /build
COPY pyproject.toml constraints.txt deploy/requirements.py ./
# No gRPC and no text handling here: those are the scheduler's.
RUN python requirements.py --extra worker --without torch triton typer rich uvloop tokenizers \
        jinja2 grpcio grpcio-health-checking grpcio-reflection grpcio-status > requirements.txt \
    && grep -i '^torch==' constraints.txt > torch.txt

FROM ${BASE_IMAGE} AS runtime
RUN groupadd --gid 10001 quire \
    && useradd --uid 10001 --gid quire --no-create-home --shell /usr/sbin/nologin quire \
    && install -d -o quire -g quire /models /var/cache/triton \
    && install -d -o quire -g quire -m 0700 /run/quire
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
WORKDIR /app
COPY deploy/check_worker.py /app/
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 \
    CMD ["python", "check_worker.py"]
ENTRYPOINT ["python", "-m", "worker_svc"]

# ---------------------------------------------------------------------------------------- CUDA
FROM build AS build-cuda
# Of these builds, the index has those for the CUDA version in its name.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
RUN --mount=type=cache,target=/var/cache/pip \
    /opt/venv/bin/pip install --disable-pip-version-check --cache-dir=/var/cache/pip --retries 1 \
        ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} -r torch.txt \
    && /opt/venv/bin/pip install --disable-pip-version-check --cache-dir=/var/cache/pip -c constraints.txt \
        -r requirements.txt triton

FROM runtime AS cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-cuda /opt/venv /opt/venv
COPY protos /app/protos
COPY shared /app/shared
COPY kernels /app/kernels
COPY worker_svc /app/worker_svc
ENV TRITON_CACHE_DIR=/var/cache/triton
USER 10001:10001

# ----------------------------------------------------------------------------------------- CPU
FROM build AS build-cpu
# Where CPU builds of torch come from; empty leaves it to pip's own settings.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/var/cache/pip \
    /opt/venv/bin/pip install --disable-pip-version-check --cache-dir=/var/cache/pip --retries 1 \
        ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} -r torch.txt \
    && /opt/venv/bin/pip install --disable-pip-version-check --cache-dir=/var/cache/pip -c constraints.txt \
        -r requirements.txt
COPY shared ./shared
COPY kernels ./kernels
# The machine that runs the image is another than builds it: every instruction set is compiled.
RUN if [ "$(uname -m)" = x86_64 ]; then sets="avx512 avxvnni avx2 portable"; else sets=portable; fi \
    && /opt/venv/bin/python -m kernels.cpu build --isa $sets

FROM runtime AS cpu
COPY --from=build-cpu /opt/venv /opt/venv
COPY protos /app/protos
COPY shared /app/shared
COPY --from=build-cpu /build/kernels /app/kernels
COPY worker_svc /app/worker_svc
USER 10001:10001
