"""Kinds of finding about an engine's options: what makes results depend on the batch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jupyter_detllm.controls.environ import NO_EFFECT
from jupyter_detllm.doctor.code import MISSING, OPAQUE, Code, Place
from jupyter_detllm.doctor.options import ENGINE_CALLS, given_options, is_truthy, sampling, words
from jupyter_detllm.doctor.scene import Finding, Scene, Severity
from jupyter_detllm.probes.engine import Scheme, scheme_of

__all__ = [
    "find_lora",
    "find_prefix_cache",
    "find_quantised_model",
    "find_speculative",
    "find_tensor_parallel",
    "find_unknown_options",
]

_PREFIX_CACHE = "enable_prefix_caching"
_PREFIX_WHY = "a prompt with a cached beginning is computed in a different shape from a new one"
_PREFIX_FIX = "enable_prefix_caching=False"


def find_prefix_cache(scene: Scene) -> Iterator[Finding]:
    """Yield where the prefix cache is on: by option, by default, or in the engine."""
    if scene.live_field("engine.prefix_cache") is True:
        evidence = f"the running engine has its prefix cache on: {_PREFIX_WHY}"
        fix = "%detllm release, then %detllm use without --enable-prefix-caching"
        yield Finding(Severity.RISK, evidence, fix, "this kernel")
    greedy = any(item.greedy for item in sampling(scene.code))
    for given in given_options(scene.code, _PREFIX_CACHE):
        if given.value is OPAQUE:
            evidence = "whether the prefix cache is on is known only when this runs"
            yield Finding(Severity.UNKNOWN, evidence, _PREFIX_FIX, str(given.place))
        elif is_truthy(given.value):
            evidence = f"{given.engine} with the prefix cache on: {_PREFIX_WHY}"
            yield Finding(Severity.RISK, evidence, _PREFIX_FIX, str(given.place))
    for call in scene.code.calls_to("vllm.LLM") if greedy else ():
        if call.keyword(_PREFIX_CACHE) is MISSING:
            evidence = f"temperature 0 and vLLM's default, prefix cache on: {_PREFIX_WHY}"
            yield Finding(Severity.RISK, evidence, _PREFIX_FIX, str(call.place))


_PARALLEL = ("tensor_parallel_size", "tp")
_PARALLEL_FIX = "tensor_parallel_size=1, or keep the size: it is part of the fingerprint"


def find_tensor_parallel(scene: Scene) -> Iterator[Finding]:
    """Yield where the tensor parallel size is above 1."""
    size = scene.live_field("engine.tensor_parallel")
    if isinstance(size, int) and size > 1:
        yield Finding(Severity.RISK, _ranks_evidence(size), _PARALLEL_FIX, "this kernel")
    for given in given_options(scene.code, *_PARALLEL):
        if given.value is OPAQUE:
            evidence = "the tensor parallel size is known only when this runs"
            yield Finding(Severity.UNKNOWN, evidence, _PARALLEL_FIX, str(given.place))
        elif isinstance(given.value, int) and given.value > 1:
            yield Finding(
                Severity.RISK, _ranks_evidence(given.value), _PARALLEL_FIX, str(given.place)
            )


def _ranks_evidence(size: int) -> str:
    return (
        f"tensor parallel size {size}: sums are split over {size} GPUs, so that results hold for "
        "this size alone, and no level spans sizes"
    )


_QUANTISED_FIX = "jupyter detllm probe MODEL shows whether its results depend on the batch"
#: By how vLLM resolves them: their kernels choose how to split a product by its rows.
_VARYING = ("marlin", "awq", "gptq", "machete", "exllama", "bitsandbytes", "gguf")


def find_quantised_model(scene: Scene) -> Iterator[Finding]:
    """Yield what is quantised: in the engine, in a model's config, by option."""
    method = scene.live_field("engine.quantization")
    if method not in (None, "none"):
        evidence = f"the running engine computes with {method}"
        severity = _quantised_severity(str(method))
        yield Finding(severity, evidence, "%detllm probe", "this kernel")
    for model in scene.models:
        if model.config is None:
            evidence = f"whether {model.name} is quantised is not known: its config is not here"
            fix = "jupyter detllm doctor --model FOLDER, with config.json in it"
            yield Finding(Severity.UNKNOWN, evidence, fix)
            continue
        scheme = scheme_of(model.config)
        if scheme is not None:
            yield _quantised_finding(model.name, scheme)
    for given in given_options(scene.code, "quantization"):
        if is_truthy(given.value):
            evidence = f"{given.engine} with quantization={given.value}"
            yield Finding(
                _quantised_severity(str(given.value)),
                evidence,
                _QUANTISED_FIX,
                str(given.place),
            )


def _quantised_severity(method: str) -> Severity:
    return Severity.RISK if any(name in method.lower() for name in _VARYING) else Severity.NOTE


def _quantised_finding(name: str, scheme: Scheme) -> Finding:
    dynamic = scheme.activations == "dynamic"
    severity = Severity.RISK if dynamic else _quantised_severity(scheme.method)
    why = ": activation scales are taken from what is in the step" if dynamic else ""
    return Finding(severity, f"{name} is quantised ({scheme}){why}", _QUANTISED_FIX)


_LORA_WHY = "an adapter changes the weights in effect, and adds kernels that depend on the batch"
_LORA_FIX = "%detllm use MODEL --lora FOLDER, which records the digest; or merge it into the model"


