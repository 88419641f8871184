"""Engine options and sampling parameters, wherever a notebook spells them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from jupyter_detllm.core.options import option_name
from jupyter_detllm.doctor.code import MISSING, OPAQUE, Code, MagicLine, Place

__all__ = [
    "ENGINE_CALLS",
    "Given",
    "SamplingUse",
    "given_options",
    "is_truthy",
    "models_named",
    "sampling",
    "uses_detllm",
    "words",
]

ENGINE_CALLS = ("vllm.LLM", "LLM", "EngineArgs", "AsyncEngineArgs", "jupyter_detllm.use")
_SAMPLING_CALLS = ("SamplingParams", "completions.create", "responses.create")


@dataclass(frozen=True, slots=True)
class Given:
    """An option as it was written; the value is literal or `OPAQUE`."""

    place: Place
    name: str
    value: object
    engine: str

    def __str__(self) -> str:
        return f"{self.name}={self.value!r}" if self.value is not OPAQUE else self.name


@dataclass(frozen=True, slots=True)
class SamplingUse:
    """One place that sets sampling parameters.

    Attributes
    ----------
    temperature, seed
        Literal, `MISSING` or `OPAQUE`.
    ours
        Whether it is `%%detgen` or `det.generate`, which seed every request.
    """

    place: Place
    what: str
    temperature: object
    seed: object
    ours: bool = False

    @property
    def greedy(self) -> bool:
        """Whether it says temperature 0."""
        value = self.temperature
        return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def words(text: str) -> list[str]:
    """Split a line as a shell does, as far as it can be split."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def is_truthy(value: object) -> bool:
    """Return whether an option's value, from Python or a command line, means on."""
    if isinstance(value, str):
        return value.lower() not in ("", "0", "false", "none", "off", "no")
    return value not in (MISSING, OPAQUE) and bool(value)


def uses_detllm(code: Code) -> Place | None:
    """Return the first place where `%detllm` or `det.use` sets the kernel up."""
    verbs = [
        line.place
        for line in code.magics("%detllm")
        if words(line.text)[1:2] in ([], ["use"]) or words(line.text)[1:2][0].startswith("-")
    ]
    calls = [call.place for call in code.calls_to("jupyter_detllm.use")]
    return min([*verbs, *calls], default=None)


def given_options(code: Code, *names: str) -> list[Given]:
    """Return where any of the engine options `names` is given, and its value."""
    found = []
    for call in code.calls_to(*ENGINE_CALLS):
        for name in names:
            if call.spells(name):
                found.append(Given(call.place, name, call.keyword(name), call.name))
    for line in code.lines:
        for command, arguments in _engine_commands(line):
            for name, value in _command_options(arguments):
                if name in names:
                    found.append(Given(line.place, name, value, command))
    return sorted(found, key=lambda item: item.place)


def models_named(code: Code) -> list[str]:
    """Return the names of the models that engines are started with, as far as written."""
    found = []
    for call in code.calls_to(*ENGINE_CALLS):
        value = call.keyword("model")
        value = call.argument(0) if value is MISSING else value
        found.append(value if isinstance(value, str) else "a model chosen when the code runs")
    for line in code.lines:
        for _, arguments in _engine_commands(line):
            named = [name for name in arguments[:1] if not name.startswith("-")]
            given = [v for name, v in _command_options(arguments) if name == "model"]
            texts = (v if isinstance(v, str) else "a model chosen when it runs" for v in given)
            found += named or list(texts)
    return found


def _engine_commands(line: MagicLine) -> Iterator[tuple[str, list[str]]]:
    tokens = words(line.text)
    if tokens[:2] == ["%detllm", "use"]:
        yield "%detllm use", tokens[2:]
    for text in re.split(r"[\n;&|]+", line.shell.replace("\\\n", " ")):
        tokens = words(text)
        if "vllm" in tokens and "serve" in tokens:
            yield "vllm serve", tokens[tokens.index("serve") + 1 :]
            continue
        modules = [i for i, word in enumerate(tokens) if word.startswith("vllm.entrypoints")]
        if modules:
            yield "vllm server", tokens[modules[0] + 1 :]


def _command_options(tokens: list[str]) -> Iterator[tuple[str, object]]:
    for index, token in enumerate(tokens):
        name, equals, value = token.partition("=")
        if not (name.startswith("--") or (equals and re.fullmatch(r"[A-Za-z]\w*", name))):
            continue
        name = option_name(name)
        if equals:
            yield name, _value(value)
            continue
        following = tokens[index + 1] if index + 1 < len(tokens) else "--"
        if name.startswith("no_"):
            yield name.removeprefix("no_"), False
        else:
            yield name, True if following.startswith("--") else _value(following)


def _value(text: str) -> object:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        # "$N" and "{name}" are filled in by the shell or by IPython.
        return OPAQUE if re.search(r"[${]", text) else text


def sampling(code: Code) -> list[SamplingUse]:
    """Return every place that sets sampling parameters, in order."""
    found = [
        SamplingUse(
            call.place,
            call.name.rsplit(".", 1)[-1]
            if "Sampling" in call.name
            else ".".join(call.name.rsplit(".", 2)[-2:]),
            call.keyword("temperature"),
            call.keyword("seed"),
        )
        for call in code.calls_to(*_SAMPLING_CALLS)
    ]
    found += [
        SamplingUse(call.place, "generate(do_sample=True)", call.keyword("temperature"), MISSING)
        for call in code.calls
        if call.name.endswith(".generate") and call.keyword("do_sample") is True
    ]
    found += [
        SamplingUse(c.place, "det.generate", c.keyword("temperature"), c.keyword("seed"), ours=True)
        for c in code.calls_to("jupyter_detllm.generate")
    ]
    for line in code.magics("%%detgen"):
        options = dict(_command_options(words(line.text)))
        temperature = options.get("temperature", MISSING)
        seed = options.get("seed", MISSING)
        found.append(SamplingUse(line.place, "%%detgen", temperature, seed, ours=True))
    return sorted(found, key=lambda item: item.place)
