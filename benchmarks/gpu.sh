#!/bin/sh
# What one GPU makes of a denoising step, at LLaDA-8B's shapes, in under 8 minutes and with one call:
#     sh benchmarks/gpu.sh [--json FILE]        on the GPU
#     sh benchmarks/gpu.sh --rehearse           the same code at a small shape, on a CPU
# PYTHON names another interpreter. benchmarks/gpu.py says what is measured.
cd "$(dirname "$0")/.." || exit 1
# PyTorch uses the same GPU afterwards; both profilers want CUPTI for themselves while they run.
export XLA_PYTHON_CLIENT_PREALLOCATE=false TEARDOWN_CUPTI=1 TF_CPP_MIN_LOG_LEVEL=3
case " $* " in
    *" --rehearse "*) export JAX_PLATFORMS=cpu ;;
    *) export XLA_FLAGS="$XLA_FLAGS --xla_enable_command_buffers_during_profiling=true" ;;
esac
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
