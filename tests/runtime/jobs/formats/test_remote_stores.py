"""Inputs on S3, Google Cloud Storage and Hugging Face, and outputs on S3, by local servers.

S3 is moto's; the others are the few calls of their APIs that reading takes.
"""

import gzip
import http.server
import importlib
import json
import os
import re
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import pytest

from tests.commands import PATIENCE, python

# For `tests` in another process.
CHECKOUT, PATHS = Path(__file__).parents[4], os.environ.get("PYTHONPATH", "").split(os.pathsep)

FILES = {"en/a.txt": b"one\ntwo\n", "en/b.txt.gz": gzip.compress(b"three\n", mtime=0)}
# Clients read settings such as HF_ENDPOINT when they are imported, so they get a process.
READ = """
import json, sys
from transferry.runtime.errors import TransferryError
from transferry.runtime.jobs.formats.readers import open_inputs
from transferry.runtime.jobs.job import open_sources

for url in sys.argv[1:]:
    try:
        found = [row.text for row in open_inputs(open_sources([url])).rows()]
    except TransferryError as error:
        found = str(error)
    print(json.dumps(found))
"""

# Two partitions, the second first; then both once more.
WRITE = """
import json, sys
from pathlib import Path
from tests.runtime.jobs.helpers import Echo
from transferry.runtime.errors import TransferryError
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions

Path("in.txt").write_text("".join(f"row {number}\\n" for number in range(9)))
for url in sys.argv[1:]:
    found = []
    try:
        for number in (2, 1, 2, 1):
            options = JobOptions(chunk_rows=2, partition=f"{number}/2")
            found.append(str(Job(Echo(), "in.txt", url, options).run().finished_before))
    except TransferryError as error:
        found = str(error)
    print(json.dumps(found))
"""


def read(urls: list[str], script: str = READ, **settings: str) -> list[list[str] | str]:
    """Returns the rows of each URL, or the error."""
    paths = {"PYTHONPATH": os.pathsep.join([str(CHECKOUT), *PATHS])}
    done = python("-c", script, *urls, env=os.environ | paths | settings)
    return [json.loads(line) for line in done.stdout.splitlines()]


class Store(http.server.BaseHTTPRequestHandler):
    """The common part of both APIs."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        raise NotImplementedError

    def send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_json(self, value: Any, status: int = 200) -> None:
        self.send(json.dumps(value).encode(), status, Content_Type="application/json")

    def send_file(self, content: bytes, **headers: str) -> None:
        """Sends a file, or the bytes that the request asks for."""
        if (asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))) is None:
            self.send(content, 200, **headers)
            return
        first, last = int(asked[1]), min(int(asked[2] or 1 << 60), len(content) - 1)
        span = f"bytes {first}-{last}/{len(content)}"
        self.send(content[first : last + 1], 206, Content_Range=span, **headers)


class Cloud(Store):
    """The JSON API of Google Cloud Storage, with one bucket."""

    def do_GET(self) -> None:
        url = urlparse(self.path)
        asked, path = parse_qs(url.query), unquote(url.path).removeprefix("/download")
        _, objects, name = path.partition("/storage/v1/b/corpora/o")
        name = name.removeprefix("/")
        if not objects:
            self.send_json({"error": {"code": 404, "message": "no such bucket"}}, 404)
        elif not name:
            prefix = asked.get("prefix", [""])[0]
            found = [self.about(each) for each in FILES if each.startswith(prefix)]
            self.send_json({"kind": "storage#objects", "items": found})
        elif name not in FILES:
            self.send_json({"error": {"code": 404, "message": "no such object"}}, 404)
        elif asked.get("alt") == ["media"]:
            self.send_file(FILES[name])
        else:
            self.send_json(self.about(name))

    def about(self, name: str) -> dict[str, str]:
        made = {"updated": "2026-01-01T00:00:00Z", "timeCreated": "2026-01-01T00:00:00Z"}
        return {"name": name, "bucket": "corpora", "size": str(len(FILES[name])), **made}


class Hub(Store):
    """The Hugging Face Hub, with one dataset."""

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        if "/me/corpus" not in path:
            self.send(b'{"error": "not found"}', 404, X_Error_Code="RepoNotFound")
        elif "/tree/" in path:
            folder = path.partition("/tree/")[2].partition("/")[2]
            files = [{"type": "file", "path": p, "size": len(FILES[p]), "oid": "1"} for p in FILES]
            self.send_json(files if folder else [{"type": "directory", "path": "en", "oid": "2"}])
        elif "/resolve/" in path:
            name = path.partition("/resolve/")[2].partition("/")[2]
            self.send_file(FILES[name], ETag='"x"', X_Repo_Commit="1" * 40)
        else:
            self.send_json({"id": "me/corpus", "sha": "1" * 40, "siblings": []})


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), request.param) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


def check(root: str, elsewhere: str, **settings: str) -> None:
    """A file, a pattern with a compressed file, and three that are not there."""
    urls = [f"{root}/en/a.txt", f"{root}/en/*.txt*"]
    absent = [f"{root}/en/c.txt", f"{root}/en/*.csv", f"{elsewhere}/a.txt"]
    *found, file, pattern, place = read([*urls, *absent], **settings)
    assert found == [["one", "two"], ["one", "two", "three"]]
    assert file == f"{absent[0]}: there is no such file"
    assert pattern == f"{absent[1]}: expected files of this pattern, found no file"
    assert isinstance(place, str)
    assert place.startswith(f"{absent[2]}: there is no such file")
    assert len(place.splitlines()) == 1


@pytest.mark.optional("s3fs", "moto")
def test_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    moto = importlib.import_module("moto.server")
    serving = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    serving.start()
    try:
        endpoint = "http://{}:{}".format(*serving.get_host_and_port())
        for name, content in {"": b"", **{f"/{name}": FILES[name] for name in FILES}}.items():
            kind = {"Content-Type": "application/octet-stream"}
            url = f"{endpoint}/corpora{name}"
            put = urllib.request.Request(url, content, kind, method="PUT")
            urllib.request.urlopen(put, timeout=PATIENCE).close()
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        region = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": endpoint}
        check("s3://corpora", "s3://nothing", **keys, **region)
        out, absent = "s3://corpora/out.txt", "s3://nothing/out.txt"
        found, lacking = read([out, absent], WRITE, **keys, **region)
        assert found == ["False", "False", "True", "True"]
        assert lacking == f"{absent}: cannot be written: there is no such bucket or folder; " + (
            "create it, then run the command again"
        )
        assert {path.name for path in tmp_path.iterdir()} == {"in.txt"}
        assert read([f"{out}/*.txt"], **keys, **region) == [[f"ROW {row}" for row in range(9)]]
        # Nobody listens there any more.
        serving.stop()
        (lost,) = read([out], WRITE, **keys, **region)
        assert str(lost).startswith(f"{out}: cannot be written: Could not connect")
    finally:
        serving.stop()


@pytest.mark.optional("gcsfs")
@pytest.mark.parametrize("server", [Cloud], indirect=True)
def test_google_cloud_storage(server: str) -> None:
    check("gs://corpora", "gs://nothing", STORAGE_EMULATOR_HOST=server)


@pytest.mark.parametrize("server", [Hub], indirect=True)
def test_hugging_face(server: str) -> None:
    pytest.importorskip("huggingface_hub", reason="huggingface_hub, for hf://, is not installed")
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    check("hf://datasets/me/corpus", "hf://datasets/me/nothing", HF_ENDPOINT=server)
