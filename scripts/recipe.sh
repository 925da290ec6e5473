#!/usr/bin/env bash
# Trains a recipe: a configuration of scripts/recipes/, which says what is trained and why.
#
#   scripts/recipe.sh NAME [PROCESSES] [OPTION...]
#
#   python data/fineweb.py --name edu --size 10B && python data/hellaswag.py
#   scripts/recipe.sh gpt2_124M          # one GPU
#   scripts/recipe.sh gpt2_124M 8        # eight GPUs: the same run
#   scripts/recipe.sh gpt2_124M 8 --steps 100 --out-dir runs/try
#   scripts/recipe.sh gpt3_6700M_3d 16   # another number of GPUs than 64: a multiple of 4 x 2
#   HOSTFILE=hosts scripts/recipe.sh gpt3_6700M_3d
#
# The file `hosts` has a line "NAME slots=8" for each machine with eight GPUs.
#
# gpt2_124M reads the 10 billion tokens of `--size 10B`, and the other recipes those of `--size 100B`. Options override the
# configuration. Relative paths in options and HOSTFILE are relative to the repository's folder, wherever this is started.
set -euo pipefail
cd "$(dirname "$0")/.."
names=(scripts/recipes/*.toml)
names=("${names[@]##*/}")
names=("${names[@]%.toml}")
refuse() {
    echo "error: $1" >&2
    exit 2
}

name=${1-}
if [[ $name == -h || $name == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" # the comment above
    exit
fi
if [[ $name == */* || ! -f scripts/recipes/$name.toml ]]; then
    if [[ $name ]]; then problem="unknown recipe '$name'"; else problem="no recipe is given"; fi
    refuse "$problem; use scripts/recipe.sh NAME [PROCESSES] [OPTION...], where NAME is one of: ${names[*]}"
fi
shift
case $name in
    gpt3_6700M_3d) processes=64 ;; # 8 data-parallel x 4 pipeline stages x 2 tensor-parallel
    *) processes=1 ;;
esac
if [[ ${1-} =~ ^[0-9]+$ ]]; then
    [[ $1 != 0* ]] || refuse "'$1' is not a number of processes; give 1 or more, without zeros before it"
    processes=$1
    shift
fi
if [[ ${1-} && $1 != -* ]]; then
    refuse "'$1' is neither a number of processes nor an option; use scripts/recipe.sh NAME [PROCESSES] [OPTION...]"
fi
if [[ ${HOSTFILE-} && (! -r $HOSTFILE || -d $HOSTFILE) ]]; then
    refuse "HOSTFILE '$HOSTFILE' cannot be read; give a file with a line \"NAME slots=8\" for each machine"
fi
# Prints the command that gets the recipe's data if there are none: `missing OPTION COMMAND`.
missing() {
    [[ " $options" != *" --$1"[=\ ]* ]] || return 0
    pattern=$(sed -n "s/^$1 = \"\(.*\)\"$/\1/p" "scripts/recipes/$name.toml")
    compgen -G "$pattern" >/dev/null || refuse "there is no $pattern; get the recipe's data with: $2"
}
options="$* "
needs_data=true
[[ " $options" == *" "@(-h|--help|--version|--print-model|--print-step|--generate)" "* ]] && needs_data=false
[[ " $options" == *" --steps"[=\ ]"0 "* && " $options" != *" --"@(init|resume)[=\ ]* ]] && needs_data=false # it plans
if $needs_data; then
    size=$(sed -n 's/^train-data = ".*_\([0-9]*B\)\/.*/\1/p' "scripts/recipes/$name.toml")
    missing train-data "python data/fineweb.py --name edu --size $size"
    missing eval-hellaswag "python data/hellaswag.py"
fi
# A recipe that is started again goes on.
if [[ " $options" != *" --"@(resume|overwrite|generate)[=\ ]* ]]; then set -- --resume-if-any "$@"; fi
exec scripts/launch.sh -np "$processes" ${HOSTFILE:+--hostfile "$HOSTFILE"} ./train_gpt --config "scripts/recipes/$name.toml" "$@"
