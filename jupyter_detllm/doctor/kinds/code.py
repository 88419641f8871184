"""Kinds of finding about a notebook's code: seeds, sampling, a model's mode."""

from __future__ import annotations

from collections.abc import Iterator

from jupyter_detllm.core.levels import Level
from jupyter_detllm.doctor.code import MISSING, OPAQUE, CallSite, Code, Place, ends_in
from jupyter_detllm.doctor.options import SamplingUse, sampling, uses_detllm, words
from jupyter_detllm.doctor.scene import Finding, Scene, Severity

__all__ = [
    "find_partial_seeding",
    "find_seed_after_load",
    "find_temperature_zero",
    "find_training_mode",
    "find_unread_code",
    "find_unseeded_sampling",
    "find_worker_seeding",
]

STREAMS = ("random", "numpy", "torch")

_SEED_CALLS = {
    "random.seed": ("random",),
    "numpy.random.seed": ("numpy",),
    "torch.manual_seed": ("torch",),
    "torch.random.manual_seed": ("torch",),
    "torch.cuda.manual_seed_all": (),
}
_SEED_ALL_CALLS = ("set_seed", "seed_everything", "enable_full_determinism")
_TORCH_DRAWS = frozenset(
    {
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
        *("multinomial", "bernoulli", "normal", "poisson"),
    }
)
_NO_DRAW = frozenset({"seed", "getstate", "setstate", "get_state", "set_state", "RandomState"})


def seeds_in(code: Code) -> dict[str, list[Place]]:
    """Return each seeded stream with its place."""
    found: dict[str, list[Place]] = {}
    for call in code.calls:
        streams = _SEED_CALLS.get(call.name, STREAMS if ends_in(call.name, _SEED_ALL_CALLS) else ())
        for stream in streams:
            found.setdefault(stream, []).append(call.place)
    setup = uses_detllm(code)
    for stream in STREAMS if setup is not None else ():
        found.setdefault(stream, []).append(setup or Place(0, 0))
    return found


def draws_in(code: Code) -> dict[str, list[Place]]:
    """Return each stream that is used without a separate generator, with its place."""
    found: dict[str, list[Place]] = {}
    for call in code.calls:
        head, _, last = call.name.rpartition(".")
        if head == "random" and last not in _NO_DRAW and last != "Random":
            found.setdefault("random", []).append(call.place)
        elif head == "numpy.random" and last not in _NO_DRAW and not _own_generator(last):
            found.setdefault("numpy", []).append(call.place)
        elif head == "torch" and last in _TORCH_DRAWS and not call.spells("generator"):
            found.setdefault("torch", []).append(call.place)
    return found


def _own_generator(name: str) -> bool:
    return name in ("default_rng", "Generator", "SeedSequence", "PCG64", "MT19937", "Philox")


_MODEL_LOADS = ("vllm.LLM", "LLM", "from_pretrained", "transformers.pipeline", "pipeline")


def find_seed_after_load(scene: Scene) -> Iterator[Finding]:
    """Yield the first seed of each stream that comes after the first model."""
    code = scene.code
    loads = code.calls_to(*_MODEL_LOADS)
    # A tokenizer draws nothing.
    models = [c.place for c in loads if "Tokenizer" not in c.name and "Config" not in c.name]
    first = min(models, default=None)
    if first is None:
        return
    for stream, places in sorted(seeds_in(code).items()):
        if min(places) > first:
            evidence = f"{stream} is seeded after the model was loaded ({first})"
            fix = f"seed it above {first}: %detllm --seed 0 there seeds everything"
            yield Finding(Severity.WRONG, evidence, fix, str(min(places)))


_SEED_LINES = {
    "random": "random.seed(0)",
    "numpy": "numpy.random.seed(0)",
    "torch": "torch.manual_seed(0)",
}


