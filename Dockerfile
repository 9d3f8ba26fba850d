# The orchestrator as an image; `orchestrator run /config.toml` is the default, so mount a configuration there.

# A release should name what it was built from: --build-arg PYTHON_IMAGE=python:3.12-slim@sha256:… with the digest that
# `docker buildx imagetools inspect python:3.12-slim` prints where you build. A tag moves with its security updates.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
RUN python -m venv /opt/venv
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY envs ./envs
COPY orchestrator ./orchestrator
RUN /opt/venv/bin/pip install --no-cache-dir --constraint constraints.txt .

FROM ${PYTHON_IMAGE}
# No version for tini: the distribution keeps only its newest.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 orchestrator \
    && install --directory --owner orchestrator --group orchestrator /runs
COPY --from=build /opt/venv /opt/venv
COPY configs/container.toml /config.toml
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /home/orchestrator
VOLUME /runs
# HTTP answers from the very start, also while a large model still loads: this says that the process is alive. Whether
# the run is under way is /readyz's to say.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8600/healthz', timeout=3)"]
# tini passes signals on and reaps what env servers may leave behind.
ENTRYPOINT ["/usr/bin/tini", "--", "orchestrator"]
CMD ["run", "/config.toml"]
