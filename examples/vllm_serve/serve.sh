#!/usr/bin/env bash
# vLLM's server with the backend `weightsync`: serve.sh MODEL [PORT]. On a GPU nothing but the backend is needed.
set -euo pipefail
python=${VLLM_PYTHON:-${XDG_CACHE_HOME:-$HOME/.cache}/weightsync/engines/vllm/bin/python}
options=(--weight-transfer-config '{"backend": "weightsync"}' --served-model-name model --max-model-len 1000)
if [[ ${DEVICE:-cpu} == cpu ]]; then
  options+=(--dtype float32 --enforce-eager --gpu-memory-utilization 0.1 --kv-cache-memory-bytes 67108864)
fi
# The routes that change weights exist in development mode only. They are nobody's but the trainer's.
export VLLM_SERVER_DEV_MODE=1
exec "$python" -m vllm.entrypoints.openai.api_server --model "$1" --host 127.0.0.1 --port "${2:-8000}" "${options[@]}"
