"""One engine at a time on a device, across the processes of this user on this machine.

Two engines that share a GPU get less memory than one alone, so a different number of KV blocks,
or none at all. The CPU counts as one device for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.engines.base import FAKE, VLLM_SERVER

__all__ = ["CPU", "devices_for", "devices_held"]

CPU = "cpu"
_NEED_NONE = {FAKE, VLLM_SERVER}


def devices_for(stamps: Iterable[Stamp]) -> tuple[str, ...]:
    """Return the devices that an engine for these stamps may use, sorted.

    None for the fake engine and for servers; else every GPU this process sees, or the CPU where it
    sees none. Without stamps nothing is known, so all of them.
    """
    engines = {
        stamp.fingerprint.values().get("engine.name") if stamp.fingerprint else None
        for stamp in stamps
    }
    if engines and engines <= _NEED_NONE:
        return ()
    from jupyter_detllm.probes.nvidia import gpu_ids

    return tuple(sorted(gpu_ids())) or (CPU,)


@contextmanager
def devices_held(devices: Iterable[str]) -> Iterator[None]:
    """Hold the lock of each device; wait for as long as another process has one.

    Locks are taken in sorted order, so that two processes never wait for each other,
    and end with their process, however that ends.

    Raises
    ------
    ModelError
        When the cache folder cannot be written.
    """
    with ExitStack() as stack:
        for device in sorted(devices):
            from filelock import FileLock

            from jupyter_detllm.models.cache import writable_folder

            name = "".join(c if c.isalnum() or c in "-." else "_" for c in device)
            stack.enter_context(FileLock(writable_folder("devices") / f"{name}.lock"))
        yield
