"""Replays on the fake engine in this process: verdicts, batches, refusals, interrupts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.generation import Prompt
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import read_notebook
from jupyter_detllm.core.verdict import Policy, Verdict
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.errors import EngineError, UsageError
from jupyter_detllm.render import FORMATS, render_report
from jupyter_detllm.verify.job import Job, Listener
from jupyter_detllm.verify.plan import Permissions, allowed_models
from jupyter_detllm.verify.replay import Replay, replay_paths
from jupyter_detllm.verify.report import Mode
from tests.fakes import Run
from tests.replaying import Lab, book, written

SAMPLED = SamplingOptions(max_tokens=12, temperature=0.9)


def run(name: str, *prompts: str, **options: Any) -> Run:
    asked = tuple(Prompt.chat(p) for p in prompts or (f"About {name}.",))
    return Run(prompts=asked, name=name, source=f"%%detgen {name}\n{name}", **options)


def replayed(folder: Path, lab: Lab, *books: Mapping[str, Any], **options: Any) -> Replay:
    paths = [written(folder, f"nb{i}", data) for i, data in enumerate(books)]
    return replay_paths(paths, runner=lab, **options)


def verdicts(report: Listener) -> list[Verdict]:
    return [cell.verdict for cell in report.cells]


@pytest.mark.parametrize("level", list(Level))
def test_what_was_recorded_matches_bitwise(tmp_path: Path, level: Level) -> None:
    cells = [
        run("a", "One.", "Two.", level=level),
        run("b", "Three.", level=level, n=3, sampling=SAMPLED),
        run("c", "Four.", "Five.", level=level, calls=[[0], [1]], root_seed=8),
    ]
    lab = Lab()
    done = replayed(tmp_path, lab, book(*cells[:2]), book(cells[2]))
    assert verdicts(done.report) == [Verdict.MATCH] * 3
    assert [cell.outcome.facts.fields for cell in done.report.cells] == [()] * 3
    assert done.report.mode is Mode.REPLAY
    assert done.report.exit_code == 0
    assert not done.interrupted
    assert len(lab.started) == 1
    sizes = [len(call) for call in lab.started[0].calls]
    assert sizes == ([5] if level is Level.INVARIANT else [2, 1, 1, 1])


def test_files_stay_as_they_were(tmp_path: Path) -> None:
    path = written(tmp_path, "nb", book(run("a")))
    before = path.read_bytes()
    replay_paths([path], runner=Lab())
    assert path.read_bytes() == before


def test_a_batch_effect_is_absent_because_the_batch_is_the_recorded_one(tmp_path: Path) -> None:
    # The engine is batch-sensitive, which no fingerprint shows.
    lab = Lab({"batch_sensitive": True})
    made = run("a", "One.", "Two.", options={"batch_sensitive": True})
    assert verdicts(replayed(tmp_path, lab, book(made)).report) == [Verdict.MATCH]


def test_drift_names_its_field(tmp_path: Path) -> None:
    lab = Lab({"drift_field": "software.vllm=0.33.0"})
    report = replayed(tmp_path, lab, book(run("a", sampling=SamplingOptions(max_tokens=40)))).report
    (cell,) = report.cells
    assert cell.verdict is Verdict.DRIFT
    assert cell.outcome.reasons == ("software.vllm: 0.32.0 -> 0.33.0",)
    assert report.exit_code == 1
    # The explanation is about what was replayed, not about the output in the file.
    comparison = cell.outcome.facts.comparison
    assert comparison is not None
    assert comparison.first is not None
    assert cell.view.actual is not None
    assert cell.view.actual.generations[0] == comparison.first.actual


def test_a_change_without_a_field_is_a_divergence(tmp_path: Path) -> None:
    lab = Lab({"drift_salt": "another machine"})
    report = replayed(tmp_path, lab, book(run("a", sampling=SamplingOptions(max_tokens=40)))).report
    assert verdicts(report) == [Verdict.DIVERGED]


def test_the_policy_of_the_command_line_wins(tmp_path: Path) -> None:
    lab = Lab({"drift_evidence": True})
    loose = replayed(tmp_path, lab, book(run("a")))
    assert verdicts(loose.report) == [Verdict.TOKENS_MATCH]
    assert loose.report.exit_code == 0
    strict = replayed(tmp_path, lab, book(run("a")), policy=Policy.parse("bitwise"))
    assert strict.report.exit_code == 1


@pytest.mark.parametrize("part", ["weights", "tokenizer", "chat_template"])
def test_another_model_is_named_and_nothing_is_run(tmp_path: Path, part: str) -> None:
    lab = Lab({part: "other"})
    report = replayed(tmp_path, lab, book(run("a"))).report
    (cell,) = report.cells
    assert cell.verdict is Verdict.NOT_COMPARABLE
    assert cell.outcome.reasons[0].startswith(f"another model: the {part.replace('_', ' ')}")
    assert lab.started[0].calls == []
    assert report.exit_code == 3


def forged(level: Level) -> dict[str, Any]:
    """Return a notebook whose second request claims tokens that its message does not have."""
    from dataclasses import replace

    from jupyter_detllm.core.generation import prompt_digest
    from jupyter_detllm.core.promotion import Update, promote
    from jupyter_detllm.core.stamp import Call
    from tests.builders import notebook, stamped_cell

    made = run("a", "One.", "Two.", level=level)
    stamp = made.stamp()
    call = stamp.calls[0]
    other = replace(call.requests[1], prompt_tokens=prompt_digest([1, 2, 3]))
    changed = replace(stamp, calls=(Call((call.requests[0], other), call.generations),))
    cells = (stamped_cell(made.source, changed), run("b", "Three.", level=level).cell())
    return promote(notebook(*cells), Update.NEW)[0]


@pytest.mark.parametrize("level", [Level.REPEATABLE, Level.INVARIANT])
def test_prompt_tokens_must_be_the_recorded_ones(tmp_path: Path, level: Level) -> None:
    lab = Lab()
    first, second = replayed(tmp_path, lab, forged(level)).report.cells
    assert first.verdict is Verdict.NOT_COMPARABLE
    assert first.outcome.reasons[0].startswith("request 2: the prompt has different tokens here")
    assert "tokenizer or chat template" in first.outcome.reasons[0]
    assert second.verdict is Verdict.MATCH
    # A recorded batch is run whole or not at all; a free one without the refused request.
    sizes = [len(call) for call in lab.started[0].calls]
    assert sizes == ([2] if level is Level.INVARIANT else [1])


def test_a_failing_call_keeps_the_others(tmp_path: Path) -> None:
    def fail_first(call: int) -> None:
        if call == 1:
            raise EngineError("the engine hiccupped")

    done = replayed(tmp_path, Lab(before_call=fail_first), book(run("a"), run("b")))
    assert verdicts(done.report) == [Verdict.ERROR, Verdict.MATCH]
    assert done.report.cells[0].outcome.reasons == ("the engine hiccupped",)
    assert done.report.exit_code == 2


def test_an_engine_that_does_not_start_does_not_stop_the_next(tmp_path: Path) -> None:
    lab = Lab()

    def runner(job: Job, report: Listener) -> None:
        if job.spec.options["dtype"] == "float32":
            raise EngineError("no memory")
        lab(job, report)

    data = book(run("a", options={"dtype": "float32"}), run("b"))
    done = replay_paths([written(tmp_path, "nb", data)], runner=runner)
    assert verdicts(done.report) == [Verdict.ERROR, Verdict.MATCH]
    assert done.report.cells[0].outcome.reasons == ("not run: no memory",)


def test_an_interrupt_keeps_what_is_done(tmp_path: Path) -> None:
    def interrupt(call: int) -> None:
        if call == 2:
            raise KeyboardInterrupt

    data = book(run("a"), run("b"), run("c", options={"dtype": "float32"}))
    done = replayed(tmp_path, Lab(before_call=interrupt), data)
    assert done.interrupted
    assert verdicts(done.report) == [Verdict.MATCH, Verdict.ERROR, Verdict.ERROR]
    reasons = [cell.outcome.reasons for cell in done.report.cells[1:]]
    assert reasons == [("not run: interrupted",)] * 2


def test_too_many_tokens_are_refused_before_anything_starts(tmp_path: Path) -> None:
    lab = Lab()
    path = written(tmp_path, "nb", book(run("a")))
    with pytest.raises(UsageError, match="--max-tokens-total"):
        replay_paths([path], permissions=Permissions(max_tokens_total=20), runner=lab)
    assert lab.started == []


def test_an_unreadable_file_is_a_problem_and_the_rest_is_run(tmp_path: Path) -> None:
    good = written(tmp_path, "nb", book(run("a")))
    bad = tmp_path / "bad.ipynb"
    bad.write_text("{")
    report = replay_paths([bad, good, tmp_path / "none.ipynb"], runner=Lab()).report
    assert [bool(book.problems) for book in report.notebooks] == [True, False, True]
    assert verdicts(report) == [Verdict.MATCH]
    assert report.exit_code == 2


def test_no_engine_starts_where_nothing_is_recorded(tmp_path: Path) -> None:
    lab = Lab()
    data = book(run("a"))
    data["cells"] = []
    assert replayed(tmp_path, lab, data).report.exit_code == 3
    assert lab.started == []


def test_a_code_cell_is_never_run(tmp_path: Path) -> None:
    from tests.builders import cell

    trap = tmp_path / "ran"
    data = book(run("a"))
    data["cells"].insert(0, cell(f"open({str(trap)!r}, 'w')"))
    assert verdicts(replayed(tmp_path, Lab(), data).report) == [Verdict.MATCH]
    assert not trap.exists()


def test_progress_counts_recorded_tokens(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    said: list[str] = []

    class Watch:
        def say(self, line: str) -> None:
            said.append(line)

        def advance(self, tokens: int, total: int) -> None:
            seen.append((tokens, total))

    data = book(run("a"), run("b"))
    views = read_notebook(data).cells
    counts = [len(v.reference.generations[0].token_ids) for v in views if v.reference is not None]
    replayed(tmp_path, Lab(), data, watcher=Watch())
    assert seen == [(counts[0], sum(counts)), (sum(counts), sum(counts))]
    assert said[0] == "engine: demo at level repeatable, 2 requests of 2 cells in 1 notebook"


def test_the_report_renders_in_every_format(tmp_path: Path) -> None:
    lab = Lab({"drift_salt": "another machine"})
    data = book(run("a", sampling=SamplingOptions(max_tokens=40)), run("b"))
    report = replayed(tmp_path, lab, data).report
    for form in FORMATS:
        assert "diverged" in render_report(report, form)
    assert json.loads(render_report(report, "json"))["mode"] == "replay"


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"drift_salt": "another machine"}, "`jupyter detllm rescore "),
        ({"drift_field": "software.vllm=0.33.0"}, "install the same vLLM version; or `jupyter "),
        ({"weights": "other"}, "executes the notebook instead"),
    ],
)
def test_the_advice_fits_a_replay(tmp_path: Path, options: dict[str, str], advice: str) -> None:
    data = book(run("a", sampling=SamplingOptions(max_tokens=40)))
    text = render_report(replayed(tmp_path, Lab(options), data).report, "text")
    assert advice in text
    # What was replayed stands in no file: promoting it is not one command.
    assert "makes the present side the reference" not in text


def test_a_folder_that_is_allowed_stands_for_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "mine"
    folder.mkdir(parents=True)
    found, _ = allowed_models([str(folder), "owner/name"])
    assert found == {
        "demo": "demo",
        str(folder): str(folder),
        "mine": str(folder),
        "owner/name": "owner/name",
    }


def test_no_folder_takes_the_name_of_the_demo_model(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    models, _ = allowed_models([str(tmp_path / "demo")])
    assert models["demo"] == "demo"
