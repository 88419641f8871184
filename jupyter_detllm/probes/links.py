"""How the GPUs that work together are linked, by the driver's library."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from jupyter_detllm.probes.nvidia import nvml

__all__ = ["gpu_links"]

_MOST_LINKS = 18
_PCIE = {
    0: "PCIe, same board",
    10: "PCIe, one switch",
    20: "PCIe switches",
    30: "PCIe, host bridge",
    40: "PCIe, one processor",
    50: "between processors",
}


def gpu_links(uuids: Sequence[str]) -> str | None:
    """Return the links between these GPUs, equal ones once; None where nothing tells.

    As in ``NVLink, 18 links``; where pairs are linked differently, ``NVLink, 12 links
    (1 pair); PCIe, host bridge (2 pairs)``.
    """
    lib = nvml()
    if lib is None or len(uuids) < 2:
        return None
    handles = [_handle(lib, uuid) for uuid in uuids]
    if None in handles:
        return None
    kinds = [_link(lib, left, right) for left, right in combinations(handles, 2)]
    counts = {kind: kinds.count(kind) for kind in sorted(kinds)}
    if len(counts) == 1:
        return kinds[0]
    return "; ".join(f"{kind} ({n} pair{'s' * (n > 1)})" for kind, n in counts.items())


def _ask(lib: Any, function: Any, *args: object) -> Any:
    try:
        return function(*args)
    except lib.NVMLError:
        return None


def _handle(lib: Any, uuid: str) -> Any:
    # torch gives the bare UUID, the driver's library wants its kind before it.
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    return _ask(lib, lib.nvmlDeviceGetHandleByUUID, name)


def _link(lib: Any, left: Any, right: Any) -> str:
    status = _ask(lib, lib.nvmlDeviceGetP2PStatus, left, right, lib.NVML_P2P_CAPS_INDEX_NVLINK)
    if status == lib.NVML_P2P_STATUS_OK:
        count = min(_active(lib, left), _active(lib, right))
        return f"NVLink, {count} links" if count else "NVLink"
    level = _ask(lib, lib.nvmlDeviceGetTopologyCommonAncestor, left, right)
    return _PCIE.get(level, "unknown")


def _active(lib: Any, handle: Any) -> int:
    states = (_ask(lib, lib.nvmlDeviceGetNvLinkState, handle, i) for i in range(_MOST_LINKS))
    return sum(state == lib.NVML_FEATURE_ENABLED for state in states)
