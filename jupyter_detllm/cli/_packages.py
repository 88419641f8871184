"""``stamp --with-packages``: the running environment's package list put into a notebook."""

from __future__ import annotations

from jupyter_detllm.core.notebook import JsonObject, read_notebook
from jupyter_detllm.core.packages import keep_package_list, list_digest, list_digests, stamps_of

__all__ = ["with_packages"]


def with_packages(notebook: JsonObject) -> tuple[JsonObject, bool, str]:
    """Return the notebook with this environment's package list, and whether it holds it.

    The list is stored only where a stamp of the notebook holds its digest; the third
    value is a sentence that says what was done.
    """
    from jupyter_detllm.probes.distributions import package_list

    view = read_notebook(notebook)
    fingerprints = {str(stamp.fingerprint_digest) for stamp in stamps_of(view)}
    wanted = {digest for name in fingerprints for digest in list_digests(view, name)}
    packages = package_list()
    here = list_digest(packages)
    if here in wanted:
        stored = keep_package_list(notebook, packages)
        return stored, True, f"it holds the package list: {len(packages)} packages"
    return notebook, False, f"the package list was not stored: {_reason(here, wanted)}"


def _reason(here: str, wanted: set[str]) -> str:
    if not wanted:
        return "no stamp holds the digest of one (run the cells again with this version)"
    return (
        f"this environment's is {_short(here)}, stamped is {', '.join(map(_short, sorted(wanted)))}"
        " (use the kernel's own Python: `python -m jupyter_detllm stamp --with-packages NOTEBOOK`)"
    )


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]
