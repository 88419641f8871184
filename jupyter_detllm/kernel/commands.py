"""The commands of `%detllm` and `%%detgen`, after their line is parsed.

A tab that is closed while cells run loses their outputs. `%detllm stamps` sends the stored
outputs with its list, as transient content of the display, which no front end saves. The
JupyterLab extension puts them into the cells that have no stamp; other front ends ignore them.

Metrics never go into a stamp or into an output that a re-run would compare: crossed thresholds
are reported in the volatile metadata, in the panel, and on request.
"""

from __future__ import annotations

import json
import keyword
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.options import option_flag
from jupyter_detllm.core.shown import generations_html
from jupyter_detllm.core.verdict import Policy
from jupyter_detllm.engines.base import Progress, SamplingOptions
from jupyter_detllm.errors import UsageError, nearest
from jupyter_detllm.expect.expectation import from_line
from jupyter_detllm.kernel import status
from jupyter_detllm.kernel.arguments import (
    EVERY_CELL,
    ArgumentParser,
    Namespace,
    UseParser,
    add_setup,
    asks_for_help,
    detgen_help,
    detgen_parser,
    number,
    refuse_variables,
    setup_parser,
    split_line,
    without_comment,
)
from jupyter_detllm.kernel.cells import notebook_of, running_cells
from jupyter_detllm.kernel.config import DetLLM
from jupyter_detllm.kernel.display import (
    Slot,
    displays_of,
    generations_text,
    is_watched,
    progress_text,
    show_again,
    show_bundle,
    show_text,
)
from jupyter_detllm.kernel.expecting import Expect
from jupyter_detllm.kernel.prompts import CacheUse, GenerateCall, fill, prompts_of, split_body
from jupyter_detllm.kernel.session import Session, SessionSettings, run_probe
from jupyter_detllm.kernel.stamping import Ledger, StampRecord, note_recorded
from jupyter_detllm.kernel.status import stamps_text
from jupyter_detllm.metering.measures import Thresholds

__all__ = [
    "VERBS",
    "MagicCommands",
    "Verb",
    "detllm_help",
    "models_in_training",
    "set_thresholds",
    "watch",
]

_SETUP = (
    "seed",
    "level",
    "torch_deterministic",
    "launch_blocking",
    "dtype",
    "no_tf32",
    "eager",
)


