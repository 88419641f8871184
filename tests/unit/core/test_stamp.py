from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from jupyter_detllm.core import stamp as stamps
from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import MAX_EVIDENCE_TOKENS, Prompt, PromptKind
from jupyter_detllm.core.levels import Level, Reach, fallback_level
from jupyter_detllm.core.stamp import (
    STAMP_SCHEMA,
    USUAL_PARAMETERS,
    Call,
    Stamp,
    StoredForm,
    assemble_stamp,
    content_digest,
    normalise_source,
    read_stamp,
    reference_json,
    source_digest,
)
from jupyter_detllm.core.stamp import Run as EngineRun
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.errors import CanonicalError, StampError
from tests.builders import make_stamp, with_fields
from tests.fakes import Run

Path = tuple[str | int, ...]

FULL = Run(
    prompts=(
        Prompt.chat("Hello", "Be brief."),
        Prompt(PromptKind.TEXT, text="Once upon"),
        Prompt(PromptKind.TOKENS, token_ids=(1, 2, 3)),
    ),
    sampling=SamplingOptions(temperature=0.7, max_tokens=4, stop=("zzz",)),
    n=2,
    name="story",
)


def resealed(data: dict[str, Any]) -> dict[str, Any]:
    """Return the stored stamp with its own digest recomputed."""
    return {**data, "digest": str(content_digest(data))}


