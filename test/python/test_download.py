"""data/download.py: files arrive whole and right despite connections that drop, servers that fail and sources that change."""

import email.utils
import gzip
import hashlib
import json
import socket
import sys
import time

import file_server
import pytest
from file_server import (File, change_to, drop_after, drop_whole_after, ignoring_if_range, in_chunks, reset_after, status, too_much,
                         wrong_bytes)

import program

sys.path.insert(0, str(program.ROOT / "data"))
import download  # noqa: E402
import shards  # noqa: E402
from download import Downloader, RemoteFile  # noqa: E402

BODY = bytes(i * i % 251 for i in range(300_000))
OTHER = BODY[::-1]


def sha256(body):
    return hashlib.sha256(body).hexdigest()


class Place:
    """A server with one file, and a Downloader's work with it."""

    def __init__(self, server, folder, file):
        self.server, self.folder, self.file = server, folder, file
        server.files["/some/file.txt"] = file
        self.path = folder / "file.txt"

    def fetch(self, sha256="", size=-1, tries=8):
        remote = RemoteFile("https://source.example/some/file.txt", "file.txt", sha256, size)
        return Downloader(self.server.url, tries=tries).fetch(remote, self.folder)

    def refused(self, **arguments):
        with pytest.raises(SystemExit) as ending:
            self.fetch(**arguments)
        text = str(ending.value)
        assert text.startswith("error: ") and "\n" not in text
        return text

    @property
    def ranges(self):
        return [asked for _, asked in self.server.requests]


@pytest.fixture
def pauses(monkeypatch):
    """The requested pauses in seconds, without any real pause."""
    waited = []
    monkeypatch.setattr(download.time, "sleep", waited.append)
    return waited


@pytest.fixture
def place(tmp_path, pauses):
    with file_server.serving() as server:
        yield Place(server, tmp_path / "download", File(BODY))


def test_download_and_record(place):
    assert place.fetch() == place.path and place.path.read_bytes() == BODY
    assert (place.folder / "file.txt.sha256").read_text() == f"{sha256(BODY)}  file.txt\n"
    assert sorted(path.name for path in place.folder.iterdir()) == ["file.txt", "file.txt.sha256"]
    place.fetch()
    assert len(place.server.requests) == 1  # an existing file is checked, not downloaded


@pytest.mark.parametrize("file", [File(BODY), File(BODY, etag="", modified="Wed, 21 Oct 2015 07:28:00 GMT"),
                                  File(BODY, headers={"X-Linked-Etag": f'"{sha256(BODY)}"'})], ids=["etag", "date", "linked"])
def test_dropped_connections(place, pauses, file):
    place.server.files["/some/file.txt"] = file
    file.faults = [drop_after(100_000), drop_after(50_000), drop_after(7)]
    assert place.fetch().read_bytes() == BODY
    assert place.ranges == [None, "bytes=100000-", "bytes=150000-", "bytes=150007-"]
    assert pauses == [1, 1, 1]  # each attempt received something


def test_a_later_run_goes_on(place):
    place.file.faults = [drop_after(1000), *[status(503)] * 2]
    assert "3 times in a row" in place.refused(tries=3)
    assert not place.path.exists() and (place.folder / "file.txt.part").stat().st_size == 1000
    place.file.faults = []
    place.server.requests.clear()
    assert place.fetch().read_bytes() == BODY
    assert place.ranges == ["bytes=1000-"]


@pytest.mark.parametrize("answer", [None, ignoring_if_range], ids=["whole", "part of another version"])
def test_changed_while_it_arrives(place, answer):
    def changed(handler, file):
        change_to(OTHER, '"2"')(handler, file)
        return answer(handler, file) if answer else None
    place.file.faults = [drop_after(1000), changed]
    assert place.fetch().read_bytes() == OTHER
    assert place.ranges == [None, "bytes=1000-"] + [None] * (answer is not None)


def test_linked_checksum_changed(place):
    """Hugging Face gives a file's checksum with the redirect to it. The target of the redirect has validators of its own."""
    server = place.server
    server.files["/some/file.txt"] = File(b"", location="/store", headers={"X-Linked-Etag": f'"{sha256(BODY)}"'})
    server.files["/store"] = File(BODY, etag='"x"')

    def changed(handler, file):
        file.headers["X-Linked-Etag"] = f'"{sha256(OTHER)}"'
        server.files["/store"].body = OTHER
    server.files["/store"].faults = [drop_after(1000), change_to(BODY, '"y"')]
    assert place.fetch().read_bytes() == BODY
    assert server.answers[-1] == 206  # whatever the store calls it, it is the same file
    place.path.unlink()
    (place.folder / "file.txt.sha256").unlink()
    server.files["/store"].faults = [drop_after(1000)]
    server.files["/some/file.txt"].faults = [None, changed]
    assert place.fetch().read_bytes() == OTHER


