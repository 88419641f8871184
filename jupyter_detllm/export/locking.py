"""A lock file (PEP 751, ``pylock.toml``) with the hashes of an index, and what could not be locked.

pip is asked which file of its index a pin is, with its hash; nothing is installed or built.
pip's own configuration says which indexes, certificates and credentials are used. Of what
it answers only addresses and hashes that fit a strict pattern are kept, credentials removed.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit

from packaging.utils import canonicalize_name

from jupyter_detllm.errors import DetLLMError, UsageError
from jupyter_detllm.export.environment import Environment, Pin, heading, pytorch_index
from jupyter_detllm.verify.scratch import scratch_folder

__all__ = [
    "Locked",
    "LockedFile",
    "Resolution",
    "Runner",
    "lock",
    "pylock_text",
    "resolve",
]

_FILE_URL = re.compile(r"(?:https?|file)://[A-Za-z0-9._~:/%+@!,=()\[\]-]{1,2000}", re.ASCII)
_WHEEL = re.compile(r"[A-Za-z0-9_.+!]+(?:-[A-Za-z0-9_.+!]+){4,5}\.whl", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LockedFile:
    """A wheel: its address, without credentials, and its SHA-256.

    Raises
    ------
    ValueError
        For anything that cannot stand in a lock file.
    """

    url: str
    sha256: str

    def __post_init__(self) -> None:
        fits = _FILE_URL.fullmatch(self.url) and "@" not in self.url.split("/")[2]
        if not fits or not _WHEEL.fullmatch(self.name) or not _SHA256.fullmatch(self.sha256):
            raise ValueError("not the address of a wheel and its SHA-256")

    @property
    def name(self) -> str:
        """The wheel's file name."""
        return self.url.rsplit("/", 1)[-1].replace("%2B", "+").replace("%2b", "+")

    def to_lock(self) -> dict[str, Any]:
        """Return its entry in a lock file."""
        return {"name": self.name, "url": self.url, "hashes": {"sha256": self.sha256}}

    @property
    def is_local(self) -> bool:
        """Whether it lies on this machine."""
        return self.url.startswith("file:")


def pylock_text(environment: Environment, files: Mapping[str, LockedFile]) -> str:
    """Return the file; a pin without an entry in `files` is left out.

    Parameters
    ----------
    environment
        What is exported.
    files
        The wheel of each distribution, by its name.
    """
    import tomli_w
    from packaging.pylock import Pylock

    python = environment.python
    # Wheels are built per minor version; the patch level changes none of them.
    minor = {"requires-python": f"=={'.'.join(python.split('.')[:2])}.*"} if python else {}
    locked = {
        "lock-version": "1.0",
        **minor,
        "created-by": "jupyter-detllm",
        # In order of their names: a lock file is compared line by line.
        "packages": [
            {"name": pin.name, "version": pin.version, "wheels": [files[pin.name].to_lock()]}
            for pin in sorted(environment.all_pins)
            if pin.name in files
        ],
    }
    Pylock.from_dict(locked)  # raises for anything that PEP 751 does not allow
    return "\n".join([*heading("pylock", environment), tomli_w.dumps(locked)])


Runner: TypeAlias = Callable[[Sequence[str]], tuple[int, str, str]]
"""Arguments of pip to exit code, stdout and stderr."""

_PINS_A_CALL = 40
_PIP_SECONDS = 1200
_PIP_ATTEMPTS = 3
_SILENT = "the index did not answer"
_GONE = re.compile(r"No matching distribution found for ([A-Za-z0-9._-]+)==")
_FORBIDDEN = re.compile(r"Cannot install ([A-Za-z0-9._-]+)==")
_UNREACHABLE = re.compile(
    r"Retrying \(|Could not fetch URL|NewConnectionError|ProxyError|Max retries exceeded"
    r"|Name or service not known|Temporary failure in name resolution"
)


@dataclass(slots=True)
class Resolution:
    """The index's answers so far.

    Attributes
    ----------
    files
        The wheel of each distribution, by its name.
    omitted
        Why a distribution has none, by its name.
    unreachable
        Whether an index did not respond, so that the rest was not requested.
    """

    files: dict[str, LockedFile] = field(default_factory=dict)
    omitted: dict[str, str] = field(default_factory=dict)
    unreachable: bool = False


