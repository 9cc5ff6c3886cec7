# Meshtune on NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t meshtune:cuda .
# Run with: docker run --gpus all --ipc host meshtune:cuda meshtune env
# On CPUs: docker build -f docker/cuda.Dockerfile --build-arg DEVICE=cpu --build-arg EXTRAS=serve,evaluate,synth -t meshtune:cpu .
# The CUDA libraries come with JAX's wheels; the host needs the driver and the container toolkit.
# The base is 3.11-slim-bookworm of 21 September 2026 (Python 3.11.16); .github/dependabot.yml raises its digest.
FROM python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
# The packages are those of docker/requirements-cuda.txt or docker/requirements-cpu.txt.
ARG DEVICE=cuda
ARG EXTRAS=cuda13,serve,evaluate,synth
COPY . /src
# Every package with its hash. What comes as source is built with the base's setuptools: isolated builds fetch one without a hash.
RUN pip install --no-cache-dir --no-deps --no-build-isolation --require-hashes -r /src/docker/requirements-${DEVICE}.txt \
 && pip install --no-cache-dir --no-deps --no-build-isolation "/src[${EXTRAS}]" && pip check \
 && rm -rf /src && useradd --create-home --uid 1000 meshtune && install -d -o meshtune /work
USER meshtune
WORKDIR /work
ENV PYTHONUNBUFFERED=1
# No shell in between: SIGTERM reaches the process that saves.
CMD ["meshtune", "--help"]
