#!/usr/bin/env bash
# Runs train_gpt with N processes: on this machine, or on several with mpirun's options.
#
#   scripts/launch.sh -np N [MPIRUN-OPTION...] ./train_gpt [OPTION...]
#   scripts/launch.sh -np 2 ./train_gpt --steps 100                     # as ./train_gpt --processes 2 --steps 100
#   scripts/launch.sh -np 16 --hostfile hosts ./train_gpt --steps 100   # mpirun, with the options that it needs
set -euo pipefail

show_usage() { sed -n '4s/^#  /usage:/p; 5s/^#  /e.g.:/p' "$0"; }
usage() {
    echo "error: $1" >&2
    show_usage >&2
    exit 1
}

if [[ ${1-} == -h || ${1-} == --help ]]; then
    show_usage
    exit
fi
[[ ${1-} == -np || ${1-} == -n ]] || usage 'the first arguments must be -np and the number of processes'
[[ ${2-} =~ ^[1-9][0-9]*$ ]] || usage "-np needs a number of processes, not '${2-}'"
(($# > 2)) || usage 'no program to run'
processes=$2
shift 2
if [[ $1 != -* ]]; then
    command -v "$1" >/dev/null || usage "there is no program $1; build it with: make train_gpt"
    [[ ${1##*/} == train_gpt* ]] || usage "$1 is not train_gpt; mpirun starts other programs"
    for word in "${@:2}"; do
        [[ $word != --processes?(=*) ]] || usage "-np gives the number of processes; leave $word out"
    done
    exec "$1" --processes "$processes" "${@:2}"
fi

mpirun=$(command -v mpirun.openmpi || command -v mpirun) || usage "$1 is an option of mpirun, which is not installed"
# mpirun refuses to run as root, the default user in a container.
if ((EUID == 0)); then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# More processes than cores are allowed. A waiting process must then yield its core, or the processes starve one
# another (a small all-reduce of 8 processes on 2 cores takes 25 ms instead of 12 us).
export OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_mpi_yield_when_idle=1
# While mpirun ends a job, its event loop may find a pipe already closed and print "[warn] Epoll MOD(1) on fd 23
# failed". With poll it prints nothing.
export EVENT_NOEPOLL=1
# The command as typed, one quoted word per line. The program prints it as the command that resumes the run.
TRAIN_GPT_LAUNCHED=$(printf '%q\n' "$0" -np "$processes" "$@")$'\n'
export TRAIN_GPT_LAUNCHED
# With one or two processes, mpirun would bind each to a single core, whatever its number of threads.
exec "$mpirun" --bind-to none -np "$processes" "$@"
