"""Processes of a job without MPI, started one by one as from a plain shell: with RANK, WORLD_SIZE and the address of rank 0."""

import os
import random
import signal
import socket
import subprocess
import time

import program

MPI_VARIABLES = ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"]


def free_port():
    """Below the ports that the system assigns to connections, so that it stays free."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket(socket.AF_INET6) as listener:
            try:
                listener.bind(("::", port))
                return port
            except OSError:
                pass


def sockets_at(port, state):
    """The number of this machine's sockets of this local port in a state of Linux's tcp_states.h."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in open(f"/proc/net/{table}").read().splitlines()[1:]]
    return sum(1 for line in lines if (int(line[1].rsplit(":", 1)[1], 16), int(line[3], 16)) == (port, state))


ESTABLISHED, LISTENS = 1, 10


class Ended:
    def __init__(self, statuses, out, err):
        self.statuses, self.out, self.err = statuses, out, err


class Job:
    """Several processes with a common standard error, as on a terminal."""

    def __init__(self, size, port=None, host="127.0.0.1", seconds=60):
        self.size, self.port, self.host = size, port or free_port(), host
        self.seconds = int(seconds * program.PATIENCE)
        self.processes = []
        self.out, self.err = os.pipe(), os.pipe()

    def start(self, rank, *command, **variables):
        """`variables` override others; None removes one."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(self.size),
                       "MASTER_ADDR": self.host, "MASTER_PORT": str(self.port),
                       "TRAIN_GPT_CONNECT_SECONDS": str(self.seconds), **{name: None for name in MPI_VARIABLES}, **variables}
        process = subprocess.Popen([str(word) for word in command], cwd=program.ROOT, stdin=subprocess.DEVNULL,
                                   stdout=self.out[1], stderr=self.err[1],
                                   env={name: value for name, value in environment.items() if value is not None})
        self.processes.append(process)
        return process

    def start_all(self, *command, **variables):
        for rank in range(self.size):
            self.start(rank, *command, **variables)
        return self

    def end(self, seconds=30):
        """Waits for all processes, which must end by themselves."""
        os.close(self.out[1])
        os.close(self.err[1])
        deadline = time.monotonic() + seconds * program.PATIENCE
        try:
            statuses = [process.wait(max(0, deadline - time.monotonic())) for process in self.processes]
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
            texts = [open(pipe[0], errors="replace").read() for pipe in (self.out, self.err)]
        return Ended(statuses, *texts)
