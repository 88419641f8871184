from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from typing import Any

import jsonschema
import pytest

from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import CellView
from jupyter_detllm.core.stamp import ModelIdentity, Stamp
from jupyter_detllm.core.verdict import Policy
from jupyter_detllm.errors import UsageError
from jupyter_detllm.probes.software import Platform
from jupyter_detllm.render.bisect import bisect_json, bisect_text
from jupyter_detllm.verify.bisect import BisectOptions, bisect_cell
from jupyter_detllm.verify.bisect_plan import BisectReport, Conclusion, Result
from jupyter_detllm.verify.job import JobResult
from tests.bisecting import Machine, view
from tests.builders import with_fields

ALONE = ((0,), (1,), (2,))
SCHEMA = json.loads(
    (files("jupyter_detllm") / "schemas" / "bisect-1.schema.json").read_text(encoding="utf-8")
)


def bisect(cell: CellView, machine: Machine, **options: Any) -> BisectReport:
    return bisect_cell(
        "a.ipynb", cell, BisectOptions(**options), platform=Platform.CPU, runner=machine
    )


def names(report: BisectReport) -> list[str]:
    return [trial.name for trial in report.trials]


def test_an_unchanged_run_that_equals_the_reference_ends_it() -> None:
    machine = Machine()
    stamp = machine.record()
    report = bisect(view(stamp, stamp), machine)
    assert (report.finding, report.exit_code) == (Conclusion.EQUAL, 0)
    assert names(report) == ["unchanged", "unchanged, again"]
    assert report.repeatable is True


def test_without_an_output_the_recorded_settings_are_run() -> None:
    machine = Machine()
    report = bisect(view(machine.record(threads=5), None), machine)
    assert report.finding is Conclusion.EQUAL
    assert machine.environs[0]["OMP_NUM_THREADS"] == "5"


def test_the_recorded_thread_count_is_tried_first_and_named() -> None:
    machine = Machine()
    report = bisect(view(machine.record(threads=4), machine.record(threads=2)), machine)
    assert (report.finding, report.exit_code) == (Conclusion.CAUSE, 1)
    assert names(report)[2:] == ["torch.threads as recorded (4)"]
    assert [environ["OMP_NUM_THREADS"] for environ in machine.environs] == ["2", "2", "4"]
    assert "OMP_NUM_THREADS" in report.causes[0].adopt


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enable_prefix_caching": True}, "engine.prefix_cache as recorded (False)"),
        ({"dtype": "float16"}, "engine.dtype as recorded (bfloat16)"),
        ({"max_num_batched_tokens": 64}, "engine.max_num_batched_tokens as recorded (4096)"),
        ({"enforce_eager": False}, "engine.compile as recorded (eager)"),
        ({"attention_backend": "OTHER"}, "engine.attention_backend as recorded (FAKE_ATTN)"),
        ({"tensor_parallel_size": 2}, "engine.tensor_parallel as recorded (1)"),
    ],
)
def test_each_recorded_setting_is_put_back(options: dict[str, Any], named: str) -> None:
    machine = Machine()
    report = bisect(view(machine.record(), machine.record(options)), machine)
    assert [cause.name for cause in report.causes] == [named]
    assert len(report.trials) == 3


def test_two_causes_need_all_recorded_settings_together() -> None:
    machine = Machine()
    actual = machine.record({"dtype": "float16", "max_num_seqs": 8})
    report = bisect(view(machine.record(), actual), machine)
    assert names(report)[2:] == [
        "engine.dtype as recorded (bfloat16)",
        "engine.max_num_seqs as recorded (256)",
        "all recorded settings together",
    ]
    assert report.causes[0].name == "all recorded settings together"


def test_a_batch_effect_is_named_by_the_recorded_batch() -> None:
    machine = Machine({"batch_sensitive": True})
    cell = view(machine.record(groups=ALONE), machine.record())
    report = bisect(cell, machine)
    assert report.causes[0].name == "engine.batch as recorded (3 requests together in 3 calls)"
    assert [len(call.requests) for call in machine.jobs[-1].batches] == [1, 1, 1]


def test_alone_is_tried_before_what_costs_more() -> None:
    machine = Machine({"batch_sensitive": True})
    # Recorded together on a machine without the effect: no field differs.
    cell = view(Machine().record(), machine.record())
    report = bisect(cell, machine)
    assert names(report)[2:] == ["alone"]
    assert report.causes[0].adopt


def test_nothing_helps_on_a_machine_that_drifts_by_itself() -> None:
    machine = Machine({"drift_salt": "other"})
    report = bisect(view(Machine().record(), machine.record()), machine)
    assert (report.finding, report.exit_code) == (Conclusion.NO_CAUSE, 1)
    assert {"alone", "float32", "one-sequence", "compiled"} <= set(names(report))
    assert not report.causes