def places(value: object, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every value inside `value`; of a list, its first and last items."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1} if value else ()):
            yield from places(value[index], (*path, index))


def edited(data: Any, path: Path, edit: Callable[[Any, Any], None]) -> dict[str, Any]:
    """Return a copy on which `edit(container, key)` was called for the value at `path`."""
    out: dict[str, Any] = copy.deepcopy(data)
    container: Any = out
    for key in path[:-1]:
        container = container[key]
    edit(container, path[-1])
    return out


@pytest.fixture(scope="module", params=StoredForm)
def stored(request: pytest.FixtureRequest) -> dict[str, Any]:
    stamp = FULL.stamp()
    return (stamp.as_first() if request.param is StoredForm.FIRST else stamp).to_json()


def test_round_trip_through_json(stored: dict[str, Any]) -> None:
    stamp = FULL.stamp()
    back = read_stamp(json.loads(json.dumps(stored)))
    assert back.digest == (stamp if back.form is stamp.form else stamp.as_first()).digest
    assert back.calls == stamp.calls
    assert back.requests == stamp.requests
    assert [g.text for g in back.generations] == [g.text for g in stamp.generations]
    assert back.to_json() == stored


def test_a_browser_writes_the_same_numbers(stored: dict[str, Any]) -> None:
    def numbers(value: object) -> Iterator[object]:
        if isinstance(value, dict):
            for item in value.values():
                yield from numbers(item)
        elif isinstance(value, list):
            for item in value:
                yield from numbers(item)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield value

    assert all(isinstance(n, int) and abs(n) < 2**53 for n in numbers(stored))


def test_nothing_volatile_is_in_a_stamp() -> None:
    assert FULL.stamp().to_json() == FULL.stamp().to_json()


def test_a_reference_is_the_stamp_without_its_fingerprint(stored: dict[str, Any]) -> None:
    reference = reference_json(stored)
    assert set(stored) - set(reference) == {"fingerprint"}
    stamp = read_stamp(stored)
    assert stamp.fingerprint is not None
    alone = read_stamp(reference)
    assert alone.fingerprint is None
    assert alone.digest == stamp.digest
    found = read_stamp(reference, {str(stamp.fingerprint_digest): stamp.fingerprint})
    assert found == stamp


def test_identity_fields_stand_in_the_model_not_in_the_fingerprint() -> None:
    stamp = FULL.stamp()
    assert stamp.fingerprint is not None
    with_identity = with_fields(stamp.fingerprint, stamp.model.fields())
    stored = replace(stamp, fingerprint=with_identity).to_json()
    assert stored == stamp.to_json()
    kept: Any = stored["fingerprint"]
    assert set(kept) == {"schema", "numerics", "informational"}
    assert list(kept["informational"]) == ["software.packages"]
    assert stamp.model.fields()["model.weights"] == str(stamp.model.weights)
    assert replace(stamp.model, weights=None).fields()["model.weights"] is None


def test_without_prompts_only_digests_are_kept() -> None:
    stamp = FULL.stamp()
    data = stamp.to_json(store_prompt=False)
    shown = json.dumps(data)
    for secret in ("Hello", "Be brief", "Once upon", "prompt_token_ids", "messages"):
        assert secret not in shown
    back = read_stamp(data)
    assert [request.prompt for request in back.requests] == [None, None, None]
    assert [r.digest for r in back.requests] == [r.digest for r in stamp.requests]
    assert str(back.digest) == data["digest"]


def test_long_evidence_is_cut_when_stored() -> None:
    run = Run(
        sampling=SamplingOptions(max_tokens=4500, ignore_eos=True), options={"max_model_len": 8192}
    )
    stamp = run.stamp()
    evidence = read_stamp(stamp.to_json()).generations[0].evidence
    assert evidence is not None
    assert evidence.positions is not None
    assert (evidence.tokens, len(evidence.positions)) == (4500, 4096)


def test_unknown_keys_are_tolerated_and_covered_by_the_digest(stored: dict[str, Any]) -> None:
    data = copy.deepcopy(stored)
    data["added_later"] = {"x": 1}
    data["calls"][0]["requests"][0]["added_later"] = [1]
    with pytest.raises(StampError, match="disagrees with its own digest"):
        read_stamp(data)
    assert read_stamp(resealed(data)).calls == read_stamp(stored).calls


OPTIONAL = {
    *("fingerprint", "evidence", "messages", "prompt", "prompt_token_ids"),
    *("weights", "tokenizer", "chat_template", *USUAL_PARAMETERS),
}


def is_optional(path: Path, form: object) -> bool:
    # `prompt` is a request's text and a generation's index: only the text may be missing.
    if path[-1] in USUAL_PARAMETERS:
        return form != StoredForm.FIRST
    return path[-1] in OPTIONAL and not (path[-1] == "prompt" and "generations" in path)


def value_at(data: Any, path: Path) -> object:
    for key in path:
        data = data[key]
    return data


def test_every_removed_key_is_refused_or_optional(stored: dict[str, Any]) -> None:
    keys = [path for path in places(stored) if isinstance(path[-1], str)]
    assert len(keys) > 80
    for path in keys:
        data = edited(stored, path, lambda box, key: box.pop(key))
        absent = path[0] == "fingerprint" and (len(path) == 1 or value_at(stored, path) is None)
        if absent or path[:2] == ("fingerprint", "informational"):
            read_stamp(data)  # a reference has none, and a field without a value is absent
            continue
        with pytest.raises(StampError):
            read_stamp(data)
        if is_optional(path, stored["schema"]):
            read_stamp(resealed(data))
        elif path != ("digest",):
            with pytest.raises(StampError):
                read_stamp(resealed(data))


WRONG: tuple[object, ...] = (
    None,
    True,
    -1,
    10**30,
    0.5,
    "",
    "x",
    "\ud800",
    [],
    {},
    [[]],
    {"__proto__": {}},
    [{"a": 1}],
    ["sha256:0"],
    "9" * 5000,
)


def refusal(data: object) -> str | None:
    """Return why a stamp is refused; anything but a `StampError` fails the test."""
    try:
        read_stamp(data)
    except StampError as error:
        return str(error)
    return None


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: repr(w)[:12])
def test_wrong_types_anywhere_are_stamp_errors_only(stored: dict[str, Any], wrong: object) -> None:
    refused = []
    for path in places(stored):

        def put(box: Any, key: Any) -> None:
            box[key] = copy.deepcopy(wrong)

        data = edited(stored, path, put)
        with suppress(CanonicalError):  # without a canonical form there is no digest
            data = resealed(data)
        refused.append(refusal(data))
    messages = [message for message in refused if message is not None]
    assert len(messages) > 0.85 * len(refused)  # a text may be any, and the second form has fewer
    assert all("\n" not in message and len(message) < 300 for message in messages)


@pytest.mark.parametrize("data", [None, 1, "x", [], True, [{}], "\ud800"])
def test_a_stamp_is_an_object(data: object) -> None:
    with pytest.raises(StampError, match="not an object"):
        read_stamp(data)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("detllm.stamp/3", "pip install -U"),
        ("detllm.stamp/999999", "another version"),
        ("other", "expected 'detllm.stamp/2'"),
        (None, "schema None"),
        (1, "schema 1"),
        ([["x"]], "schema a list"),
    ],
)
def test_other_schemas_are_named(stored: dict[str, Any], schema: object, message: str) -> None:
    with pytest.raises(StampError, match=message):
        read_stamp({**stored, "schema": schema})


def test_depth_bombs_are_one_line(stored: dict[str, Any]) -> None:
    bomb: object = []
    for _ in range(900):
        bomb = [bomb]
    for key in [*stored, "unknown"]:
        with pytest.raises(StampError):
            read_stamp({**stored, key: bomb})


