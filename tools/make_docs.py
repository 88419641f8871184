"""Reference pages generated from the tables in the code.

``python -m tools.make_docs`` writes the pages of `PAGES` in ``docs/``; with ``--check`` it
exits 1 when one of them is not current.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from jupyter_detllm.controls.environ import ENV_CONTROLS, NO_EFFECT, RECORDED, EnvControl
from jupyter_detllm.core.fields import FIELDS, Group
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.verdict import RULES, PolicyKind, Verdict
from jupyter_detllm.doctor.table import KINDS
from jupyter_detllm.verify.report import ACCEPTABLE
from tools.markdown import NOTE, table
from tools.reference_pages import commands, configuration, magics
from tools.schema_page import schemas

__all__ = ["PAGES", "main"]

DOCS = Path(__file__).resolve().parents[1] / "docs"


def _set_for(control: EnvControl) -> str:
    levels = [level.value for level in Level if level in control.levels]
    wanted = ", ".join(levels) if len(levels) < len(Level) else "every level"
    if not levels:
        wanted = ", ".join(f"`--{modifier.value}`" for modifier in sorted(control.modifiers))
    if control.parallel:
        wanted += "; several ranks only"
    return wanted if control.platform is None else f"{wanted}; {control.platform.value} only"


def controls() -> str:
    """Return the page of determinism controls."""
    rows = [
        (
            f"`{control.name}`",
            "the thread count in use" if control.value is None else f"`{control.value}`",
            _set_for(control),
            control.precedes.value,
            f"{control.why} {control.evidence}".strip(),
        )
        for control in ENV_CONTROLS
    ]
    head = ("variable", "value", "set for", "before", "why")
    parts = [
        "# Determinism controls\n",
        NOTE,
        "Set by `%detllm`, unless you have set them yourself: then your value stays and is "
        "recorded as yours. What comes too late is not set, named, and recorded as late.\n",
        table(head, rows),
        "## Recorded, never set\n",
        table(("variable", "why"), [(f"`{r.name}`", r.why) for r in RECORDED]),
        "## In circulation, without effect\n",
        "Named by `%detllm status` when you have set one; never set.\n",
        table(
            ("variable", "why", "instead"), [(f"`{n.name}`", n.why, n.instead) for n in NO_EFFECT]
        ),
    ]
    return "\n".join(parts)


def fields() -> str:
    """Return the page of fingerprint fields."""
    parts = [
        "# Fingerprint fields\n",
        NOTE,
        "`identity`: another value is another model, nothing is compared. `numerics`: part of the "
        "digest, named as a cause. `informational`: recorded, never a cause. The weight orders "
        "differences: the likeliest to change results comes first.\n",
    ]
    for group in Group:
        rows = [
            (
                f"`{row.name}`",
                f"{row.role.value}, {row.weight}",
                f"{row.meaning}. {row.why}",
                row.align,
            )
            for row in FIELDS
            if row.group is group
        ]
        head = ("field", "role, weight", "meaning, and why it matters", "how to align")
        parts += [f"## {group.value}\n", table(head, rows)]
    return "\n".join(parts)


MEANINGS: Mapping[Verdict, str] = {
    Verdict.MATCH: "tokens, finish reasons and evidence are bitwise equal",
    Verdict.TOKENS_MATCH: "tokens and finish reasons are equal; logprobs differ, or are absent "
    "on a side",
    Verdict.DRIFT: "tokens differ, and so does the environment: the fields are named, likeliest "
    "first",
    Verdict.DIVERGED: "tokens differ under the same fingerprint",
    Verdict.FOLLOWS: "the request differs only because it contains a text of an earlier cell, "
    "which differs; it counts as that cell does",
    Verdict.STALE: "the cell's source or the request is not the stamped one",
    Verdict.RECORDED: (
        "the output is the very run that was promoted, or comes from the result cache: nothing "
        "was verified"
    ),
    Verdict.STRIPPED: (
        "there is a reference and the stamp is gone (cleared, stripped), or the cell that had one "
        "was deleted, changed its type or lost its reference"
    ),
    Verdict.UNSTAMPED: "there is neither reference nor stamp, or no reference yet",
    Verdict.NOT_COMPARABLE: "another model, another level, or a missing capability",
    Verdict.ERROR: "a stamp is malformed or disagrees with its own digests, or the cell did not "
    "run",
}


POLICIES: Mapping[PolicyKind, str] = {
    PolicyKind.TOKENS: "`match` and `tokens_match`; the default",
    PolicyKind.BITWISE: "`match`",
    PolicyKind.WITHIN: "`match`, and `tokens_match` where logprobs are on both sides and differ by "
    "at most ATOL nats",
    PolicyKind.PREFIX: "equal first N tokens of every generation; counted as `relaxed` where more "
    "differs",
}
SPELLED: Mapping[PolicyKind, str] = {
    PolicyKind.TOKENS: "tokens",
    PolicyKind.BITWISE: "bitwise",
    PolicyKind.WITHIN: "within(ATOL)",
    PolicyKind.PREFIX: "prefix(N)",
}
EXIT_CODES = (
    ("0", "every stamped cell was compared and accepted"),
    ("1", "drift, divergence, or a policy that was not met"),
    ("2", "usage, an unreadable file, a failed execution, a broken stamp"),
    ("3", "nothing failed, but something was not verified"),
)


def verdicts() -> str:
    """Return the page of verdicts: what each means, and the rules that give them."""
    meanings = [(f"`{verdict}`", MEANINGS[verdict]) for verdict in Verdict]
    rows = [(str(i), rule.name, f"`{rule.verdict}`") for i, rule in enumerate(RULES, start=1)]
    return "\n".join(
        [
            "# Verdicts\n",
            NOTE,
            "One for each stamped cell. Accepted without further options are `match` and "
            "`tokens_match`; `--policy` and `--accept` change that.\n",
            table(("verdict", "meaning"), meanings),
            "## Rules\n",
            "The first rule that applies to a cell gives its verdict.\n",
            table(("order", "rule", "verdict"), rows),
            "## Policies\n",
            "A policy says which verdicts are accepted. `--policy` of a command wins, then the "
            "one of `%%detgen --policy`, then a cell's tag `detllm-policy-POLICY`, then "
            "`tokens`.\n",
            table(
                ("policy", "accepts"), [(f"`{SPELLED[kind]}`", POLICIES[kind]) for kind in SPELLED]
            ),
            f"Not verified are {', '.join(f'`{name}`' for name in sorted(ACCEPTABLE))}: each can "
            "be let pass by name, with `--accept`, and none counts as verified.\n",
            "## Exit codes\n",
            "With several reasons, 2 comes before 1, and 1 before 3.\n",
            table(("exit code", "meaning"), EXIT_CODES),
        ]
    )


def findings() -> str:
    """Return the page of what a doctor looks for."""
    rows = [(f"`{kind.name}`", kind.title, kind.needs.text or "always checked") for kind in KINDS]
    return "\n".join(
        [
            "# Kinds of finding\n",
            NOTE,
            "What `jupyter detllm doctor` and `%detllm doctor` look for "
            "([how to use it](../howto/doctor.md)). If there is nothing for a kind to check, "
            "the report says so.\n",
            table(("kind", "looks for", "in"), rows),
        ]
    )


PAGES = {
    "reference/commands.md": commands,
    "reference/configuration.md": configuration,
    "reference/controls.md": controls,
    "reference/fields.md": fields,
    "reference/findings.md": findings,
    "reference/magics.md": magics,
    "reference/schemas.md": schemas,
    "reference/verdicts.md": verdicts,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or check that they are current."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(argv).check
    stale = []
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    if stale:
        print(f"{'not current' if check else 'written'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