def test_what_cannot_be_put_back_is_listed() -> None:
    machine = Machine({"drift_field": "software.torch=9.9"})
    report = bisect(view(Machine().record(), machine.record()), machine)
    assert [diff.name for diff in report.out_of_reach] == ["software.torch"]
    assert "software.torch: 2.13.0+cpu -> 9.9" in bisect_text(report)


def test_the_recorded_level_is_a_setting() -> None:
    machine = Machine()
    recorded = machine.record(level=Level.SEEDED)
    cell = view(recorded, machine.record({"dtype": "float16"}))
    report = bisect(cell, machine)
    assert names(report)[2] == "level as recorded (seeded)"
    assert machine.jobs[2].spec.level == "seeded"


def flaky(*salted: int) -> Machine:
    """Return a machine whose runs of these numbers come out otherwise."""

    def before(number: int, job: Any) -> JobResult | None:
        if number not in salted:
            return None
        return Machine({"drift_salt": str(number)})(job, {"OMP_NUM_THREADS": "2"}, 1.0)

    return Machine(before=before)


def test_unchanged_runs_that_differ_are_told_and_what_is_equal_is_run_twice() -> None:
    machine = flaky(1)
    stamp = Machine().record()
    report = bisect(view(stamp, stamp), machine, only=("alone", "float32"))
    assert report.repeatable is False
    assert names(report)[2:] == ["alone", "alone, again"]
    assert report.finding is Conclusion.CAUSE
    assert "two unchanged runs differ" in bisect_text(report)


def test_an_equal_run_by_luck_is_no_cause() -> None:
    stamp = Machine().record()
    report = bisect(view(stamp, stamp), flaky(1, 4), only=("alone",))
    assert names(report)[2:] == ["alone", "alone, again"]
    assert report.finding is Conclusion.NO_CAUSE


def test_bitwise_sees_what_tokens_do_not() -> None:
    machine = Machine()
    cell = view(machine.record(), machine.record())
    hidden = Machine({"drift_evidence": True})
    assert bisect(cell, hidden).finding is Conclusion.EQUAL
    report = bisect(cell, hidden, policy=Policy.parse("bitwise"), only=("alone",))
    assert report.finding is Conclusion.NO_CAUSE
    assert report.trials[0].detail.startswith("logprobs by up to ")


def test_the_user_chooses_what_is_tried() -> None:
    machine = Machine({"drift_salt": "other"})
    report = bisect(view(Machine().record(), machine.record()), machine, only=("float32",))
    assert names(report)[2:] == ["float32"]
    assert machine.jobs[-1].spec.options["dtype"] == "float32"


def test_every_goes_on_after_the_first() -> None:
    machine = Machine({"batch_sensitive": True})
    cell = view(machine.record(groups=ALONE), machine.record())
    report = bisect(cell, machine, every=True)
    assert report.causes[0].name.startswith("engine.batch as recorded")
    assert [trial.name for trial in report.causes[1:]] == ["level-invariant"]
    assert len(report.trials) > 4
    # Each alone is what was recorded: it is not run again.
    assert "alone" not in names(report)


def test_one_prompt_is_alone_already() -> None:
    machine = Machine({"drift_salt": "other"})
    recorded, actual = (m.record(groups=((0,),)) for m in (Machine(), machine))
    report = bisect(view(recorded, actual), machine, only=("alone", "float32"))
    assert names(report)[2:] == ["float32"]


def test_options_of_the_user_are_in_every_run() -> None:
    machine = Machine({"drift_salt": "other"})
    bisect(view(Machine().record(), machine.record()), machine, options={"max_model_len": 999})
    assert {job.spec.options["max_model_len"] for job in machine.jobs} == {999}


def test_a_setting_that_cannot_start_is_a_failed_run_and_no_end() -> None:
    def before(number: int, job: Any) -> JobResult | None:
        return JobResult(problem="no such backend") if number == 3 else None

    machine = Machine({"drift_salt": "other"}, before=before)
    report = bisect(view(Machine().record(), machine.record()), machine, only=("alone", "float32"))
    assert [trial.result for trial in report.trials[2:]] == [Result.FAILED, Result.DIFFERS]
    assert report.trials[2].detail == "no such backend"
    assert report.finding is Conclusion.NO_CAUSE


def test_an_unchanged_run_that_fails_ends_it() -> None:
    machine = Machine(before=lambda number, job: JobResult(problem="out of memory"))
    stamp = Machine().record()
    report = bisect(view(stamp, stamp), machine)
    assert (report.finding, report.exit_code) == (Conclusion.FAILED, 2)
    assert "out of memory" in report.reason


