"""A web server on this machine that serves small files to the tests of data/, and misbehaves on request."""

import contextlib
import http.server
import re
import socket
import struct
import threading
import time
import urllib.parse


class File:
    """A file served at a path. Each request uses up one of `faults`. A fault is a function (server's handler, file) that may
    answer instead of the file, and returns True if it did."""

    def __init__(self, body, etag='"1"', modified="", headers=None, location=None):
        self.body, self.etag, self.modified, self.headers, self.location = body, etag, modified, headers or {}, location
        self.faults = []


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_GET(self):
        path = urllib.parse.unquote(self.path)
        self.server.requests.append((path, self.headers.get("Range")))
        file = self.server.files.get(path)
        if file is None:
            return self.answer(404)
        fault = file.faults.pop(0) if file.faults else None
        if fault is None or not fault(self, file):
            self.serve(file)

    def serve(self, file, length=None, honour_if_range=True):
        """Serves the file or the requested part of it; only `length` bytes of the body if `length` is given."""
        if file.location:
            return self.answer(302, {"Location": file.location, **file.headers})
        headers = {**file.headers, **({"ETag": file.etag} if file.etag else {}),
                   **({"Last-Modified": file.modified} if file.modified else {})}
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        condition = self.headers.get("If-Range")
        holds = condition is None or (condition and condition in (file.etag, file.modified))
        if not wanted or (honour_if_range and not holds):
            return self.answer(200, headers, file.body, length)
        start, size = int(wanted[1]), len(file.body)
        if start >= size:
            return self.answer(416, {"Content-Range": f"bytes */{size}"})
        self.answer(206, {**headers, "Content-Range": f"bytes {start}-{size - 1}/{size}"}, file.body[start:], length)

    def answer(self, status, headers=None, body=b"", length=None):
        self.server.answers.append(status)
        self.send_response(status)
        for name, value in {"Content-Length": len(body), "Connection": "close", **(headers or {})}.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body[:length])
        self.close_connection = True


def drop_after(length):
    """Sends only `length` bytes of the requested ones, though all are announced."""
    return lambda handler, file: handler.serve(file, length) or True


def drop_whole_after(length):
    """The same for a server that does not support ranges and starts at the beginning each time."""
    return lambda handler, file: handler.answer(200, {"ETag": file.etag}, file.body, length) or True


def too_much(handler, file):
    """The whole file when only the rest was requested: more than is announced."""
    start, size = int(re.findall(r"\d+", handler.headers.get("Range", "0"))[0]), len(file.body)
    handler.answer(206, {"ETag": file.etag, "Content-Range": f"bytes {start}-{size - 1}/{size}"}, file.body)
    return True


def in_chunks(*chunks, ends=False):
    """Sends chunks, without announcing the length. `chunks` are (size, bytes). After the last one the connection ends, properly
    if `ends`."""
    def serve(handler, file):
        handler.protocol_version = "HTTP/1.1"
        handler.answer(200, {"ETag": file.etag, "Content-Length": None, "Transfer-Encoding": "chunked"},
                       b"".join(b"%x\r\n%s" % chunk for chunk in chunks) + b"0\r\n\r\n" * ends)
        return True
    return serve


def reset_after(length):
    """Like drop_after, but the server resets the connection."""
    def serve(handler, file):
        handler.serve(file, length)
        handler.wfile.flush()
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()
        return True
    return serve


def status(code, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler, file: handler.answer(code, headers) or True


def wrong_bytes(handler, file):
    served = File(bytes(byte ^ 1 for byte in file.body), file.etag, file.modified, file.headers)
    handler.serve(served)
    return True


def change_to(body, etag):
    """Replaces the file from now on."""
    def change(handler, file):
        file.body, file.etag = body, etag
    return change


def ignoring_if_range(handler, file):
    handler.serve(file, honour_if_range=False)
    return True


def in_pieces(size, seconds):
    """Sends the file in pieces of `size` bytes, with a pause of `seconds` between them."""
    def serve(handler, file):
        handler.answer(200, {"ETag": file.etag, "Content-Length": len(file.body)})
        for begin in range(0, len(file.body), size):
            handler.wfile.write(file.body[begin:begin + size])
            time.sleep(seconds)
        return True
    return serve


class Hang:
    """Serves `length` bytes (None: no answer at all), then nothing until it is released. `reached` is set when it waits."""

    def __init__(self, length):
        self.length, self.reached, self.released = length, threading.Event(), threading.Event()

    def __call__(self, handler, file):
        if self.length is not None:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(file.body)))
            handler.send_header("ETag", file.etag)
            handler.end_headers()
            handler.wfile.write(file.body[:self.length])
            handler.wfile.flush()
        self.reached.set()
        self.released.wait(60)
        handler.close_connection = True
        return True


@contextlib.contextmanager
def serving(files=None):
    """A server of {path: File or bytes}, with its `url`, its `requests` so far as (path, range), its `answers` (statuses) and
    its `files`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    server.files = {path: file if isinstance(file, File) else File(file) for path, file in (files or {}).items()}
    server.requests, server.answers = [], []
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
