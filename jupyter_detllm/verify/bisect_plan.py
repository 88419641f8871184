"""What a bisection tries, in which order, and what it found: typed values. Pure.

A setting is a row of SETTINGS; an `Override` changes the `Conditions` of a run. What two
fingerprints say differs comes first, put back to its recorded value (`aligned`); the rows
follow by cost. `render.bisect` turns the `BisectReport` into text and JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from jupyter_detllm.controls.environ import ENV_CONTROLS, RECORDED
from jupyter_detllm.controls.ledger import UNKNOWN
from jupyter_detllm.core.compare import Comparison
from jupyter_detllm.core.fingerprint import FieldDiff, FieldValue, Fingerprint
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.verdict import Policy
from jupyter_detllm.engines.base import FAKE, VLLM
from jupyter_detllm.engines.start import Modifiers
from jupyter_detllm.errors import UsageError, nearest
from jupyter_detllm.probes.software import Platform
from jupyter_detllm.verify.engine_settings import ROWS

__all__ = [
    "SETTINGS",
    "BatchComposition",
    "BisectReport",
    "Conclusion",
    "Conditions",
    "Override",
    "Result",
    "Setting",
    "Trial",
    "TrialResult",
    "aligned",
    "difference_text",
    "plan",
    "recorded_variable",
    "settings_named",
]


class BatchComposition(StrEnum):
    """Which requests share a call."""

    PRESENT = "as in the output"
    RECORDED = "as in the reference"
    ALONE = "each alone"


@dataclass(frozen=True, slots=True)
class Conditions:
    """Everything a run is started with.

    Attributes
    ----------
    engine, level
        Name of the engine, and the guarantee level.
    options, modifiers
        Engine options, and the debugging options of the session.
    environ
        Variables set before Python starts; None means unset.
    composition
        Which requests share a call.
    """

    engine: str
    level: Level
    options: Mapping[str, FieldValue] = field(default_factory=dict)
    modifiers: Modifiers = field(default_factory=Modifiers)
    environ: Mapping[str, str | None] = field(default_factory=dict)
    composition: BatchComposition = BatchComposition.PRESENT


@dataclass(frozen=True, slots=True)
class Override:
    """What a trial overrides in the conditions of a run.

    An option of None is left out; None elsewhere leaves the conditions as they are.
    """

    options: Mapping[str, FieldValue] = field(default_factory=dict)
    environ: Mapping[str, str | None] = field(default_factory=dict)
    composition: BatchComposition | None = None
    level: Level | None = None
    torch_deterministic: str | None = None

    def applied(self, base: Conditions) -> Conditions:
        """Return the conditions with this change."""
        options = {**base.options, **self.options}
        mode = self.torch_deterministic or base.modifiers.torch_deterministic
        return replace(
            base,
            options={name: value for name, value in options.items() if value is not None},
            modifiers=replace(base.modifiers, torch_deterministic=mode),
            environ={**base.environ, **self.environ},
            composition=self.composition or base.composition,
            level=self.level or base.level,
        )

    def joined(self, other: Override) -> Override:
        """Return both changes as one; `other` wins."""
        return Override(
            {**self.options, **other.options},
            {**self.environ, **other.environ},
            other.composition or self.composition,
            other.level or self.level,
            other.torch_deterministic or self.torch_deterministic,
        )


_MAX_THREADS = 1024
_MODES = ("off", "warn", "error")
_PLAIN = re.compile(r"[A-Za-z0-9_.:,+-]{1,64}")
_VARIABLES = frozenset(row.name for row in ENV_CONTROLS) | {row.name for row in RECORDED}


def aligned(
    diff: FieldDiff, engine: str, platform: Platform, levels: Iterable[Level]
) -> Override | None:
    """Return the change that puts a field back to its recorded (`left`) value.

    None if that is not possible: another version, another processor, or a value that this
    package would not have written.
    """
    value = diff.left
    if diff.name == "level":
        level = next((level for level in levels if level == value), None)
        return None if level is None else Override(level=level)
    if diff.name == "engine.batch":
        return Override(composition=BatchComposition.RECORDED)
    if diff.name == "torch.deterministic_algorithms":
        return Override(torch_deterministic=str(value)) if value in _MODES else None
    if diff.name == "torch.threads" or diff.name.startswith("controls."):
        return recorded_variable(diff.name, value, platform)
    return _recorded_option(diff.name, value, engine, platform)


def recorded_variable(name: str, value: FieldValue, platform: Platform) -> Override | None:
    """Return the change that sets a recorded variable: only one that we know.

    The number of threads is one, too.
    """
    if name == "torch.threads":
        fits = type(value) is int and 0 < value <= _MAX_THREADS and platform is Platform.CPU
        return Override(environ={"OMP_NUM_THREADS": str(value)}) if fits else None
    variable = name.removeprefix("controls.")
    if variable not in _VARIABLES or value == UNKNOWN:
        return None
    if value is not None and not _PLAIN.fullmatch(str(value)):
        return None
    if value is not None and variable.endswith("_NUM_THREADS") and not _threads(str(value)):
        return None
    return Override(environ={variable: None if value is None else str(value)})


def _threads(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) <= _MAX_THREADS


def _recorded_option(
    name: str, value: FieldValue, engine: str, platform: Platform
) -> Override | None:
    if name == "engine.attention_backend" and engine == VLLM and platform is Platform.CPU:
        return None  # there is only one
    for row in ROWS:
        if row.name == name and row.option:
            try:
                # What the default reaches is reached by leaving the option out.
                return Override({row.option: row.read(value)})
            except ValueError:
                return None
    return None


_VLLM = (VLLM,)
_BOTH = (FAKE, VLLM)
_CPU, _CUDA = (Platform.CPU,), (Platform.CUDA,)
_ANY = tuple(Platform)


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table.

    Attributes
    ----------
    name
        For people and for ``--only``.
    engines, platforms
        Where it exists.
    change
        What it changes.
    cost
        The order: what a user gives up for it, from nothing to most.
    why
        One sentence: why it can make a difference disappear.
    adopt
        How to run with it from now on.
    shown_by
        Fingerprint field and the value it has where the setting is in force already.
    unless
        Whether `shown_by` holds for every value except that one.
    """

    name: str
    engines: tuple[str, ...]
    platforms: tuple[Platform, ...]
    change: Override
    cost: int
    why: str
    adopt: str
    shown_by: tuple[str, FieldValue] | None = None
    unless: bool = False

    def offered(self, base: Conditions, platform: Platform, levels: Iterable[Level]) -> bool:
        """Return whether engine and platform have it."""
        return (
            base.engine in self.engines
            and platform in self.platforms
            and (self.change.level is None or self.change.level in levels)
        )

    def in_force(self, base: Conditions, found: Mapping[str, FieldValue]) -> bool:
        """Return whether it would change nothing: `found` are the fields of the unchanged run."""
        if self.shown_by is not None and self.shown_by[0] in found:
            name, value = self.shown_by
            return (found[name] == value) is not self.unless
        return self.change.applied(base) == base


