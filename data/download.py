"""Downloads files and survives broken connections. Not run by itself: the dataset scripts use it.

A file appears under its name only when it is whole and its checksum is right. NAME.sha256 has its checksum, in the
format of `sha256sum -c`. During the download there are also NAME.part and NAME.part.json, which identifies the
version of the file. Checksums come from the script, from the server's list (Hugging Face has one), or from the first
download; they hold for all later downloads.
"""

import dataclasses
import email.utils
import json
import os
import re
import time
import urllib.parse

import requests

from shards import checksum, sync_folder, write_whole
from terminal import fail, naming, progress, reason, say

BLOCK = 1 << 16  # bytes per read; at most so many are lost if the script is stopped
TIMEOUTS = (20, 60)  # seconds for a connection, and between two pieces of data
LONGEST_PAUSE = 300  # seconds
QUICK_TRIES = 2  # while no server has answered yet, so that an offline user hears of it soon


@dataclasses.dataclass
class RemoteFile:
    url: str
    name: str  # name of the local file
    sha256: str = ""  # empty: unknown, the first download records it
    size: int = -1  # bytes; -1: as the server says


class Transient(Exception):
    """A failure that may go away soon."""

    def __init__(self, why, pause=None, reached=0):
        super().__init__(why)
        self.pause = pause  # seconds, if the server gave a number
        self.reached = reached  # bytes of the file received by then


def record_of(path):
    return path.with_name(path.name + ".sha256")


def recorded_checksum(path):
    """The checksum that an earlier download recorded next to the file; empty if there is none."""
    try:
        found = re.match(r"[0-9a-f]{64}\b", record_of(path).read_text(errors="replace"))
    except FileNotFoundError:
        return ""
    if not found:
        fail(f"{record_of(path)} has no checksum; remove it to download {path.name} again")
    return found[0]


def record(path, sha256):
    if recorded_checksum(path) != sha256:
        write_whole(record_of(path), f"{sha256}  {path.name}\n".encode())