def test_a_changed_digest_is_named_where_it_is(stored: dict[str, Any]) -> None:
    other = str(digest_of("other"))
    changes: dict[Path, str] = {
        ("calls", 0, "requests", 2, "prompt_tokens"): "prompt disagrees",
        ("fingerprint_digest",): "fingerprint disagrees",
    }
    if stored["schema"] == StoredForm.FIRST:
        changes |= {
            ("calls", 0, "digest"): "generation digest",
            ("calls", 0, "requests", 0, "digest"): "request digest",
            ("calls", 0, "batch", 0): "batch is not",
        }
    for path, message in changes.items():

        def put(box: Any, key: Any) -> None:
            box[key] = other

        data = edited(stored, path, put)
        with pytest.raises(StampError, match="its own digest"):
            read_stamp(data)
        with pytest.raises(StampError, match=message):
            read_stamp(resealed(data))


def test_a_parameter_of_a_later_version_makes_another_request(stored: dict[str, Any]) -> None:
    def put(box: Any, key: Any) -> None:
        box[key] = {**box[key], "logit_bias": {}}

    data = edited(stored, ("calls", 0, "requests", 0, "params"), put)
    with pytest.raises(StampError, match="'logit_bias' is not known here"):
        read_stamp(resealed(data))


def test_generations_fit_the_requests(stored: dict[str, Any]) -> None:
    stamp = FULL.stamp()
    (call,) = stamp.calls
    wrong = [
        call.generations[1:],
        (*call.generations, call.generations[-1]),
        tuple(reversed(call.generations)),
        tuple(replace(g, prompt_index=99) for g in call.generations),
    ]
    for generations in wrong:
        data = replace(stamp, calls=(Call(call.requests, generations),)).to_json()
        with pytest.raises(StampError, match="do not fit the requests"):
            read_stamp(data)


def test_offsets_are_ascending_and_inside_the_text() -> None:
    stamp = FULL.stamp()
    (call,) = stamp.calls
    first = call.generations[0]
    for offsets in (first.offsets[1:], first.offsets[::-1], (*first.offsets[:-1], 10**6)):
        changed = (replace(first, offsets=offsets), *call.generations[1:])
        with pytest.raises(StampError):
            read_stamp(replace(stamp, calls=(Call(call.requests, changed),)).to_json())


def test_sizes_are_limited(stored: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamps, "MAX_CALLS", 2)
    monkeypatch.setattr(stamps, "MAX_ITEMS", 40)
    monkeypatch.setattr(stamps, "MAX_TEXT", 200)
    # Each key has the limit of its own, whatever was checked before.
    monkeypatch.setattr(stamps, "_check_sizes", lambda reader: None)
    read_stamp(resealed({**stored, "late": [""] * 40, "name": "x" * 200}))
    with pytest.raises(StampError, match="more than 2 calls"):
        read_stamp(resealed({**stored, "calls": [stored["calls"][0]] * 3}))
    with pytest.raises(StampError, match="'late'"):
        read_stamp(resealed({**stored, "late": [""] * 41}))
    with pytest.raises(StampError, match="'late'"):
        read_stamp(resealed({**stored, "late": ["x" * 201]}))
    with pytest.raises(StampError, match="'name'"):
        read_stamp(resealed({**stored, "name": "x" * 201}))


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["x" * 21], "a text of more than 20 characters"),
        (["x"] * 21, "a list of more than 20 items"),
    ],
)
def test_sizes_are_limited_before_a_digest_is_taken(
    extra: object, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stamps, "MAX_TEXT", 20)
    monkeypatch.setattr(stamps, "MAX_ITEMS", 20)
    monkeypatch.setattr(stamps, "content_digest", lambda _: pytest.fail("digested"))
    with pytest.raises(StampError, match=says):
        read_stamp({"schema": STAMP_SCHEMA, "more": {"deep": extra}})


def test_requests_out_of_the_cache_are_named_once_and_in_order(stored: dict[str, Any]) -> None:
    def with_cached(*indices: int) -> dict[str, Any]:
        call = {**stored["calls"][0], "cached": list(indices)}
        return resealed({**stored, "calls": [call, *stored["calls"][1:]]})

    assert len(stored["calls"][0]["requests"]) > 1
    assert read_stamp(with_cached(0, 1)).calls[0].cached == (0, 1)
    for wrong in ((1, 0), (0, 0)):
        with pytest.raises(StampError, match="the cached requests are not in order"):
            read_stamp(with_cached(*wrong))
    with pytest.raises(StampError, match="'cached'"):
        read_stamp(with_cached(len(stored["calls"][0]["requests"])))


def test_the_reach_of_a_self_test_is_stored_only_where_there_is_one(
    stored: dict[str, Any],
) -> None:
    assert "reach" not in stored
    stamp = replace(FULL.stamp(), reach=Reach(1700, 1), beyond_reach=True)
    back = read_stamp(json.loads(json.dumps(stamp.to_json())))
    assert (back.reach, back.beyond_reach) == (Reach(1700, 1), True)
    assert str(back.reach) == "1,700 tokens, 1 sequence"