class MagicCommands:
    """The magics' work: a shell to display in, a session, and the user's defaults."""

    def __init__(self, shell: Any, session: Session, config: DetLLM) -> None:
        self.shell = shell
        self.session = session
        self.config = config
        watch(session, config)

    def line(self, line: str) -> None:
        """Run `%detllm LINE`; a comment may follow, as after any statement."""
        tokens = split_line(without_comment(line))
        refuse_variables(tokens, self.shell.user_ns)
        if tokens and asks_for_help(tokens):
            show_text(self.shell, detllm_help())
            return
        if not tokens or tokens[0].startswith("-"):
            self._setup(setup_parser().parse(tokens))
            return
        verb = VERBS.get(tokens[0])
        if verb is None:
            raise UsageError(
                f"%detllm has no verb {tokens[0]!r:.60}",
                meant=nearest(tokens[0], VERBS),
                expected=", ".join(VERBS),
                fix="%detllm?",
            )
        verb.run(self, verb.parser.parse(tokens[1:]))

    def _settings(self, given: Mapping[str, object]) -> SessionSettings:
        base = self.session.settings or self.config.settings()
        return base.changed({name: given.get(name) for name in _SETUP})

    def _setup(self, arguments: Namespace) -> None:
        given = {name: getattr(arguments, name) for name in _SETUP}
        asked = any(value is not None for value in given.values())
        if self.session.settings is None or asked:
            self.session.configure(self._settings(given))
            show_text(self.shell, status.setup_text(self.session))
        else:
            show_text(self.shell, status.status_text(self.session))

    def use(self, arguments: Namespace) -> None:
        """Run `%detllm use`."""
        settings = self._settings(vars(arguments))
        self.start(arguments.model, arguments.engine_options, settings)

    def start(
        self, model: str, options: Mapping[str, FieldValue], settings: SessionSettings
    ) -> None:
        """Start the engine, or keep it; show the set-up if it is new, and one line."""
        session = self.session
        if session.engine is None and session.settings != settings:
            session.configure(settings)
            show_text(self.shell, status.setup_text(session))
        slot = Slot(self.shell, live=self.config.show_progress)
        with slot.settled("engine: none was started"):
            session.use(model, options, settings, progress=slot.line)
        slot.finish(status.engine_text(session))

    def status(self, _: Namespace) -> None:
        """Run `%detllm status`."""
        note_recorded(self.session.ledger)
        show_text(self.shell, status.status_text(self.session))

    def show(self, arguments: Namespace) -> None:
        """Run `%detllm show`: a widget where there can be one, text and HTML in any case."""
        note_recorded(self.session.ledger)
        show_panel(self.shell, self.session, static=arguments.static)

    def check(self, arguments: Namespace) -> None:
        """Run `%detllm check`: what the saved file holds, compared."""
        from jupyter_detllm.render import render_report
        from jupyter_detllm.verify.service import check_paths

        policy = Policy.parse(arguments.policy) if arguments.policy else None
        path = notebook_of(self.shell, arguments.notebook, "%detllm check FILE.ipynb")
        show_text(self.shell, render_report(check_paths([path], policy), "text").rstrip("\n"))

    def stamps(self, arguments: Namespace) -> None:
        """Run `%detllm stamps`: list them and send them again, or emit some, or free a name."""
        ledger = self.session.ledger
        if arguments.forget:
            ledger.forget(arguments.forget)
        if not arguments.emit or (arguments.emit == EVERY_CELL and not len(ledger)):
            note_recorded(ledger)
            show_stamps(self.shell, ledger)
            return
        every = arguments.emit == EVERY_CELL
        for entry in ledger.entries() if every else [ledger.find(arguments.emit)]:
            show_again(self.shell, entry)

    def release(self, _: Namespace) -> None:
        """Run `%detllm release`."""
        model = self.session.spec.model if self.session.spec else ""
        report = self.session.release()
        text = "engine: none is running" if report is None else status.release_text(model, report)
        show_text(self.shell, text)

    def bisect(self, arguments: Namespace) -> None:
        """Run `%detllm bisect`: nothing of this kernel's engine is used or changed."""
        slot = Slot(self.shell, live=self.config.show_progress)
        with slot.settled("bisect: no result"):
            text = bisect_saved(self.shell, arguments, slot.line)
        slot.finish(text.rstrip("\n"))

    def doctor(self, arguments: Namespace) -> None:
        """Run `%detllm doctor`: findings about kernel, machine and notebook."""
        text = doctor_here(self.shell, self.session, arguments.notebook, arguments.model)
        show_text(self.shell, text)

    def probe(self, arguments: Namespace) -> None:
        """Run `%detllm probe`: the self-test on the running engine."""
        slot = Slot(self.shell, live=self.config.show_progress)
        with slot.settled("probe: no result"):
            text = probe_running(self.session, slot.line, short=arguments.short)
        slot.finish(text)

    def metrics(self, arguments: Namespace) -> None:
        """Run `%detllm metrics`: what is true of this run only."""
        from jupyter_detllm.render.metrics import metrics_html, metrics_json, metrics_text

        set_thresholds(self.config, arguments)
        found = self.session.metrics.figures()
        if arguments.json:
            show_text(self.shell, metrics_json(found))
        else:
            show_text(self.shell, metrics_text(found), metrics_html(found))

    def cell(self, line: str, body: str) -> None:
        """Run `%%detgen LINE` over `body`."""
        tokens = split_line(line)
        if asks_for_help(tokens):
            show_text(self.shell, detgen_help())
            return
        refuse_variables(tokens, self.shell.user_ns)
        arguments = detgen_parser().parse(tokens)
        call = self._call(arguments, body)
        expect = self._expect(arguments, line)
        if self.session.engine is None and self.config.model:
            self.start(self.config.model, {}, self._settings({}))
        requests = self.session.prepare(call)
        slot = Slot(self.shell, live=self.config.show_progress)

        def report(progress: Progress) -> None:
            slot.line(progress_text(progress))

        with slot.settled("detllm: no text was generated"):
            result = self.session.generate(call, requests, expect, progress=report)
        text = generations_text(requests, result.generations)
        markup = generations_html(requests, result.generations, show_prompt=call.store_prompt)
        slot.finish(text, markup)
        if arguments.out:
            self.shell.user_ns[arguments.out] = list(result.generations)
        result.settle(lambda problem: show_text(self.shell, f"detllm: {problem}"))

    def _expect(self, arguments: Namespace, line: str) -> Expect | None:
        if arguments.expect is None:
            if arguments.tries is not None or arguments.unmet is not None:
                raise UsageError("--tries and --unmet need --expect", fix="%%detgen?")
            return None
        expectation = from_line(arguments.expect, self.shell.user_ns, line)
        return Expect.of(expectation, arguments.tries, arguments.unmet)

    def _call(self, arguments: Namespace, body: str) -> GenerateCall:
        """Return what the cell asks for; nothing is started for a cell that cannot run."""
        if arguments.policy:
            Policy.parse(arguments.policy)
        if arguments.out and keyword.iskeyword(arguments.out):
            raise UsageError(f"--out: {arguments.out!r} is a Python keyword", expected="a name")
        texts = split_body(body, split=not arguments.no_split)
        if arguments.fill:
            texts = [fill(text, self.shell.user_ns) for text in texts]
        kind = "text" if arguments.text else "messages" if arguments.messages else "chat"
        store = self.config.store_prompt and not arguments.no_store_prompt
        return GenerateCall(
            prompts=tuple(prompts_of(texts, kind, arguments.system)),
            options=self._sampling(arguments),
            name=arguments.name or "",
            n=arguments.n,
            seed=arguments.seed,
            store_prompt=store,
            cache=self._cache(arguments),
        )

    def _cache(self, arguments: Namespace) -> CacheUse | None:
        on = self.config.cache if arguments.cache is None else arguments.cache
        share = arguments.verify_sample
        if share is not None and not on:
            raise UsageError("--verify-sample is about cached results", fix="add --cache")
        sample = self.config.verify_sample if share is None else share
        return CacheUse(sample, self.config.cache_bytes) if on else None

    def _sampling(self, arguments: Namespace) -> SamplingOptions:
        temperature, max_tokens = arguments.temperature, arguments.max_tokens
        if temperature is None and not arguments.beam_width:
            temperature = self.config.temperature
        return SamplingOptions(
            temperature=temperature,
            top_p=arguments.top_p,
            top_k=arguments.top_k,
            max_tokens=self.config.max_tokens if max_tokens is None else max_tokens,
            stop=tuple(arguments.stop) if arguments.stop else None,
            beam_width=arguments.beam_width,
            length_penalty=arguments.length_penalty,
        )


