#!/usr/bin/env bash
# Runs a program with N processes on this machine (or, with mpirun's --hostfile, on several). Sets Open MPI's
# options so that this works everywhere and at full speed.
#
#   scripts/launch.sh -np N [MPIRUN-OPTION...] PROGRAM [ARGUMENT...]
#   scripts/launch.sh -np 2 ./train_gpt --steps 100
#
# Without mpirun, or with MPI=0 in the environment, the processes run on this machine and find each other without
# MPI (scripts/local_job.sh). No options are then allowed between N and the program.
#
# OMP_NUM_THREADS stays as it is: without it, each process uses its share of the cores.
set -euo pipefail

# If a standard stream is closed, opens /dev/null for it, so that no other file gets its number.
[[ -e /dev/fd/0 ]] || exec </dev/null
[[ -e /dev/fd/1 ]] || exec >/dev/null
[[ -e /dev/fd/2 ]] || exec 2>/dev/null

# A terminal sends Ctrl-C to all foreground processes, and mpirun then ends its processes. Here the first Ctrl-C (or
# SIGTERM, or SIGUSR1) is passed on as SIGUSR1, which mpirun forwards. train_gpt then finishes its step and saves; a
# program that does not handle the signal ends. The second signal ends everything at once, and so does the first if no
# process runs yet. For this, mpirun has its own session. mpirun still ends if this script is killed.
job= # mpirun, or what stands in for it
signals=0
ended_by=
# shellcheck disable=SC2317  # traps call it
pass_on() { # signal
    [[ $job ]] || exit $((128 + $(kill -l "$1")))
    # The job's child processes. They are found without starting another process, which could wait for seconds on busy
    # cores.
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
        # mpirun would wait one second for them. It ends the processes on other machines itself.
        ((${#children[@]} == 0)) || kill -KILL "${children[@]}" || true
    fi
} 2>/dev/null
trap 'pass_on INT' INT
trap 'pass_on TERM' TERM
trap 'pass_on USR1' USR1

# Ctrl-Z stops mpirun too, until the shell's fg. The terminal's signal does not reach mpirun, which has its own session.
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

[[ ${1-} == -np || ${1-} == -n ]] || usage 'the first arguments must be -np and the number of processes'
[[ ${2-} =~ ^[1-9][0-9]*$ ]] || usage "-np needs a number of processes, not '${2-}'"
(($# > 2)) || usage 'no program to run'
processes=$2
shift 2

mpirun=$(command -v mpirun.openmpi || command -v mpirun) || mpirun=
if [[ ${MPI-} == 0 || ! $mpirun ]]; then
    [[ $1 != -* ]] || usage "$1 is an option of mpirun, which is not used here (no mpirun, or MPI=0)"
    command -v "$1" >/dev/null || usage "no program $1"
    start=("$(dirname "$0")/local_job.sh" "$processes")
else
    # With one or two processes, mpirun would bind each to a single core, whatever its number of threads.
    start=("$mpirun" --bind-to none -np "$processes")
fi

# mpirun refuses to run as root, the usual user in a container.
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

# Processes of one machine read large messages from each other's memory if the system permits it, 1.5 times faster
# than through a shared segment. If it does not (some containers), Open MPI tries all the same and prints "Read -1,
# expected 32768, errno = 1" for every message. This test therefore lets a process read the memory of its child.
# Without python3, the shared segment is used.
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

# The command as typed, one quoted word per line. The program prints it as the command that resumes the run.
TRAIN_GPT_LAUNCHED=$(printf '%q\n' ${MPI:+"MPI=$MPI"} "$0" -np "$processes" "$@")$'\n'
export TRAIN_GPT_LAUNCHED

# Whether standard output and standard error go to the same place. The pipes of this script may swap text that the
# program writes to the two.
unset TRAIN_GPT_ONE_STREAM
[[ ! /dev/fd/1 -ef /dev/fd/2 ]] || export TRAIN_GPT_ONE_STREAM=1

# On a terminal, train_gpt's progress line is at the bottom. This erases it before the output of other processes.
erase=
[[ ! -t 1 || ${TERM:-dumb} == dumb ]] || erase=$'\r\e[K'
[[ -t 2 ]] && before_line=$erase || before_line=
# Filters mpirun's messages. Its note that it forwards a signal is left out. If a signal ends a process, mpirun prints
# two paragraphs between lines of dashes; the second may be missing if several have ended. Each process that was
# reading from its memory adds a line of Open MPI (errno 3). One line replaces all of this, as in a run without MPI.
because='see that machine'\''s log (out of memory?)'
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
        s/.* rank \([0-9]*\) .* on node \(.*\) exited on signal \(.*)\)\..*/error: rank \1 is gone: signal \3 ended its process on \2; $because; the job ends/
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

# mpirun kills its processes if it cannot write, for example when Ctrl-C has also ended `| tee log`. Its output
# therefore goes through a process that continues to read. That process passes train_gpt's last output, the command
# that resumes the run, to standard error.
exec {output}>&1
copier=
if [[ ${start[0]} == "$mpirun" && -p /dev/fd/1 ]]; then
    exec {output}>&-
    exec {output}> >(trap '' INT TERM USR1 PIPE && { cat 2>/dev/null || exec sed -n '/^go on with$/,$p' >&2; })
    copier=$!
fi

# Only the shell may read from a terminal, not a background process.
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
