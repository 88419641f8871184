"""The vectors are current, and hold when they are read back."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from jupyter_detllm.core.canonical import canonical_bytes, digest_of
from jupyter_detllm.core.generation import TokenEvidence
from jupyter_detllm.core.notebook import check_cell, read_notebook
from jupyter_detllm.core.promotion import Update, promote, strip
from jupyter_detllm.core.stamp import StoredForm, read_stamp
from jupyter_detllm.core.verdict import Verdict, decide, facts_of
from tests.vectors.make_vectors import FOLDER, KEPT, VECTORS, rendered


def cases(name: str) -> list[dict[str, Any]]:
    data = json.loads((FOLDER / f"{name}.json").read_text(encoding="ascii"))
    found: list[dict[str, Any]] = data["cases"]
    return found


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_are_current(name: str) -> None:
    stored = (FOLDER / f"{name}.json").read_text(encoding="ascii")
    assert stored == rendered(name), "run: python tests/vectors/make_vectors.py"


def test_every_file_has_a_writer() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {*VECTORS, *KEPT}


def test_vectors_of_the_first_form_are_what_they_were() -> None:
    digests = {name: hashlib.sha256((FOLDER / f"{name}.json").read_bytes()) for name in KEPT}
    assert {name: digest.hexdigest()[:16] for name, digest in digests.items()} == {
        "promotion": "c512c3951808e1c8",
        "stamps": "d1ae5079c6488a29",
    }


def test_canonical_cases_hold() -> None:
    for case in cases("canonical"):
        assert canonical_bytes(case["value"]).decode() == case["canonical"], case["name"]
        assert str(digest_of(case["value"])) == case["digest"]


@pytest.mark.parametrize("name", ["stamps", "stamps-2"])
def test_stamps_read_back_and_a_reference_has_its_stamps_digest(name: str) -> None:
    found = cases(name)
    assert len(found) >= 4
    for case in found:
        stamp = read_stamp(case["stamp"])
        assert str(stamp.digest) == case["digest"] == case["stamp"]["digest"]
        assert read_stamp(case["reference"]).digest == stamp.digest
        assert stamp.to_json() == case["stamp"]
        assert read_stamp(case["without_prompts"]).calls[0].digest == stamp.calls[0].digest
        assert [str(call.digest) for call in stamp.calls] == case["call_digests"]
        assert [str(request.digest) for request in stamp.requests] == case["request_digests"]


def test_both_forms_of_a_stamp_hold_the_same() -> None:
    for old, new in zip(cases("stamps"), cases("stamps-2"), strict=True):
        first, second = read_stamp(old["stamp"]), read_stamp(new["stamp"])
        assert (first.form, second.form) == tuple(StoredForm)
        assert second.as_first().digest == first.digest == read_stamp(old["reference"]).digest
        assert new["as_first"] == old["digest"]
        for key in ("generation_digest", "fingerprint_digest", "call_digests", "request_digests"):
            assert new[key] == old[key]
        assert decide(facts_of(first, second)).verdict in (Verdict.MATCH, Verdict.TOKENS_MATCH)


def test_evidence_reads_back() -> None:
    for case in cases("evidence"):
        value = TokenEvidence.from_json(case["stored"], case["stored"]["tokens"])
        assert value.to_json() == case["stored"]


@pytest.mark.parametrize("name", ["promotion", "promotion-2"])
def test_promotion_cases_hold(name: str) -> None:
    found = cases(name)
    for case in found:
        book = case["before"]
        assert [check_cell(c).verdict for c in read_notebook(book).cells] == case["verdicts"]
        assert strip(book)[0] == case["stripped"]
        for update in Update:
            expected = case[update.value]
            after, changes = promote(book, update)
            assert after == expected["after"], (case["name"], update)
            assert [{"cell": c.label, "kind": c.kind} for c in changes] == expected["changes"]
    seen = {kind for case in found for u in Update for kind in map(str, case[u.value]["changes"])}
    for kind in ("added", "replaced", "unchanged", "kept", "refused", "removed"):
        assert any(kind in change for change in seen)
