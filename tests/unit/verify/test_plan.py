"""Recorded requests grouped by engine: batches, bounds, and what needs no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from jupyter_detllm.core.generation import (
    GenerationRequest,
    Message,
    Prompt,
    PromptKind,
    Sampling,
    prompt_digest,
)
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import KEY, CellView, read_notebook
from jupyter_detllm.core.stamp import read_stamp
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.errors import UsageError
from jupyter_detllm.probes.software import Platform
from jupyter_detllm.verify.engine_settings import as_recorded
from jupyter_detllm.verify.plan import (
    FREE_BATCH,
    Key,
    Plan,
    check_total,
    excess,
    most_tokens,
    plan_replay,
)
from tests.builders import make_stamp, notebook, promoted, stamped_cell
from tests.fakes import Run
from tests.replaying import book

TWO = (Prompt.chat("One."), Prompt.chat("Two."))


def views(*books: Mapping[str, Any]) -> list[tuple[CellView, ...]]:
    return [read_notebook(data).cells for data in books]


def plan(*books: Mapping[str, Any], models: Mapping[str, str] | None = None) -> Plan:
    return plan_replay(views(*books), as_recorded(models or {"demo": "demo"}, {}, Platform.CPU))


def run(name: str, **options: Any) -> Run:
    prompts = options.pop("prompts", (Prompt.chat(f"About {name}."),))
    return Run(prompts=prompts, name=name, source=f"%%detgen {name}\n{name}", **options)


def test_cells_of_many_notebooks_share_one_engine() -> None:
    found = plan(book(run("a"), run("b")), book(run("c", root_seed=9)))
    assert len(found.groups) == 1
    assert [cell.key for cell in found.groups[0].cells] == [Key(0, 1), Key(0, 2), Key(1, 1)]
    assert found.settled == {}


@pytest.mark.parametrize(
    "other",
    [
        {"level": Level.SEEDED},
        {"options": {"dtype": "float32"}},
        {"options": {"enforce_eager": False}},
        {"options": {"weights": "other"}},
    ],
)
def test_another_level_setting_or_model_is_another_engine(other: dict[str, Any]) -> None:
    found = plan(book(run("a"), run("b", **other)), book(run("c"), run("d", **other)))
    keys = [[cell.key for cell in group.cells] for group in found.groups]
    assert keys == [[Key(0, 1), Key(1, 1)], [Key(0, 2), Key(1, 2)]]


@pytest.mark.parametrize("level", [Level.SEEDED, Level.REPEATABLE])
def test_a_recorded_call_stays_one_call(level: Level) -> None:
    split = run("a", prompts=TWO, level=level, calls=[[0], [1]])
    together = run("b", prompts=TWO, level=level)
    group = plan(book(split, together)).groups[0]
    assert not group.free
    assert [len(batch.requests) for batch in group.batches] == [1, 1, 2]
    recorded = [call.requests for cell in group.cells for call in cell.stamp.calls]
    assert [batch.requests for batch in group.batches] == recorded


def test_free_batches_are_filled_across_cells_and_notebooks() -> None:
    runs = [run(f"c{i}", prompts=TWO, level=Level.INVARIANT) for i in range(FREE_BATCH)]
    group = plan(book(*runs[:20]), book(*runs[20:])).groups[0]
    assert group.free
    assert [len(batch.requests) for batch in group.batches] == [FREE_BATCH, FREE_BATCH]
    for cell in group.cells:
        asked = cell.stamp.calls[0].requests
        places = cell.places[0]
        assert [group.batches[p.batch].requests[p.index] for p in places] == list(asked)


def test_a_free_batch_counts_completions() -> None:
    sampled = SamplingOptions(max_tokens=4, temperature=1.0)
    many = run("a", prompts=TWO, level=Level.INVARIANT, n=FREE_BATCH, sampling=sampled)
    assert [len(b.requests) for b in plan(book(many)).groups[0].batches] == [1, 1]


def test_the_root_seed_of_the_first_cell_starts_the_engine() -> None:
    group = plan(book(run("a", root_seed=3), run("b", root_seed=4))).groups[0]
    assert group.root_seed == 3


def settled(data: Mapping[str, Any], **options: Any) -> tuple[Verdict, str]:
    found = plan(data, **options)
    assert found.groups == ()
    (outcome,) = found.settled.values()
    return outcome.verdict, outcome.reasons[0]


def test_without_a_reference_there_is_nothing_to_compare() -> None:
    verdict, reason = settled(notebook(run("a").cell()))
    assert verdict is Verdict.UNSTAMPED
    assert reason == "no reference yet: nothing was verified"


def test_a_cleared_output_does_not_matter() -> None:
    data = book(run("a"))
    data["cells"][0]["outputs"] = []
    assert len(plan(data).cells) == 1


def test_a_changed_source_is_stale() -> None:
    data = book(run("a"))
    data["cells"][0]["source"] = "%%detgen a\nanother prompt"
    assert settled(data)[0] is Verdict.STALE


def test_a_broken_reference_is_an_error() -> None:
    data = book(run("a"))
    reference = data["cells"][0]["metadata"][KEY]["reference"]
    reference["root_seed"] = "17"
    assert settled(data)[0] is Verdict.ERROR


def test_a_prompt_that_was_not_stored_is_not_comparable() -> None:
    made = run("a")
    stored = read_stamp(made.stamp().to_json(store_prompt=False))
    cell = stamped_cell(made.source, stored)
    cell["outputs"][0]["metadata"][KEY] = stored.to_json(store_prompt=False)
    from jupyter_detllm.core.promotion import Update, promote

    verdict, reason = settled(promote(notebook(cell), Update.NEW)[0])
    assert verdict is Verdict.NOT_COMPARABLE
    assert reason.startswith("the prompt was not stored")


def test_a_lost_fingerprint_is_not_comparable() -> None:
    data = book(run("a"))
    del data["metadata"][KEY]["fingerprints"]
    verdict, reason = settled(data)
    assert verdict is Verdict.NOT_COMPARABLE
    assert "the recorded fingerprint is not in the notebook" in reason


def test_a_skipped_cell_is_not_run() -> None:
    data = book(run("a"))
    data["cells"][0]["metadata"]["tags"] = ["detllm-skip"]
    assert settled(data) == (Verdict.NOT_COMPARABLE, "skipped by its tag: not run")


def of_vllm(model_name: str) -> dict[str, Any]:
    source = "%%detgen haiku\nWrite a haiku."
    stamp = make_stamp(source, name="haiku", fields={"engine.name": "vllm"})
    named = replace(stamp, model=replace(stamp.model, name=model_name))
    return promoted(stamped_cell(source, named))


@pytest.mark.parametrize("name", ["/etc", "../secret", "owner/model", "fake"])
def test_a_model_is_loaded_only_if_it_is_allowed(name: str) -> None:
    verdict, reason = settled(of_vllm(name))
    assert verdict is Verdict.NOT_COMPARABLE
    assert reason.startswith(f"the model {name!r} is not allowed")


def test_what_is_loaded_is_the_users_text() -> None:
    group = plan(of_vllm("mine"), models={"mine": "~/models/mine"}).groups[0]
    assert group.model == "~/models/mine"
    assert plan(of_vllm("demo")).groups[0].model == "demo"
    assert ("load_format", "safetensors") in group.settings.options


def test_wide_beams_get_the_logprobs_they_ask_for() -> None:
    stamp = make_stamp(
        "%%detgen b\nx", name="b", fields={"engine.name": "vllm"}, sampling=Sampling(beam_width=16)
    )
    group = plan(promoted(stamped_cell("%%detgen b\nx", stamp))).groups[0]
    assert dict(group.settings.options)["max_logprobs"] == 32


def request(**changed: Any) -> GenerationRequest:
    sampling = Sampling(**changed.pop("sampling", {}))
    base = GenerationRequest(
        Prompt.chat("x"), prompt_digest([1]), sampling, (1,), 10, PromptKind.CHAT
    )
    return replace(base, **changed)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"prompt": Prompt.chat("x" * 1_000_001)}, "characters of prompt"),
        ({"prompt": Prompt(PromptKind.TEXT, text="x" * 1_000_001)}, "characters of prompt"),
        ({"prompt": Prompt(PromptKind.CHAT, (Message("user", ""),) * 1001)}, "messages"),
        ({"prompt_length": 2**40}, "prompt tokens"),
        ({"seeds": tuple(range(1025))}, "completions"),
        ({"sampling": {"max_tokens": 2**40}}, "new tokens"),
        ({"sampling": {"beam_width": 65}}, "beams"),
        ({"sampling": {"stop": ("a",) * 65}}, "stop strings"),
        ({"sampling": {"stop": ("a" * 1001,)}}, "characters in a stop string"),
        ({"sampling": {"stop_token_ids": (1,) * 1025}}, "stop token ids"),
        ({"sampling": {"temperature": float("nan")}}, "not a finite number"),
        ({"sampling": {"length_penalty": float("inf")}}, "not a finite number"),
    ],
)
def test_requests_are_bounded(changed: dict[str, Any], text: str) -> None:
    assert excess(request()) is None
    found = excess(request(**changed))
    assert found is not None
    assert text in found


def test_a_request_beyond_the_bounds_is_not_comparable() -> None:
    sampling = Sampling(stop=("a",) * 65)
    stamp = make_stamp("%%detgen b\nx", name="b", sampling=sampling)
    verdict, reason = settled(promoted(stamped_cell("%%detgen b\nx", stamp)))
    assert verdict is Verdict.NOT_COMPARABLE
    assert reason == "it asks for 65 stop strings, more than the 64 taken from a notebook"


def test_the_total_is_asked_for() -> None:
    sampled = request(seeds=(1, 2, 3), sampling={"max_tokens": 40, "temperature": 1.0})
    beams = request(sampling={"max_tokens": 40, "beam_width": 4})
    assert [most_tokens(sampled), most_tokens(beams)] == [150, 200]
    check_total([150, 200], 350)
    with pytest.raises(UsageError, match=r"up to 350 tokens.*--max-tokens-total 350"):
        check_total([150, 200], 349)