@dataclass(frozen=True, slots=True)
class Trial:
    """One change to try; `setting` is None where a recorded value is put back."""

    name: str
    change: Override
    why: str
    adopt: str
    setting: Setting | None = None


def _option(name: str) -> str:
    return f"%detllm use MODEL --{name}"


# The formatter would spread each row over a dozen lines.
# fmt: off
SETTINGS: tuple[Setting, ...] = (
    Setting("alone", _BOTH, _ANY, Override(composition=BatchComposition.ALONE), 10,
            "Kernels depend on the number of rows in a batch.",
            "give each prompt a separate cell, or use level invariant"),
    Setting("prefix-cache-off", _BOTH, _ANY, Override({"enable_prefix_caching": False}), 20,
            "A cached prefix leaves fewer rows to compute.",
            _option("enable-prefix-caching false"), ("engine.prefix_cache", False)),
    Setting("prefix-cache-on", _BOTH, _ANY, Override({"enable_prefix_caching": True}), 21,
            "The recorded run may have found its prefix cached.",
            _option("enable-prefix-caching true"), ("engine.prefix_cache", True)),
    Setting("in-process", _VLLM, _ANY,
            Override(environ={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}), 24,
            "In its own process the engine batches requests by time of arrival.",
            "level repeatable, or VLLM_ENABLE_V1_MULTIPROCESSING=0 before Python starts",
            ("controls.VLLM_ENABLE_V1_MULTIPROCESSING", "0")),
    Setting("async-scheduling-off", _VLLM, _ANY, Override({"async_scheduling": False}), 25,
            "Asynchronous scheduling changes which requests share a step.",
            _option("async-scheduling false"), ("engine.async_scheduling", False)),
    Setting("chunked-prefill-off", _BOTH, _ANY, Override({"enable_chunked_prefill": False}), 30,
            "A prompt that is cut into chunks is computed in other shapes.",
            _option("enable-chunked-prefill false"), ("engine.chunked_prefill", False)),
    Setting("chunked-prefill-on", _BOTH, _ANY, Override({"enable_chunked_prefill": True}), 31,
            "The recorded run may have cut its prompts into chunks.",
            _option("enable-chunked-prefill true"), ("engine.chunked_prefill", True)),
    Setting("long-steps", _BOTH, _ANY, Override({"max_num_batched_tokens": 16384}), 32,
            "With room for more tokens in a step fewer prompts are cut or put off.",
            _option("max-num-batched-tokens 16384"), ("engine.max_num_batched_tokens", 16384)),
    Setting("one-sequence", _BOTH, _ANY, Override({"max_num_seqs": 1}), 35,
            "With one sequence at a time nothing shares a step, whatever is asked together.",
            _option("max-num-seqs 1"), ("engine.max_num_seqs", 1)),
    Setting("flashinfer-sampler-off", _VLLM, _CUDA,
            Override(environ={"VLLM_USE_FLASHINFER_SAMPLER": "0"}), 40,
            "FlashInfer's sampler draws differently from the seeded one.",
            "level repeatable, or VLLM_USE_FLASHINFER_SAMPLER=0 before Python starts",
            ("controls.VLLM_USE_FLASHINFER_SAMPLER", "0")),
    Setting("split-kv-off", _VLLM, _CPU, Override(environ={"VLLM_CPU_ATTN_SPLIT_KV": "0"}), 45,
            "Attention splits its KV range over idle threads, so by batch size.",
            "VLLM_CPU_ATTN_SPLIT_KV=0 before Python starts",
            ("controls.VLLM_CPU_ATTN_SPLIT_KV", "0")),
    Setting("triton-attention", _VLLM, _CUDA, Override({"attention_backend": "TRITON_ATTN"}), 50,
            "Each attention backend sums in its own order.",
            _option("attention-backend TRITON_ATTN"), ("engine.attention_backend", "TRITON_ATTN")),
    Setting("flash-attention", _VLLM, _CUDA, Override({"attention_backend": "FLASH_ATTN"}), 51,
            "Each attention backend sums in its own order.",
            _option("attention-backend FLASH_ATTN"), ("engine.attention_backend", "FLASH_ATTN")),
    Setting("level-repeatable", _BOTH, _ANY, Override(level=Level.REPEATABLE), 55,
            "It sets every control that run-to-run determinism needs.",
            "%detllm --level repeatable"),
    Setting("deterministic-algorithms", _VLLM, _ANY, Override(torch_deterministic="warn"), 60,
            "torch takes slower kernels that add in a fixed order.",
            "%detllm --torch-deterministic warn", ("torch.deterministic_algorithms", "warn")),
    Setting("no-tf32", _VLLM, _CUDA, Override(environ={"NVIDIA_TF32_OVERRIDE": "0"}), 65,
            "TF32 keeps 10 bits of mantissa in float32 products.",
            "%detllm --no-tf32", ("controls.NVIDIA_TF32_OVERRIDE", "0")),
    Setting("one-thread", _VLLM, _CPU, Override(environ={"OMP_NUM_THREADS": "1"}), 70,
            "CPU attention splits its KV range by thread count.",
            "OMP_NUM_THREADS=1 before Python starts", ("torch.threads", 1)),
    Setting("eager", _BOTH, _ANY, Override({"enforce_eager": True}), 75,
            "Compiled graphs fuse and pad differently from eager.",
            "%detllm --eager", ("engine.compile", "eager")),
    Setting("compiled", _BOTH, _ANY, Override({"enforce_eager": False}), 80,
            "The recorded run may have been compiled.",
            _option("enforce-eager false"), ("engine.compile", "eager"), True),
    Setting("float32", _BOTH, _ANY, Override({"dtype": "float32"}), 90,
            "In float32, the order of sums changes too little to flip a token.",
            "%detllm --dtype float32", ("engine.dtype", "float32")),
    Setting("level-invariant", _BOTH, _ANY, Override(level=Level.INVARIANT), 95,
            "A generation then does not depend on what shares its batch.",
            "%detllm --level invariant"),
)
# fmt: on


