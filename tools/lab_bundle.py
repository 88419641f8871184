"""The lab extension's bundle: its digests written after a build, checked without node.

``python -m tools.lab_bundle`` exits with 1 while the committed bundle was not built from
the committed sources. ``--write`` writes the digests; ``npm run build`` in
``labextension/`` does so.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["BUILD", "findings", "main", "state"]

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "labextension"
BUNDLE = ROOT / "jupyter_detllm" / "labextension"
STATE_FILE = BUNDLE / "SOURCES"
BUILD = "cd labextension && npm ci --ignore-scripts && npm run build"
_FOLDERS = ("src", "style", "schema")
_FILES = ("package.json", "package-lock.json", "tsconfig.json")


def _digest(files: Iterable[Path], base: Path) -> str:
    """Return a digest of names and contents; line ends do not count."""
    found = hashlib.sha256()
    for path in sorted(files):
        data = path.read_bytes().replace(b"\r\n", b"\n")
        found.update(path.relative_to(base).as_posix().encode() + b"\0" + data + b"\0")
    return found.hexdigest()


def state() -> str:
    """Return the digests of sources and bundle, as the bundle keeps them."""
    sources = [path for name in _FOLDERS for path in (SOURCES / name).rglob("*") if path.is_file()]
    sources += [SOURCES / name for name in _FILES]
    bundle = [path for path in BUNDLE.rglob("*") if path.is_file() and path != STATE_FILE]
    return f"sources {_digest(sources, SOURCES)}\nbundle {_digest(bundle, BUNDLE)}\n"


def findings() -> list[str]:
    """Return what is not current, one line each."""
    if not STATE_FILE.is_file() or STATE_FILE.read_text(encoding="ascii") != state():
        return ["jupyter_detllm/labextension was not built from the present sources"]
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """Write the digests, or check."""
    options = list(sys.argv[1:] if argv is None else argv)
    if options == ["--write"]:
        STATE_FILE.write_text(state(), encoding="ascii")
        return 0
    found = findings()
    lines = [*found, f"build it: {BUILD}"] if found else ["the lab extension is current"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
