"""A local server that speaks as much of the Hub's protocol as its client needs to push, pull and search."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml
from huggingface_hub import constants


TOKEN = "hf_test"
USER = "me"
DATE = "2026-01-01T00:00:00.000Z"


class Repo:
    """Commits and the branches that point to them; a commit is all of its files."""

    def __init__(self, private: bool = False):
        self.private = private
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.commit({})

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit that replaces all files of a branch."""
        oid = hashlib.sha1(f"{len(self.commits)}{sorted(files)}".encode()).hexdigest()
        self.commits[oid] = dict(files)
        self.branches[branch] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.branches["main"]]

    def tags(self) -> list[str]:
        """Those of the card's metadata, as the Hub reads them; none if they are broken."""
        match = re.match(r"---\n(.*?)\n---", self.files.get("README.md", b"").decode(), flags=re.DOTALL)
        try:
            return list(yaml.safe_load(match[1]).get("tags") or [])
        except (TypeError, AttributeError, yaml.YAMLError):
            return []


class HubServer(ThreadingHTTPServer):
    """
    In memory, on a free port of this machine, from when it is entered to when it is left.

    Everything is uploaded in the Hub's `regular` mode, inside the commit: neither LFS nor Xet is spoken.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str]] = []
        self.cut: dict[str, int] = {}  # paths in a repository, of which only so many bytes are sent
        self.before: Callable[[str, str], None] = lambda method, path: None
        self.lock = threading.Lock()

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self.shutdown()
        self.server_close()

    def add(self, repo_id: str, files: dict[str, bytes], private: bool = False) -> Repo:
        repo = self.repos[repo_id] = Repo(private)
        repo.commit(files)
        return repo

    def handle_error(self, request, client_address):
        """A client that has gone is no news."""


def use_hub(server: HubServer, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let the Hub's client speak to a server, with an empty cache. It reads the environment when it is imported."""
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *args):
        """Nothing on the tests' stderr."""

    def do_GET(self):
        address = urlsplit(self.path)
        path, query = unquote(address.path), parse_qs(address.query)
        body = self._body() if self.command == "POST" else b""
        with self.server.lock:
            self.server.requests.append((self.command, path))
            self.server.before(self.command, path)
            self._route(path, query, body)

    do_HEAD = do_POST = do_GET

    @property
    def is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status: int, content: object, cut: int | None = None, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:cut])
            self.close_connection = cut is not None

    def _refuse(self, status: int, code: str, message: str, **headers: str) -> None:
        self._send(status, {"error": message}, X_Error_Code=code, X_Error_Message=message, **headers)

    def _route(self, path: str, query: dict, body: bytes) -> None:
        if path == "/api/whoami-v2" and self.is_known:
            self._send(200, {"type": "user", "name": USER, "orgs": [], "auth": {"type": "access_token"}})
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif path == "/api/models":
            wanted = set(query.get("filter", []))
            found = [name for name, repo in self.server.repos.items() if wanted <= set(repo.tags())]
            self._send(200, [self._info(name, self.server.repos[name], "main") for name in found])
        elif path == "/api/whoami-v2" or (self.command == "POST" and not self.is_known):
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or USER}/{asked['name']}"
            exists = name in self.server.repos
            if not exists:
                self.server.repos[name] = Repo(bool(asked.get("private")))
            self._send(409 if exists else 200, {"url": f"{self.server.url}/{name}", "name": name, "id": name})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/([\w-]+)(?:/([^/]+))?(/.*)?)?", path):
            name, action, revision, _ = match.groups()
            repo = self._repo(name)
            if repo is not None:
                self._act(name, repo, action, revision or "main", body)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo = self._repo(match[1])
            if repo is not None:
                self._file(repo, match[2], match[3])
        else:
            self._refuse(404, "", f"no route for {self.command} {path}")

    def _repo(self, name: str) -> Repo | None:
        repo = self.server.repos.get(name)
        if repo is None or (repo.private and not self.is_known):
            self._refuse(401 if not self.is_known else 404, "RepoNotFound", "Repository not found")
            return None
        return repo

    def _info(self, name: str, repo: Repo, revision: str) -> dict:
        commit = repo.resolve(revision)
        entries = {"id": name, "modelId": name, "sha": commit, "private": repo.private, "tags": repo.tags()}
        dates = {"createdAt": DATE, "lastModified": DATE, "downloads": 0, "likes": 0}
        return entries | dates | {"siblings": [{"rfilename": file} for file in repo.commits[commit]]}

    def _file(self, repo: Repo, revision: str, path: str) -> None:
        commit = repo.resolve(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound", "Revision not found")
        content = repo.commits[commit].get(path)
        if content is None:
            return self._refuse(404, "EntryNotFound", "Entry not found", X_Repo_Commit=commit)
        headers = {"ETag": f'"{_oid(content)}"', "X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
        cut = self.server.cut.get(path)
        if self.command == "GET" and (match := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))):
            start = int(match[1])
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return self._send(206, content[start:], cut=None if cut is None else 0, **headers)
        return self._send(200, content, cut=cut if self.command == "GET" else None, **headers)

    def _act(self, name: str, repo: Repo, action: str | None, revision: str, body: bytes) -> None:
        if action == "branch":
            started = json.loads(body or b"{}").get("startingPoint") or "main"
            exists = revision in repo.branches
            repo.branches.setdefault(revision, repo.resolve(started))
            return self._send(409 if exists else 200, {})
        commit = repo.resolve(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound", "Revision not found")
        files = repo.commits[commit]
        if action in (None, "revision"):
            return self._send(200, self._info(name, repo, revision))
        if action in ("tree", "paths-info"):
            asked = files if action == "tree" else _paths(body)
            entries = [{"type": "file", "path": path, "size": len(files[path]), "oid": _oid(files[path])}
                       for path in sorted(asked) if path in files]  # fmt: skip
            return self._send(200, entries)
        if action == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            return self._send(200, {"files": modes})
        if action == "commit":
            new = dict(files)
            for line in body.splitlines():
                operation = json.loads(line)
                if operation["key"] == "file":
                    new[operation["value"]["path"]] = base64.b64decode(operation["value"]["content"])
                elif operation["key"] == "deletedFile":
                    new.pop(operation["value"]["path"], None)
            oid = repo.commit(new, revision)
            url = f"{self.server.url}/{name}/commit/{oid}"
            return self._send(200, {"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})
        return self._refuse(404, "", f"no route for {action}")


def _paths(body: bytes) -> list[str]:
    return json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode()).get("paths", [])


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