def settings_named(text: str) -> tuple[str, ...]:
    """Read ``alone,eager``: names of rows, comma-separated.

    Raises
    ------
    UsageError
        For one that does not exist, with the nearest.
    """
    known = [row.name for row in SETTINGS]
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in known:
            raise UsageError(
                f"there is no setting {name[:40]!r}",
                meant=nearest(name, known),
                expected=", ".join(known),
            )
    return names


def plan(
    base: Conditions,
    found: Fingerprint,
    diffs: Iterable[FieldDiff],
    *,
    platform: Platform,
    levels: Iterable[Level],
    only: Iterable[str] = (),
) -> tuple[Trial, ...]:
    """Return what to try after the unchanged run, in order.

    Parameters
    ----------
    base
        The conditions of the unchanged run.
    found
        Its fingerprint, as the engine resolved it.
    diffs
        Recorded against found (batch and level as fields), the likeliest cause first.
    platform, levels
        Where it runs, and the available levels.
    only
        Names of rows; with any, nothing else is tried.
    """
    chosen, levels = frozenset(only), tuple(levels)
    trials = [] if chosen else _alignments(base, diffs, platform, levels)
    seen = [trial.change.applied(base) for trial in trials]
    values = found.values()
    for row in sorted(SETTINGS, key=lambda row: row.cost):
        if chosen and row.name not in chosen:
            continue
        if not row.offered(base, platform, levels) or row.in_force(base, values):
            continue
        if row.change.applied(base) not in seen:
            trials.append(Trial(row.name, row.change, row.why, row.adopt, row))
    return tuple(trials)