def test_a_session_without_a_level_falls_back_to_what_its_engine_can_hold() -> None:
    assert fallback_level("demo") is Level.REPEATABLE
    assert fallback_level("http://127.0.0.1:8000") is Level.SEEDED


def test_the_place_is_named() -> None:
    with pytest.raises(StampError, match="the cell's reference is not an object"):
        read_stamp(3, where="the cell's reference")


@pytest.mark.parametrize(
    ("source", "normal"),
    [
        ("%%detgen\r\nHi\r\n", "%%detgen\nHi"),
        ("%%detgen\rHi", "%%detgen\nHi"),
        ("\n  \n\t\n%%detgen\nHi\n\n", "%%detgen\nHi"),
        ("%%detgen\nHi  \t\v\f", "%%detgen\nHi  \t\v\f"),
        ("%%time\n\n%%detgen a\nHi \n \n", "%%time\n\n%%detgen a\nHi "),
        ("det.generate('x') \t\n", "det.generate('x')"),
        ("%%writefile f\n%%detgen\nHi ", "%%writefile f\n%%detgen\nHi"),
        ("  %%detgen\n\n Hi", "  %%detgen\n\n Hi"),
        ("", ""),
        ("  \n ", ""),
        ("a\u3000", "a\u3000"),
        ("a\x1f\n", "a\x1f"),
        ("\ufeffa\x85", "\ufeffa\x85"),
    ],
)
def test_source_normalisation(source: str, normal: str) -> None:
    assert normalise_source(source) == normal
    assert normalise_source(normal) == normal
    assert source_digest(source) == digest_of(normal)


def test_levels_are_an_ordered_closed_list_with_a_promise_each() -> None:
    assert list(Level) == ["seeded", "repeatable", "invariant"]
    assert len({level.promise for level in Level}) == 3


def test_the_digest_covers_every_field() -> None:
    stamp = FULL.stamp()
    others: list[Stamp] = [
        replace(stamp, name="x"),
        replace(stamp, level=Level.SEEDED),
        replace(stamp, source=digest_of("x")),
        replace(stamp, model=replace(stamp.model, weights=None)),
        replace(stamp, fingerprint_digest=digest_of("x")),
        replace(stamp, root_seed=9),
        replace(stamp, calls=()),
        replace(stamp, late=("OMP_NUM_THREADS",)),
        replace(stamp, self_test="held"),
    ]
    assert len({stamp.digest, *(other.digest for other in others)}) == 10
    assert stamp.to_json()["schema"] == STAMP_SCHEMA


def test_an_assembled_stamp_is_what_its_stored_form_reads_back_as() -> None:
    recorded = make_stamp("%%detgen\nx", ("x " * (MAX_EVIDENCE_TOKENS + 1),))
    assert recorded.fingerprint is not None
    informational = {"software.packages": "sha256:00", "hardware.cpu_cores": 4}
    whole = Fingerprint(recorded.fingerprint.numerics, {"model.weights": "x"}, informational)
    run = EngineRun(recorded.model, Level.INVARIANT, 3, whole, ("A",), "held", Reach(9, 1))
    stamp = assemble_stamp(run, recorded.calls, name="n", source=recorded.source)
    assert stamp.fingerprint is not None
    assert stamp.fingerprint.identity == {}
    assert set(stamp.fingerprint.informational) == {"software.packages"}
    assert stamp.generations[0].evidence != recorded.generations[0].evidence
    assert stamp.beyond_reach
    assert read_stamp(stamp.to_json()) == stamp


def test_a_stamps_reach_is_judged_by_the_batches_that_were_run() -> None:
    recorded = make_stamp("%%detgen\nx", ("one", "two"))
    assert recorded.fingerprint is not None
    run = EngineRun(recorded.model, Level.INVARIANT, 0, recorded.fingerprint, reach=Reach(9999, 1))
    alone = [[request] for request in recorded.requests]
    for batches, beyond in ((None, True), (alone, False)):
        stamp = assemble_stamp(
            run, recorded.calls, name="", source=recorded.source, batches=batches
        )
        assert stamp.beyond_reach is beyond


@pytest.mark.parametrize(
    "name",
    [
        "\x1b[31mred",
        "a\x1b]0;title\x07",
        "a\nb",
        "a\r",
        "::error::x",
        "a b",
        "-a",
        "a" * 201,
        "\u202ea",
    ],
)
def test_a_name_that_no_line_can_give_is_refused(name: str) -> None:
    stored = make_stamp("%%detgen\nx", name=name).to_json()
    with pytest.raises(StampError, match="'name' is not a cell name") as caught:
        read_stamp(stored)
    assert str(caught.value).isprintable()
    for fine in ("", "haiku", "_a.b-1", "aé"):
        assert read_stamp(make_stamp("%%detgen\nx", name=fine).to_json()).name == fine
