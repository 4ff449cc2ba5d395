# The scheduler: gRPC, text and planning. No torch, no compiler.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
RUN python -m venv /opt/venv
WORKDIR /build
COPY pyproject.toml constraints.txt deploy/requirements.py ./
RUN --mount=type=cache,target=/var/cache/pip \
    python requirements.py --without typer rich > requirements.txt \
    && /opt/venv/bin/pip install --disable-pip-version-check --cache-dir=/var/cache/pip -c constraints.txt \
        -r requirements.txt

FROM ${BASE_IMAGE}
RUN groupadd --gid 10001 quire \
    && useradd --uid 10001 --gid quire --no-create-home --shell /usr/sbin/nologin quire \
    && install -d -o quire -g quire /models \
    && install -d -o quire -g quire -m 0700 /run/quire
COPY --from=build /opt/venv /opt/venv
COPY protos /app/protos
COPY shared /app/shared
COPY scheduler_svc /app/scheduler_svc
COPY deploy/check_scheduler.py /app/
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
WORKDIR /app
USER 10001:10001
EXPOSE 50051 50053
HEALTHCHECK --interval=10s --timeout=10s --start-period=120s --retries=3 \
    CMD ["python", "check_scheduler.py"]
ENTRYPOINT ["python", "-m", "scheduler_svc"]
