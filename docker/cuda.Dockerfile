# Meshtune on NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t meshtune:cuda .
# Run with: docker run --gpus all --ipc host meshtune:cuda meshtune env
# On CPUs: docker build -f docker/cuda.Dockerfile --build-arg DEVICE=cpu --build-arg EXTRAS=serve,evaluate -t meshtune:cpu .
# The CUDA libraries come with JAX's wheels; the host needs the driver and the container toolkit.
# To pin the base: --build-arg BASE=python:3.11-slim@sha256:..., as `docker buildx imagetools inspect python:3.11-slim` says.
ARG BASE=python:3.11-slim
FROM ${BASE}
# The packages are those of docker/requirements-cuda.txt or docker/requirements-cpu.txt.
ARG DEVICE=cuda
ARG EXTRAS=cuda13,serve,evaluate
COPY . /src
# Every package with the hash of its wheel; Meshtune itself is built with what is among them.
RUN pip install --no-cache-dir --require-hashes -r /src/docker/requirements-${DEVICE}.txt \
 && pip install --no-cache-dir --no-deps --no-build-isolation "/src[${EXTRAS}]" \
 && rm -rf /src && useradd --create-home --uid 1000 meshtune && install -d -o meshtune /work
USER meshtune
WORKDIR /work
ENV PYTHONUNBUFFERED=1
# No shell in between: SIGTERM reaches the process that saves.
CMD ["meshtune", "--help"]
