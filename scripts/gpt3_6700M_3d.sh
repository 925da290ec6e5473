#!/usr/bin/env bash
echo "error: scripts/gpt3_6700M_3d.sh was removed in 0.2: use scripts/recipe.sh gpt3_6700M_3d${1+$(printf ' %q' "$@")}" >&2 && exit 2
