# Meshtune on an image that brings its own JAX, such as NVIDIA's or AMD's, which is left as it is:
#   docker build -f docker/on-jax.Dockerfile --build-arg IMAGE=nvcr.io/nvidia/jax:25.10-py3 -t meshtune:nvidia .
# To pin the base: give IMAGE with its digest, NAME@sha256:..., as `docker buildx imagetools inspect NAME` says.
ARG IMAGE
FROM ${IMAGE}
COPY . /src
# pip replaces a JAX that is too old for Meshtune by one that knows no GPU: that ends the build.
RUN python3 -c "import jax, jaxlib; print(jax.__version__, jaxlib.__version__)" > /tmp/before \
 && pip install --no-cache-dir "/src[serve,evaluate]" \
 && python3 -c "import jax, jaxlib; print(jax.__version__, jaxlib.__version__)" > /tmp/after \
 && { cmp /tmp/before /tmp/after || { echo "the image's JAX $(cat /tmp/before) is too old for Meshtune" >&2; exit 1; }; } \
 && rm -rf /src /tmp/before /tmp/after \
 && { id 1000 > /dev/null 2>&1 || useradd --create-home --uid 1000 meshtune; } && install -d -o 1000 /work
USER 1000
WORKDIR /work
ENV PYTHONUNBUFFERED=1
CMD ["meshtune", "--help"]