class Downloader:
    def __init__(self, mirror="", tries=8, pause=1.0, remedy="give another server with --mirror URL"):
        """`mirror` replaces https://HOST in all addresses. After a first failure the script waits `pause` seconds,
        and twice as long after each further one. It gives up after `tries` failures in a row that brought nothing.
        `remedy` is the advice that is then printed."""
        self.mirror, self.tries, self.pause = mirror.rstrip("/"), tries, pause
        self.remedy = remedy
        self.session = requests.Session()
        self.session.headers.update({"Accept-Encoding": "identity", "User-Agent": "train_gpt-data"})
        self.answered = False  # whether any server has ever answered

    def address(self, url):
        if not self.mirror:
            return url
        parts = urllib.parse.urlsplit(url)
        return f"{self.mirror}{parts.path}" + (f"?{parts.query}" if parts.query else "")

    def fetch(self, remote, folder):
        """The complete and verified file in `folder`, which is downloaded if it is missing."""
        path = folder / remote.name
        known = remote.sha256 or recorded_checksum(path)
        if path.exists():
            found = checksum(path)
            if found == (known or found):
                record(path, found)
                return path
            say(f"{path} has changed since it was downloaded (its sha256 is {found}, not {known}): downloading it again")
        self.receive_verified(remote, path, known)
        return path

    def receive_verified(self, remote, path, known):
        part = path.with_name(path.name + ".part")
        version_file = path.with_name(path.name + ".part.json")
        for last_try in (False, True):
            version = self.with_patience(remote.url, lambda: self.receive(remote, part, version_file))
            found, right = checksum(part), known or version.get("sha256")
            if found == (right or found):
                break
            # These may be parts of two versions: download the whole file once more.
            part.unlink()
            if last_try:
                earlier = record_of(path)
                whose = (f"of an earlier download (in {earlier}); if the source has changed and you want the new version, "
                         f"remove {earlier}" if known and not remote.sha256 else f"that it should have; {self.remedy}")
                fail(f"{self.address(remote.url)} arrived twice with the sha256 {found}, not {right} {whose}")
            say(f"{path.name} arrived damaged: downloading it again")
        record(path, found)
        os.replace(part, path)
        version_file.unlink(missing_ok=True)
        sync_folder(path.parent)

    def get_json(self, url):
        """The JSON object at an address, and the address of its next page or None."""
        def attempt():
            with self.get(url) as response:
                try:
                    return response.json(), response.links.get("next", {}).get("url")
                except ValueError:
                    raise Transient("the answer is not JSON")
                except requests.RequestException as error:
                    raise Transient(f"the connection broke ({last_words(error)})")

        return self.with_patience(url, attempt)

    def with_patience(self, url, attempt):
        """The result of `attempt`, which is called again after transient failures. The number of calls has no limit
        while each gets further than all before. (If a server cannot resume in the middle, receiving the same data
        again is no progress.)"""
        failures = furthest = 0
        while True:
            try:
                return attempt()
            except Transient as trouble:
                failures = 1 if trouble.reached > furthest else failures + 1
                furthest = max(furthest, trouble.reached)
                self.pause_or_fail(url, trouble, failures)

    def pause_or_fail(self, url, trouble, failures):
        if failures >= (self.tries if self.answered else min(self.tries, QUICK_TRIES)):
            host = urllib.parse.urlsplit(self.address(url)).netloc
            if not self.answered:
                fail(f"cannot reach {host} ({trouble}); are you offline? The same command resumes the download; "
                     f"{self.remedy}")
            fail(f"{self.address(url)}: {trouble}, {failures} times in a row; the same command resumes the "
                 "download")
        pause = self.pause * 2 ** (failures - 1) if trouble.pause is None else trouble.pause
        pause = min(pause, LONGEST_PAUSE)
        say(f"{urllib.parse.urlsplit(url).path.split('/')[-1]}: {trouble}; trying again in {pause:g} s")
        time.sleep(pause)

    def get(self, url, headers=None):
        """The server's response: 2xx or 416. Other responses raise Transient if they may pass, and fail otherwise."""
        address = self.address(url)
        try:
            response = self.session.get(address, headers=headers, stream=True, timeout=TIMEOUTS)
        except (requests.exceptions.InvalidURL, requests.exceptions.MissingSchema, requests.exceptions.InvalidSchema):
            fail(f"'{address}' is not a web address, or redirects to something else; a mirror is for example https://HOST")
        except requests.exceptions.SSLError as error:
            fail(f"{address}: the server's certificate is not trusted ({last_words(error)}); if your network has its own "
                 "certificates, set REQUESTS_CA_BUNDLE to them")
        except requests.exceptions.TooManyRedirects:
            fail(f"{address} redirects in a circle; {self.remedy}")
        except requests.RequestException as error:
            asked = urllib.parse.urlsplit(getattr(error.request, "url", None) or address).netloc
            redirected = f"{asked}, to which it redirects: " if asked != urllib.parse.urlsplit(address).netloc else ""
            raise Transient(redirected + last_words(error))
        self.answered = True
        status = response.status_code
        if 200 <= status < 300 or status == 416:
            return response
        response.close()
        if status in (408, 425, 429) or status >= 500:
            raise Transient(f"the server answers {status} {response.reason}", seconds_to_wait(response))
        fail(f"{address}: the server answers {status} {response.reason}; {self.remedy}")

    def receive(self, remote, part, version_file):
        """Continues `part` with one connection; returns the server's description of the file's version. Raises
        Transient if the file is still incomplete."""
        have, version = kept_part(remote.url, part, version_file)
        headers = {}
        if have and have == remote.size:
            return version
        if have:
            headers["Range"] = f"bytes={have}-"
            # A version's checksum comes from the server that redirects. The server that sends the data does not know it as an
            # ETag.
            if not version["sha256"]:
                headers["If-Range"] = version["etag"] or version["modified"]
        with self.get(remote.url, headers) as response:
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":  # these bytes are not the ones that the server counts
                fail(f"{self.address(remote.url)} arrives as {encoding}, although the plain file was requested; {self.remedy}")
            new = version_of(response, remote.url)
            start, total = span_of(response)
            if response.status_code == 416 and have == total and have:
                return version
            is_part = response.status_code == 206
            # Without earlier bytes, a partial response is usable only if it starts at byte 0 and names the file's size.
            if not have and (response.status_code == 416 or (is_part and (start > 0 or total < 0))):
                fail(f"{self.address(remote.url)}: the server answers {response.status_code} {response.reason}, although "
                     f"the whole file was requested; {self.remedy}")
            if response.status_code == 416 or (is_part and have and (start != have or not same_version(version, new))):
                part.unlink(missing_ok=True)
                raise Transient("the file has changed since its download began; the download starts again", 0)
            if not is_part:
                have = 0
            if total >= 0 and remote.size >= 0 and total != remote.size:
                fail(f"{self.address(remote.url)} has {total:,} bytes instead of {remote.size:,}; it has changed at the "
                     "source, or the mirror has another version")
            part.parent.mkdir(parents=True, exist_ok=True)  # not before there is data to keep
            write_whole(version_file, json.dumps(new).encode())
            size = write_body(response, part, have, total, remote.name)
            if 0 <= total < size:
                part.unlink()
                raise Transient(f"{size:,} bytes arrived instead of {total:,}")
            if size < total:
                raise Transient(f"the connection ended after {size:,} of {total:,} bytes", reached=size)
            return new


