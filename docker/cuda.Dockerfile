# Meshtune on NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t meshtune:cuda .
# The CUDA libraries come with JAX's wheels; the host needs the driver and the container toolkit alone.
# Run with: docker run --gpus all --ipc host meshtune:cuda meshtune env
# To put Meshtune on NVIDIA's own JAX image use docker/on-jax.Dockerfile.
FROM python:3.11-slim
ARG EXTRA=cuda13
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[${EXTRA}]" nvidia-ml-py && rm -rf /src
WORKDIR /work
ENV PYTHONUNBUFFERED=1
CMD ["meshtune", "--help"]
