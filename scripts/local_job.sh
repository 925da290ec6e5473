#!/usr/bin/env bash
# Runs a program with N processes on this machine, which find each other by RANK, WORLD_SIZE, LOCAL_RANK,
# LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT: what scripts/launch.sh uses in the place of mpirun.
#
#   scripts/local_job.sh N PROGRAM [ARGUMENT...]
#
# SIGUSR1 is passed on, SIGTSTP and SIGCONT stop and continue the processes, and SIGTERM ends them. If one of them fails
# the others have two seconds to say so; the exit status is that of the first one that failed.
set -u
count=$1
shift

# A port that nobody has, below those that the system gives to connections.
port=$((20000 + RANDOM % 12000))
while grep -qsi ":$(printf %04X "$port") " /proc/net/tcp /proc/net/tcp6; do
    port=$((20000 + RANDOM % 12000))
done
# Nor is this the job of a launcher around it.
unset OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK PMIX_RANK PMI_RANK TORCHELASTIC_USE_AGENT_STORE
export WORLD_SIZE=$count LOCAL_WORLD_SIZE=$count MASTER_ADDR=localhost MASTER_PORT=$port

ranks=()
trap 'kill -KILL "${ranks[@]}"' TERM
trap 'kill -USR1 "${ranks[@]}"' USR1
trap 'kill -STOP "${ranks[@]}"' TSTP
trap 'kill -CONT "${ranks[@]}"' CONT
exec {input}<&0
for ((rank = 0; rank < count; rank++)); do
    # Standard input is the first one's, as with mpirun.
    ((rank == 0)) || exec {input}</dev/null
    RANK=$rank LOCAL_RANK=$rank setpriv --pdeathsig KILL "$@" <&"$input" {input}<&- &
    ranks+=($!)
done
exec {input}<&-
exec 2>/dev/null # the shell would report what became of them

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
exit "$status"
