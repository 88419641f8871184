from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_detllm.cli import main
from jupyter_detllm.core.fields import Role
from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint
from jupyter_detllm.core.generation import Prompt
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import Which
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.core.verdict import Policy, Verdict, facts_of
from jupyter_detllm.render import render_report
from jupyter_detllm.render.explain import environment_lines, informational_heading
from jupyter_detllm.verify.compare import compare_paths
from jupyter_detllm.verify.report import NotebookReport, PolicySource, Report, Standing
from tests.builders import (
    MODEL,
    cell,
    generation,
    make_stamp,
    notebook,
    of_another_run,
    promoted,
    stamped_cell,
    with_actual,
)
from tests.fakes import Run
from tests.unit.render.test_text import validate

SOURCE = "%%detgen haiku\nWrite a haiku."


def save(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def save_fingerprint(path: Path, fields: Mapping[str, FieldValue]) -> Path:
    found = Fingerprint.build({k: v for k, v in fields.items() if v is not None})
    return save(path, {**found.to_json(), "digest": str(found.digest)})


def only(report: Report) -> NotebookReport:
    (found,) = report.notebooks
    validate(report)
    return found


def fields_of(report: Report) -> list[str]:
    (found,) = only(report).environment
    return [diff.name for diff in found.telling]


# The case of two servers: equal GPUs but for their memory, ten equal runs on each, and
# A and B differ; B's vLLM is upgraded, then its threads are set.

SERVER_A: Mapping[str, FieldValue] = {
    "controls.OMP_NUM_THREADS": "16",
    "engine.kv_blocks": 27_000,
    "engine.name": "vllm",
    "hardware.cpu_cores": "40 cores, 80 threads, 80 usable",
    "hardware.gpu": "NVIDIA A100 SXM4",
    "hardware.gpu_memory": "81920",
    "software.cuda": "12.2",
    "software.driver": "535.104.05",
    "software.vllm": "0.6.3.post1",
    "torch.threads": 16,
}
SERVER_B = {
    **SERVER_A,
    "controls.OMP_NUM_THREADS": None,
    "engine.kv_blocks": 9_000,
    "hardware.gpu_memory": "40960",
    "software.vllm": "0.6.2",
    "torch.threads": 80,
}
UPGRADED = {**SERVER_B, "software.vllm": "0.6.3.post1"}
ALIGNED = {**UPGRADED, "controls.OMP_NUM_THREADS": "16", "torch.threads": 16}
THREADS = ["torch.threads", "controls.OMP_NUM_THREADS"]
MEMORY = ["hardware.gpu_memory", "engine.kv_blocks"]


@pytest.mark.parametrize(
    ("server", "telling", "code", "left"),
    [
        (SERVER_B, ["software.vllm", *THREADS], 1, "left after that: torch.threads"),
        (UPGRADED, THREADS, 1, "align torch.threads and compare again"),
        (ALIGNED, [], 0, "no field that can change results differs"),
    ],
    ids=["at first", "vLLM upgraded", "threads set"],
)
def test_two_servers_version_then_threads_then_memory(
    server: Mapping[str, FieldValue], telling: list[str], code: int, left: str, tmp_path: Path
) -> None:
    a = save_fingerprint(tmp_path / "a.json", SERVER_A)
    b = save_fingerprint(tmp_path / "b.json", server)
    report = compare_paths(a, b)
    found = only(report)
    assert fields_of(report) == telling
    assert [diff.name for diff in found.environment[0].informational] == MEMORY
    assert report.exit_code == code
    text = "\n".join(environment_lines(found))
    assert left in text
    assert "also different, but unlikely to matter if outputs are equal:" in text
    assert text.index("hardware.gpu_memory: 81920 -> 40960") > text.index(left)
    assert "It sets how many KV blocks fit, which matters only under preemption." in text
    # Each field has its reason and, where one can act, its remedy.
    assert all(diff.why.endswith(".") for diff in found.environment[0].fields)
    assert all(diff.align for diff in found.environment[0].telling)


@pytest.mark.parametrize(
    ("server", "text", "verdict", "cause"),
    [
        (SERVER_B, "An old frog.", Verdict.DRIFT, "software.vllm"),
        (UPGRADED, "An old frog.", Verdict.DRIFT, "torch.threads"),
        (ALIGNED, "An old pond.", Verdict.MATCH, None),
    ],
    ids=["at first", "vLLM upgraded", "threads set"],
)
def test_two_servers_by_their_notebooks(
    server: Mapping[str, FieldValue], text: str, verdict: Verdict, cause: str | None, tmp_path: Path
) -> None:
    def book(fields: Mapping[str, FieldValue], text: str) -> dict[str, Any]:
        kept = {k: v for k, v in fields.items() if v is not None}
        return promoted(stamped_cell(SOURCE, make_stamp(SOURCE, [text], name="haiku", fields=kept)))

    a = save(tmp_path / "a.ipynb", book(SERVER_A, "An old pond."))
    b = save(tmp_path / "b.ipynb", of_another_run(book(server, text)))
    report = compare_paths(a, b)
    (found,) = only(report).cells
    assert found.verdict is verdict
    numerics = [diff for diff in found.outcome.facts.fields if diff.role is Role.NUMERICS]
    assert [diff.name for diff in numerics][:1] == ([cause] if cause else [])
    assert report.exit_code == (0 if verdict is Verdict.MATCH else 1)
    # Memory is reported from the stamps alone, with its effect: the number of KV blocks.
    (environment,) = report.notebooks[0].environment
    assert [diff.name for diff in environment.informational] == MEMORY
    lines = "\n".join(environment_lines(report.notebooks[0]))
    since = "since the" if verdict is Verdict.MATCH else "if"
    assert f"also different, but unlikely to matter {since} outputs are equal:" in lines
    assert "hardware.gpu_memory: 81920 -> 40960" in lines
    assert "It sets how many KV blocks fit, which matters only under preemption." in lines


def test_a_gpu_model_is_one_whatever_its_memory() -> None:
    from jupyter_detllm.probes.nvidia import _chip

    assert _chip("NVIDIA A100-SXM4-80GB") == _chip("NVIDIA A100-SXM4-40GB") == "NVIDIA A100 SXM4"
    assert _chip("NVIDIA A100 80GB PCIe") == _chip("NVIDIA A100-PCIE-40GB") == "NVIDIA A100 PCIe"
    assert _chip("NVIDIA A100-SXM4-80GB") != _chip("NVIDIA A100 80GB PCIe")
    assert _chip("NVIDIA H100 80GB HBM3") == "NVIDIA H100 HBM3"
    assert _chip("NVIDIA H200") == "NVIDIA H200"
    assert _chip("NVIDIA GeForce GTX 1060 3GB") == "NVIDIA GeForce GTX 1060 3GB"


def test_groups_that_only_one_side_recorded_are_not_differences(tmp_path: Path) -> None:
    bare = {"software.torch": "2.13.0+cpu", "software.vllm": "0.32.0"}
    b = save_fingerprint(tmp_path / "b.json", {**bare, "controls.NCCL_ALGO": "ring"})
    a = save(tmp_path / "a.ipynb", promoted(stamped_cell(SOURCE)))
    report = compare_paths(a, b)
    (found,) = only(report).environment
    # What the shell has set is a difference: a session would keep it.
    assert [diff.name for diff in found.fields] == ["controls.NCCL_ALGO"]
    assert found.missing == (
        "engine: only A recorded it",
        "model: only A recorded it",
        "torch: only A recorded it",
    )
    assert report.exit_code == 1
    b = save_fingerprint(tmp_path / "b.json", bare)
    report = compare_paths(a, b)
    assert report.exit_code == 3
    assert replace(report, accept=frozenset({Standing.NOT_COMPARABLE})).exit_code == 0


def test_controls_of_two_bare_environments_are_compared(tmp_path: Path) -> None:
    bare = {"software.vllm": "0.32.0"}
    a = save_fingerprint(tmp_path / "a.json", {**bare, "controls.OMP_NUM_THREADS": "16"})
    b = save_fingerprint(tmp_path / "b.json", bare)
    assert fields_of(compare_paths(a, b)) == ["controls.OMP_NUM_THREADS"]
    assert fields_of(compare_paths(b, a)) == ["controls.OMP_NUM_THREADS"]


def test_another_model_is_not_comparable(tmp_path: Path) -> None:
    a = save_fingerprint(tmp_path / "a.json", {"model.weights": "sha256:a", "torch.threads": 1})
    b = save_fingerprint(tmp_path / "b.json", {"model.weights": "sha256:b", "torch.threads": 2})
    report = compare_paths(a, b)
    assert report.exit_code == 3
    assert fields_of(report) == ["model.weights", "torch.threads"]


def test_a_notebook_against_each_of_its_fingerprints(tmp_path: Path) -> None:
    other = make_stamp("%%detgen b\nx", name="b", fields={"torch.threads": 4})
    book = promoted(stamped_cell(SOURCE), stamped_cell("%%detgen b\nx", other))
    a = save(tmp_path / "a.ipynb", book)
    (reference,) = (make_stamp(SOURCE, name="haiku").fingerprint,)
    assert reference is not None
    b = save(tmp_path / "b.json", reference.to_json())
    environment = only(compare_paths(a, b)).environment
    assert [found.cells for found in environment] == [("cell 1 (haiku)",), ("cell 2 (b)",)]
    assert [[diff.name for diff in found.telling] for found in environment] == [
        [],
        ["torch.threads"],
    ]


# Cells of two notebooks.


def books(tmp_path: Path, left: list[Any], right: list[Any]) -> tuple[Path, Path]:
    return (
        save(tmp_path / "a.ipynb", notebook(*left)),
        save(tmp_path / "b.ipynb", of_another_run(notebook(*right))),
    )


def verdicts(report: Report) -> dict[str, Verdict]:
    return {c.view.label: c.verdict for c in only(report).cells}


def test_cells_are_matched_by_name_wherever_they_stand(tmp_path: Path) -> None:
    one, two = stamped_cell("%%detgen one\nx"), stamped_cell("%%detgen two\ny")
    left, right = books(tmp_path, [one, two], [cell("1"), two, one])
    report = compare_paths(left, right)
    assert verdicts(report) == {"cell 1 (one)": Verdict.MATCH, "cell 2 (two)": Verdict.MATCH}
    assert report.exit_code == 0


def test_unnamed_cells_are_matched_by_requests_and_occurrence(tmp_path: Path) -> None:
    def unnamed(source: str, prompts: list[str], texts: list[str]) -> dict[str, Any]:
        return stamped_cell(source, make_stamp(source, texts, prompts=prompts))

    same = [unnamed("%%detgen\np", ["p"], ["first"]), unnamed("%%detgen\np", ["p"], ["second"])]
    q = unnamed("%%detgen\nq", ["q"], ["answer"])
    left, right = books(tmp_path, [*same, q], [q, *same])
    assert verdicts(compare_paths(left, right)) == {
        "cell 1": Verdict.MATCH,
        "cell 2": Verdict.MATCH,
        "cell 3": Verdict.MATCH,
    }


def test_an_unnamed_cell_is_found_by_the_requests_in_common_or_by_its_source(
    tmp_path: Path,
) -> None:
    def of(prompts: list[str], model: ModelIdentity = MODEL) -> dict[str, Any]:
        source = f"%%detgen\n{prompts[0]}"
        texts = [f"to {p}" for p in prompts]
        return stamped_cell(source, make_stamp(source, texts, prompts=prompts, model=model))

    left, right = books(tmp_path, [of(["p", "q"])], [of(["x"]), of(["p"])])
    cells = only(compare_paths(left, right)).cells
    assert [c.verdict for c in cells] == [Verdict.STALE, Verdict.NOT_COMPARABLE]
    assert cells[0].outcome.reasons == ("1 request only in A",)
    assert cells[1].outcome.reasons == ("only B has it, A does not",)
    # Another tokenizer makes other requests of the same source.
    source = "%%detgen\np"
    other = make_stamp(source, ["x"], prompts=["p p"], model=ModelIdentity("other"))
    left, right = books(tmp_path, [of(["p"])], [stamped_cell(source, other)])
    (found,) = only(compare_paths(left, right)).cells
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert "another model" in found.outcome.reasons[0]


def test_cells_of_one_side_only_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = stamped_cell("%%detgen one\nx"), stamped_cell("%%detgen two\ny")
    left, right = books(tmp_path, [one], [two])
    assert main(["compare", str(left), str(right)]) == 3
    out = capsys.readouterr().out
    assert "cell 1 (one): not_comparable" in out
    assert "why       only A has it, B does not" in out
    assert "why       only B has it, A does not" in out


def test_other_level_and_broken_stamps(tmp_path: Path) -> None:
    seeded = stamped_cell(SOURCE, make_stamp(SOURCE, name="haiku", level=Level.SEEDED))
    left, right = books(tmp_path, [stamped_cell(SOURCE)], [seeded])
    assert list(verdicts(compare_paths(left, right)).values()) == [Verdict.NOT_COMPARABLE]
    broken = stamped_cell(SOURCE)
    broken["outputs"][0]["metadata"]["detllm"]["name"] = "other"
    left, right = books(tmp_path, [stamped_cell(SOURCE)], [broken])
    report = compare_paths(left, right)
    assert report.exit_code == 2
    assert only(report).cells[0].outcome.reasons[0].startswith("B: the output's stamp disagrees")


@pytest.mark.parametrize(
    ("side", "verdict"),
    [(None, Verdict.DIVERGED), ("actual", Verdict.DIVERGED), ("reference", Verdict.MATCH)],
)
def test_the_side_that_is_compared(side: str | None, verdict: Verdict, tmp_path: Path) -> None:
    book = promoted(stamped_cell(SOURCE))
    again = of_another_run(book)
    again = with_actual(again, 1, make_stamp(SOURCE, ["An old frog."], name="haiku"))
    left, right = save(tmp_path / "a.ipynb", book), save(tmp_path / "b.ipynb", again)
    report = compare_paths(left, right, which=Which(side or "one"))
    assert list(verdicts(report).values()) == [verdict]


def test_cleared_outputs_leave_the_references(tmp_path: Path) -> None:
    book = promoted(stamped_cell(SOURCE))
    left = save(tmp_path / "a.ipynb", book)
    book = of_another_run(book)
    book["cells"][0]["outputs"] = []
    right = save(tmp_path / "b.ipynb", book)
    report = compare_paths(left, right)
    assert list(verdicts(report).values()) == [Verdict.MATCH]
    assert only(report).notes == (
        "A: stamps compared: 1 in outputs",
        "B: stamps compared: 1 in references",
    )
    assert compare_paths(left, right, which=Which.ACTUAL).exit_code == 3


def test_policies_of_cells_and_of_the_command_line(tmp_path: Path) -> None:
    source = "%%detgen haiku --policy prefix(2)\nWrite a haiku."
    other = make_stamp(source, ["An old frog."], name="haiku")
    left, right = books(
        tmp_path, [stamped_cell(source)], [stamped_cell(source, other, tags=["detllm-skip"])]
    )
    (found,) = only(compare_paths(left, right)).cells
    assert (str(found.policy), found.policy_from) == ("prefix(2)", PolicySource.CELL)
    assert found.standing is Standing.SKIPPED
    (found,) = only(compare_paths(left, right, Policy.parse("bitwise"))).cells
    assert (str(found.policy), found.policy_from) == ("bitwise", PolicySource.COMMAND)


def test_sides_are_called_a_and_b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = generation("An old pond is still.", margins={3: 0.125})
    after = generation("An old pond was quiet.", margins={3: 0.25})
    left, right = books(
        tmp_path,
        [stamped_cell(SOURCE, make_stamp(SOURCE, [before], name="haiku"))],
        [stamped_cell(SOURCE, make_stamp(SOURCE, [after], name="haiku"))],
    )
    assert main(["compare", str(left), str(right)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"A: {left}\nB: {right}\n")
    assert '    A         " is"' in out
    assert '    B         " was"' in out
    assert "stamp --update" not in out
    assert "recorded  " not in out


def test_a_file_against_its_own_copy_compares_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = promoted(stamped_cell(SOURCE))
    a, b = save(tmp_path / "a.ipynb", book), save(tmp_path / "b.ipynb", book)
    for which in Which.ONE, Which.ACTUAL, Which.REFERENCE:
        report = compare_paths(a, b, which=which)
        assert list(verdicts(report).values()) == [Verdict.RECORDED]
        assert report.exit_code == 3
    assert main(["compare", str(a), str(b)]) == 3
    out = capsys.readouterr().out
    assert "both sides are the same run: nothing was compared" in out
    assert "compare files of two runs" in out
    # Equal stamps without ids may be of one run; ids that differ, or other contents, are not.
    nameless = save(tmp_path / "c.ipynb", of_another_run(book, None))
    other = save(tmp_path / "d.ipynb", of_another_run(book))
    edited = make_stamp(SOURCE, ["An old frog."], name="haiku")
    changed = save(tmp_path / "e.ipynb", with_actual(book, 1, edited, run_id="run-1"))
    assert compare_paths(a, nameless).exit_code == 3
    assert compare_paths(a, other).exit_code == 0
    assert compare_paths(a, changed).exit_code == 1


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({}, {}),
        ({}, SERVER_A),
        ({"hardware.gpu_memory": "1"}, {"hardware.gpu_memory": "1"}),
        ({"software.vllm": "1"}, {"software.torch": "1"}),
    ],
)
def test_fingerprints_without_a_common_field_verify_nothing(
    left: Mapping[str, FieldValue], right: Mapping[str, FieldValue], tmp_path: Path
) -> None:
    a = save_fingerprint(tmp_path / "a.json", left)
    b = save_fingerprint(tmp_path / "b.json", right)
    report = compare_paths(a, b)
    assert report.exit_code in (1, 3)
    (found,) = only(report).environment
    assert found.missing[-1] == "A and B have no field in common that can change results"
    if not left:
        assert report.exit_code == 3
        assert "not verified" in render_report(report, "text")


