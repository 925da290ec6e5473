#!/usr/bin/env bash
# GPT-3 6.7B on 64 GPUs: 8 data-parallel x 4 pipeline stages x 2 tensor-parallel, with ZeRO-1, on 100 billion tokens of
# FineWeb-Edu.
#
#   python data/fineweb.py --name edu --size 100B && python data/hellaswag.py
#   HOSTFILE=hosts scripts/gpt3_6700M_3d.sh       # eight machines of eight GPUs: mpirun's hostfile, "name slots=8" a line
#   sbatch scripts/slurm.sbatch scripts/gpt3_6700M_3d.toml
#   scripts/gpt3_6700M_3d.sh 16 --steps 100       # another number of GPUs: a multiple of 4 x 2
#
# What it trains is in gpt3_6700M_3d.toml. Options override it. Files and folders that they or HOSTFILE name
# are the repository's, wherever this is started, unless they begin with /.
set -euo pipefail
cd "$(dirname "$0")/.."
processes=64
if [[ ${1-} =~ ^[0-9]+$ ]]; then processes=$1 && shift; fi
exec scripts/launch.sh -np "$processes" ${HOSTFILE:+--hostfile "$HOSTFILE"} ./train_gpt --config scripts/gpt3_6700M_3d.toml "$@"
