# Meshtune on AMD GPUs: docker build -f docker/rocm.Dockerfile -t meshtune:rocm .
# AMD's image brings ROCm and the JAX that is built for it; Meshtune is put on top and leaves them as they are.
# Run with: docker run --device /dev/kfd --device /dev/dri --group-add video --ipc host meshtune:rocm meshtune env
# Any other image that brings its own JAX works so too: --build-arg IMAGE=NAME.
# The tag has no digest: none was to be had that two sources agree on. To pin it, give IMAGE as NAME@sha256:...
ARG IMAGE=rocm/jax:rocm7.14-jax0.10.0-py3.12
FROM ${IMAGE}
COPY . /src
# The image's JAX is a constraint: pip would replace one that is too old for Meshtune by one that knows no GPU.
RUN python3 -c "import jax, jaxlib; print(f'jax=={jax.__version__}\njaxlib=={jaxlib.__version__}')" > /tmp/constraints.txt \
 && grep -vE '^jax(lib)?==' /src/constraints.txt >> /tmp/constraints.txt \
 && python3 -m pip install --no-cache-dir -c /tmp/constraints.txt "/src[serve,evaluate,synth]" \
 && { [ ! -d /opt/rocm/share/amd_smi ] || python3 -m pip install --no-cache-dir /opt/rocm/share/amd_smi; } \
 && rm -rf /src /tmp/constraints.txt \
 && { id 1000 > /dev/null 2>&1 || useradd --create-home --uid 1000 meshtune; } && install -d -o 1000 /work
USER 1000
WORKDIR /work
ENV PYTHONUNBUFFERED=1
CMD ["meshtune", "--help"]