# Files that are neither, and the command line.


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{}", "is neither a notebook nor a fingerprint"),
        ("[]", "is JSON, but not a notebook"),
        ('{"schema": "detllm.fingerprint/9"}', "schema 'detllm.fingerprint/9'"),
        ('{"schema": "detllm.fingerprint/1", "numerics": []}', "not an object"),
        (
            '{"schema": "detllm.fingerprint/1", "digest": "sha256:0"}',
            "the fingerprint disagrees with its digest",
        ),
        ('{"nbformat": 3, "worksheets": []}', "nbformat 3"),
        ("", "is empty"),
    ],
)
@pytest.mark.parametrize("name", ["A", "B"])
def test_what_cannot_be_compared_is_one_line(
    content: str, expected: str, name: str, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(content)
    good = save(tmp_path / "good.ipynb", promoted(stamped_cell(SOURCE)))
    report = compare_paths(bad, good) if name == "A" else compare_paths(good, bad)
    (problem,) = only(report).problems
    assert problem.startswith(f"{name}: ")
    assert expected in problem
    assert report.exit_code == 2


def test_json_html_and_junit_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = save_fingerprint(tmp_path / "a.json", SERVER_A)
    b = save_fingerprint(tmp_path / "b.json", SERVER_B)
    html, junit = tmp_path / "r.html", tmp_path / "r.xml"
    argv = ["compare", str(a), str(b), "--json", "--html", str(html), "--junit", str(junit)]
    assert main(argv) == 1
    data = json.loads(capsys.readouterr().out)
    (found,) = data["notebooks"]
    assert (found["path"], found["against"]) == (str(a), str(b))
    (environment,) = found["environment"]
    assert environment["decides"] is True
    assert environment["fields"][0]["name"] == "software.vllm"
    assert '<td class="field">software.vllm</td>' in html.read_text()
    assert '<failure type="fingerprint"' in junit.read_text()


def test_accept_and_policy_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = stamped_cell("%%detgen one\nx"), stamped_cell("%%detgen two\ny")
    left, right = books(tmp_path, [one], [one, two])
    assert main(["compare", str(left), str(right)]) == 3
    assert main(["compare", str(left), str(right), "--accept", "not_comparable"]) == 0
    assert main(["compare", str(left), str(right), "--policy", "exact"]) == 2
    assert main(["compare", str(left)]) == 2
    capsys.readouterr()


def test_the_order_of_fields_does_not_depend_on_the_order_of_sides(tmp_path: Path) -> None:
    a = save_fingerprint(tmp_path / "a.json", SERVER_A)
    b = save_fingerprint(tmp_path / "b.json", SERVER_B)
    assert fields_of(compare_paths(a, b)) == fields_of(compare_paths(b, a))
    assert render_report(compare_paths(a, a), "text").endswith(
        "verified: the fingerprints were compared and accepted\n"
    )


def test_outputs_are_not_called_equal_when_no_request_was_common() -> None:
    run = Run(prompts=(Prompt.chat("one"),), name="a")
    other = replace(run, prompts=(Prompt.chat("two"),))
    facts = facts_of(run.stamp(), other.stamp())
    assert facts.comparison is not None
    assert facts.comparison.tokens_equal  # vacuously: there is no pair
    cell = SimpleNamespace(outcome=SimpleNamespace(facts=facts))
    heading = informational_heading(SimpleNamespace(telling=()), SimpleNamespace(cells=(cell,)))
    assert heading == "also different, but unlikely to matter if outputs are equal:"


def test_only_the_stamps_that_are_compared_are_read(tmp_path: Path) -> None:
    book = promoted(stamped_cell(SOURCE, make_stamp(SOURCE, name="haiku")))
    book = with_actual(book, 1, make_stamp(SOURCE, ["An old frog."], name="haiku"))
    broken = of_another_run(book)
    broken["cells"][0]["metadata"]["detllm"]["reference"]["level"] = "changed"
    a, b = save(tmp_path / "a.ipynb", book), save(tmp_path / "b.ipynb", broken)
    # The reference is broken, and nobody asked for it.
    (found,) = only(compare_paths(a, b)).cells
    assert found.verdict is Verdict.MATCH
    (found,) = only(compare_paths(a, b, which=Which.REFERENCE)).cells
    assert found.verdict is Verdict.ERROR
    # Without a stamp in the output the reference is what is compared.
    del broken["cells"][0]["outputs"][0]["metadata"]["detllm"]
    save(b, broken)
    (found,) = only(compare_paths(a, b)).cells
    assert found.verdict is Verdict.ERROR


def test_a_notebook_agrees_with_the_fingerprint_taken_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, fingerprint = tmp_path / "a.ipynb", tmp_path / "fp.json"
    save(a, promoted(stamped_cell(SOURCE)))
    assert main(["fingerprint", str(a), "--out", str(fingerprint)]) == 0
    report = compare_paths(a, fingerprint)
    assert only(report).environment[0].fields == ()
    assert only(report).environment[0].missing == ()
    assert report.exit_code == 0
    # A different model is reported, though its fingerprint has the same digest.
    other = replace(MODEL, name="other", weights=MODEL.tokenizer)
    book = promoted(stamped_cell(SOURCE, make_stamp(SOURCE, name="haiku", model=other)))
    report = compare_paths(save(tmp_path / "b.ipynb", book), fingerprint)
    assert fields_of(report) == ["model.weights"]
    assert report.exit_code == 3  # not comparable
    # Two models under one fingerprint: it says nothing of either.
    two = "%%detgen two\nWrite."
    book = promoted(
        stamped_cell(SOURCE), stamped_cell(two, make_stamp(two, name="two", model=other))
    )
    save(a, book)
    assert main(["fingerprint", str(a), "--out", str(fingerprint)]) == 0
    assert "identity" not in json.loads(fingerprint.read_text())
    capsys.readouterr()
