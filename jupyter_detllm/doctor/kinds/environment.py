"""Kinds of finding about the process and what is installed: controls, torch, packages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from jupyter_detllm.controls.environ import ENV_CONTROLS, ProcessEvent
from jupyter_detllm.doctor.code import OPAQUE, Code, Place
from jupyter_detllm.doctor.options import uses_detllm, words
from jupyter_detllm.doctor.scene import Finding, Live, Scene, Severity
from jupyter_detllm.probes.software import REMOVE_VISION, Platform, misfit

__all__ = [
    "ALWAYS",
    "SOMETIMES",
    "find_bytecode",
    "find_deterministic_algorithms",
    "find_dockerfile_seed",
    "find_hash_seed",
    "find_late_controls",
    "find_omp_threads",
    "find_tf32",
    "find_torchvision",
    "find_two_environments",
]

_INSTALL_KERNEL = "jupyter detllm kernel install"
_HEAVY_MODULES = {
    ProcessEvent.TORCH_IMPORT: ("torch", "vllm", "transformers"),
    ProcessEvent.CUDA_START: ("vllm",),
    ProcessEvent.VLLM_IMPORT: ("vllm",),
    ProcessEvent.ENGINE_START: ("vllm",),
}


def find_late_controls(scene: Scene) -> Iterator[Finding]:
    """Yield controls that are late in the kernel or by the notebook's order."""
    if scene.live is not None:
        yield from _late_live(scene.live)
    yield from _late_in_code(scene.code)


def _late_live(live: Live) -> Iterator[Finding]:
    if live.report is None:
        evidence = "nothing is set up in this kernel, so its controls are not known"
        yield Finding(Severity.UNKNOWN, evidence, "%detllm --seed 42")
        return
    for entry in live.report.too_late:
        evidence = f"{entry.name} came too late and is {entry.effective}: {entry.reason}"
        yield Finding(Severity.WRONG, evidence, _INSTALL_KERNEL, "this kernel")


def _late_in_code(code: Code) -> Iterator[Finding]:
    setup, heavy = uses_detllm(code), code.first_import("torch", "vllm", "transformers")
    if setup is not None and heavy is not None and heavy < setup:
        evidence = f"%detllm comes after torch or vllm was imported ({heavy})"
        fix = f"move it above {heavy}, or: {_INSTALL_KERNEL}"
        yield Finding(Severity.WRONG, evidence, fix, str(setup))
    controls = {control.name: control for control in ENV_CONTROLS}
    for place, name in _set_in(code):
        control = controls.get(name)
        if control is None:
            continue
        first = code.first_import(*_HEAVY_MODULES.get(control.precedes, ()))
        if control.precedes is ProcessEvent.INTERPRETER_START:
            evidence = f"{name} is set in a cell, but only read when Python starts"
            yield Finding(Severity.WRONG, evidence, _INSTALL_KERNEL, str(place))
        elif first is not None and first < place:
            evidence = f"{name} is set after {first}, and must be before {control.precedes}"
            yield Finding(Severity.WRONG, evidence, f"move it above {first}", str(place))
    for place, name, value in _exported(code):
        control = controls.get(name)
        evidence = f"{name} is exported in a shell that ends with it: this kernel keeps its own"
        early = control is not None and control.precedes is ProcessEvent.INTERPRETER_START
        fix = _INSTALL_KERNEL if early else f"%env {name}={value} in the first cell"
        severity = Severity.RISK if control is None else Severity.WRONG
        yield Finding(severity, evidence, fix, str(place))


_EXPORT = re.compile(r"\s*export\s+([A-Za-z_]\w*)=(\S*)\s*")


def _exported(code: Code) -> Iterator[tuple[Place, str, str]]:
    """Yield what a shell of the notebook exports without starting anything after it."""
    for line in code.lines:
        commands = [text for text in re.split(r"\n|;|&&", line.shell) if text.strip()]
        while commands and (found := _EXPORT.fullmatch(commands[-1])) is not None:
            yield line.place, found[1], found[2].strip("\"'")
            commands.pop()