def test_wrong_bytes_of_a_linked_checksum(place):
    place.file.headers = {"X-Linked-Etag": f'"{sha256(BODY)}"'}
    place.file.faults = [wrong_bytes]
    assert place.fetch().read_bytes() == BODY
    place.path.unlink()
    (place.folder / "file.txt.sha256").unlink()
    place.file.faults = [wrong_bytes] * 2
    assert "arrived twice" in place.refused()


def test_reset_connections(place):
    """The server resets the connection instead of closing it."""
    place.file.faults = [reset_after(200_000)]
    assert place.fetch().read_bytes() == BODY
    assert place.ranges[1] is None or 0 < int(place.ranges[1][6:-1]) <= 200_000


def test_no_validator(place):
    """If nothing tells versions apart, a part is not continued."""
    place.file.etag = ""
    place.file.faults = [drop_after(1000)]
    assert place.fetch().read_bytes() == BODY
    assert place.ranges == [None, None]


def test_weak_validator(place):
    place.file.etag = 'W/"1"'
    place.file.faults = [drop_after(1000)]
    assert place.fetch().read_bytes() == BODY
    assert place.ranges == [None, None]


def test_wrong_bytes(place):
    place.file.faults = [wrong_bytes]
    assert place.fetch(sha256(BODY)).read_bytes() == BODY
    place.path.unlink()
    place.file.faults = [wrong_bytes, wrong_bytes]
    assert "it should have" in place.refused(sha256=sha256(BODY))
    assert not place.path.exists() and not (place.folder / "file.txt.part").exists()


def test_wrong_bytes_in_a_part(place):
    """The connection drops, and the rest of the file is then wrong."""
    place.file.faults = [drop_after(1000), wrong_bytes]
    assert place.fetch(sha256(BODY)).read_bytes() == BODY
    assert place.ranges == [None, "bytes=1000-", None]


def test_recorded_checksum(place):
    place.fetch()
    place.path.unlink()
    change_to(OTHER, '"2"')(None, place.file)
    text = place.refused()
    assert sha256(BODY) in text and "remove" in text and "file.txt.sha256" in text
    assert not place.path.exists()
    (place.folder / "file.txt.sha256").unlink()
    assert place.fetch().read_bytes() == OTHER


def test_damaged_here(place, capsys):
    place.fetch()
    place.path.write_bytes(BODY[:-1] + b"x")
    assert place.fetch().read_bytes() == BODY
    assert "downloading it again" in capsys.readouterr().out


def test_damaged_record(place):
    place.fetch()
    (place.folder / "file.txt.sha256").write_text("nonsense")
    assert "has no checksum; remove it" in place.refused()


def test_failing_server(place, pauses):
    soon = email.utils.formatdate(time.time() + 100, usegmt=True)
    place.file.faults = [status(503), status(500), status(429, Retry_After="7"), status(503, Retry_After=soon),
                         status(429, Retry_After="1000000"), status(503, Retry_After="later")]
    assert place.fetch().read_bytes() == BODY
    assert pauses[:3] == [1, 2, 7] and 90 < pauses[3] <= 100 and pauses[4:] == [300, 32]


def test_giving_up(place, pauses):
    place.file.faults = [status(503)] * 8
    assert "503 Service Unavailable, 8 times in a row" in place.refused()
    assert pauses == [1, 2, 4, 8, 16, 32, 64]


def test_a_server_that_falls_silent(place, pauses, monkeypatch):
    """It falls silent before it answers, and later in the middle of the file. Each time, the script waits until its time
    limit and tries again."""
    monkeypatch.setattr(download, "TIMEOUTS", tuple(seconds / 200 for seconds in download.TIMEOUTS))
    hangs = [file_server.Hang(None), file_server.Hang(100_000)]
    place.file.faults = list(hangs)
    begin = time.monotonic()
    assert place.fetch().read_bytes() == BODY
    assert time.monotonic() - begin < 30 and len(place.server.requests) == 3  # the server hangs for a minute
    assert place.ranges[-1] is not None and place.ranges[-1] != "bytes=0-"  # not from the beginning
    for hang in hangs:
        hang.released.set()


def test_nothing_ever_comes(place, pauses):
    place.file.faults = [drop_after(0)] * 8
    assert "8 times in a row" in place.refused()