def find_lora(scene: Scene) -> Iterator[Finding]:
    """Yield where LoRA is switched on."""
    adapter = scene.live_field("model.adapter")
    if scene.live_field("engine.lora") not in (None, "off") and adapter is None:
        evidence = f"the running engine has LoRA on, and no adapter is recorded: {_LORA_WHY}"
        yield Finding(Severity.RISK, evidence, _LORA_FIX, "this kernel")
    for given in given_options(scene.code, "enable_lora", "lora_modules"):
        if is_truthy(given.value):
            evidence = f"{given.engine} with LoRA on: {_LORA_WHY}"
            yield Finding(Severity.RISK, evidence, _LORA_FIX, str(given.place))


_SPECULATIVE = ("speculative_config", "speculative_model", "num_speculative_tokens")
_SPECULATIVE_WHY = (
    "how many drafted tokens a step checks changes its shape, and with it the rounding"
)
_SPECULATIVE_FIX = "start the engine without speculative_config"


def find_speculative(scene: Scene) -> Iterator[Finding]:
    """Yield where speculative decoding is switched on."""
    if scene.live_field("engine.speculative") not in (None, "off"):
        evidence = f"the running engine decodes speculatively: {_SPECULATIVE_WHY}"
        yield Finding(Severity.RISK, evidence, _SPECULATIVE_FIX, "this kernel")
    for given in given_options(scene.code, *_SPECULATIVE):
        if is_truthy(given.value):
            evidence = f"{given.engine} with {given.name}: {_SPECULATIVE_WHY}"
            yield Finding(Severity.RISK, evidence, _SPECULATIVE_FIX, str(given.place))


_BEAMS = "LLM.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=64))"
_BACKENDS = {
    "FLASH_ATTENTION": "FLASH_ATTN",
    "FLASHATTENTION": "FLASH_ATTN",
    "FLASH_ATTENTION_2": "FLASH_ATTN",
    "TRITON": "TRITON_ATTN",
    "TRITON_ATTENTION": "TRITON_ATTN",
    "FLASH_INFER": "FLASHINFER",
    "SDPA": "TORCH_SDPA",
}
#: Options of the command line, as an engine argument spells them, and what to use.
_FLAGS = {
    "sampling_temperature": "temperature belongs to a request: temperature=0",
    "enable_beam_search": _BEAMS,
    "beam_size": _BEAMS,
    "deterministic": "%detllm --level invariant, before the engine starts",
    "disable_log_requests": "leave it out: requests are not logged unless that is enabled",
}
# Tools set TOKENIZERS_PARALLELISM, for speed.
_UNKNOWN_VARIABLES = {row.name: row for row in NO_EFFECT if row.name != "TOKENIZERS_PARALLELISM"}


def find_unknown_options(scene: Scene) -> Iterator[Finding]:
    """Yield variables and options that nothing reads."""
    for name, row in _UNKNOWN_VARIABLES.items():
        if name in scene.environ:
            evidence = f"{name}={scene.environ[name]:.60} is set: {row.why}"
            yield Finding(Severity.WRONG, evidence, _use(name))
    yield from _in_code(scene.code)


def _use(name: str) -> str:
    return _UNKNOWN_VARIABLES[name].instead or f"unset {name}"


def _in_code(code: Code) -> Iterator[Finding]:
    for given in given_options(code, *_FLAGS):
        evidence = f"{given.engine} has no option {given.name}"
        yield Finding(Severity.WRONG, evidence, _FLAGS[given.name], str(given.place))
    for item in code.assignments:
        if item.target.endswith(".deterministic") and "sampler" in item.target.lower():
            evidence = (
                "nothing reads it: vLLM's sampler has no branch `if self.deterministic:`, "
                "which is quoted here and there"
            )
            yield Finding(Severity.WRONG, evidence, _FLAGS["deterministic"], str(item.place))
    for call in code.calls_to("SamplingParams", *ENGINE_CALLS):
        for name in ("use_beam_search", "best_of"):
            if call.spells(name):
                evidence = f"{call.name.rsplit('.', 1)[-1]} has no field {name}"
                yield Finding(Severity.WRONG, evidence, _BEAMS, str(call.place))
    for given in given_options(code, "attention_backend"):
        right = _BACKENDS.get(str(given.value).upper())
        if right is not None:
            evidence = f"there is no attention backend {given.value}"
            fix = f'attention_backend="{right}"'
            yield Finding(Severity.WRONG, evidence, fix, str(given.place))
    for place, name in _unknown_variables(code):
        yield Finding(
            Severity.WRONG, f"{name} is set: {_UNKNOWN_VARIABLES[name].why}", _use(name), str(place)
        )


def _unknown_variables(code: Code) -> Iterator[tuple[Place, str]]:
    """Yield the variables without effect that the notebook sets, and where."""
    known = _UNKNOWN_VARIABLES.keys()
    for item in code.assignments:
        name = item.target.removeprefix("os.environ[").removesuffix("]")
        if name in known:
            yield item.place, name
    for call in code.calls_to("os.environ.setdefault", "os.putenv"):
        if call.argument(0) in known:
            yield call.place, str(call.argument(0))
    for line in code.lines:
        text = " ".join(words(line.text)[1:]) if line.text.startswith("%env") else line.shell
        for name in sorted(known):
            if re.search(rf"\b{name}\s*=|^{name}\s", text, re.MULTILINE):
                yield line.place, name