def _set_in(code: Code) -> Iterator[tuple[Place, str]]:
    """Yield (place, variable) of each that a cell sets."""
    for item in code.assignments:
        if item.target.startswith("os.environ["):
            yield item.place, item.target[len("os.environ[") : -1]
    for call in code.calls_to("os.environ.setdefault", "os.putenv"):
        yield call.place, str(call.argument(0))
    for line in (*code.magics("%env"), *code.magics("%set_env")):
        for word in words(line.text)[1:2]:
            yield line.place, word.partition("=")[0]


#: Operators for which torch raises on CUDA (its notes on `use_deterministic_algorithms`).
ALWAYS = frozenset({"histc", "put_", "MaxUnpool1d", "MaxUnpool2d", "MaxUnpool3d", "NLLLoss"})
#: Those for which it does in some modes, for some types, or where they are differentiated.
SOMETIMES = frozenset(
    {
        *("AvgPool3d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AdaptiveMaxPool2d"),
        *("FractionalMaxPool2d", "FractionalMaxPool3d", "interpolate", "grid_sample"),
        *("ReflectionPad1d", "ReflectionPad2d", "ReflectionPad3d", "CTCLoss", "EmbeddingBag"),
        *("bincount", "median", "cumsum"),
    }
)
_ELSEWHERE = ("numpy.", "statistics.", "pandas.", "scipy.")
_STEPWISE = "start without it and let `jupyter detllm bisect` name what is needed"


def find_deterministic_algorithms(scene: Scene) -> Iterator[Finding]:
    """Yield operators that fail or warn with deterministic algorithms."""
    if (
        scene.live_field("torch.deterministic_algorithms") == "error"
        and scene.platform is Platform.CUDA
    ):
        evidence = "deterministic algorithms are on: an operator without one raises an error"
        yield Finding(Severity.RISK, evidence, _STEPWISE, "this kernel")
    yield from _algorithms_in_code(scene.code, scene.platform)


def _algorithms_in_code(code: Code, platform: Platform) -> Iterator[Finding]:
    switches = code.calls_to("torch.use_deterministic_algorithms")
    on = [call for call in switches if call.argument(0) is True or call.keyword("mode") is True]
    opaque = [c for c in switches if OPAQUE in (c.argument(0), c.keyword("mode"))]
    fix = "torch.use_deterministic_algorithms(True, warn_only=True)"
    for call in opaque:
        evidence = "whether deterministic algorithms are on is known only when this runs"
        yield Finding(Severity.UNKNOWN, evidence, fix, str(call.place))
    for call in on:
        warns = call.keyword("warn_only") is True
        for place, name in _operators(code, call.place):
            what = "warns" if warns else "raises an error"
            when = "" if name in ALWAYS else ", in some modes or where it is differentiated,"
            severity = Severity.WRONG if name in ALWAYS and not warns else Severity.RISK
            if platform is Platform.CPU:
                severity = Severity.NOTE
            evidence = (
                f"{name} on CUDA{when} {what}: deterministic algorithms are on ({call.place})"
            )
            yield Finding(severity, evidence, _STEPWISE if warns else fix, str(place))


def _operators(code: Code, after: Place) -> list[tuple[Place, str]]:
    return [
        (call.place, call.name.rsplit(".", 1)[-1])
        for call in code.calls
        if call.place > after
        and call.name.rsplit(".", 1)[-1] in ALWAYS | SOMETIMES
        and not call.name.startswith(_ELSEWHERE)
    ]


_TF32_FIX = "%detllm --no-tf32"
_TF32_VARIABLES = {
    "NVIDIA_TF32_OVERRIDE": ("1",),
    "VLLM_FLOAT32_MATMUL_PRECISION": ("high", "medium", "tf32"),
}
_TF32_WHY = "float32 operands lose 13 bits; bf16 and fp16 models are untouched"


