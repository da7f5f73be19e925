# SPDX-License-Identifier: Apache-2.0
# Trains and tests on a CPU, as a clone does:
#   docker build -t fullshard . && docker run --rm --shm-size 1g fullshard
#   docker build -t fullshard-test --target test . && docker run --rm --shm-size 4g fullshard-test
# --build-arg PIP_EXTRA_INDEX_URL=... names the index of torch's small CPU build.
FROM python:3.11-slim AS base
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
ARG PIP_EXTRA_INDEX_URL
WORKDIR /fullshard
COPY . .

FROM base AS test
RUN scripts/test --fast --collect-only -q
CMD ["scripts/test"]

FROM base AS train
RUN scripts/train --help
CMD ["scripts/train"]
