"""Downloading from a hub: the real huggingface_hub against a server on this machine that speaks the
hub's protocol."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shardwise.formats.catalogue import CATALOGUE
from shardwise.formats.huggingface.hf_config import to_hugging_face

COMMIT = "b" * 40
FILES = {
    "config.json": json.dumps(to_hugging_face(CATALOGUE["smollm2-135m"])).encode(),
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "consolidated.safetensors": b"the same again",
    "pytorch_model.bin": b"a pickle",
    "original/params.json": b"{}",
    "README.md": b"words",
}


class Hub(BaseHTTPRequestHandler):
    """Three kinds of answer: a model's commit, the tree of its files, and a file; 404 and 403 as
    the hub words them."""

    def __init__(self, files: dict[str, dict[str, bytes]], *rest: object) -> None:
        self.files = files
        super().__init__(*rest)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/")
        api = path.startswith("api/models/")
        repository = "/".join(path.removeprefix("api/models/").split("/")[:2])
        rest = path.removeprefix("api/models/").split("/")[2:]
        if repository == "org/gated" and not api:
            return self.answer(
                b"", 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}
            )
        if repository not in self.files:
            return self.answer(
                b"",
                404,
                {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"},
            )
        files = self.files[repository]
        if not api:
            name = "/".join(rest[2:])  # resolve/REVISION/NAME
            if name not in files:
                return self.answer(
                    b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
                )
            etag = sha1(files[name]).hexdigest()
            return self.answer(files[name], 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        found = tree if rest[:1] == ["tree"] else {"id": repository, "sha": COMMIT, "siblings": []}
        return self.answer(json.dumps(found).encode(), 200, {"Content-Type": "application/json"})

    def answer(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    without = {
        name: data
        for name, data in FILES.items()
        if name not in ("model.safetensors", "config.json")
    }
    pickled = {name: data for name, data in FILES.items() if "safetensors" not in name}
    served = {"org/tiny": FILES, "org/other": without, "org/pickled": pickled}
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, served))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


FETCH = """
import sys
from shardwise.formats.catalogue import find_model, model_path
try:
    found = find_model(sys.argv[1])
    print(found.kind, found.config.num_layers, model_path(found))
except ValueError as error:
    print(error)
"""


def fetch(word: str, endpoint: str, home: Path) -> str:
    """The endpoint is read when huggingface_hub is imported, so a process of its own asks for
    it."""
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    kept = {
        name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")
    }
    done = subprocess.run(
        [sys.executable, "-c", FETCH, word],
        capture_output=True,
        text=True,
        timeout=60,
        env=kept | settings,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_hub_model_is_downloaded_once_and_only_what_is_read(
    endpoint: str, tmp_path: Path
) -> None:
    kind, layers, folder = fetch("org/tiny", endpoint, tmp_path).split()
    assert (kind, layers) == ("hub", "30")
    names = {path.name for path in Path(folder).iterdir()}
    assert names == {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert (Path(folder) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    nobody = (
        "http://127.0.0.1:9"  # the second time it comes from the cache, with no server in reach
    )
    assert fetch("org/tiny", nobody, tmp_path) == f"hub 30 {folder}"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "org/missing",
            "org/missing is neither a folder on this machine nor a public model on the hub",
        ),
        ("org/gated", "org/gated is gated: accept its terms at https://huggingface.co/org/gated"),
        ("org/other", "org/other has no config.json on the hub"),
        ("org/pickled", "org/pickled has no safetensors weights on the hub"),
    ],
)
def test_what_the_hub_cannot_give_is_a_sentence(
    word: str, said: str, endpoint: str, tmp_path: Path
) -> None:
    answer = fetch(word, endpoint, tmp_path)
    assert said in answer
    assert "\n" not in answer