def find_tf32(scene: Scene) -> Iterator[Finding]:
    """Yield where TF32 is switched on: variables, torch's live switch, the notebook."""
    severity = Severity.NOTE if scene.platform is Platform.CPU else Severity.RISK
    for name, values in _TF32_VARIABLES.items():
        if scene.environ.get(name, "").lower() in values:
            evidence = f"{name}={scene.environ[name]}: {_TF32_WHY}"
            yield Finding(severity, evidence, f"unset {name}")
    live = scene.live_field("torch.float32_matmul_precision")
    if live not in (None, "highest", "ieee", "none"):
        evidence = f"torch multiplies float32 at precision {live!r}: {_TF32_WHY}"
        yield Finding(severity, evidence, _TF32_FIX, "this kernel")
    yield from _tf32_in_code(scene.code, severity)


def _tf32_in_code(code: Code, severity: Severity) -> Iterator[Finding]:
    for item in code.assignments:
        on = item.target.endswith(".allow_tf32") and item.value is True
        if on or (item.target.endswith("fp32_precision") and item.value == "tf32"):
            evidence = f"{item.target} switches TF32 on: {_TF32_WHY}"
            yield Finding(severity, evidence, "remove the line", str(item.place))
    for call in code.calls_to("torch.set_float32_matmul_precision"):
        value = call.argument(0)
        if value in ("high", "medium"):
            evidence = f"set_float32_matmul_precision({value!r}): {_TF32_WHY}"
            fix = 'torch.set_float32_matmul_precision("highest")'
            yield Finding(severity, evidence, fix, str(call.place))
        elif value is OPAQUE:
            evidence = "the precision of float32 products is known only when this runs"
            yield Finding(Severity.UNKNOWN, evidence, _TF32_FIX, str(call.place))


_INSTALL_THERE = "jupyter detllm kernel install, with the Python that has the packages"


def find_two_environments(scene: Scene) -> Iterator[Finding]:
    """Compare this Python with the server's, and with that of the notebook's kernel."""
    if scene.live is None:
        yield from _of_notebook(scene)
    elif scene.server is None:
        evidence = "which Python the Jupyter server runs under is not known"
        yield Finding(Severity.UNKNOWN, evidence, "!jupyter --paths, in a cell")
    elif scene.server and _environment_differs(scene.server, scene.executable):
        evidence = "the server runs in a different environment from this kernel"
        fix = "%pip install here (not !pip); for JupyterLab's panel install in the server's too"
        yield Finding(Severity.NOTE, evidence, fix)


def _of_notebook(scene: Scene) -> Iterator[Finding]:
    kernel = scene.code.kernel
    if scene.kernels is None:
        evidence = f"where the kernel {kernel!r:.60} starts is not known"
        yield Finding(Severity.UNKNOWN, evidence, "pip install jupyter_client")
        return
    python = scene.kernels.get(kernel)
    if python is None:
        evidence = f"the notebook's kernel {kernel!r:.60} is not installed here"
        fix = f"jupyter detllm kernel install --name {kernel:.60}"
        yield Finding(Severity.RISK, evidence, fix)
    # A bare name such as "python3" is found on PATH when the kernel is started.
    elif Path(python).is_absolute() and _environment_differs(python, scene.executable):
        evidence = f"the notebook's kernel {kernel!r:.60} starts a different Python"
        yield Finding(Severity.RISK, evidence, _INSTALL_THERE)


def _environment_differs(left: str, right: str) -> bool:
    """Return whether two interpreters are in different environments; links are not followed."""
    return Path(left).parent != Path(right).parent


