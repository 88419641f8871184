"""Seeds every random stream of the process, including those of modules not yet imported.

`%detllm` must not import torch, but the user's own ``import torch; torch.rand(1)``
afterwards must draw from a seeded stream, and torch's own switches (deterministic
algorithms, cuDNN, TF32) can only be set once torch is imported. So a finder at the head of
`sys.meta_path` lets the ordinary finders find the module and replaces `exec_module` on the
loader instance they return. The loader keeps its type, and both the attribute and the finder
are removed once the module is loaded.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from jupyter_detllm.core.canonical import canonical_bytes, sha256_hex
from jupyter_detllm.core.generation import MAX_SEED
from jupyter_detllm.errors import ControlError

__all__ = [
    "SEED_VARIABLE",
    "Callback",
    "SeedReport",
    "TorchDeterministic",
    "TorchFlags",
    "generator",
    "hooked",
    "preserved_streams",
    "root_seed",
    "seed_child",
    "seed_everything",
    "seed_numpy",
    "seed_pending",
    "seed_torch",
    "worker_init_fn",
]


class TorchDeterministic(StrEnum):
    """Mode of `torch.use_deterministic_algorithms`; `off` keeps the user's setting."""

    OFF = "off"
    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TorchFlags:
    """The torch switches to set.

    Attributes
    ----------
    deterministic
        Deterministic algorithms: off; warn or fail if an operator has none.
    no_tf32
        Never round float32 operands to TF32.
    """

    deterministic: TorchDeterministic = TorchDeterministic.OFF
    no_tf32: bool = False


def parse_deterministic(value: str) -> TorchDeterministic:
    """Return the mode named `value`; refuse anything else in one line."""
    try:
        return TorchDeterministic(value)
    except ValueError:
        raise ControlError(
            f"{value[:40]!r} is not a mode of --torch-deterministic",
            expected=", ".join(TorchDeterministic),
            fix="%detllm --torch-deterministic warn",
        ) from None


# Whether they were switched on here: only then does `off` switch them off.
_on_by_us = False


def apply_torch_flags(torch: Any, flags: TorchFlags) -> None:
    """Set the switches on an imported torch.

    At every level cuDNN is kept from choosing kernels by timing; a user who wants that can
    set it afterwards.
    """
    global _on_by_us
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    if flags.deterministic is not TorchDeterministic.OFF:
        warn_only = flags.deterministic is TorchDeterministic.WARN
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        _on_by_us = True
    elif _on_by_us:
        torch.use_deterministic_algorithms(False)
        _on_by_us = False
    if flags.no_tf32:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False


Callback = Callable[[ModuleType], None]