_Add: TypeAlias = Callable[[ArgumentParser], object]


def _arg(name: str, **reported: Any) -> _Add:
    return lambda parser: parser.add_argument(name, **reported)


def _threshold(name: str, unit: str, text: str) -> _Add:
    return _arg(name, type=number, metavar=unit, help=text)


class Verb:
    """A verb of `%detllm`: what it does, what its help says, and its arguments.

    Parameters
    ----------
    run
        Called with the arguments of its line.
    description, synopsis
        What its help says, and what follows its name there.
    *arguments
        Add its arguments to a parser.
    """

    def __init__(
        self,
        run: Callable[[MagicCommands, Namespace], None],
        description: str,
        synopsis: str = "",
        *arguments: _Add,
    ) -> None:
        self.run = run
        self._description, self._synopsis, self._arguments = description, synopsis, arguments

    @cached_property
    def parser(self) -> ArgumentParser:
        """The parser of its line."""
        takes_options = self.run is MagicCommands.use
        parser = (UseParser if takes_options else ArgumentParser)(
            f"%detllm {self.run.__name__}", synopsis=self._synopsis, description=self._description
        )
        for add in self._arguments:
            add(parser)
        return add_setup(parser, shown=False) if takes_options else parser


_FILE = "the notebook, where the front end does not name it"
_notebook = _arg("notebook", nargs="?", metavar="FILE", help=_FILE)
_policy = _arg("--policy", metavar="POLICY", help="what counts as equal: tokens, bitwise, ...")