def test_always_dropped_at_the_same_place(place, pauses):
    """The server cannot continue from there. The same length again is no progress; more than ever before is progress."""
    place.file.faults = [drop_whole_after(200_000)] * 100
    assert "the connection ended after 200,000 of 300,000 bytes, 8 times in a row" in place.refused()
    assert len(place.server.requests) == 8 and pauses == [1, 2, 4, 8, 16, 32, 64]
    pauses.clear()
    place.file.faults = [drop_whole_after(length) for length in (5000, 4000, 5000, 6000, 3000, 6000, 7000)]
    assert place.fetch().read_bytes() == BODY
    assert pauses == [1, 2, 4, 1, 2, 4, 1]


def test_more_than_was_announced(place):
    place.file.faults = [drop_after(1000), too_much]
    assert place.fetch().read_bytes() == BODY
    place.path.unlink()
    place.file.faults = [drop_after(1000), too_much] * 50
    assert "301,000 bytes arrived instead of 300,000, 8 times in a row" in place.refused()


def part_instead(content_range, body):
    headers = {"Content-Range": content_range} if content_range else {}
    return lambda handler, file: handler.answer(206, {"ETag": file.etag, **headers}, body) or True


def test_a_part_that_nobody_asked_for(place, pauses):
    """If the part is the file's beginning, it counts as the whole answer. For another part, the message says which it is."""
    place.file.faults = [part_instead("bytes 0-299999/300000", BODY)]
    assert place.fetch().read_bytes() == BODY
    assert place.ranges == [None]
    place.path.unlink()
    place.file.faults = [part_instead("bytes 0-999/300000", BODY[:1000])]
    assert place.fetch().read_bytes() == BODY
    assert place.ranges == [None, None, "bytes=1000-"] and pauses == [1]
    place.path.unlink()
    for answer, told in ((part_instead("bytes 1000-299999/300000", BODY[1000:]), "206 Partial Content"),
                         (part_instead("bytes 0-999/*", BODY[:1000]), "206 Partial Content"),
                         (part_instead("", BODY), "206 Partial Content"), (status(416), "416 Requested Range Not Satisfiable")):
        place.file.faults = [answer]
        assert f"the server answers {told}, although the whole file was requested; give another server with --mirror URL" in place.refused()
    assert pauses == [1] and not list(place.folder.glob("*.part"))


def test_compressed_on_the_way(place, pauses):
    """Though no compression was requested."""
    place.file.body = gzip.compress(BODY)
    place.file.headers = {"Content-Encoding": "gzip"}
    assert "/some/file.txt arrives as gzip, although the plain file was requested; give another server with --mirror URL" in place.refused()
    assert pauses == [] and not place.path.exists()


def test_of_unknown_size(place):
    place.file.faults = [in_chunks((5000, BODY[:5000] + b"\r\n"), ends=True)]
    assert place.fetch().read_bytes() == BODY[:5000]


@pytest.mark.parametrize("chunks", [[(5000, BODY[:4000])], [(5000, BODY[:5000] + b"\r\n")], [(5000, BODY[:5000] + b"\r\nnonsense\r\n")]],
                         ids=["within a chunk", "between two", "nonsense"])
def test_unknown_size_and_dropped(place, capsys, chunks):
    place.file.faults = [in_chunks(*chunks)] * 100
    text = place.refused()
    came = 5000 if len(chunks[0][1]) > 5000 else 0  # incomplete chunks are not used
    assert f"the connection broke after {came:,} bytes (it ended before the answer did), 8 times in a row" in text
    assert capsys.readouterr().out.count("(it ended before the answer did); trying again in ") == 7


def test_not_there(place, pauses):
    del place.server.files["/some/file.txt"]
    assert "404 Not Found" in place.refused()
    assert pauses == []


def test_complete_but_not_renamed(place):
    """Killed before the last step."""
    place.file.faults = [drop_after(1000), *[status(503)] * 7]
    place.refused()
    (place.folder / "file.txt.part").write_bytes(BODY)
    place.server.requests.clear()
    assert place.fetch().read_bytes() == BODY
    assert place.ranges == ["bytes=300000-"]  # answered with 416


def test_part_too_long(place):
    place.file.faults = [drop_after(1000), *[status(503)] * 7]
    place.refused()
    (place.folder / "file.txt.part").write_bytes(BODY + b"more")
    assert place.fetch().read_bytes() == BODY


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"{}", b"[1]"])
def test_damaged_state(place, damage):
    place.file.faults = [drop_after(1000), *[status(503)] * 7]
    place.refused()
    (place.folder / "file.txt.part.json").write_bytes(damage)
    assert place.fetch().read_bytes() == BODY


