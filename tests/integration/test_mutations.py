"""A thousand single changes, each with its one right verdict; unchanged re-runs raise no alarm.

Every case is a pair of runs on the fake engine, stored, promoted and checked as files are.
The expected verdict is derived here, from what was changed and from the tokens that
came of it, without the comparison or the verdict table of the package.
"""

from __future__ import annotations

import base64
import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.core.fields import FIELDS, Role
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import Generation, Prompt, PromptKind, TokenEvidence
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import KEY, check_cell, read_notebook
from jupyter_detllm.core.promotion import Update, promote, store_once
from jupyter_detllm.core.stamp import Call, Stamp
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.errors import DetLLMError
from tests.builders import cell, notebook, with_actual, with_fields
from tests.fakes import MACHINE, Run

CASES = 1000
RERUNS = 200
WORDS = ("river", "山", "🌊", "a letter", "the old pond", "why?", "Ünïcode", "x = 1")
NUMERICS = [
    row.name for row in FIELDS if row.role is Role.NUMERICS and not row.name.startswith("engine.")
]
INFORMATIONAL = [row.name for row in FIELDS if row.role is Role.INFORMATIONAL]


@dataclass(frozen=True)
class Case:
    """What the re-run differs in, and the verdict that this must give."""

    kind: str
    run: Run
    actual: Stamp
    expected: Verdict
    present_source: str


def random_run(rng: random.Random) -> Run:
    """Return a cell as users write them: one to four prompts, greedy, sampled or beams."""
    prompts = tuple(
        rng.choice(
            [
                Prompt.chat(f"{rng.choice(WORDS)} {rng.randrange(100)}"),
                Prompt.chat(rng.choice(WORDS), "Be brief."),
                Prompt(PromptKind.TEXT, text=f"{rng.choice(WORDS)} {rng.randrange(100)}"),
                Prompt(PromptKind.TOKENS, token_ids=(rng.randrange(1, 256), rng.randrange(256))),
            ]
        )
        for _ in range(rng.randrange(1, 5))
    )
    kind = rng.choice(["greedy", "sampled", "sampled", "beams"])
    tokens = rng.randrange(8, 24)
    sampling, n = SamplingOptions(max_tokens=tokens), 1
    if kind == "sampled":
        temperature, top_p = rng.choice([0.2, 0.7, 1.0]), rng.choice([None, 0.9])
        sampling = SamplingOptions(temperature=temperature, top_p=top_p, max_tokens=tokens)
        n = rng.randrange(1, 4)
    elif kind == "beams":
        sampling, n = SamplingOptions(beam_width=3, max_tokens=tokens), rng.randrange(1, 4)
    name = rng.choice(["", f"cell{rng.randrange(9)}"])
    return Run(
        prompts=prompts,
        sampling=sampling,
        n=n,
        seed=rng.choice([None, None, rng.randrange(1000)]),
        root_seed=rng.randrange(2**40),
        name=name,
        source=f"%%detgen {name}\n" + "\n---\n".join(repr(p) for p in prompts),
        level=rng.choice(list(Level)),
        options={"batch_sensitive": rng.choice([True, False])},
    )


def same_tokens(left: Stamp, right: Stamp) -> bool:
    """Whether equal requests have equal tokens and finish reasons, by prompt and completion."""

    def outcomes(stamp: Stamp) -> list[tuple[str, int, tuple[int, ...], str]]:
        return sorted(
            (
                str(call.requests[g.prompt_index].prompt_tokens),
                g.completion_index,
                g.token_ids,
                g.finish_reason,
            )
            for call in stamp.calls
            for g in call.generations
        )

    return outcomes(left) == outcomes(right)


def same_evidence(left: Stamp, right: Stamp) -> bool:
    def kept(stamp: Stamp) -> list[str]:
        return sorted(
            json.dumps([g.token_ids, g.evidence.to_json() if g.evidence else None])
            for g in stamp.generations
        )

    return kept(left) == kept(right)


def expected_of_rerun(left: Stamp, right: Stamp, *, numerics_differ: bool) -> Verdict:
    """Return the right verdict about two runs of the same requests."""
    if not same_tokens(left, right):
        return Verdict.DRIFT if numerics_differ else Verdict.DIVERGED
    return Verdict.MATCH if same_evidence(left, right) else Verdict.TOKENS_MATCH


