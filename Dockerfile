# fp8q in a container: calibrates, proves, serves on a CPU, and builds engines of TensorRT-RTX. Nobody has built this
# file yet: the machines that fp8q was made on have no Docker engine.
#
#   docker build -t fp8q .                                       with CUDA, as PyPI's PyTorch for Linux has it
#   docker build -t fp8q --build-arg TORCH_INDEX=ADDRESS .       PyTorch for CPUs: its installation page has the address
#   docker run --rm -v "$PWD:/work" --user "$(id -u):$(id -g)" fp8q \
#     run MODEL --data TEXT --out RUN
#
# EXTRAS: of pyproject.toml; `serve,tensorrt-rtx` makes an image without torch. With CUDA PyTorch brings Triton, whose
# kernels start where there is a C compiler when they run.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG EXTRAS=all
ARG TORCH_INDEX
COPY --from=wheel /wheels /wheels
COPY constraints.txt /wheels/
# The index is asked for PyTorch alone.
RUN if [ -n "$TORCH_INDEX" ]; then \
      pip install --no-cache-dir --constraint /wheels/constraints.txt --index-url "$TORCH_INDEX" torch; \
    fi && \
    pip install --no-cache-dir --constraint /wheels/constraints.txt "$(ls /wheels/*.whl)[$EXTRAS]" && \
    useradd --create-home fp8q && \
    install --directory --owner fp8q /work
RUN if python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)'; then \
      apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
USER fp8q
WORKDIR /work
# What libraries keep is the user's, whoever that is, and ONNX Runtime reports nothing.
ENV HF_HOME=/tmp/huggingface MPLCONFIGDIR=/tmp/matplotlib TRITON_CACHE_DIR=/tmp/triton ORT_DISABLE_TELEMETRY=1
ENTRYPOINT ["fp8q"]
CMD ["--help"]