def run_pip(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Run the pip of this environment.

    Raises
    ------
    DetLLMError
        When it does not end in time.
    """
    command = [sys.executable, "-m", "pip", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PIP_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DetLLMError(f"pip did not answer within {_PIP_SECONDS} s") from None
    return done.returncode, done.stdout, done.stderr


def resolve(
    pins: Sequence[Pin],
    *,
    python: str | None = None,
    index: str | None = None,
    run: Runner = run_pip,
) -> Resolution:
    """Return the wheel of each pin.

    Parameters
    ----------
    pins
        What is asked for.
    python
        Version of Python the wheels are for, where it is not the running one.
    index
        A further index, asked only for builds of PyTorch that pip's own do not have.
    run
        What runs pip.

    Raises
    ------
    DetLLMError
        When pip is missing, or fails for a reason that is no missing package.
    """
    found, options = Resolution(), _pip_options(python)
    for start in range(0, len(pins), _PINS_A_CALL):
        _ask(run, options, pins[start : start + _PINS_A_CALL], found)
        if found.unreachable:
            silent = {pin.name: _SILENT for pin in pins if pin.name not in found.files}
            found.omitted = silent | found.omitted
            return found
    builds = [pin for pin in pins if pin.variant and pin.name in found.omitted]
    if builds and index:
        further = Resolution(found.files)
        _ask(run, [*options, "--extra-index-url", index], builds, further)
        for name in found.files.keys() & found.omitted.keys():
            del found.omitted[name]
    return found


def _pip_options(python: str | None) -> list[str]:
    options = [
        *("install", "--dry-run", "--no-deps", "--ignore-installed", "--no-input", "--quiet"),
        # A source distribution would be run to learn its name.
        *("--only-binary", ":all:", "--retries", "1", "--timeout", "15", "--report", "-"),
    ]
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    wanted = ".".join(python.split(".")[:2]) if python else running
    # pip takes another Python only together with a target, which a dry run leaves alone.
    other = ["--python-version", wanted, "--target", tempfile.gettempdir()]
    return options if wanted == running else [*options, *other]


def _ask(run: Runner, options: Sequence[str], pins: Sequence[Pin], found: Resolution) -> None:
    """Add the wheels of some pins to `found`; a pin that the index lacks is taken out."""
    left = {pin.name: pin for pin in pins}
    while left:
        with scratch_folder("lock") as folder:
            wanted = folder / "requirements.txt"
            wanted.write_text("".join(f"{pin}\n" for pin in left.values()), encoding="ascii")
            code, out, err = run([*options, "-r", str(wanted)])
        if code == 0:
            files = _files(out)
            for name in left:
                if name in files:
                    found.files[name] = files[name]
                else:
                    found.omitted[name] = "its index gives no SHA-256"
            return
        gone = _GONE.search(err) or _FORBIDDEN.search(err)
        name = canonicalize_name(gone[1]) if gone else ""
        if name not in left:
            raise _failed(err)
        del left[name]
        found.omitted[name] = _reason(err)
        if list(found.omitted.values()).count(_SILENT) >= _PIP_ATTEMPTS:
            found.unreachable = True
            return


def _reason(err: str) -> str:
    if not _GONE.search(err):
        return "the constraints of pip's configuration forbid it"
    return _SILENT if _UNREACHABLE.search(err) else "the index has no wheel of this version"


def _failed(err: str) -> DetLLMError:
    lines = [line for line in err.strip().splitlines() if line.strip()] or ["no output"]
    if "No module named pip" in lines[-1]:
        return DetLLMError(
            "this environment has no pip to ask for hashes", fix="python -m ensurepip"
        )
    cause = next((line for line in lines if line.startswith("ERROR")), lines[-1])
    return DetLLMError(f"pip failed: {cause[:300]}")


def _files(report: str) -> dict[str, LockedFile]:
    """Return the wheels that a report of pip names, by name; what is malformed is left out."""
    try:
        items = json.loads(report)["install"]
        pairs = [(item["metadata"]["name"], item["download_info"]) for item in items]
    except (ValueError, KeyError, TypeError):
        raise DetLLMError("pip's report cannot be read", fix="pip install -U pip") from None
    found: dict[str, LockedFile] = {}
    for name, info in pairs:
        file = _file(info)
        if file is not None:
            found[canonicalize_name(str(name))] = file
    return found


def _file(info: Mapping[str, Any]) -> LockedFile | None:
    archive = info.get("archive_info") or {}
    digest = (archive.get("hashes") or {}).get("sha256", "")
    try:
        return LockedFile(_address(str(info.get("url", ""))), str(digest))
    except ValueError:
        return None


def _address(url: str) -> str:
    """Return an address without user, password, query and fragment."""
    parts = urlsplit(url if url.isprintable() else "")
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


@dataclass(frozen=True, slots=True)
class Locked:
    """A lock file; what was left out of it; what to know about it."""

    text: str
    omitted: tuple[str, ...]
    remarks: tuple[str, ...]


def lock(environment: Environment, *, run: Runner = run_pip) -> Locked:
    """Return the lock file of an environment.

    Raises
    ------
    UsageError
        When no pin could be locked: an empty lock file would install nothing.
    DetLLMError
        When pip fails.
    """
    pins = environment.all_pins
    if not pins:
        raise UsageError("there is no package to lock: the stamp holds no version of one")
    index = pytorch_index(pins)
    answer = resolve(pins, python=environment.python, index=index, run=run)
    if not answer.files:
        what = "the package index did not answer" if answer.unreachable else "no pin has a hash"
        raise DetLLMError(
            f"{what}: nothing can be locked",
            fix="--to requirements, which needs no index",
        )
    text = pylock_text(environment, answer.files)
    remarks = []
    local = sum(file.is_local for file in answer.files.values())
    if local:
        remarks.append(f"{local} of {len(answer.files)} wheels are on this machine only")
    recorded = environment.fingerprint.values().get("hardware.machine")
    if recorded is not None and recorded != platform.machine():
        remarks.append(f"the wheels are those for this machine, {platform.machine()}")
    own = environment.own
    if own is not None and own.name in answer.omitted:
        remarks.append(f"{own}: {answer.omitted[own.name]}; install it from where you have it")
    omitted = [f"{pin}: {why}" for pin in environment.pins if (why := answer.omitted.get(pin.name))]
    return Locked(text, tuple(omitted), tuple(remarks))
