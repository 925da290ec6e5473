#!/usr/bin/env bash
# Runs a program with N processes on this machine. They find each other by RANK, WORLD_SIZE, LOCAL_RANK,
# LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. scripts/launch.sh uses this script instead of mpirun.
#
#   scripts/local_job.sh N PROGRAM [ARGUMENT...]
#
# SIGUSR1 is passed on (and ends a job that has not begun). SIGTSTP and SIGCONT stop and continue the processes;
# SIGTERM ends them. If a process fails, the others have two seconds to report it. The exit status is that of the
# first process that failed.
set -u
count=$1
shift

ranks=()
all_started=
early= # a signal that came before all processes were started
# shellcheck disable=SC2317  # traps call it
pass_on() { # signal
    if [[ $all_started ]]; then
        kill "-$1" "${ranks[@]}"
    elif [[ $1 != STOP && $1 != CONT ]]; then
        early=$1
    fi
}
trap 'pass_on KILL' TERM
trap 'pass_on USR1' USR1
trap 'pass_on STOP' TSTP
trap 'pass_on CONT' CONT

# A free port, below those that the system gives to outgoing connections.
port=$((20000 + RANDOM % 12000))
while grep -qsi ":$(printf %04X "$port") " /proc/net/tcp /proc/net/tcp6; do
    port=$((20000 + RANDOM % 12000))
done
# The processes must not believe that they belong to an outer launcher's job.
unset OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK PMIX_RANK PMI_RANK TORCHELASTIC_USE_AGENT_STORE
export WORLD_SIZE=$count LOCAL_WORLD_SIZE=$count MASTER_ADDR=localhost MASTER_PORT=$port

exec {input}<&0
for ((rank = 0; rank < count; rank++)); do
    # Only the first process has standard input, as with mpirun.
    ((rank == 0)) || exec {input}</dev/null
    RANK=$rank LOCAL_RANK=$rank setpriv --pdeathsig KILL "$@" <&"$input" {input}<&- &
    ranks+=($!)
done
exec {input}<&-
exec 2>/dev/null # otherwise the shell reports how the processes ended

all_started=yes
# A process that has just been started may miss any signal but KILL.
[[ ! $early ]] || kill -KILL "${ranks[@]}"

status=0
killer=
while ((${#ranks[@]} > 0)); do
    wait -n # for the end of one, or for a signal
    left=()
    for process in "${ranks[@]}"; do
        if kill -0 "$process"; then
            left+=("$process")
            continue
        fi
        wait "$process"
        ended=$?
        ((ended == 0 || status != 0)) || status=$ended
    done
    ranks=("${left[@]}")
    if ((status != 0 && ${#ranks[@]} > 0)) && [[ ! $killer ]]; then
        (sleep 2 && kill -KILL "${ranks[@]}") >/dev/null &
        killer=$!
    fi
done
[[ ! $killer ]] || kill "$killer"
[[ ! $early ]] || status=$((128 + $(kill -l "$early")))
exit "$status"