def find_partial_seeding(scene: Scene) -> Iterator[Finding]:
    """Yield the streams that are used but never seeded, or only afterwards."""
    code = scene.code
    seeds = seeds_in(code)
    others = ", ".join(sorted(seeds)) or "nothing"
    for stream, places in sorted(draws_in(code).items()):
        first, seeded = min(places), min(seeds.get(stream, []), default=None)
        if seeded is not None and seeded < first:
            continue
        when = f"only later ({seeded})" if seeded else f"never: {others} is seeded"
        evidence = f"{stream} is drawn from and seeded {when}"
        fix = f"%detllm --seed 0 in the first cell, or {_SEED_LINES[stream]}"
        yield Finding(Severity.WRONG, evidence, fix, str(first))
    for call in code.calls_to(
        "numpy.random.default_rng", "random.Random", "numpy.random.RandomState"
    ):
        if call.argument(0) in (MISSING, None) and call.keyword("seed") in (MISSING, None):
            name = call.name.rsplit(".", 1)[-1]
            fix = f"{name}(0)"
            evidence = f"{name}() without a seed starts anew in every run"
            yield Finding(Severity.WRONG, evidence, fix, str(call.place))


_LOADER_FIX = (
    "DataLoader(..., worker_init_fn=det.worker_init_fn, generator=torch.Generator().manual_seed(0))"
)
_CHILD_FIX = "call jupyter_detllm.controls.seeding.seed_child(INDEX) first in each child"
_POOLS = ("multiprocessing.Pool", "concurrent.futures.ProcessPoolExecutor", "ProcessPoolExecutor")
_PROCESSES = ("multiprocessing.Process", "joblib.Parallel", "torch.multiprocessing.spawn")


def find_worker_seeding(scene: Scene) -> Iterator[Finding]:
    """Yield loaders and pools that do not seed their workers."""
    code = scene.code
    for call in code.calls_to("DataLoader"):
        yield from _loader(call)
    for call in code.calls_to(*_POOLS):
        if call.keyword("initializer") is MISSING and call.argument(1) is MISSING:
            evidence = f"{call.name} without an initializer: its workers are not seeded"
            yield Finding(Severity.RISK, evidence, _CHILD_FIX, str(call.place))
    if not code.calls_to("seed_child"):
        for call in code.calls_to(*_PROCESSES):
            evidence = f"children of {call.name} are not seeded"
            yield Finding(Severity.RISK, evidence, _CHILD_FIX, str(call.place))


def _loader(call: CallSite) -> Iterator[Finding]:
    workers = call.keyword("num_workers")
    seeded = (
        call.keyword("worker_init_fn") is not MISSING or call.keyword("generator") is not MISSING
    )
    if seeded or workers in (MISSING, 0):
        return
    if workers is OPAQUE:
        evidence = "how many workers this DataLoader has is not known; none would be seeded"
        yield Finding(Severity.UNKNOWN, evidence, _LOADER_FIX, str(call.place))
    else:
        evidence = f"{workers} workers of a DataLoader, without worker_init_fn or generator"
        yield Finding(Severity.RISK, evidence, _LOADER_FIX, str(call.place))


_GREEDY_WHY = (
    "temperature 0 repeats only with the same batch; what else is in it can change the text"
)
_GREEDY_FIX = "%detllm --level invariant, before the engine starts"


def find_temperature_zero(scene: Scene) -> Iterator[Finding]:
    """Yield the first greedy request that may depend on its batch."""
    code = scene.code
    greedy = [item for item in sampling(code) if item.greedy]
    theirs = next((item for item in greedy if not item.ours), None)
    if theirs is not None:
        yield _greedy_finding(theirs, Severity.RISK)
    ours = next((item for item in greedy if item.ours), None)
    if ours is None:
        return
    level = _level_in_force(scene, code)
    if level is None:
        evidence = f"{_GREEDY_WHY}: whether the level here is invariant is known once an engine ran"
        yield Finding(Severity.NOTE, evidence, "%detllm status", str(ours.place))
    elif level is not Level.INVARIANT:
        yield _greedy_finding(ours, Severity.NOTE)


