# Meshtune on CPUs: docker build -f docker/cpu.Dockerfile -t meshtune:cpu .
# To pin the base: --build-arg BASE=python:3.11-slim@sha256:..., as `docker buildx imagetools inspect python:3.11-slim` says.
ARG BASE=python:3.11-slim
FROM ${BASE}
COPY . /src
# Every package with the hash of its wheel; Meshtune itself is built with what is among them.
RUN pip install --no-cache-dir --require-hashes -r /src/docker/requirements-cpu.txt \
 && pip install --no-cache-dir --no-deps --no-build-isolation "/src[serve,evaluate]" \
 && rm -rf /src && useradd --create-home --uid 1000 meshtune && install -d -o meshtune /work
USER meshtune
WORKDIR /work
ENV JAX_PLATFORMS=cpu PYTHONUNBUFFERED=1
# No shell in between: SIGTERM reaches the process that saves.
CMD ["meshtune", "--help"]
