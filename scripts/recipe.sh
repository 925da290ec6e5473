#!/usr/bin/env bash
# Trains a recipe: a configuration of scripts/recipes/, which says what is trained and why.
#
#   scripts/recipe.sh NAME [PROCESSES] [OPTION...]
#
#   python data/fineweb.py --name edu --size 10B && python data/hellaswag.py
#   scripts/recipe.sh gpt2_124M          # one GPU
#   scripts/recipe.sh gpt2_124M 8        # eight GPUs: the same run
#   scripts/recipe.sh gpt2_124M 8 --steps 100 --out-dir runs/try
#   HOSTFILE=hosts scripts/recipe.sh gpt3_6700M_3d       # eight machines of eight GPUs; the file has "NAME slots=8" a line
#   scripts/recipe.sh gpt3_6700M_3d 16 --steps 100       # another number of GPUs: a multiple of 4 x 2
#
# gpt2_124M reads the 10 billion tokens of `--size 10B`, and the other recipes those of `--size 100B`. Options override the
# configuration. Relative paths in options and HOSTFILE are relative to the repository's folder, wherever this is started.
set -euo pipefail
cd "$(dirname "$0")/.."
names=(scripts/recipes/*.toml)
names=("${names[@]##*/}")
names=("${names[@]%.toml}")
name=${1-}
if [[ $name == */* || ! -f scripts/recipes/$name.toml ]]; then
    if [[ $name ]]; then problem="unknown recipe '$name'"; else problem="which recipe?"; fi
    echo "error: $problem; use scripts/recipe.sh NAME [PROCESSES] [OPTION...], where NAME is one of: ${names[*]}" >&2
    exit 2
fi
shift
case $name in
    gpt3_6700M_3d) processes=64 ;; # 8 data-parallel x 4 pipeline stages x 2 tensor-parallel
    *) processes=1 ;;
esac
if [[ ${1-} =~ ^[0-9]+$ ]]; then processes=$1 && shift; fi
exec scripts/launch.sh -np "$processes" ${HOSTFILE:+--hostfile "$HOSTFILE"} ./train_gpt --config "scripts/recipes/$name.toml" "$@"
