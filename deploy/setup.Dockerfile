# The one-shot service that places the demonstration model and the worker plane's secret.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS model
COPY deploy/fetch_model.sh /build/
RUN bash /build/fetch_model.sh /opt/model

FROM ${BASE_IMAGE}
# Volumes take the owner of the folder that they are first mounted over.
RUN groupadd --gid 10001 quire \
    && useradd --uid 10001 --gid quire --no-create-home --shell /usr/sbin/nologin quire \
    && install -d -o quire -g quire /models \
    && install -d -o quire -g quire -m 0700 /run/quire
COPY --from=model /opt/model /opt/model
COPY deploy/setup.sh /app/
COPY shared/__init__.py shared/errors.py shared/secret_file.py /app/shared/
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    QUIRE_WORKER_SECRET_FILE=/run/quire/worker.secret
WORKDIR /app
USER 10001:10001
HEALTHCHECK --interval=10s CMD ["test", "-s", "/run/quire/worker.secret"]
CMD ["sh", "setup.sh"]
