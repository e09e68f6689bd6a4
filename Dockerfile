# Train on pictures of the host, on its GPUs if the NVIDIA container toolkit is there:
#   docker build --tag rectified-flow-trainer .
#   docker run --rm --gpus all --shm-size 1g --user "$(id -u):$(id -g)" -v "$PWD:/work" rectified-flow-trainer \
#       rectified-flow train --dataset_path /work/pictures --output_dir /work/runs/pictures
FROM python:3.11-slim

# --compile needs a compiler and a cache folder. Its default folder needs a user name, which --user does not set.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HOME=/tmp TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
COPY requirements.txt /package/
RUN pip install --requirement /package/requirements.txt
COPY pyproject.toml README.md LICENSE /package/
COPY rectified_flow /package/rectified_flow
RUN pip install "/package[evaluation,export]"

WORKDIR /work
CMD ["rectified-flow", "--help"]
