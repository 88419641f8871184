"""What `%detllm` and `%%detgen` do, once their line is parsed."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping
from typing import Any

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.policy import Policy
from jupyter_detllm.engines.base import Progress, SamplingOptions
from jupyter_detllm.errors import UsageError, nearest
from jupyter_detllm.expect.expectation import from_line
from jupyter_detllm.kernel import status
from jupyter_detllm.kernel.argline import Namespace, asks_for_help, split_line, without_comment
from jupyter_detllm.kernel.asking import Ask
from jupyter_detllm.kernel.bodies import fill, prompts_of, split_body
from jupyter_detllm.kernel.caching import CacheUse
from jupyter_detllm.kernel.config import DetLLM
from jupyter_detllm.kernel.current import notebook_of
from jupyter_detllm.kernel.detgen_line import detgen_help, detgen_parser
from jupyter_detllm.kernel.display import (
    Slot,
    generations_text,
    progress_text,
    show_again,
    show_text,
)
from jupyter_detllm.kernel.engine_options import parse_use
from jupyter_detllm.kernel.expecting import Expect, generate_expected
from jupyter_detllm.kernel.measuring import set_thresholds, watch
from jupyter_detllm.kernel.parsers import (
    EVERY_CELL,
    VERB_PARSERS,
    detllm_help,
    setup_parser,
    verb_parser,
)
from jupyter_detllm.kernel.recording import note_recorded
from jupyter_detllm.kernel.reissue import show_stamps
from jupyter_detllm.kernel.session import Session
from jupyter_detllm.kernel.settings import Settings
from jupyter_detllm.render.cell import generations_html

__all__ = ["VERBS", "Surface"]

_SETUP = (
    "seed",
    "level",
    "torch_deterministic",
    "launch_blocking",
    "dtype",
    "no_tf32",
    "eager",
)


class Surface:
    """The magics' work: a shell to display in, a session, and the user's defaults."""

    def __init__(self, shell: Any, session: Session, config: DetLLM) -> None:
        self.shell = shell
        self.session = session
        self.config = config
        watch(session, config)

    def line(self, line: str) -> None:
        """Run `%detllm LINE`; a comment may follow, as after any statement."""
        tokens = split_line(without_comment(line))
        if tokens and asks_for_help(tokens):
            show_text(self.shell, detllm_help())
            return
        if not tokens or tokens[0].startswith("-"):
            self._setup(setup_parser().parse(tokens))
            return
        verb = tokens[0]
        if verb not in VERBS:
            near = nearest(verb, VERBS)
            raise UsageError(
                f"%detllm has no verb {verb!r:.60}",
                expected=f"perhaps {near}" if near else ", ".join(VERBS),
                fix="%detllm?",
            )
        VERBS[verb](self, tokens[1:])

    def _settings(self, given: Mapping[str, object]) -> Settings:
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

    def use(self, tokens: list[str]) -> None:
        """Run `%detllm use`."""
        arguments, options = parse_use(tokens, verb_parser("use"))
        self.start(arguments.model, options, self._settings(vars(arguments)))

    def start(self, model: str, options: Mapping[str, FieldValue], settings: Settings) -> None:
        """Start the engine, or keep it; show the set-up if it is new, and one line."""
        session = self.session
        if session.engine is None and session.settings != settings:
            session.configure(settings)
            show_text(self.shell, status.setup_text(session))
        slot = Slot(self.shell, live=self.config.show_progress)
        with slot.settled("engine: none was started"):
            session.use(model, options, settings, progress=slot.line)
        slot.finish(status.engine_text(session))

    def status(self, tokens: list[str]) -> None:
        """Run `%detllm status`."""
        verb_parser("status").parse(tokens)
        note_recorded(self.session.ledger)
        show_text(self.shell, status.status_text(self.session))

    def show(self, tokens: list[str]) -> None:
        """Run `%detllm show`: a widget where there can be one, text and HTML in any case."""
        from jupyter_detllm.kernel.showing import show_panel

        arguments = verb_parser("show").parse(tokens)
        note_recorded(self.session.ledger)
        show_panel(self.shell, self.session, static=arguments.static)

    def check(self, tokens: list[str]) -> None:
        """Run `%detllm check`: what the saved file holds, compared."""
        from jupyter_detllm.render import render_report
        from jupyter_detllm.verify.service import check_paths

        arguments = verb_parser("check").parse(tokens)
        policy = Policy.parse(arguments.policy) if arguments.policy else None
        path = notebook_of(self.shell, arguments.notebook, "%detllm check FILE.ipynb")
        show_text(self.shell, render_report(check_paths([path], policy), "text").rstrip("\n"))

    def stamps(self, tokens: list[str]) -> None:
        """Run `%detllm stamps`: list them and send them again, or emit some, or free a name."""
        arguments = verb_parser("stamps").parse(tokens)
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

    def release(self, tokens: list[str]) -> None:
        """Run `%detllm release`."""
        verb_parser("release").parse(tokens)
        model = self.session.spec.model if self.session.spec else ""
        report = self.session.release()
        text = "engine: none is running" if report is None else status.release_text(model, report)
        show_text(self.shell, text)

    def bisect(self, tokens: list[str]) -> None:
        """Run `%detllm bisect`: nothing of this kernel's engine is used or changed."""
        from jupyter_detllm.kernel.bisecting import bisect_saved

        arguments = verb_parser("bisect").parse(tokens)
        slot = Slot(self.shell, live=self.config.show_progress)
        with slot.settled("bisect: nothing was found out"):
            text = bisect_saved(self.shell, arguments, slot.line)
        slot.finish(text.rstrip("\n"))

    def doctor(self, tokens: list[str]) -> None:
        """Run `%detllm doctor`: findings about kernel, machine and notebook."""
        from jupyter_detllm.kernel.doctoring import doctor_here

        arguments = verb_parser("doctor").parse(tokens)
        text = doctor_here(self.shell, self.session, arguments.notebook, arguments.model)
        show_text(self.shell, text)

    def probe(self, tokens: list[str]) -> None:
        """Run `%detllm probe`: the self-test on the running engine."""
        from jupyter_detllm.kernel.probing import probe_running

        arguments = verb_parser("probe").parse(tokens)
        slot = Slot(self.shell, live=self.config.show_progress)
        with slot.settled("probe: nothing was found out"):
            text = probe_running(self.session, slot.line, short=arguments.short)
        slot.finish(text)

    def metrics(self, tokens: list[str]) -> None:
        """Run `%detllm metrics`: what is true of this run only."""
        from jupyter_detllm.render.metrics import metrics_html, metrics_json, metrics_text

        arguments = verb_parser("metrics").parse(tokens)
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
        arguments = detgen_parser().parse(tokens)
        ask = self._ask(arguments, body)
        expect = self._expect(arguments, line)
        if self.session.engine is None and self.config.model:
            self.start(self.config.model, {}, self._settings({}))
        requests = self.session.prepare(ask)
        slot = Slot(self.shell, live=self.config.show_progress)

        def report(progress: Progress) -> None:
            slot.line(progress_text(progress))

        with slot.settled("detllm: no text was generated"):
            result = generate_expected(self.session, ask, requests, expect, progress=report)
        text = generations_text(requests, result.generations)
        markup = generations_html(requests, result.generations, show_prompt=ask.store_prompt)
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

    def _ask(self, arguments: Namespace, body: str) -> Ask:
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
        return Ask(
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


VERBS: Mapping[str, Callable[[Surface, list[str]], None]] = {
    "use": Surface.use,
    "status": Surface.status,
    "show": Surface.show,
    "check": Surface.check,
    "stamps": Surface.stamps,
    "release": Surface.release,
    "bisect": Surface.bisect,
    "probe": Surface.probe,
    "metrics": Surface.metrics,
    "doctor": Surface.doctor,
}

if VERBS.keys() != VERB_PARSERS.keys():
    raise AssertionError("every verb has a parser, and every parser a verb")
