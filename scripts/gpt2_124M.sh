#!/usr/bin/env bash
# GPT-2 124M, on 10 billion tokens of FineWeb-Edu.
#
#   python data/fineweb.py --name edu --size 10B && python data/hellaswag.py
#   scripts/gpt2_124M.sh          # one GPU
#   scripts/gpt2_124M.sh 8        # eight GPUs: the same run
#   scripts/gpt2_124M.sh 8 --steps 100 --out-dir runs/try
#
# What it trains is in gpt2_124M.toml. Options override it. Files and folders that they name
# are the repository's, wherever this is started, unless they begin with /.
set -euo pipefail
cd "$(dirname "$0")/.."
processes=1
if [[ ${1-} =~ ^[0-9]+$ ]]; then processes=$1 && shift; fi
exec scripts/launch.sh -np "$processes" ./train_gpt --config scripts/gpt2_124M.toml "$@"
