"""Defaults that `%config DetLLM` and ipython_config.py set; options on the line win."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traitlets import Bool, CaselessStrEnum, Float, Int, Unicode
from traitlets.config import Configurable

from jupyter_detllm.core.levels import DEFAULT_LEVEL, DEFAULT_SEED, Level

if TYPE_CHECKING:
    from jupyter_detllm.kernel.session import SessionSettings

__all__ = ["DetLLM"]


class DetLLM(Configurable):
    """Defaults of `%detllm` and `%%detgen`."""

    seed = Int(DEFAULT_SEED, min=0, help="Root seed of the first `%detllm`.").tag(config=True)
    level = CaselessStrEnum(
        [level.value for level in Level],
        DEFAULT_LEVEL.value,
        help="Guarantee level of the first `%detllm`.",
    ).tag(config=True)
    model = Unicode(
        "", help="Model that the first `%%detgen` starts without a `%detllm use` before it."
    ).tag(config=True)
    temperature = Float(None, allow_none=True, help="None: the model's own default.").tag(
        config=True
    )
    max_tokens = Int(None, allow_none=True, min=1, help="None: the engine's default.").tag(
        config=True
    )
    store_prompt = Bool(True, help="Keep prompts in stamps; otherwise only digests.").tag(
        config=True
    )
    cache = Bool(False, help="Answer `%%detgen` from the result cache, as `--cache` does.").tag(
        config=True
    )
    verify_sample = Float(
        0.0, min=0.0, max=1.0, help="Share of cached results generated again and compared."
    ).tag(config=True)
    cache_bytes = Int(
        256 * 1024 * 1024,
        min=0,
        help="Maximum bytes of results; the least recently used are evicted first.",
    ).tag(config=True)
    min_tokens_per_second = Float(
        None, allow_none=True, min=0.0, help="Warn below this many tokens/s."
    ).tag(config=True)
    max_p99_ms = Float(
        None, allow_none=True, min=0.0, help="Warn if p99 per request exceeds this many ms."
    ).tag(config=True)
    max_token_p99_ms = Float(
        None, allow_none=True, min=0.0, help="Warn if p99 between tokens exceeds this many ms."
    ).tag(config=True)
    max_memory = Float(
        None, allow_none=True, min=0.0, max=1.0, help="Warn above this share of memory."
    ).tag(config=True)
    show_progress = Bool(True, help="Show one line that updates while the engine works.").tag(
        config=True
    )

    def settings(self) -> SessionSettings:
        """Return the settings of a session that names none."""
        from jupyter_detllm.kernel.session import SessionSettings

        settings = SessionSettings.initial()
        if self.seed != DEFAULT_SEED or "seed" in self.config.get("DetLLM", {}):
            settings = settings.changed({"seed": self.seed})
        if settings.level_asked:
            return settings
        asked = self.level != DEFAULT_LEVEL or "level" in self.config.get("DetLLM", {})
        return settings.changed({"level": self.level, "level_asked": asked})
