#!/usr/bin/env bash
# Runs a program with N processes on this machine (or, with mpirun's --hostfile, on several), with what Open
# MPI needs to be told so that this works everywhere and at full speed:
#
#   scripts/launch.sh -np N [MPIRUN-OPTION...] PROGRAM [ARGUMENT...]
#   scripts/launch.sh -np 2 ./train_gpt --steps 100
#
# Where there is no mpirun, or with MPI=0 before it, the processes of this machine find each other without MPI
# (scripts/local_job.sh), and there are no options between N and the program.
#
# OMP_NUM_THREADS is left alone: without it the program takes its share of the cores.
set -euo pipefail

# No file or pipe is opened in place of a standard stream that is closed.
[[ -e /dev/fd/0 ]] || exec </dev/null
[[ -e /dev/fd/1 ]] || exec >/dev/null
[[ -e /dev/fd/2 ]] || exec 2>/dev/null

# mpirun ends its processes where it receives Ctrl-C, which a terminal sends to all that it has in the foreground.
# Here the first Ctrl-C (or SIGTERM, or SIGUSR1) is passed on as SIGUSR1, which mpirun forwards: train_gpt then
# finishes its step and saves; what does not know the signal ends. The second one ends all at once, and so does the
# first as long as nothing runs. For that mpirun has a session of its own; it ends with this script nevertheless,
# should that be killed.
job= # mpirun, or what stands in for it
signals=0
ended_by=
# shellcheck disable=SC2317  # traps call it
pass_on() { # signal
    [[ $job ]] || exit $((128 + $(kill -l "$1")))
    # Its processes, found without one more, which would wait for its turn where all cores are busy: for seconds.
    local file stat children=()
    for file in /proc/[0-9]*/stat; do
        read -r stat <"$file" || continue # it has ended
        stat=${stat##*) } # behind the name: state, parent, ...
        [[ ${stat#* } != "$job "* ]] || children+=("${file//[^0-9]/}")
    done
    ((${#children[@]} > 0)) || signals=1
    signals=$((signals + 1))
    if ((signals == 1)); then
        kill -USR1 "$job" || true
    else
        ended_by=$1
        kill -TERM "$job" || true
        # mpirun would give them a second; of those elsewhere it still ends itself.
        ((${#children[@]} == 0)) || kill -KILL "${children[@]}" || true
    fi
} 2>/dev/null
trap 'pass_on INT' INT
trap 'pass_on TERM' TERM
trap 'pass_on USR1' USR1

# Ctrl-Z, until the shell's fg: the terminal does not reach mpirun and its processes, which would run on.
pauses=0
# shellcheck disable=SC2317
pause() {
    pauses=$((pauses + 1))
    [[ ! $job ]] || kill -TSTP "$job" || true
    kill -STOP $$
    [[ ! $job ]] || kill -CONT "$job" || true
} 2>/dev/null
trap pause TSTP

usage() {
    echo "error: $1" >&2
    sed -n '5s/^#  /usage:/p; 6s/^#  /e.g.:/p' "$0" >&2
    exit 1
}

[[ ${1-} == -np || ${1-} == -n ]] || usage 'the first argument must be -np, the number of processes after it'
[[ ${2-} =~ ^[1-9][0-9]*$ ]] || usage "-np needs a number of processes, not '${2-}'"
(($# > 2)) || usage 'no program to run'
processes=$2
shift 2

mpirun=$(command -v mpirun.openmpi || command -v mpirun) || mpirun=
if [[ ${MPI-} == 0 || ! $mpirun ]]; then
    [[ $1 != -* ]] || usage "options such as $1 are mpirun's, which is not used here (no mpirun, or MPI=0)"
    command -v "$1" >/dev/null || usage "no program $1"
    start=("$(dirname "$0")/local_job.sh" "$processes")
else
    # mpirun binds one or two processes to one core each, however many threads they have.
    start=("$mpirun" --bind-to none -np "$processes")
fi

# mpirun refuses to run as root, which is who one is in a container.
if ((EUID == 0)); then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

# More processes than cores are welcome; a process that waits then has to leave its core to the others, or they
# starve one another (a small all-reduce of 8 processes on 2 cores takes 25 ms instead of 12 us).
export OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_mpi_yield_when_idle=1

# While mpirun ends a job its event loop can find a pipe already closed, and then prints "[warn] Epoll MOD(1) on
# fd 23 failed"; with poll it has nothing to say.
export EVENT_NOEPOLL=1

# Processes of one machine read large messages from each other's memory, 1.5 times as fast as through a shared
# segment, where the system permits it. Where it does not (some containers) Open MPI tries all the same and
# prints "Read -1, expected 32768, errno = 1" for every message, so it is tried out here, by a process on its
# child. Without a python3 nothing is known and the shared segment is used.
may_read_processes() {
    python3 - 2>/dev/null <<'END'
import ctypes, os, signal, sys, time

class Part(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]

libc = ctypes.CDLL(None, use_errno=True)
memory = ctypes.create_string_buffer(64)
part = Part(ctypes.addressof(memory), len(memory))
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
count = libc.process_vm_readv(child, ctypes.byref(part), 1, ctypes.byref(part), 1, 0)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
sys.exit(count != len(memory))
END
}
if [[ ${start[0]} == "$mpirun" && -z ${OMPI_MCA_btl_vader_single_copy_mechanism-} ]] && ! may_read_processes; then
    export OMPI_MCA_btl_vader_single_copy_mechanism=none
fi

# What was typed, a quoted word a line, from which the program makes the command that goes on.
TRAIN_GPT_LAUNCHED=$(printf '%q\n' ${MPI:+"MPI=$MPI"} "$0" -np "$processes" "$@")$'\n'
export TRAIN_GPT_LAUNCHED

# Standard output and standard error go to one place, but what stands here between them and the program can swap what it
# wrote to the one and then to the other.
unset TRAIN_GPT_ONE_STREAM
[[ ! /dev/fd/1 -ef /dev/fd/2 ]] || export TRAIN_GPT_ONE_STREAM=1

# On a terminal train_gpt's progress stands at the bottom, and what other processes say must not be appended to it.
erase=
[[ ! -t 1 || ${TERM:-dumb} == dumb ]] || erase=$'\r\e[K'
[[ -t 2 ]] && before_line=$erase || before_line=
# mpirun's note that it forwards a signal is left out. Of a process that a signal ends it makes two paragraphs between
# lines of dashes, and Open MPI says in each process that was reading from that one's memory that it is not there (errno 3):
# in place of all that stands one line, as without MPI. Where several have gone the second paragraph may be missing.
because='that machine'\''s log (out of memory?) may say why'
says="
/^mpirun[^ ]*: Forwarding signal [0-9]* to job\$/d
/^\[[^]]*\] Read -1, expected [0-9]*, errno = 3\$/d
/^-\{60,\}\$/{
    \$!N
    /\nPrimary job  terminated normally, but/{
        N
        N
        :next
        \$b show
        N
        /\n\[[^]]*\] Read -1, expected [0-9]*, errno = 3\$/{
            s/\n[^\n]*\$//
            b next
        }
        /\n-\{60,\}\$/!b show
        s/.*\n/\n/
        D
    }
    /\nmpirun[^ ]* noticed that process rank [0-9]* .* exited on signal /{
        N
        s/.* rank \([0-9]*\) .* on node \(.*\) exited on signal \(.*)\)\..*/error: rank \1 has gone: signal \3 ended its process on \2; $because; the job ends/
        b show
    }
    s/^/$before_line/
    P
    D
}
:show
s/^/$before_line/"
exec {errors}> >(trap '' INT TERM USR1 && exec sed -u -e "$says" >&2)
filter=$!

# mpirun kills its processes where it cannot write any more, as when Ctrl-C has ended `| tee log` too: what it says goes
# through a process that goes on reading then, and passes what train_gpt says last, the command that goes on, to standard
# error.
exec {output}>&1
copier=
if [[ ${start[0]} == "$mpirun" && -p /dev/fd/1 ]]; then
    exec {output}>&-
    exec {output}> >(trap '' INT TERM USR1 PIPE && { cat 2>/dev/null || exec sed -n '/^go on with$/,$p' >&2; })
    copier=$!
fi

# A terminal is for the shell to read, not for what runs in the background.
[[ ! -t 0 ]] || exec </dev/null
setsid setpriv --pdeathsig TERM "${start[@]}" "$@" <&0 >&"$output" 2>&"$errors" {output}>&- {errors}>&- &
job=$!
exec {output}>&- {errors}>&-
status=0
before=-1
while ((before != signals + pauses)); do # a signal ends `wait` early
    before=$((signals + pauses))
    wait "$job" && status=0 || status=$?
done
wait "$filter" || true
[[ ! $copier ]] || wait "$copier" || true
printf %s "$erase"
[[ ! $ended_by ]] || status=$((128 + $(kill -l "$ended_by")))
exit "$status"