VERBS: Mapping[str, Verb] = {
    "use": Verb(
        MagicCommands.use,
        "Start the kernel's one engine. The options of %detllm are understood too; any other\n"
        "goes to the engine as vLLM spells it: --max-model-len 4096 or max_model_len=4096.\n"
        "--lora FOLDER loads a LoRA adapter, whose digest is recorded with the model's.",
        "MODEL [options] [engine options]",
        _arg(
            "model",
            metavar="MODEL",
            help="demo, an engine's name such as fake, a folder, a Hugging Face id (owner/name), "
            "or a server's address",
        ),
    ),
    "status": Verb(
        MagicCommands.status, "Level, seed, engine, every control, and the stamped cells."
    ),
    "show": Verb(
        MagicCommands.show,
        "Show a panel: the fingerprint by group, late controls, self-test, stamped cells.\n"
        "Without widgets (--static, a terminal) it is text and HTML, for notebooks to keep.",
        "[--static]",
        _arg("--static", action="store_true", help="never make a widget"),
    ),
    "check": Verb(
        MagicCommands.check,
        "Compare what the saved notebook holds: outputs with their references.",
        "[FILE] [options]",
        _notebook,
        _policy,
    ),
    "stamps": Verb(
        MagicCommands.stamps,
        "List the stamped cells of this kernel; JupyterLab puts lost outputs back.",
        "[options]",
        _arg(
            "--emit",
            nargs="?",
            const=EVERY_CELL,
            metavar="NAME",
            help="put text and stamp of cell NAME, or of all cells, into this cell's output",
        ),
        _arg("--forget", metavar="NAME", help="free the name of a cell that was deleted"),
    ),
    "release": Verb(MagicCommands.release, "Shut down the engine; report what was freed."),
    "bisect": Verb(
        MagicCommands.bisect,
        "Send a saved cell's recorded requests again, with one setting changed at a time,\n"
        "each in its own process; name the change that makes the difference disappear.",
        "[NAME] [options]",
        _arg("name", nargs="?", metavar="NAME", help="name or number of the cell that differs"),
        _arg("--notebook", metavar="FILE", help=_FILE),
        _policy,
        _arg("--model", metavar="MODEL", help="the model to load, if not demo"),
        _arg("--only", metavar="LIST", default="", help="only these settings, comma-separated"),
        _arg(
            "--all",
            action="store_true",
            help="continue after the first one that makes it disappear",
        ),
    ),
    "probe": Verb(
        MagicCommands.probe,
        "Test whether generations of the running engine depend on what shares their batch.",
        "[--short]",
        _arg(
            "--short",
            action="store_true",
            help="fewer prompts and compositions, as at an engine's start",
        ),
    ),
    "metrics": Verb(
        MagicCommands.metrics,
        "Tokens/s, latency, KV cache, memory and cache hits of this kernel and its cells.\n"
        "They describe this run only. A threshold stays set; 0 removes it.",
        "[options]",
        _threshold("--min-tokens-per-second", "N", "warn below this many tokens/s"),
        _threshold("--max-p99-ms", "MS", "warn when p99 per request takes longer"),
        _threshold("--max-token-p99-ms", "MS", "the same from token to token"),
        _threshold("--max-memory", "SHARE", "warn above this share, 0.9 is 90 %%"),
        _arg("--json", action="store_true", help="show JSON"),
    ),
    "doctor": Verb(
        MagicCommands.doctor,
        "Look at this kernel, its machine and the notebook: what is wrong, and what fixes it.\n"
        "Code is read, never executed.",
        "[FILE] [options]",
        _notebook,
        _arg("--model", metavar="FOLDER", help="also read this model's config.json"),
    ),
}

_DETLLM_HEAD = """\
Same requests, same text: seed the kernel, set its controls, run one engine.

Examples
--------
Seed and set controls first, before anything imports torch or vllm::

  %detllm --seed 42

Start the engine; generate with %%detgen in a cell of its own::

  %detllm use demo --max-model-len 4096

Free the engine to start another::

  %detllm release

Without a verb or options it shows the status. The verbs are: {verbs}.
"""


