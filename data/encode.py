"""Encodes pieces of data in several processes. Not run by itself: the dataset scripts use it.

A piece is text as bytes and what else its encoder takes. An encoder has encode_pieces(list of pieces), which returns a
result for each, and it can be pickled: the tokenizers of tokenizer.py and the conversations of conversations.py. The
results do not depend on the number of processes.
"""

import collections
import contextlib
import concurrent.futures
import concurrent.futures.process
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading

from terminal import fail

END_SIGNALS = {signal.SIGINT, signal.SIGTERM}

BATCH = 1 << 20  # bytes of one task of a process


class Worker:
    """The state of a tokenizing process."""

    encoder = None

    @classmethod
    def begin(cls, encoder):
        for number in END_SIGNALS:  # often sent to all processes of a job; the parent process ends the work
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
        threading.Thread(target=cls.end_with_parent, daemon=True).start()
        cls.encoder = encoder

    @staticmethod
    def end_with_parent():
        """Ends this process when its parent ends, because a parent that is killed does not tell it."""
        multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    @classmethod
    def encode(cls, pieces):
        return cls.encoder.encode_pieces(pieces)


def batches_of(pieces):
    """Yields (batch, whether a part of the source ends with it). A batch is a list of (position, *piece) of about BATCH
    bytes."""
    batch, size = [], 0
    for piece in pieces:
        if piece is not None:
            batch.append(piece)
            size += len(piece[1]) + 64  # short documents have a cost too
        if piece is None or size >= BATCH:
            yield batch, piece is None
            batch, size = [], 0


@contextlib.contextmanager
def ending_later():
    """Delays Ctrl-C and SIGTERM until the block ends. Processes started in the block have them blocked until
    Worker.begin."""
    came = []
    handlers = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in END_SIGNALS}
    # Blocks them for the new processes. In this process other threads may still receive a signal, so it has handlers.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


def encode_in_order(pieces, encoder, processes):
    """Takes (position, *piece), and None at the end of each part of the source. Yields (position, result) in the same
    order, computed by `processes` processes. A few batches are read ahead, but none beyond the end of a part: opening
    the next part may need a download that turns out to be unnecessary."""
    pool, waiting = None, collections.deque()

    def first_done():
        batch, future = waiting.popleft()
        return zip((piece[0] for piece in batch), future.result())

    try:
        for batch, ends in batches_of(pieces):
            if processes == 1 or (pool is None and ends and not waiting):  # too little for several processes
                yield from zip((piece[0] for piece in batch), encoder.encode_pieces([piece[1:] for piece in batch]))
                continue
            # Spawned, not forked, so that they inherit no connections and files of the parent. The pool is made outside
            # ending_later(), because Python may start a helper process for it and then unblocks Ctrl-C.
            pool = pool or concurrent.futures.ProcessPoolExecutor(
                processes, multiprocessing.get_context("spawn"), Worker.begin, (encoder,))
            with ending_later():
                waiting.append((batch, pool.submit(Worker.encode, [piece[1:] for piece in batch])))
            while waiting and (ends or len(waiting) > 2 * processes):
                yield from first_done()
    except concurrent.futures.process.BrokenProcessPool:
        fail("a tokenizing process was killed, perhaps because memory ran out; fewer --processes need less, and the same "
             "command continues from here")
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