class _Finder(MetaPathFinder):
    """Meta path finder that wraps the loading of the modules it waits for."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callback] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the other finders' spec for a module that is waited for."""
        if fullname not in self.waiting:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None else None
            if spec is not None:
                self._wrap(spec)
                return spec  # type: ignore[no-any-return]
        return None

    def _wrap(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if loader is None or execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            loader.__dict__.pop("exec_module", None)
            execute(module)
            self._arrived(module)

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError:
            return  # a loader without attributes: the callback runs at the next `%detllm`

    def _arrived(self, module: ModuleType) -> None:
        callback = self.waiting.pop(module.__name__, None)
        _tidy()
        if callback is None:
            return
        try:
            callback(module)
        except Exception as error:
            # The import itself succeeded and must not fail because of the callback.
            warnings.warn(
                f"jupyter-detllm could not prepare {module.__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )


_finder = _Finder()


def _tidy() -> None:
    if not _finder.waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def on_import(name: str, callback: Callback) -> None:
    """Call `callback` with module `name` once it has been imported.

    It is called immediately if the module is already imported. A second call for the same
    name replaces the first.
    """
    module = sys.modules.get(name)
    if module is not None:
        _finder.waiting.pop(name, None)
        _tidy()
        callback(module)
        return
    _finder.waiting[name] = callback
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def hooked() -> tuple[str, ...]:
    """Return the names of the modules that are waited for, sorted."""
    return tuple(sorted(_finder.waiting))


#: Passes the root seed to child processes that start a fresh interpreter.
SEED_VARIABLE = "JUPYTER_DETLLM_SEED"


@dataclass(frozen=True, slots=True)
class SeedReport:
    """The result of `seed_everything`.

    Attributes
    ----------
    seed
        The root seed.
    seeded
        Streams seeded now: ``random``, ``numpy``, ``torch``, ``cuda``.
    deferred
        Streams that will be seeded when their module is imported.
    absent
        Streams whose module is not installed.
    """

    seed: int
    seeded: tuple[str, ...]
    deferred: tuple[str, ...]
    absent: tuple[str, ...]


class _Session:
    """The root seed of this process, and the streams still to be seeded."""

    seed: int | None = None
    flags = TorchFlags()
    generator: Any = None
    seeded_modules: frozenset[str] = frozenset()


_session = _Session()


def root_seed() -> int | None:
    """Return the seed given to `seed_everything`; None if it was not called."""
    return _session.seed


def _checked(seed: int) -> int:
    if type(seed) is not int or not 0 <= seed <= MAX_SEED:
        raise ControlError(
            f"{str(seed)[:40]} is not a seed",
            expected="an integer from 0 to 2**63 - 1",
            fix="%detllm --seed 42",
        )
    return seed


def seed_everything(seed: int, *, deterministic: str = "off", no_tf32: bool = False) -> SeedReport:
    """Seed random, numpy, torch and every CUDA device, and set torch's switches.

    Nothing is imported: numpy and torch are seeded now if they are loaded, otherwise when
    the user imports them. CUDA is not started: it is seeded when it starts.

    Parameters
    ----------
    seed
        Root seed, 0 to 2**63 - 1.
    deterministic
        torch's deterministic algorithms: `off`, `warn` or `error`.
    no_tf32
        Never round float32 operands to TF32.

    Raises
    ------
    ControlError
        For an invalid seed or mode.
    """
    flags = TorchFlags(parse_deterministic(deterministic), no_tf32)
    _session.seed = _checked(seed)
    _session.flags = flags
    _session.generator = None
    _session.seeded_modules = frozenset()
    os.environ[SEED_VARIABLE] = str(seed)
    random.seed(seed)
    # numpy loads numpy.random on first use, and seeds its legacy stream then.
    on_import("numpy.random", _numpy_arrived)
    on_import("torch", _torch_arrived)
    return _report(seed)


def _report(seed: int) -> SeedReport:
    seeded, deferred, absent = ["random"], [], []
    for stream, module in (("numpy", "numpy.random"), ("torch", "torch")):
        if module in _session.seeded_modules:
            seeded.append(stream)
        elif find_spec(stream) is not None:
            deferred.append(stream)
        else:
            absent.append(stream)
    version = getattr(sys.modules.get("torch"), "version", None)
    if "torch" in seeded and getattr(version, "cuda", None) is not None:
        seeded.append("cuda")
    return SeedReport(seed, tuple(seeded), tuple(deferred), tuple(absent))


def _numpy_arrived(module: ModuleType) -> None:
    if _session.seed is not None:
        seed_numpy(module, _session.seed)
        _session.seeded_modules |= {"numpy.random"}


def _torch_arrived(module: ModuleType) -> None:
    if _session.seed is not None:
        seed_torch(module, _session.seed)
        apply_torch_flags(module, _session.flags)
        _session.seeded_modules |= {"torch"}


def seed_numpy(numpy_random: Any, seed: int) -> None:
    """Seed numpy's legacy stream; a seed beyond 32 bits is passed as two words."""
    numpy_random.seed(seed if seed < 2**32 else [seed & 0xFFFFFFFF, seed >> 32])


def seed_torch(torch: Any, seed: int) -> None:
    """Seed torch on CPU and on every CUDA device, even if CUDA has not started."""
    torch.manual_seed(seed)


def seed_pending() -> tuple[str, ...]:
    """Seed modules that were imported past the import hook; return their names.

    Called at engine start, where there is normally nothing to do.
    """
    done = []
    arrived = {"numpy.random": _numpy_arrived, "torch": _torch_arrived}
    for name in hooked():
        if name in sys.modules and name in arrived:
            on_import(name, arrived[name])
            done.append(name)
    return tuple(done)


def generator() -> Any:
    """Return the session's `numpy.random.Generator`: ``default_rng(root seed)``.

    It is the same object every time, until the session is seeded again. Neither an engine
    nor numpy's legacy functions advance it.
    """
    if _session.seed is None:
        raise ControlError(
            "nothing is seeded yet", expected="a root seed first", fix="%detllm --seed 42"
        )
    if _session.generator is None:
        import numpy as np

        _session.generator = np.random.default_rng(_session.seed)
    return _session.generator


def worker_init_fn(worker_id: int) -> None:
    """Seed random and numpy in a torch `DataLoader` worker from torch's worker seed.

    Pass it as ``DataLoader(..., worker_init_fn=worker_init_fn)``. torch has seeded
    itself by then, with a different seed in each worker and epoch.
    """
    import torch

    _adopt(torch.initial_seed() & MAX_SEED, torch_too=False)


def seed_child(index: int, seed: int | None = None) -> int:
    """Seed a `multiprocessing` child and return its seed.

    `index` is the child's number among its siblings, 0 or more; `seed` is the root seed, the
    parent's by default. The child's seed is the first 63 bits of SHA-256 over the canonical list
    ``["child", root seed, index]``.
    """
    root = seed if seed is not None else _inherited_seed()
    data = canonical_bytes(["child", str(_checked(root)), index])
    child = int(sha256_hex(data)[:16], 16) >> 1
    _adopt(child, torch_too=True)
    return child


def _inherited_seed() -> int:
    if _session.seed is not None:
        return _session.seed
    text = os.environ.get(SEED_VARIABLE, "")
    if text.isascii() and text.isdecimal():
        return int(text)
    raise ControlError(
        "this child process has no root seed",
        expected="a seeded parent or a seed",
        fix="seed_child(index, seed=42)",
    )


def _adopt(seed: int, *, torch_too: bool) -> None:
    """Make `seed` the root of this process, without touching its variables."""
    _session.seed = seed
    _session.generator = None
    random.seed(seed)
    on_import("numpy.random", _numpy_arrived)
    if torch_too:
        on_import("torch", _torch_arrived)


@dataclass(slots=True)
class _TorchStreams:
    """torch's generators; if CUDA has not started, the seeds queued for it."""

    cpu: Any
    cuda: list[Any] | None = None
    waiting: dict[str, Any] | None = None


@contextmanager
def preserved_streams() -> Iterator[None]:
    """Restore random, numpy, torch and every CUDA generator when the block is left.

    This holds for errors too. A module imported inside the block has the state it would have
    if the user imported it afterwards: seeded from the root seed or, in a process without
    one, arbitrary.
    """
    seed, python = root_seed(), random.getstate()
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    numpy = None if numpy_random is None else numpy_random.get_state(legacy=False)
    saved = None if torch is None else _save_torch(torch)
    try:
        yield
    finally:
        random.setstate(python)
        _restore_numpy(sys.modules.get("numpy.random"), numpy, seed)
        _restore_torch(sys.modules.get("torch"), saved, seed)


def _cuda_started(torch: Any) -> bool:
    return bool(torch.cuda.is_initialized())


def _save_torch(torch: Any) -> _TorchStreams:
    cpu = torch.get_rng_state()
    if _cuda_started(torch):
        return _TorchStreams(cpu, cuda=torch.cuda.get_rng_state_all())
    tracker = getattr(torch.cuda, "_lazy_seed_tracker", None)
    waiting = None if tracker is None else dict(vars(tracker))
    return _TorchStreams(cpu, waiting=waiting)


def _restore_numpy(numpy_random: Any, state: Any, seed: int | None) -> None:
    if state is not None:
        numpy_random.set_state(state)
    elif numpy_random is not None and seed is not None:
        seed_numpy(numpy_random, seed)


def _restore_torch(torch: Any, saved: _TorchStreams | None, seed: int | None) -> None:
    if saved is None:
        if torch is not None and seed is not None:
            seed_torch(torch, seed)
        return
    torch.set_rng_state(saved.cpu)
    if saved.cuda is not None:
        torch.cuda.set_rng_state_all(saved.cuda)
    elif _cuda_started(torch):
        _seed_started_cuda(torch, saved)
    elif saved.waiting is not None:
        # Still not started: the queued seeds must still apply.
        vars(torch.cuda._lazy_seed_tracker).update(saved.waiting)


def _seed_started_cuda(torch: Any, saved: _TorchStreams) -> None:
    """Give CUDA, if started inside the block, the seeds it would have had at its start."""
    calls = [call for call in (saved.waiting or {}).get("call_order", ()) if call]
    for call, _traceback in calls:
        call()
    if saved.waiting is None:
        # A torch without that queue: seed_torch gave CPU and CUDA one seed.
        torch.cuda.manual_seed_all(torch.initial_seed())
