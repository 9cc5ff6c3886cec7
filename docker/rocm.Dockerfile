# Meshtune on AMD GPUs: docker build -f docker/rocm.Dockerfile -t meshtune:rocm .
# AMD's image brings ROCm and the JAX that is built for it; Meshtune is put on top and leaves them as they are.
# Run with: docker run --device /dev/kfd --device /dev/dri --group-add video --ipc host meshtune:rocm meshtune env
# Any other image that brings its own JAX works so too: --build-arg IMAGE=NAME.
# To pin the base: give IMAGE with its digest, NAME@sha256:..., as `docker buildx imagetools inspect NAME` says.
ARG IMAGE=rocm/jax:latest
FROM ${IMAGE}
COPY . /src
# pip replaces a JAX that is too old for Meshtune by one that knows no GPU: that ends the build.
RUN python3 -c "import jax, jaxlib; print(jax.__version__, jaxlib.__version__)" > /tmp/before \
 && pip install --no-cache-dir "/src[serve,evaluate]" \
 && python3 -c "import jax, jaxlib; print(jax.__version__, jaxlib.__version__)" > /tmp/after \
 && { cmp /tmp/before /tmp/after || { echo "the image's JAX $(cat /tmp/before) is too old for Meshtune" >&2; exit 1; }; } \
 && { [ ! -d /opt/rocm/share/amd_smi ] || pip install --no-cache-dir /opt/rocm/share/amd_smi; } \
 && rm -rf /src /tmp/before /tmp/after \
 && { id 1000 > /dev/null 2>&1 || useradd --create-home --uid 1000 meshtune; } && install -d -o 1000 /work
USER 1000
WORKDIR /work
ENV PYTHONUNBUFFERED=1
CMD ["meshtune", "--help"]