def with_generation(
    stamp: Stamp, rng: random.Random, edit: Callable[[Generation], Generation]
) -> Stamp:
    """Return the stamp with one of its generations edited, its digests consistent."""
    calls = list(stamp.calls)
    which = rng.randrange(len(calls))
    generations = list(calls[which].generations)
    index = rng.randrange(len(generations))
    generations[index] = edit(generations[index])
    calls[which] = Call(calls[which].requests, tuple(generations))
    return replace(stamp, calls=tuple(calls))


def a_token(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    def edit(generation: Generation) -> Generation:
        ids = list(generation.token_ids)
        position = rng.randrange(len(ids))
        ids[position] = rng.choice([t for t in range(300) if t != ids[position]])
        return replace(generation, token_ids=tuple(ids))

    changed = with_generation(stamp, rng, edit)
    return Case("token", run, changed, Verdict.DIVERGED, run.source)


def a_missing_token(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    def edit(generation: Generation) -> Generation:
        return replace(
            generation,
            token_ids=generation.token_ids[:-1],
            offsets=generation.offsets[:-1],
            evidence=None,
        )

    changed = with_generation(stamp, rng, edit)
    return Case("missing token", run, changed, Verdict.DIVERGED, run.source)


def a_token_under_another_field(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    changed = a_token(run, stamp, rng).actual
    moved = with_field(changed, rng.choice(NUMERICS), f"other {rng.random()}")
    return Case("token and field", run, moved, Verdict.DRIFT, run.source)


def a_finish_reason(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    def edit(generation: Generation) -> Generation:
        other = "length" if generation.finish_reason == "stop" else "stop"
        return replace(generation, finish_reason=other)

    changed = with_generation(stamp, rng, edit)
    return Case("finish reason", run, changed, Verdict.DIVERGED, run.source)


def a_text(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    changed = with_generation(stamp, rng, lambda g: replace(g, text=g.text + "."))
    return Case("text", run, changed, Verdict.TOKENS_MATCH, run.source)


def flipped_bit(evidence: TokenEvidence, rng: random.Random) -> TokenEvidence | None:
    """Return the evidence with one stored bit flipped; None for a signalling NaN."""
    stored: Any = evidence.to_json()
    key = rng.choice(["chosen", "runner_up", "runner_up_ids"])
    raw = bytearray(base64.b64decode(stored[key]))
    bit = rng.randrange(8 * len(raw))
    raw[bit // 8] ^= 1 << bit % 8
    stored[key] = base64.b64encode(raw).decode()
    return TokenEvidence.from_json(stored, evidence.tokens)


def an_evidence_bit(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    def edit(generation: Generation) -> Generation:
        assert generation.evidence is not None
        return replace(generation, evidence=flipped_bit(generation.evidence, rng))

    changed = with_generation(stamp, rng, edit)
    return Case("evidence bit", run, changed, Verdict.TOKENS_MATCH, run.source)


def absent_evidence(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    changed = with_generation(stamp, rng, lambda g: replace(g, evidence=None))
    return Case("no evidence", run, changed, Verdict.TOKENS_MATCH, run.source)


def with_field(stamp: Stamp, name: str, value: str) -> Stamp:
    assert stamp.fingerprint is not None
    changed = with_fields(stamp.fingerprint, {name: value})
    return replace(stamp, fingerprint=changed, fingerprint_digest=changed.digest)


def a_field_without_effect(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    name = rng.choice(NUMERICS + INFORMATIONAL)
    changed = with_field(stamp, name, f"other {rng.random()}")
    return Case("field without effect", run, changed, Verdict.MATCH, run.source)


def a_field(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    name = rng.choice(NUMERICS)
    options = {**run.options, "drift_field": f"{name}=other {rng.random()}"}
    changed = replace(run, options=options).stamp()
    expected = expected_of_rerun(stamp, changed, numerics_differ=True)
    return Case("field", run, changed, expected, run.source)


def an_engine_setting(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    name, value = rng.choice(
        [
            ("dtype", "float32"),
            ("attention_backend", "OTHER"),
            ("tensor_parallel_size", 2),
            ("max_num_seqs", 8),
            ("enforce_eager", False),
            ("enable_prefix_caching", True),
        ]
    )
    changed = replace(run, options={**run.options, name: value}).stamp()
    expected = expected_of_rerun(stamp, changed, numerics_differ=True)
    return Case("engine setting", run, changed, expected, run.source)


def another_machine(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    options = {
        **run.options,
        "drift_salt": str(rng.random()),
        "drift_position": rng.randrange(30),
        "drift_evidence": rng.random() < 0.3,
    }
    changed = replace(run, options=options).stamp()
    expected = expected_of_rerun(stamp, changed, numerics_differ=False)
    return Case("another machine", run, changed, expected, run.source)


def a_prompt(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    prompts = list(run.prompts)
    prompts[rng.randrange(len(prompts))] = Prompt.chat(f"something else {rng.random()}")
    # Through %%include or --fill the source can be the same and the request another.
    changed = replace(run, prompts=tuple(prompts), options={}).stamp()
    return Case("prompt", run, changed, Verdict.STALE, run.source)


def a_parameter(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    change = rng.choice(
        [
            {"max_tokens": 25},
            {"repetition_penalty": 1.5},
            {"presence_penalty": 0.5},
            {"stop": ("zzzz",)},
            {"min_tokens": 3},
            {"ignore_eos": True},
        ]
    )
    changed = replace(run, sampling=replace(run.sampling, **change)).stamp()  # type: ignore[arg-type]
    return Case("parameter", run, changed, Verdict.STALE, run.source)


def a_seed(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    seed = None if run.seed is None else run.seed + 5000
    changed = replace(run, root_seed=run.root_seed + 1, seed=seed).stamp()
    return Case("seed", run, changed, Verdict.STALE, run.source)


def another_name(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    # The name is part of a derived seed; an explicit one stays.
    changed = replace(run, name=run.name + "x").stamp()
    expected = Verdict.STALE
    if run.seed is not None:
        expected = expected_of_rerun(stamp, changed, numerics_differ=False)
    return Case("name", run, changed, expected, run.source)


def an_edited_source(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    return Case("source edited", run, stamp, Verdict.STALE, run.source + " indeed")


def a_source_and_its_run(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    source = run.source + " indeed"
    changed = replace(run, source=source).stamp()
    return Case("source edited and run", run, changed, Verdict.STALE, source)


def a_blank_line(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    return Case("white space", run, stamp, Verdict.MATCH, "\n" + run.source + "\n \n")


def a_blank_after_the_prompt(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    return Case("a blank in the prompt", run, stamp, Verdict.STALE, run.source + " ")


def a_model(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    part = rng.choice(["weights", "tokenizer", "chat_template"])
    if rng.random() < 0.5:
        digests = {part: digest_of(rng.random())}
        changed = replace(stamp, model=replace(stamp.model, **digests))
    else:
        changed = replace(run, options={**run.options, part: str(rng.random())}).stamp()
    return Case("model", run, changed, Verdict.NOT_COMPARABLE, run.source)


def a_model_name(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    changed = replace(stamp, model=replace(stamp.model, name="elsewhere"))
    return Case("model name", run, changed, Verdict.MATCH, run.source)


def a_level(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    level = rng.choice([level for level in Level if level is not run.level])
    changed = replace(run, level=level).stamp()
    return Case("level", run, changed, Verdict.NOT_COMPARABLE, run.source)


def another_batch_order(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    run = replace(run, prompts=distinct(run.prompts), options={"batch_sensitive": True})
    order = list(range(len(run.prompts)))
    rng.shuffle(order)
    changed = replace(run, calls=[order]).stamp()
    expected = expected_of_rerun(run.stamp(), changed, numerics_differ=order != sorted(order))
    return Case("batch order", run, changed, expected, run.source)


def one_by_one(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    run = replace(run, prompts=distinct(run.prompts), options={"batch_sensitive": True})
    changed = replace(run, calls=[[i] for i in range(len(run.prompts))]).stamp()
    expected = expected_of_rerun(run.stamp(), changed, numerics_differ=len(run.prompts) > 1)
    return Case("one by one", run, changed, expected, run.source)


def distinct(prompts: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
    """Return two prompts at least, none equal: order then says which is which."""
    more = (Prompt.chat("first of all"), Prompt.chat("second of all"))
    return tuple(dict.fromkeys((*more, *prompts)))


def one_prompt_less(run: Run, stamp: Stamp, rng: random.Random) -> Case:
    run = replace(run, prompts=distinct(run.prompts), options={})
    changed = replace(run, calls=[range(len(run.prompts) - 1)]).stamp()
    return Case("prompt left out", run, changed, Verdict.STALE, run.source)


MUTATIONS = (
    a_token,
    a_missing_token,
    a_token_under_another_field,
    a_finish_reason,
    a_text,
    an_evidence_bit,
    absent_evidence,
    a_field_without_effect,
    a_field,
    an_engine_setting,
    another_machine,
    a_prompt,
    a_parameter,
    a_seed,
    another_name,
    an_edited_source,
    a_source_and_its_run,
    a_blank_line,
    a_blank_after_the_prompt,
    a_model,
    a_model_name,
    a_level,
    another_batch_order,
    one_by_one,
    one_prompt_less,
)


def checked(run: Run, actual: Stamp, present_source: str) -> tuple[Verdict, tuple[str, ...]]:
    """Promote the run, put the actual stamp in its output, store, load, and check the file."""
    book, _ = promote(notebook(cell("1"), run.cell()), Update.NEW)
    book = with_actual(book, 2, actual)
    book["cells"][1] = {**book["cells"][1], "source": present_source}
    loaded = json.loads(json.dumps(book))
    (found,) = read_notebook(loaded).cells
    outcome = check_cell(found)
    return outcome.verdict, outcome.reasons


def run_cases(count: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    wrong = []
    for number in range(count):
        run = random_run(rng)
        case = MUTATIONS[number % len(MUTATIONS)](run, run.stamp(), rng)
        verdict, reasons = checked(case.run, case.actual, case.present_source)
        seen[f"{case.kind}: {verdict}"] += 1
        if verdict is not case.expected:
            wrong.append((number, case.kind, str(case.expected), str(verdict), reasons))
    assert wrong == []
    return seen


def test_a_thousand_single_changes_get_the_right_verdict() -> None:
    seen = run_cases(CASES, seed=1)
    assert sum(seen.values()) == CASES
    verdicts = {key.split(": ")[1] for key in seen}
    assert verdicts == {*("match", "tokens_match", "drift", "diverged", "stale", "not_comparable")}
    # Both outcomes of what depends on the level and the batch were met.
    for kind in ("batch order", "one by one"):
        assert seen[f"{kind}: drift"] > 5
        assert seen[f"{kind}: match"] > 5


@pytest.mark.slow
def test_ten_thousand_single_changes_get_the_right_verdict() -> None:
    assert sum(run_cases(10 * CASES, seed=2).values()) == 10 * CASES


def run_unchanged(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        run = random_run(rng)
        assert checked(run, run.stamp(), run.source)[0] is Verdict.MATCH


def test_two_hundred_unchanged_reruns_raise_no_alarm() -> None:
    run_unchanged(RERUNS, seed=3)


# A fuzzer over stored notebooks.

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 10**60, -(10**400), 0.5, 1e308),
    *("", "x", "\ud800", "\u0000", "NaN", "9" * 400, "__proto__", "sha256:" + "0" * 64),
    *([], {}, [[]], [None], {"__proto__": {"polluted": True}}, {"constructor": None}, ["a"] * 9),
)


def nested(depth: int) -> Any:
    value: Any = {}
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def containers(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) inside a value."""
    out: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        box = stack.pop()
        items = box.items() if isinstance(box, dict) else enumerate(box)
        for key, item in items:
            out.append((box, key))
            if isinstance(item, (dict, list)):
                stack.append(item)
    return out


def copied(value: Any) -> Any:
    """Return a copy; of what is nested too deep to be copied, nothing."""
    try:
        return copy.deepcopy(value)
    except RecursionError:
        return None


def damage_value(book: Any, rng: random.Random) -> None:
    """Damage one value; half the time within what is ours, if it is still there."""
    places = containers(book)
    inside = [box[key] for box, key in places if key in (KEY, "detllm_run")]
    boxes = [box for box in inside if isinstance(box, dict) and box]
    if boxes and rng.random() < 0.7:
        places = containers(rng.choice(boxes))
    if not places:
        return
    box, key = rng.choice(places)
    what = rng.randrange(6)
    if what == 0:
        del box[key]
    elif what == 1:
        box[key] = nested(rng.choice([3, 70, 400]))
    elif what == 2 and isinstance(box, dict):
        box[rng.choice(["__proto__", "added", "", "\udfff", "schema"])] = copied(rng.choice(JUNK))
    elif what == 3:
        other_box, other_key = rng.choice(places)
        box[key] = copied(other_box[other_key])
    elif what == 4 and isinstance(box[key], list) and box[key]:
        rng.shuffle(box[key])
    else:
        box[key] = copied(rng.choice(JUNK))


def damage_text(text: str, rng: random.Random) -> str:
    data = bytearray(text.encode())
    for _ in range(rng.randrange(1, 4)):
        what, at = rng.randrange(4), rng.randrange(len(data))
        if what == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del data[at : at + rng.randrange(1, 9)]
        elif what == 2:
            data[at:at] = rng.choice([b"\x00", b"{", b"]", b'"', b"\\ud800", b"1e999", b"9" * 30])
        else:
            data[at:at] = data[rng.randrange(len(data)) :][: rng.randrange(1, 40)]
    return data.decode("utf-8", "surrogateescape")


def verified_content(book: Any) -> list[Any]:
    """Return what a match claims about a cell, read without the package's readers."""

    def side(stamp: Any) -> Any:
        calls = [
            [
                [g["token_ids"], g["finish_reason"], g["text"], g["offsets"], g.get("evidence")]
                for g in call["generations"]
            ]
            for call in stamp["calls"]
        ]
        requests = [call["requests"] for call in stamp["calls"]]
        digests = [stamp["model"].get(k) for k in ("weights", "tokenizer", "chat_template")]
        return [calls, requests, digests, stamp["level"], stamp["source"]]

    code = book["cells"][0]
    actual = [o["metadata"][KEY] for o in code["outputs"] if KEY in o.get("metadata", {})][-1]
    reference = code["metadata"][KEY]["reference"]
    # An output that equals the reference of its cell only names the digest of it.
    return [side(reference), side(reference if "calls" not in actual else actual)]


def fuzz(count: int, seed: int) -> Counter[str]:
    """Damage stored notebooks; every outcome is a verdict or one of our one-line errors."""
    rng = random.Random(seed)
    run = Run(prompts=(Prompt.chat("a"), Prompt.chat("b")), sampling=SamplingOptions(max_tokens=6))
    book, _ = promote(notebook(run.cell()), Update.NEW)
    book = with_actual(book, 1, run.stamp())
    forms = [json.dumps(book), json.dumps(store_once(book))]
    assert len(forms[1]) < len(forms[0])
    sound = verified_content(book)
    seen: Counter[str] = Counter()
    for number in range(count):
        text = forms[number % 2]
        damaged: Any = json.loads(text)
        if number % 3:
            for _ in range(rng.choice([1, 1, 1, 2, 5])):
                damage_value(damaged, rng)
        else:
            try:
                damaged = json.loads(damage_text(text, rng))
            except (ValueError, RecursionError):
                seen["no JSON"] += 1
                continue
        try:
            cells = read_notebook(damaged).cells
            outcomes = [check_cell(found) for found in cells]
            promote(damaged, rng.choice(list(Update)))
        except DetLLMError as error:
            seen["refused"] += 1
            message = str(error)
            assert "\n" not in message
            assert len(message) < 400
            continue
        for outcome in outcomes:
            seen[outcome.verdict] += 1
            assert all(len(reason) < 600 for reason in outcome.reasons)
            if outcome.verdict is Verdict.MATCH:
                assert verified_content(damaged) == sound
    return seen


def test_damaged_notebooks_never_raise_and_never_match_by_mistake() -> None:
    seen = fuzz(2000, seed=4)
    assert seen["error"] > 300
    assert seen["match"] > 50  # what was hit is not part of the verified content
    assert seen["refused"] > 10


@pytest.mark.slow
def test_damaged_notebooks_at_length() -> None:
    seed = random.SystemRandom().randrange(10**9)
    print(f"seed {seed}")  # shown if it fails
    assert fuzz(30_000, seed)["error"] > 1000


def test_the_machine_of_the_tests_has_every_kind_of_field() -> None:
    roles = {Fingerprint.build(MACHINE).role_of(name) for name in MACHINE}
    assert roles == {Role.NUMERICS, Role.INFORMATIONAL}
