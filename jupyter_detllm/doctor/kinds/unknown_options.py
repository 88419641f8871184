"""Options and variables in circulation that this vLLM does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jupyter_detllm.controls.environ import NO_EFFECT
from jupyter_detllm.doctor.code import MISSING, Code, Place
from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.options import ENGINE_CALLS, given_options, words
from jupyter_detllm.doctor.scene import Scene

__all__ = ["look"]

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
    "disable_log_requests": "leave it out: requests are not logged unless that is enabled",
}
_VARIABLES = {row.name: row for row in NO_EFFECT}


def look(scene: Scene) -> Look:
    """Return what is set or written and read by nothing."""
    found = [
        Finding(Severity.WRONG, f"{name}={scene.environ[name]:.60} is set: {row.why}", _use(name))
        for name, row in _VARIABLES.items()
        if name in scene.environ and name != "TOKENIZERS_PARALLELISM"  # set by tools, for speed
    ]
    return found + ([] if scene.code is None else list(_in_code(scene.code)))


def _use(name: str) -> str:
    return _VARIABLES[name].instead or f"unset {name}"


def _in_code(code: Code) -> Iterator[Finding]:
    for given in given_options(code, *_FLAGS):
        evidence = f"{given.engine} has no option {given.name}"
        yield Finding(Severity.WRONG, evidence, _FLAGS[given.name], str(given.place))
    for call in code.calls_to("SamplingParams", *ENGINE_CALLS):
        for name in ("use_beam_search", "best_of"):
            if call.keyword(name) is not MISSING and _has(call.node, name):
                evidence = f"{call.name.rsplit('.', 1)[-1]} has no field {name}"
                yield Finding(Severity.WRONG, evidence, _BEAMS, str(call.place))
    for given in given_options(code, "attention_backend"):
        right = _BACKENDS.get(str(given.value).upper())
        if right is not None:
            evidence = f"there is no attention backend {given.value}"
            mend = f'attention_backend="{right}"'
            yield Finding(Severity.WRONG, evidence, mend, str(given.place))
    for place, name in _variables(code):
        yield Finding(
            Severity.WRONG, f"{name} is set: {_VARIABLES[name].why}", _use(name), str(place)
        )


def _has(node: object, name: str) -> bool:
    return any(item.arg == name for item in getattr(node, "keywords", ()))


def _variables(code: Code) -> Iterator[tuple[Place, str]]:
    """Yield the variables without effect that the notebook sets, and where."""
    known = set(_VARIABLES) - {"TOKENIZERS_PARALLELISM"}
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