def kept_part(url, part, version_file):
    """The number of bytes received so far, and their version; 0 if it is unknown whether the rest would fit."""
    try:
        version = json.loads(version_file.read_bytes())
        usable = version["url"] == url and (version["sha256"] or version["etag"] or version["modified"])
        return (part.stat().st_size, version) if usable else (0, {})
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0, {}


def version_of(response, url):
    """The identification of a file's version. A weak ETag does not identify the exact bytes."""
    linked = [answer.headers["X-Linked-Etag"].strip('"') for answer in [*response.history, response]
              if "X-Linked-Etag" in answer.headers]
    sha256 = next((etag for etag in linked if re.fullmatch("[0-9a-f]{64}", etag)), "")
    etag = response.headers.get("ETag", "")
    return {"url": url, "sha256": sha256, "etag": "" if etag.startswith("W/") else etag,
            "modified": response.headers.get("Last-Modified", "")}


def same_version(old, new):
    return next((old[key] == new[key] for key in ("sha256", "etag", "modified") if old.get(key)), False)


def span_of(response):
    """The position of the first byte of the response, and the size of the whole file (-1: unknown)."""
    content_range = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+)", response.headers.get("Content-Range", ""))
    if response.status_code != 200 and content_range:
        return int(content_range[1] or 0), int(content_range[2])
    if response.status_code == 200 and response.headers.get("Content-Length", "").isdigit():
        return 0, int(response.headers["Content-Length"])
    return 0, -1


def write_body(response, part, have, total, name):
    """Appends the response to the `have` bytes of `part`; returns its new size."""
    size = have
    response.raw.enforce_content_length = False  # otherwise the last bytes of a broken connection would be lost
    with naming(part), open(part, "r+b" if have else "wb") as file, progress(name, "B", total if total >= 0 else None, have) as bar:
        file.seek(have)
        file.truncate()
        try:
            for block in response.iter_content(BLOCK):
                file.write(block)
                size += len(block)
                bar.update(len(block))
        except requests.RequestException as error:
            file.flush()
            raise Transient(f"the connection broke after {size:,} bytes ({last_words(error)})", reached=size)
        file.flush()
        os.fsync(file.fileno())
    return size


def seconds_to_wait(response):
    """Retry-After in seconds, from a number or a date. None without it."""
    wanted = response.headers.get("Retry-After", "")
    if wanted.isdigit():
        return float(wanted)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(wanted).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def last_words(error):
    """The system's message for a connection error, without the text that libraries add around it."""
    text = reason(error)
    if re.search("IncompleteRead|InvalidChunkLength", text):  # the message of Python's http.client
        return "it ended before the answer did"
    if "BadStatusLine" in text:
        return "the program there is not a web server"
    for pattern in (r"\[(?:Errno|SSL)[^\]]*\] ?[^'\")>]+", r"\(\d+, '([^']+)'\)", r": ([^:'\")>]+)['\")>]*$"):
        if found := re.findall(pattern, text):
            return found[-1].strip()
    return text


def hub_files(downloader, repository, folder, wanted, list_file):
    """The files in a folder of a dataset on huggingface.co whose names match the regular expression `wanted`, sorted
    by name. The revision of the first call is kept in `list_file` and used by all later ones, so that a resumed run
    does not mix two revisions. Returns the revision and RemoteFiles with their checksums."""
    try:
        kept = json.loads(list_file.read_bytes())
        return kept["revision"], [RemoteFile(**entry) for entry in kept["files"]]
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError):
        fail(f"{list_file} is damaged; remove it to download it again")
    api = f"https://huggingface.co/api/datasets/{repository}"
    try:
        about, _ = downloader.get_json(api)
        revision = about["sha"]
        following = f"{api}/tree/{revision}/{folder}".rstrip("/")
        entries = []
        while following:
            page, following = downloader.get_json(following)
            entries += page
        files = [RemoteFile(f"https://huggingface.co/datasets/{repository}/resolve/{revision}/{entry['path']}",
                            entry["path"].rsplit("/", 1)[-1], (entry.get("lfs") or {}).get("oid", ""), entry["size"])
                 for entry in sorted(entries, key=lambda entry: entry["path"])
                 if entry["type"] == "file" and re.fullmatch(wanted, entry["path"].rsplit("/", 1)[-1])]
    except (KeyError, TypeError, AttributeError):
        fail(f"{downloader.address(api)} gives an unknown answer; is --mirror a mirror of huggingface.co?")
    if not files:
        fail(f"{downloader.address(api)}: the folder '{folder}' of the dataset has no files like {wanted}; it has changed at "
             "its source")
    list_file.parent.mkdir(parents=True, exist_ok=True)
    kept = {"revision": revision, "files": [dataclasses.asdict(file) for file in files]}
    write_whole(list_file, json.dumps(kept, indent=1).encode())
    return revision, files