def find_hash_seed(scene: Scene) -> Iterator[Finding]:
    """Yield whether hashes of text differ from process to process."""
    if scene.live is None:
        in_force = scene.environ.get("PYTHONHASHSEED") or "random"
    else:
        in_force = scene.live.hash_seed
    if in_force == "unknown":
        evidence = "this platform does not report which PYTHONHASHSEED Python started with"
        yield Finding(Severity.UNKNOWN, evidence, _INSTALL_KERNEL)
    elif in_force == "random":
        evidence = (
            "PYTHONHASHSEED is not set: the order of sets of text differs from process to process "
            "(no effect on tokens was measured)"
        )
        yield Finding(Severity.NOTE, evidence, _INSTALL_KERNEL)


def find_omp_threads(scene: Scene) -> Iterator[Finding]:
    """Yield whether the thread count is not pinned; on a GPU it changes no result."""
    if scene.environ.get("OMP_NUM_THREADS"):
        return
    if scene.live is None:
        evidence = "OMP_NUM_THREADS is not set here; %detllm pins it if it runs before torch"
        yield Finding(Severity.NOTE, evidence, _INSTALL_KERNEL)
        return
    evidence = "OMP_NUM_THREADS is not set: attention on the CPU splits its work by thread count"
    yield Finding(Severity.RISK, evidence, "%detllm, before torch is imported", "this kernel")


def find_bytecode(scene: Scene) -> Iterator[Finding]:
    """Yield whether Python is kept from storing compiled modules, which slows every start."""
    if scene.environ.get("PYTHONDONTWRITEBYTECODE"):
        evidence = (
            "PYTHONDONTWRITEBYTECODE is set: unless the packages were compiled at installation, "
            "every start of an engine compiles vLLM, torch and transformers again "
            "(no result changes)"
        )
        yield Finding(Severity.NOTE, evidence, "unset PYTHONDONTWRITEBYTECODE")


_SEEDS_IN_RUN = re.compile(
    r"manual_seed|random\.seed|set_seed|seed_everything|use_deterministic_algorithms"
    r"|(?:export|set)\s+(?P<name>PYTHONHASHSEED|OMP_NUM_THREADS|CUBLAS_WORKSPACE_CONFIG|VLLM_\w+)"
    r"=(?P<value>[\w:.]+)"
)


def find_dockerfile_seed(scene: Scene) -> Iterator[Finding]:
    """Yield RUN instructions that seed or set a control."""
    for path, text in scene.dockerfiles.items():
        for line, instruction in _run_lines(text):
            seeds = _SEEDS_IN_RUN.search(instruction)
            if seeds is None:
                continue
            evidence = f"RUN {seeds[0]} applies while the image is built, not when it runs"
            name, value = seeds["name"], seeds["value"]
            fix = f"ENV {name}={value}" if name else "%detllm --seed 0 in the notebook's first cell"
            yield Finding(Severity.WRONG, evidence, fix, f"{path.name}, line {line}")


def _run_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each RUN instruction with the line it begins in."""
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        start, whole = index, lines[index]
        while whole.rstrip().endswith("\\") and index + 1 < len(lines):
            index += 1
            whole = f"{whole.rstrip()[:-1]} {lines[index]}"
        index += 1
        if re.match(r"\s*RUN\s", whole, re.IGNORECASE):
            yield start + 1, whole


def find_torchvision(scene: Scene) -> Iterator[Finding]:
    """Compare what torchvision was built for with the torch that is installed."""
    vision, torch = scene.packages.get("torchvision"), scene.packages.get("torch")
    if vision is None:
        return
    requires = scene.requires.get("torchvision", ())
    if evidence := misfit(vision, torch, requires, scene.builds):
        yield Finding(Severity.WRONG, evidence, REMOVE_VISION)
        return
    ours, theirs = scene.builds.get("torch"), scene.builds.get("torchvision")
    if ours is None or theirs is None:
        evidence = f"whether torchvision {vision} fits torch {torch} is not written anywhere"
        yield Finding(Severity.UNKNOWN, evidence, "python -c 'import torchvision'")
    elif ours != theirs:
        evidence = f"torchvision is built for {theirs}, torch for {ours}"
        yield Finding(Severity.NOTE, evidence, REMOVE_VISION)