def test_another_size(place):
    assert "has 300,000 bytes instead of 7" in place.refused(size=7)


def test_offline(tmp_path, pauses):
    with socket.socket() as free:  # a port without a listener
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(SystemExit, match="^error: cannot reach 127.0.0.1:.*Connection refused.*offline.*"):
            Downloader(url).fetch(RemoteFile("https://source.example/x", "x"), tmp_path / "folder")
    assert pauses == [1] and not list(tmp_path.iterdir())


def test_a_redirect_to_where_nobody_answers_names_it(place):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        elsewhere = f"127.0.0.1:{free.getsockname()[1]}"
        place.server.files["/some/file.txt"] = File(b"", location=f"http://{elsewhere}/store")
        said = place.refused()
    assert f"{elsewhere}, to which it redirects: " in said and "Connection refused" in said
    place.server.files["/some/file.txt"] = File(b"", location="ftp://elsewhere/store")
    assert "or redirects to something else" in place.refused()


def test_what_is_no_web_server_is_told(place):
    def garbage(handler, file):
        handler.wfile.write(b"garbage\r\n\r\n")
        return True
    place.file.faults = [garbage] * 20
    assert "the program there is not a web server" in place.refused()


def test_half_of_another_address_is_not_gone_on_with(place):
    """Even though the file has the same name, and the server gives the same date."""
    date = "Wed, 21 Oct 2015 07:28:00 GMT"
    place.server.files["/some/file.txt"] = File(OTHER, etag="", modified=date)
    place.server.files["/some/file.txt"].faults = [drop_after(1000)]
    place.refused(tries=1)
    assert (place.folder / "file.txt.part").stat().st_size >= 1000
    place.server.files["/another/file.txt"] = File(BODY, etag="", modified=date)
    mirror = Downloader(place.server.url)
    assert mirror.fetch(RemoteFile("https://source.example/another/file.txt", "file.txt"), place.folder).read_bytes() == BODY


@pytest.mark.parametrize("mirror", ["nonsense", "ftp://x", "http://"])
def test_wrong_mirror(tmp_path, mirror):
    with pytest.raises(SystemExit, match="is not a web address"):
        Downloader(mirror).fetch(RemoteFile("https://source.example/x", "x"), tmp_path)


def test_files_of_the_hub(place, tmp_path):
    """The list comes in pages. Later runs use the list and the revision of the first run."""
    def entry(name, lfs=True):
        return {"type": "file", "path": f"a/{name}", "size": 5, "oid": "0" * 40, **({"lfs": {"oid": sha256(b"12345")}} if lfs else {})}

    server, tree = place.server, "/api/datasets/some/set/tree/abc/a"
    server.files["/api/datasets/some/set"] = File(json.dumps({"sha": "abc"}).encode())
    server.files[tree] = File(json.dumps([entry("2.parquet"), {"type": "directory", "path": "a/3.parquet"}]).encode(),
                              headers={"Link": f'<https://huggingface.co{tree}?cursor=x>; rel="next"'})
    server.files[tree + "?cursor=x"] = File(json.dumps([entry("1.parquet", lfs=False), entry("README.md")]).encode())
    server.files["/api/datasets/some/set"].faults = [status(503), drop_after(3)]
    downloader = Downloader(server.url)
    wanted = ("abc", [RemoteFile("https://huggingface.co/datasets/some/set/resolve/abc/a/1.parquet", "1.parquet", "", 5),
                      RemoteFile("https://huggingface.co/datasets/some/set/resolve/abc/a/2.parquet", "2.parquet", sha256(b"12345"), 5)])
    list_file = tmp_path / "x" / "files.json"
    assert download.hub_files(downloader, "some/set", "a", r".*\.parquet", list_file) == wanted
    server.files.clear()
    assert download.hub_files(downloader, "some/set", "a", r".*\.parquet", list_file) == wanted
    list_file.write_text("{")
    with pytest.raises(SystemExit, match="files.json is damaged; remove it"):
        download.hub_files(downloader, "some/set", "a", "", list_file)
    list_file.unlink()
    server.files["/api/datasets/some/set"] = File(b"[]")
    with pytest.raises(SystemExit, match="gives an unknown answer"):
        download.hub_files(downloader, "some/set", "a", "", list_file)


def test_files_appear_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    shards.write_whole(path, b"before")

    def full(descriptor):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(shards.os, "fsync", full)
    with pytest.raises(OSError) as error:
        shards.write_whole(path, b"after")
    assert error.value.filename == str(path)
    assert path.read_bytes() == b"before" and [entry.name for entry in tmp_path.iterdir()] == ["file"]