def test_another_model_is_not_compared() -> None:
    machine = Machine(before=lambda number, job: JobResult(other=ModelIdentity("demo")))
    stamp = Machine().record()
    report = bisect(view(stamp, stamp), machine)
    assert (report.finding, report.exit_code) == (Conclusion.NOT_COMPARABLE, 3)
    assert len(report.trials) == 1


def test_an_interrupt_keeps_what_was_done() -> None:
    def before(number: int, job: Any) -> JobResult | None:
        if number == 3:
            raise KeyboardInterrupt
        return None

    machine = Machine({"drift_salt": "other"}, before=before)
    report = bisect(view(Machine().record(), machine.record()), machine)
    assert (report.finding, report.exit_code) == (Conclusion.INTERRUPTED, 130)
    assert len(report.trials) == 2


def stored_without_prompts(stamp: Stamp) -> Stamp:
    call = stamp.calls[0]
    requests = tuple(replace(request, prompt=None) for request in call.requests)
    return replace(stamp, calls=(replace(call, requests=requests),))


def without_evidence(stamp: Stamp) -> Stamp:
    call = stamp.calls[0]
    generations = tuple(replace(generation, evidence=None) for generation in call.generations)
    return replace(stamp, calls=(replace(call, generations=generations),))


def test_what_stands_against_it_is_said_and_nothing_is_run() -> None:
    machine = Machine()
    stamp = machine.record()
    bare = view(stored_without_prompts(stamp), stored_without_prompts(stamp))
    other = view(stamp, machine.record(temperature=0.7))
    unpromoted = replace(view(stamp, stamp), reference=None)
    for cell, words in (
        (bare, "only digests of its prompts"),
        (other, "requests differ"),
        (unpromoted, "no reference"),
        (view(stamp, Machine({"weights": "x"}).record()), "another model"),
    ):
        report = bisect(cell, machine)
        assert (report.finding, report.exit_code) == (Conclusion.NOT_COMPARABLE, 3)
        assert words in report.reason
    blind = without_evidence(stamp)
    report = bisect(view(blind, blind), machine, policy=Policy.parse("bitwise"))
    assert "no evidence" in report.reason
    broken = bisect(replace(view(stamp, stamp), problems=("a problem",)), machine)
    assert broken.exit_code == 2
    assert not machine.jobs


def test_a_notebook_never_chooses_the_model() -> None:
    machine = Machine()
    stamp = machine.record()
    assert stamp.fingerprint is not None
    model = replace(stamp.model, name="somebody/evil")
    fingerprint = with_fields(stamp.fingerprint, {"engine.name": "vllm"})
    theirs = replace(
        stamp, model=model, fingerprint=fingerprint, fingerprint_digest=fingerprint.digest
    )
    with pytest.raises(UsageError, match="--model somebody/evil"):
        bisect(view(theirs, theirs), machine)
    assert not machine.jobs


def test_a_notebook_does_not_choose_how_much_is_computed() -> None:
    machine = Machine()
    stamp = machine.record()
    with pytest.raises(UsageError, match="--max-tokens-total"):
        bisect(view(stamp, stamp), machine, tokens_total=50)
    assert not machine.jobs


def test_part_of_a_recorded_batch_is_bisected_on_what_both_hold() -> None:
    machine = Machine({"batch_sensitive": True})
    together = machine.record()
    only = machine.calls(machine.engine({}, "2", Level.REPEATABLE), together.requests[:1], [[0]])
    report = bisect(view(together, replace(together, calls=only)), machine)
    assert report.causes[0].name == "engine.batch as recorded (3 requests together)"
    assert [len(call.requests) for call in machine.jobs[0].batches] == [1]
    assert [call.batch for call in machine.jobs[2].batches] == [together.calls[0].batch]


def test_json_holds_what_text_shows() -> None:
    machine = Machine({"batch_sensitive": True})
    report = bisect(view(machine.record(groups=ALONE), machine.record()), machine)
    data = json.loads(json.dumps(bisect_json(report)))
    jsonschema.validate(data, SCHEMA)
    assert data["schema"] == "detllm.bisect/1"
    assert data["causes"] == [report.causes[0].name]
    text = bisect_text(report)
    assert all(trial["name"][:40] in text for trial in data["trials"])
    assert data["exit_code"] == 1


def test_nothing_of_a_notebook_reaches_the_terminal_raw() -> None:
    report = BisectReport(
        "a\x1b[2J.ipynb", "cell 1 (\u202e)", Policy(), Conclusion.FAILED, "bad\nline"
    )
    assert "\x1b" not in bisect_text(report)
    assert bisect_text(report).count("\n") == 3
