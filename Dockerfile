# SPDX-License-Identifier: Apache-2.0
# Trains and tests on a CPU, as a clone does:
#   docker build -t fullshard . && docker run --rm --shm-size 1g fullshard scripts/train
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/*
WORKDIR /fullshard
COPY . .
RUN bash -c '. scripts/venv.sh && prepare_venv torch,train'
CMD ["scripts/train"]
