# Meshtune on CPUs: docker build -f docker/cpu.Dockerfile -t meshtune:cpu .
FROM python:3.11-slim
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt /src && rm -rf /src
WORKDIR /work
ENV JAX_PLATFORMS=cpu PYTHONUNBUFFERED=1
# No shell in between: SIGTERM reaches the process that saves.
CMD ["meshtune", "--help"]
