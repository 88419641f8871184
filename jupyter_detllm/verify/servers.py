"""Which running Jupyter servers of this user have a file open. Never fails."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["servers_with"]

_TIMEOUT = 1.0
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_MOST = 1_000_000


def servers_with(path: Path) -> tuple[str, ...]:
    """Return the addresses of running servers that have a session for `path`.

    Servers are found in the user's runtime folder and asked on the loopback interface
    only. What does not answer within a second does not count.
    """
    return tuple(
        str(info["url"]) for info in _running() if path in _open_files(info, _sessions(info))
    )


def _running() -> Iterator[dict[str, Any]]:
    from jupyter_core.paths import jupyter_runtime_dir

    for file in sorted(Path(jupyter_runtime_dir()).glob("jpserver-*.json")):
        try:
            info = json.loads(file.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(info, dict) and isinstance(info.get("url"), str) and _alive(info.get("pid")):
            yield info


def _alive(pid: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    if os.name == "nt":  # there, signal 0 would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _sessions(info: Mapping[str, Any]) -> list[Any]:
    import http.client

    try:
        address = urlsplit(info["url"])
        if address.scheme != "http" or address.hostname not in _LOOPBACK:
            return []
        connection = http.client.HTTPConnection(
            address.hostname, address.port or 80, timeout=_TIMEOUT
        )
    except ValueError:
        return []
    try:
        connection.request(
            "GET",
            f"{address.path.rstrip('/')}/api/sessions",
            headers={"Authorization": f"token {info.get('token', '')}"},
        )
        response = connection.getresponse()
        found = json.loads(response.read(_MOST)) if response.status == 200 else []
    except (OSError, ValueError, http.client.HTTPException):
        return []
    finally:
        connection.close()
    return found if isinstance(found, list) else []


def _open_files(info: Mapping[str, Any], sessions: list[Any]) -> set[Path]:
    root = info.get("root_dir")
    paths = [
        session["path"]
        for session in sessions
        if isinstance(session, dict) and isinstance(session.get("path"), str)
    ]
    if not isinstance(root, str):
        return set()
    out = set()
    for path in paths:
        try:
            out.add((Path(root) / path.lstrip("/")).resolve())
        except (OSError, ValueError, RuntimeError):
            continue
    return out
