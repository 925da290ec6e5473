#!/usr/bin/env bash
echo "error: scripts/gpt2_1558M.sh was removed in 0.2: use scripts/recipe.sh gpt2_1558M${1+$(printf ' %q' "$@")}" >&2 && exit 2
