"""Runs a command on a pseudo-terminal, and reads its output."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios

import program


def run(command, columns=90, **environment):
    """(exit status, everything written to a terminal with this many columns)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(command, cwd=program.ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
                               env=os.environ | {"TERM": "xterm", "NO_COLOR": ""} | environment)
    os.close(theirs)
    written = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # Linux's report that the other side is closed
            break
        if not piece:
            break
        written += piece
    os.close(ours)
    return process.wait(), written.decode().replace("\r\n", "\n")


def screen(text):
    """The lines that a wide enough terminal shows in the end. It understands characters, \\r, \\n, and the sequences for moving
    up one line and for erasing the rest of the line."""
    lines, row, column = [""], 0, 0
    for piece in re.findall(r"\r|\n|\x1b\[A|\x1b\[K|[^\r\n\x1b]+", text):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif piece == "\x1b[A":
            row -= 1
        elif piece == "\x1b[K":
            lines[row] = lines[row][:column]
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + piece + line[column + len(piece):]
            column += len(piece)
    return [line.rstrip() for line in lines]
