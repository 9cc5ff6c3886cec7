# Meshtune on Cloud TPUs: docker build -f docker/tpu.Dockerfile -t meshtune:tpu .
# On a TPU VM, whose devices belong to root: docker run --user root --privileged --net host meshtune:tpu meshtune env
# The base is 3.11-slim-bookworm of 21 September 2026 (Python 3.11.16); .github/dependabot.yml raises its digest.
FROM python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
COPY . /src
# Every package with its hash. What comes as source is built with the base's setuptools: isolated builds fetch one without a hash.
RUN pip install --no-cache-dir --no-deps --no-build-isolation --require-hashes -r /src/docker/requirements-tpu.txt \
 && pip install --no-cache-dir --no-deps --no-build-isolation "/src[tpu,serve,evaluate,synth]" && pip check \
 && rm -rf /src && useradd --create-home --uid 1000 meshtune && install -d -o meshtune /work
USER meshtune
WORKDIR /work
ENV PYTHONUNBUFFERED=1
# No shell in between: SIGTERM reaches the process that saves.
CMD ["meshtune", "--help"]
