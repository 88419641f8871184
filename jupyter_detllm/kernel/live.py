"""Compares a fresh generation with the reference that the front end sent with its cell.

JupyterLab and Notebook 7 send a cell's own metadata with the execute request. It is
untrusted, and it is all that the kernel sees of the notebook.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jupyter_detllm.core.canonical import Json, encode_float
from jupyter_detllm.core.compare import Comparison, Divergence, PairComparison
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import Generation
from jupyter_detllm.core.notebook import CELL_SCHEMA, KEY, schema_problems
from jupyter_detllm.core.stamp import Stamp, read_stamp
from jupyter_detllm.core.verdict import Facts, Outcome, Verdict, decide, facts_of
from jupyter_detllm.errors import StampError
from jupyter_detllm.render.visible import clip, quoted, token_text, visible

__all__ = ["RECORDED", "LiveResult", "compare_live", "verdict_line"]

_WIDE, _NARROW, _TOKEN = 160, 60, 32
_REASONS, _FIELDS = 4, 6
_UNKNOWN = "fingerprint"
_FIELDS_UNKNOWN = "fingerprint differs (fields unknown here)"


@dataclass(frozen=True, slots=True)
class LiveResult:
    """What comparing a fresh generation with its reference found.

    Attributes
    ----------
    outcome
        Verdict, reasons and the facts behind them, as a check of a file has them.
    reference
        Digest of the reference; "" where there is none, or none that can be read.
    fingerprint
        ``equal``, ``differs``, ``unknown`` (another digest, whose fields are not known
        here), or "" where nothing was compared.
    """

    outcome: Outcome
    reference: str = ""
    fingerprint: str = ""

    @property
    def verdict(self) -> Verdict:
        """The verdict."""
        return self.outcome.verdict

    @property
    def first(self) -> PairComparison | None:
        """The first generation whose tokens or finish reason differ."""
        comparison = self.outcome.facts.comparison
        return comparison.first if comparison is not None else None

    def to_run(self) -> dict[str, Json]:
        """Return the data stored next to the stamp, limited in size."""
        out: dict[str, Json] = {"verdict": self.verdict.value}
        if self.verdict is not Verdict.UNSTAMPED:
            out["comparison"] = self._comparison()
        return out

    def _comparison(self) -> dict[str, Json]:
        facts = self.outcome.facts
        reasons: list[Json] = [clip(visible(r), _WIDE) for r in self._reasons()[:_REASONS]]
        out: dict[str, Json] = {"verdict": self.verdict.value, "reasons": reasons}
        if self.reference:
            out |= {"reference": self.reference, "fingerprint": self.fingerprint}
        if facts.fields:
            out["fields"] = [
                {"name": _shown(d.name), "left": _shown(d.left), "right": _shown(d.right)}
                for d in facts.fields[:_FIELDS]
            ]
        if facts.comparison is not None and self.verdict not in (Verdict.STALE, Verdict.RECORDED):
            out |= _numbers(facts.comparison)
        return out

    def _reasons(self) -> list[str]:
        """Return the reasons; what is not known here is not called not in the notebook."""
        unknown = self.fingerprint == "unknown"
        return [
            _FIELDS_UNKNOWN if unknown and reason.startswith(f"{_UNKNOWN}:") else reason
            for reason in self.outcome.reasons
        ]

    def line(self) -> str:
        """Return the result on one line: verdict, cause, first divergence, margin."""
        if self.verdict is Verdict.UNSTAMPED:
            return "new: no reference yet"
        if self.verdict in (Verdict.DRIFT, Verdict.DIVERGED) and self.first is not None:
            where = _place(self.outcome.facts.comparison, self.first)
            return "; ".join([f"{self.verdict} {where}", *self._cause()])
        if self.verdict is Verdict.MATCH or self.outcome.facts.same_run:
            return self.verdict.value
        return f"{self.verdict}: {clip(visible(self._reasons()[0]), _WIDE)}"

    def _cause(self) -> list[str]:
        if self.verdict is not Verdict.DRIFT:
            return [clip(why, _WIDE) for why in self.outcome.facts.possible_causes]
        reasons = self._reasons()
        more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        return [clip(visible(reasons[0]), 2 * _NARROW) + more]


RECORDED = LiveResult(decide(Facts(same_run=True)))
"""The generation of this kernel that has just been made the reference."""


def verdict_line(result: LiveResult | None) -> str:
    """Return a result on one line, where there is one."""
    return "not compared" if result is None else result.line()


def _shown(value: object) -> str | None:
    return None if value is None else clip(visible(str(value)), _NARROW)


def _numbers(comparison: Comparison) -> dict[str, Json]:
    out: dict[str, Json] = {
        "generations": len(comparison.pairs),
        "differing": sum(1 for pair in comparison.pairs if not pair.tokens_equal),
    }
    pair = comparison.first
    gap = comparison.gap if pair is None else pair.gap
    if gap is not None:
        out["gap"] = encode_float(gap)
    if pair is None:
        return out
    out["generation"] = _number(comparison, pair)
    divergence = pair.divergence
    if divergence is None:
        return out
    at = divergence.position
    out |= {"position": at, "recorded": _side(pair.reference, at), "now": _side(pair.actual, at)}
    for key, margin in (("margin", divergence.margin), ("margin_now", divergence.actual_margin)):
        if margin is not None:
            out[key] = encode_float(margin)
    if divergence.margin_class is not None and pair.request.sampling.greedy:
        out["margin_class"] = divergence.margin_class.value
    return out


def _number(comparison: Comparison, pair: PairComparison) -> int:
    return next(i for i, known in enumerate(comparison.pairs, start=1) if known is pair)


def _side(generation: Generation, position: int) -> dict[str, Json]:
    if position >= len(generation.token_ids):
        return {"token": None, "text": clip(visible(generation.finish_reason), _TOKEN)}
    text = clip(token_text(generation.token_bytes(position)), _TOKEN)
    return {"token": generation.token_ids[position], "text": text}


def _place(comparison: Comparison | None, pair: PairComparison) -> str:
    many = comparison is not None and len(comparison.pairs) > 1
    of = f" of generation {_number(comparison, pair)}" if comparison is not None and many else ""
    divergence = pair.divergence
    if divergence is None:
        return f"in the finish reason{of}"
    sides = [_quoted(generation, divergence) for generation in (pair.reference, pair.actual)]
    text = f"at token {divergence.position + 1}{of}: {' -> '.join(sides)}"
    return f"{text}, {_margin(pair, divergence)}"


def _quoted(generation: Generation, divergence: Divergence) -> str:
    if divergence.position >= len(generation.token_ids):
        return "(end)"
    return quoted(clip(token_text(generation.token_bytes(divergence.position)), _TOKEN))


def _margin(pair: PairComparison, divergence: Divergence) -> str:
    if divergence.margin is None:
        return "margin not recorded"
    kind = f" ({divergence.margin_class})" if pair.request.sampling.greedy else ""
    return f"margin {divergence.margin:.4g}{kind}"


def compare_live(
    stamp: Stamp,
    stored: Mapping[str, Json],
    source: str,
    metadata: Mapping[str, Any],
    known: Mapping[str, Fingerprint],
    preemptions: int | None = None,
) -> LiveResult:
    """Compare a fresh stamp with the reference in a cell's metadata.

    Parameters
    ----------
    stamp, stored
        The stamp, and its form in the output.
    source
        The cell's source.
    metadata
        That of the cell, as the front end sent it (`sent_metadata`).
    known
        Fingerprints this kernel has stamped under, by digest.
    preemptions
        How often a request of this run was preempted.
    """
    value = metadata.get(KEY)
    meta = value if isinstance(value, dict) else {}
    problems = schema_problems(meta, CELL_SCHEMA, "cell")
    recorded: Any = meta.get("reference")
    reference = None
    try:
        if recorded is not None:
            reference = read_stamp(recorded, known, "the cell's reference")
    except StampError as error:
        problems.append(str(error))
    except RecursionError:
        problems.append("the cell's reference cannot be read")
    if problems:
        return LiveResult(decide(Facts(problems=tuple(problems))))
    if reference is None:
        return LiveResult(decide(Facts(has_reference=False)))
    # Where nothing states which run was recorded, an equal stamp may be that run's.
    unnamed = not isinstance(meta.get("recorded_run"), str)
    same_run = unnamed and recorded["digest"] == stored["digest"]
    facts = facts_of(
        reference,
        stamp,
        present_source=source,
        same_run=same_run,
        preemptions=(None, preemptions),
    )
    outcome = decide(facts)
    return LiveResult(outcome, str(recorded["digest"]), _fingerprint_state(reference, stamp))


def _fingerprint_state(reference: Stamp, actual: Stamp) -> str:
    if reference.fingerprint_digest == actual.fingerprint_digest:
        return "equal"
    return "unknown" if reference.fingerprint is None else "differs"