def detllm_help() -> str:
    """Return what `%detllm?` shows."""
    parsers = [setup_parser(), *(verb.parser for verb in VERBS.values())]
    sections = (parser.section() for parser in parsers)
    return "\n".join([_DETLLM_HEAD.format(verbs=", ".join(VERBS)), *sections])


def show_panel(shell: Any, session: Session, *, static: bool) -> None:
    """Show the panel: text and HTML, and a widget too unless `static`.

    There is no widget in a terminal, or without anywidget.
    """
    from jupyter_detllm.kernel.panel import content_of, panel_html, panel_text

    content = content_of(session)
    text, markup = panel_text(content), panel_html(content)
    if static or not hasattr(shell, "kernel"):
        show_text(shell, text, markup)
        return
    from jupyter_detllm.kernel.panel_widget import open_panel

    cell_id = getattr(running_cells().outermost, "cell_id", None)
    try:
        data, metadata = open_panel(session, content, cell_id)
    except ImportError:
        show_text(shell, text, markup)
        return
    show_bundle(shell, text, markup, data, metadata)


THRESHOLDS = ("min_tokens_per_second", "max_p99_ms", "max_token_p99_ms", "max_memory")
"""The thresholds, as `%config DetLLM` spells them; options have dashes."""


def watch(session: Session, config: DetLLM) -> None:
    """Take the thresholds from the configuration, as it is whenever they are needed."""
    session.metrics.thresholds = _reader(config)


def _reader(config: Any) -> Callable[[], Thresholds]:
    return lambda: Thresholds(**{name: getattr(config, name) for name in THRESHOLDS})


def set_thresholds(config: Any, arguments: Namespace) -> None:
    """Set the thresholds that a line names; 0 or ``off`` takes one away.

    Raises
    ------
    UsageError
        For one that is out of range.
    """
    given = {name: getattr(arguments, name) for name in THRESHOLDS}
    for name, value in given.items():
        if value is None:
            continue
        if value < 0 or (name == "max_memory" and value > 1):
            span = "a share, 0 to 1" if name == "max_memory" else "a number, 0 takes it away"
            raise UsageError(f"{option_flag(name)} is {value:g}", expected=span)
    for name, value in given.items():
        if value is not None:
            setattr(config, name, value or None)


LEDGER_KEY = "detllm_ledger"
_LEDGER_VERSION = 1
_MOST_LEDGER_BYTES = 2_000_000
"""Jupyter servers may drop messages beyond 3 MB within 3 seconds."""


def ledger_content(entries: Iterable[StampRecord]) -> tuple[dict[str, Any], list[StampRecord]]:
    """Return the content sent with the list, and the entries that did not fit.

    The latest cells come first; a cell without an id cannot be found again.
    """
    cells: list[dict[str, Any]] = []
    left_out = []
    size = 0
    for entry in reversed([e for e in entries if e.cell_id]):
        outputs = [{"data": data, "metadata": meta} for data, meta in displays_of(entry)]
        cell = {"cell_id": entry.cell_id, "outputs": outputs}
        size += (length := len(json.dumps(cell)))
        if size > _MOST_LEDGER_BYTES:
            size -= length
            left_out.append(entry)
        else:
            cells.append(cell)
    return {"version": _LEDGER_VERSION, "cells": cells}, left_out


def show_stamps(shell: Any, ledger: Ledger) -> None:
    """List the stamped cells; to a front end with cells, send their outputs as well."""
    text = stamps_text(ledger)
    transient: dict[str, Any] = {}
    if is_watched(shell) and len(ledger):
        transient[LEDGER_KEY], left_out = ledger_content(ledger.entries())
        if left_out:
            names = ", ".join(e.label for e in reversed(left_out))
            text += f"\ntoo large to restore: {names}; %detllm stamps --emit NAME shows one"
    data = {"text/plain": text}
    shell.display_pub.publish(data=data, metadata={}, transient=transient)


def probe_running(session: Session, progress: Callable[[str], None], *, short: bool = False) -> str:
    """Test the running engine and return the table; raises what `run_probe` does."""
    from jupyter_detllm.render.selftest import table_text

    found = run_probe(session, progress, short=short)
    note = "preemption: `jupyter detllm probe MODEL` tries it, with an engine of its own"
    return f"{table_text(found)}\n  {note}"