def _greedy_finding(item: SamplingUse, severity: Severity) -> Finding:
    return Finding(severity, f"{item.what}: {_GREEDY_WHY}", _GREEDY_FIX, str(item.place))


def _level_in_force(scene: Scene, code: Code) -> Level | None:
    """Return the current level, or the last one in the notebook."""
    if scene.live is not None and scene.live_field("engine.dtype") is not None:
        return scene.live.level
    named = None
    for line in code.magics("%detllm") if uses_detllm(code) else ():
        tokens = words(line.text)
        for index, token in enumerate(tokens):
            value = token.partition("=")[2] or "".join(tokens[index + 1 : index + 2])
            if token.partition("=")[0] == "--level" and value in set(Level):
                named = Level(value)
    return named


def find_unseeded_sampling(scene: Scene) -> Iterator[Finding]:
    """Yield each place that samples without a seed."""
    code = scene.code
    torch_seeded = "torch" in seeds_in(code)
    for item in sampling(code):
        if item.ours or item.greedy or item.seed not in (MISSING, None, OPAQUE):
            continue
        if item.what.startswith("generate(") and torch_seeded:
            continue  # transformers draws from torch's stream
        yield _unseeded_finding(item)


def _unseeded_finding(item: SamplingUse) -> Finding:
    fix = "seed=0, with a different seed for each request; or %%detgen, which derives one for each"
    if item.what.startswith("generate("):
        fix = "transformers.set_seed(0) before it"
    if item.seed is OPAQUE or (item.temperature is OPAQUE and item.seed is MISSING):
        evidence = f"{item.what}: whether it samples with a seed is known only when it runs"
        return Finding(Severity.UNKNOWN, evidence, fix, str(item.place))
    at = "the model's own" if item.temperature is MISSING else str(item.temperature)
    evidence = f"{item.what} samples at temperature {at} without a seed"
    return Finding(Severity.WRONG, evidence, fix, str(item.place))


def find_training_mode(scene: Scene) -> Iterator[Finding]:
    """Yield models of the kernel with dropout on, and calls after a `train()`."""
    if scene.live is not None and scene.live.training is None:
        evidence = "the modes of the models in this kernel could not be read"
        yield Finding(Severity.UNKNOWN, evidence, "MODEL.eval()", "this kernel")
    elif scene.live is not None and scene.live.training is not None:
        for name, layers in sorted(scene.live.training.items()):
            evidence = f"{name} is in training mode; layers of dropout on: {layers}"
            yield Finding(Severity.WRONG, evidence, f"{name}.eval()", "this kernel")
    yield from _training_in_code(scene.code)


def _training_in_code(code: Code) -> Iterator[Finding]:
    training: dict[str, CallSite] = {}
    for call in code.calls:
        model, _, method = call.name.rpartition(".")
        if method == "train" and model:
            if call.argument(0) is False or call.keyword("mode") is False:
                training.pop(model, None)
            else:
                training[model] = call
        elif method == "eval" and model:
            training.pop(model, None)
        elif method == "generate" and model in training:
            since = training.pop(model)
            evidence = f"{model} generates in training mode (since {since.place}): dropout is on"
            yield Finding(Severity.WRONG, evidence, f"{model}.eval() before it", str(call.place))
    for model, call in training.items():
        evidence = f"{model} is left in training mode: dropout is on in whatever follows"
        yield Finding(Severity.RISK, evidence, f"{model}.eval()", str(call.place))


def find_unread_code(scene: Scene) -> Iterator[Finding]:
    """Yield the cells that are not Python even without their magics."""
    evidence = "its code cannot be parsed: nothing about it is known"
    for number in scene.code.unparsed:
        fix = "fix the syntax, or make it a raw cell"
        yield Finding(Severity.UNKNOWN, evidence, fix, f"cell {number}")