def _alignments(
    base: Conditions, diffs: Iterable[FieldDiff], platform: Platform, levels: Sequence[Level]
) -> list[Trial]:
    out: list[Trial] = []
    seen = [base]
    together = Override()
    for diff in diffs:
        change = aligned(diff, base.engine, platform, levels)
        if change is None or change.applied(base) in seen:
            continue
        seen.append(change.applied(base))
        together = together.joined(change)
        name = f"{diff.name} as recorded ({_shown(diff.left)})"
        out.append(Trial(name, change, diff.why, diff.align))
    if len(out) > 1:
        why = "No single one of them is enough."
        hints = dict.fromkeys(trial.adopt for trial in out if trial.adopt)
        out.append(Trial("all recorded settings together", together, why, "; ".join(hints)))
    return out


def _shown(value: FieldValue) -> str:
    return "unset" if value is None else str(value)


class Result(StrEnum):
    """What one run showed, against the reference and under the policy."""

    EQUAL = "equal"
    DIFFERS = "differs"
    FAILED = "failed"


class Conclusion(StrEnum):
    """How a bisection ended."""

    EQUAL = "equal"
    CAUSE = "cause"
    NO_CAUSE = "no_cause"
    FAILED = "failed"
    NOT_COMPARABLE = "not_comparable"
    INTERRUPTED = "interrupted"


_CODES = {
    Conclusion.EQUAL: 0,
    Conclusion.CAUSE: 1,
    Conclusion.NO_CAUSE: 1,
    Conclusion.FAILED: 2,
    Conclusion.NOT_COMPARABLE: 3,
    Conclusion.INTERRUPTED: 130,
}


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One run.

    Attributes
    ----------
    name, why, adopt
        What was changed, why that can matter, and how to run with it from now on.
    result
        What it showed.
    detail
        Where it differs, or why it failed; "" when equal.
    seconds
        How long it took, process start included.
    comparison
        Reference against this run; None where it failed.
    """

    name: str
    result: Result
    detail: str = ""
    seconds: float = 0.0
    why: str = ""
    adopt: str = ""
    comparison: Comparison | None = None


@dataclass(frozen=True, slots=True)
class BisectReport:
    """One bisected cell.

    Attributes
    ----------
    path, label, policy
        The notebook, the cell, and what counts as equal.
    finding, reason
        How it ended, and one sentence about it.
    repeatable
        Whether two unchanged runs agreed; None where there were not two.
    trials
        The runs in order, the unchanged ones first.
    causes
        The changes that made the difference disappear, the smallest first.
    out_of_reach
        Fields that differ and that no setting can restore here.
    """

    path: str
    label: str
    policy: Policy
    finding: Conclusion
    reason: str
    repeatable: bool | None = None
    trials: tuple[TrialResult, ...] = ()
    causes: tuple[TrialResult, ...] = ()
    out_of_reach: tuple[FieldDiff, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: nothing differs. 1: it differs, cause named or not. 2, 3, 130: not decided."""
        return _CODES[self.finding]


def difference_text(comparison: Comparison) -> str:
    """Return where two sides first differ, in a few words."""
    first = comparison.first
    if first is None:
        if comparison.gap:
            return f"logprobs by up to {comparison.gap:.3g}"
        return "evidence or text" if comparison.pairs else "nothing could be compared"
    number = 1 + next(i for i, pair in enumerate(comparison.pairs) if pair is first)
    at = first.divergence.position + 1 if first.divergence else len(first.reference.token_ids)
    others = sum(1 for pair in comparison.pairs if not pair.tokens_equal)
    count = f" ({others} of {len(comparison.pairs)} differ)" if len(comparison.pairs) > 1 else ""
    return f"generation {number}, token {at} of {len(first.reference.token_ids)}{count}"
