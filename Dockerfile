# Two images from one file:
#   docker build --target platform -t oppo-platform .    web, scheduler, migrate: no torch
#   docker build --target worker   -t oppo-worker .      a node: the worker and the engine
# For GPUs give the worker the index with the CUDA build of torch (README, "Choosing torch"):
#   --build-arg TORCH_INDEX=<index URL>
# What runs may use besides (vLLM, other trackers): --build-arg EXTRAS=gpu,trackers

FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/oppo
ENV PATH=/opt/oppo/bin:$PATH
WORKDIR /src
COPY requirements requirements
COPY pyproject.toml README.md LICENSE manage.py ./
COPY platform platform
COPY worker worker
COPY oppo_core oppo_core
COPY bench bench
COPY templates templates
COPY static static
COPY examples examples

# The documentation, which the platform serves at /docs/. Pages link to tests and scripts.
FROM build AS build-docs
RUN pip install -c requirements/cpu.lock.txt '.[docs]'
COPY mkdocs.yml ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md ./
COPY scripts scripts
COPY tests tests
COPY docs docs
RUN mkdocs build --strict

FROM build AS build-platform
COPY --from=build-docs /src/build/site build/site
RUN pip install -c requirements/cpu.lock.txt '.[platform]'

FROM build AS build-worker
ARG TORCH_INDEX=""
ARG EXTRAS=""
RUN pip install -r requirements/torch.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
RUN pip install -c requirements/cpu.lock.txt ".[worker,engine${EXTRAS:+,$EXTRAS}]"

FROM python:3.11-slim-bookworm AS base
RUN useradd --uid 10001 --create-home oppo && mkdir -p /data /artifacts /models && chown oppo:oppo /data /artifacts
ENV PATH=/opt/oppo/bin:$PATH OPPO_HOME=/data PYTHONUNBUFFERED=1
WORKDIR /data
USER oppo

FROM base AS worker
COPY --from=build-worker /opt/oppo /opt/oppo
CMD ["oppo", "worker", "run"]

FROM base AS platform
COPY --from=build-platform /opt/oppo /opt/oppo
EXPOSE 8000
CMD ["oppo", "web", "--host", "0.0.0.0", "--port", "8000"]
