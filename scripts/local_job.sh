#!/usr/bin/env bash
# Runs a program with N processes on this machine, which find each other by RANK, WORLD_SIZE, LOCAL_RANK,
# LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT: what scripts/launch.sh uses in the place of mpirun.
#
#   scripts/local_job.sh N PROGRAM [ARGUMENT...]
#
# SIGUSR1 is passed on (and ends a job that has not begun), SIGTSTP and SIGCONT stop and continue the processes, and SIGTERM
# ends them. If one of them fails the others have two seconds to say so; the exit status is that of the first one that
# failed.
set -u
count=$1
shift

ranks=()
all_started=
early= # what was to be passed on before
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

# A port that nobody has, below those that the system gives to connections.
port=$((20000 + RANDOM % 12000))
while grep -qsi ":$(printf %04X "$port") " /proc/net/tcp /proc/net/tcp6; do
    port=$((20000 + RANDOM % 12000))
done
# Nor is this the job of a launcher around it.
unset OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK PMIX_RANK PMI_RANK TORCHELASTIC_USE_AGENT_STORE
export WORLD_SIZE=$count LOCAL_WORLD_SIZE=$count MASTER_ADDR=localhost MASTER_PORT=$port

exec {input}<&0
for ((rank = 0; rank < count; rank++)); do
    # Standard input is the first one's, as with mpirun.
    ((rank == 0)) || exec {input}</dev/null
    RANK=$rank LOCAL_RANK=$rank setpriv --pdeathsig KILL "$@" <&"$input" {input}<&- &
    ranks+=($!)
done
exec {input}<&-
exec 2>/dev/null # the shell would report what became of them

all_started=yes
# One that has just been started may miss any other signal.
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
