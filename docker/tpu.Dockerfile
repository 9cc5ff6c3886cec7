# Meshtune on Cloud TPUs: docker build -f docker/tpu.Dockerfile -t meshtune:tpu .
# On a TPU VM: docker run --privileged --net host meshtune:tpu meshtune env
FROM python:3.11-slim
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[tpu]" && rm -rf /src
WORKDIR /work
ENV PYTHONUNBUFFERED=1
CMD ["meshtune", "--help"]
