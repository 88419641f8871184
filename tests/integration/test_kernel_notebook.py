"""Notebooks run by nbclient in a real kernel, on the fake engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jupyter_detllm.core.notebook import KEY, RUN_KEY
from jupyter_detllm.core.stamp import source_digest
from tests.builders import promoted, stamped_cell
from tests.kernels import LOAD, USE, errors, execute, stamps, text, without_run

PAIR = "%%detgen pair --temperature 0.8 --max-tokens 10\nOne colour\n---\nOne colour\n"


def test_a_cell_leaves_its_text_and_one_stamp() -> None:
    cells = execute(LOAD, USE, PAIR, "%detllm status", "%detllm stamps")
    outputs = cells[2]["outputs"]
    assert [o["output_type"] for o in outputs] == ["display_data", "display_data"]
    (stamp,) = stamps(cells[2])
    assert stamp.name == "pair"
    assert stamp.source == source_digest(PAIR)
    shown = text(cells[2])
    assert list(outputs[0]["data"]) == ["text/plain", "text/html"]
    assert outputs[0]["metadata"] == {}
    for generation in stamp.generations:
        assert generation.text in shown
    assert shown.startswith("[prompt 1/2]\n")
    assert set(outputs[1]["data"]) == {"text/plain", "text/html"}
    assert set(outputs[1]["metadata"]) == {KEY, RUN_KEY}
    run = outputs[1]["metadata"][RUN_KEY]
    assert len(run["run_id"]) == 32
    assert run["run_id"] not in json.dumps([o["data"] for o in outputs])
    status = text(cells[3])
    assert f"level    {stamp.level}: {stamp.level.promise}" in status
    assert f"engine   ready: fake, level {stamp.level}" in status
    assert "PYTHONHASHSEED" in status
    assert "too late" not in status
    assert text(cells[4]) == (
        f"stamped cells\n  pair  {stamp.generation_digest.short}  20 tokens  not compared"
    )


NOTEBOOK = (
    LOAD,
    "%detllm --seed 42",
    "%detllm use fake",
    PAIR,
    "%%detgen --temperature 0\nGreedy\n",
    "import jupyter_detllm as det\nfirst = det.generate(['a', 'b'], name='api', max_tokens=5)\n"
    "second = det.generate('a', max_tokens=5)\n[g.text for g in first + second]",
    "%detllm status",
    "%detllm stamps",
    "%detllm show --static",
    "%%detgen --temprature 1\nx",
    "%detllm release",
)


def test_two_fresh_kernels_put_out_the_same_bytes() -> None:
    execute(*NOTEBOOK[:3])  # from then on the self-test is remembered, and status says so
    once, again = execute(*NOTEBOOK), execute(*NOTEBOOK)
    for first, second in zip(once, again, strict=True):
        assert first["outputs"] or first["source"] == LOAD
        assert json.dumps(without_run(first)) == json.dumps(without_run(second))
    assert [len(stamps(cell)) for cell in once] == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    assert (
        once[3]["outputs"][-1]["metadata"][RUN_KEY]["run_id"]
        != (again[3]["outputs"][-1]["metadata"][RUN_KEY]["run_id"])
    )


def test_a_slow_engine_leaves_nothing_of_its_progress() -> None:
    cells = execute(LOAD, "%detllm use fake delay_ms=60 start_delay_ms=600", PAIR)
    quick = execute(LOAD, "%detllm use fake delay_ms=0 start_delay_ms=0", PAIR)
    assert text(cells[1], 1).replace("=600", "=0").replace("=60", "=0") == text(quick[1], 1)
    assert [len(cell["outputs"]) for cell in cells] == [0, 2, 2]
    assert without_run(cells[2]) == without_run(quick[2])


def test_a_stamp_survives_capture_and_output_widgets() -> None:
    cells = execute(
        LOAD,
        USE,
        "%%capture kept\nimport jupyter_detllm as det\n"
        "get_ipython().run_cell_magic('detgen', 'inner --max-tokens 5', 'Hello')\nprint('x')",
        "print([o.data['text/plain'] for o in kept.outputs], kept.stdout.strip())",
        "import ipywidgets\nout = ipywidgets.Output()\nwith out:\n"
        "    get_ipython().run_cell_magic('detgen', 'widget --max-tokens 5', 'Hello')",
        "[o['data']['text/plain'] for o in out.outputs]",
    )
    (inner,), (widget,) = stamps(cells[2]), stamps(cells[4])
    assert (inner.name, widget.name) == ("inner", "widget")
    assert inner.source == source_digest(cells[2]["source"])
    assert len(cells[2]["outputs"]) == len(cells[4]["outputs"]) == 1
    assert cells[3]["outputs"][0]["text"] == f"{[inner.generations[0].text]} x\n"
    assert text(cells[5]) == f"{[widget.generations[0].text]}"


def test_a_mistake_is_one_line_and_stops_run_all() -> None:
    from nbclient.exceptions import CellExecutionError

    cells = execute(LOAD, USE, "%%detgen --temprature 0\nx", "%detllm stauts", "%%detgen\n \n")
    assert errors(cells[2]) == [
        "UsageError: %%detgen has no option '--temprature'; did you mean --temperature? "
        "Try: %%detgen?"
    ]
    assert errors(cells[3]) == [
        "UsageError: %detllm has no verb 'stauts'; did you mean status? Try: %detllm?"
    ]
    assert errors(cells[4]) == [
        "RequestError: the cell has no prompt; expected text below the %%detgen line. "
        "Try: %%detgen?"
    ]
    assert all(len(cell["outputs"]) == 1 for cell in cells[2:])
    with pytest.raises(CellExecutionError):
        execute(LOAD, USE, "%%detgen --temprature 0\nx", allow_errors=False)


def test_a_failed_engine_and_a_failed_cell_leave_no_stamp() -> None:
    cells = execute(
        LOAD,
        "%detllm use fake --level repeatable fail_at=3",
        "%%detgen\nHello",
        "%detllm release",
        USE,
        "import jupyter_detllm as det\ndet.generate('x', max_tokens=3)\n1 / 0",
        "'no call here'",
        "%%detgen --max-tokens 3\nHello",
    )
    assert errors(cells[2]) == [
        "EngineError: the fake engine failed at token 3: fail_at was asked for"
    ]
    assert text(cells[2]) == "detllm: no text was generated"
    assert [len(stamps(cell)) for cell in cells] == [0, 0, 0, 0, 0, 0, 0, 1]
    assert cells[5]["outputs"][0]["ename"] == "ZeroDivisionError"


def test_a_failed_start_says_so_and_the_next_one_works() -> None:
    cells = execute(LOAD, "%detllm use fake fail_start=true", USE, "%%detgen --max-tokens 3\nHi")
    assert errors({"outputs": cells[1]["outputs"][2:]}) == [
        "EngineStartError: the fake engine did not start: fail_start was asked for"
    ]
    assert text(cells[1], 1) == "engine: none was started"
    assert len(stamps(cells[3])) == 1


def test_out_fill_and_no_variable_expansion() -> None:
    cells = execute(
        LOAD,
        USE,
        "country = 'France'",
        "%%detgen filled --fill --max-tokens 4 --out answers\n"
        "The capital of {country} {{x}} $country",
        "%%detgen verbatim --max-tokens 4\nThe capital of {country} $country",
        "(len(answers), type(answers[0]).__name__, answers[0].text)",
        "%%detgen --fill\n{nation}",
    )
    (filled,), (verbatim,) = stamps(cells[3]), stamps(cells[4])
    assert filled.requests[0].prompt is not None
    assert filled.requests[0].prompt.messages[-1].content == "The capital of France {x} $country"
    assert verbatim.requests[0].prompt is not None
    assert verbatim.requests[0].prompt.messages[-1].content == "The capital of {country} $country"
    assert text(cells[5]) == repr((1, "Generation", filled.generations[0].text))
    assert errors(cells[6])[0].startswith("RequestError: the prompt names {nation}")


def test_no_engine_object_and_no_result_in_the_cell() -> None:
    cells = execute(
        LOAD,
        USE,
        "import jupyter_detllm as det\ndet.use('fake')",
        "%%detgen --max-tokens 2\nHi",
        "sorted(Out)",
    )
    assert cells[2]["outputs"] == []
    assert text(cells[4]) == "[]"


def test_the_api_stamps_without_the_extension() -> None:
    cells = execute(
        "import jupyter_detllm as det\ndet.use('fake', seed=3)\n"
        "g = det.generate('x', max_tokens=4)",
        "print(det.last_stamp().root_seed, det.last_stamp().generations == tuple(g))",
        "h = det.generate('x', max_tokens=4)",
    )
    assert cells[1]["outputs"][0]["text"] == "3 True\n"
    (first,), (second,) = stamps(cells[0]), stamps(cells[2])
    assert first.generations == second.generations
    assert first.source == source_digest(cells[0]["source"])


def test_emit_puts_texts_and_stamps_out_again() -> None:
    cells = execute(
        LOAD,
        USE,
        "%detllm stamps --emit",
        PAIR,
        "%%detgen --no-store-prompt --max-tokens 3\nSecret one\n---\nSecret two",
        "%detllm stamps --emit pair",
        "%detllm stamps --emit",
        "%detllm stamps --emit piar",
        "%detllm stamps --forget pair",
        "%detllm stamps",
    )
    assert text(cells[2]) == "stamped cells: none yet"
    assert cells[5]["outputs"] == cells[3]["outputs"]
    assert cells[6]["outputs"] == cells[3]["outputs"] + cells[4]["outputs"]
    assert "One colour" in cells[3]["outputs"][0]["data"]["text/html"]
    assert "Secret" not in json.dumps(cells[4]["outputs"])
    assert "did you mean pair?" in errors(cells[7])[0]
    assert text(cells[8]) == text(cells[9])
    assert text(cells[9]).startswith("stamped cells\n  #2")


def test_check_says_what_the_saved_file_holds(tmp_path: Path) -> None:
    saved = tmp_path / "saved.ipynb"
    saved.write_text(json.dumps(promoted(stamped_cell())))
    cells = execute(
        LOAD,
        "%detllm check",
        f"%detllm check {saved}",
        f"import os\nos.environ['JPY_SESSION_NAME'] = {str(saved)!r}",
        "%detllm check --policy bitwise",
        f"%detllm check {tmp_path / 'none.ipynb'}",
        "%detllm check --policy best",
    )
    assert errors(cells[1]) == [
        "UsageError: the front end does not report which file this notebook is; "
        "expected its name. Try: %detllm check FILE.ipynb"
    ]
    for cell in (cells[2], cells[4]):
        assert "cell 1 (haiku): recorded" in text(cell)
    assert "none.ipynb" in text(cells[5])
    assert "'best' is not a policy" in errors(cells[6])[0]


def test_defaults_from_config_and_the_line_wins() -> None:
    cells = execute(
        LOAD,
        "%config DetLLM.seed = 11\n%config DetLLM.model = 'fake'\n%config DetLLM.max_tokens = 3\n"
        "%config DetLLM.temperature = 0.5\n%config DetLLM.store_prompt = False",
        "%%detgen a\nHi",
        "%%detgen b --max-tokens 5 --temperature 0\nHi",
    )
    (a,), (b,) = stamps(cells[2]), stamps(cells[3])
    assert (a.root_seed, a.requests[0].prompt) == (11, None)
    assert (a.requests[0].sampling.max_tokens, a.requests[0].sampling.temperature) == (3, 0.5)
    assert (b.requests[0].sampling.max_tokens, b.requests[0].sampling.temperature) == (5, 0.0)
    assert "engine ready: fake" in text(cells[2], 1)