def bisect_saved(shell: Any, arguments: Namespace, say: Callable[[str], None]) -> str:
    """Bisect a cell of the saved file; return the report as text.

    Raises
    ------
    UsageError
        For a cell or a setting that does not exist, or while this kernel holds a GPU.
    NotebookError
        For a file that cannot be read.
    """
    from jupyter_detllm.core.notebook import read_notebook
    from jupyter_detllm.core.verdict import DEFAULT_POLICY
    from jupyter_detllm.render.bisect import bisect_text
    from jupyter_detllm.verify.bisect import BisectOptions, bisect_cell, choose_cell
    from jupyter_detllm.verify.bisect_plan import settings_named
    from jupyter_detllm.verify.sources import read_file

    asked = Policy.parse(arguments.policy) if arguments.policy else None
    only = settings_named(arguments.only)
    fix = "%detllm bisect NAME --notebook FILE.ipynb"
    path = notebook_of(shell, arguments.notebook, fix)
    _refuse_on_gpu()
    view = read_notebook(read_file(path).data)
    cell = choose_cell(view, arguments.name, asked or DEFAULT_POLICY)
    policy = asked or cell.policy or DEFAULT_POLICY
    options = BisectOptions(policy, arguments.model, only=only, every=arguments.all)
    return bisect_text(bisect_cell(path.name, cell, options, say=say))


def _refuse_on_gpu() -> None:
    from jupyter_detllm.controls.environ import ProcessEvent
    from jupyter_detllm.controls.guard import observed_events

    if ProcessEvent.CUDA_START in observed_events(sys.modules):
        raise UsageError(
            "this kernel holds GPU memory, which the runs need",
            expected="a bisection outside of it",
            fix="`jupyter detllm bisect FILE.ipynb --cell NAME` after shutting the kernel down",
        )


def doctor_here(shell: Any, session: Session, notebook: str | None, model: str | None) -> str:
    """Return the report on this kernel.

    Parameters
    ----------
    notebook
        The saved file; without it the one the front end names, else the cells run so far.
    model
        Folder of a model whose config is read too.
    """
    from jupyter_detllm.doctor.scene import (
        Live,
        code_of_cells,
        given_model,
        scenes_of,
        with_code,
        world,
    )
    from jupyter_detllm.doctor.table import examine
    from jupyter_detllm.probes.process import hash_seed_in_force
    from jupyter_detllm.render.doctor import doctor_text

    live = Live(
        report=session.controls,
        level=session.settings.level if session.settings else None,
        fields=session.fingerprint().values(),
        training=models_in_training(shell.user_ns),
        hash_seed=hash_seed_in_force(),
    )
    base = world(os.environ, live=live)
    try:
        path = notebook_of(shell, notebook, "%detllm doctor FILE.ipynb")
    except UsageError:
        ran = [str(source) for source in shell.history_manager.input_hist_raw[1:]]
        given = () if model is None else (given_model(model),)
        code = code_of_cells(ran, "the cells run so far")
        scenes = [with_code(base, code, Path(), given)]
    else:
        scenes = scenes_of(base, [path], model=model)
    return doctor_text(examine(scenes)).rstrip("\n")


def models_in_training(namespace: Mapping[str, object]) -> dict[str, int] | None:
    """Return names bound to models in training mode, with their layers of dropout.

    Returns
    -------
    dict or None
        Models without such a layer are left out; None while torch is half imported.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    module_class = getattr(getattr(torch, "nn", None), "Module", None)
    if module_class is None:
        return None
    found = {}
    for name, value in namespace.items():
        # By type alone: nothing of a user's object is asked.
        if name.startswith("_") or not issubclass(type(value), module_class):
            continue
        layers = sum(map(_has_dropout, value.modules()))  # type: ignore[attr-defined]
        if layers:
            found[name] = layers
    return found


def _has_dropout(layer: Any) -> bool:
    kind = type(layer).__name__
    return "Dropout" in kind and bool(layer.training) and getattr(layer, "p", 0.0) > 0
