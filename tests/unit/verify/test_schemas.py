from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import fastjsonschema
import jsonschema
import pytest
from referencing import Registry, Resource

from jupyter_detllm.core.fingerprint import MAX_FIELDS, Fingerprint
from jupyter_detllm.core.generation import Prompt, PromptKind, Sampling
from jupyter_detllm.core.notebook import KEY
from jupyter_detllm.core.packages import keep_package_list
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.stamp import MAX_CALLS, USUAL_PARAMETERS
from jupyter_detllm.engines.base import SamplingOptions
from tests.builders import notebook
from tests.fakes import MACHINE, Run

NAMES = ("stamp", "stamp-1", "cell", "notebook", "notebook-1", "fingerprint")
CHAT = Prompt.chat("Hello", "Be brief.")
RUNS = {
    "greedy": Run(),
    "sampled": Run(prompts=(CHAT, CHAT), sampling=SamplingOptions(temperature=0.9), n=3, name="a"),
    "text": Run(prompts=(Prompt(PromptKind.TEXT, text="Once"),), seed=7),
    "tokens": Run(prompts=(Prompt(PromptKind.TOKENS, token_ids=(1, 2)),), root_seed=2**63 - 1),
    "beams": Run(sampling=SamplingOptions(beam_width=2, length_penalty=1e-7), n=2),
    "no evidence": Run(options={"evidence": False}),
    "long": Run(
        sampling=SamplingOptions(max_tokens=4200, ignore_eos=True), options={"max_model_len": 8192}
    ),
}


def schema(name: str) -> dict[str, Any]:
    path = files("jupyter_detllm") / "schemas" / f"{versioned(name)}.schema.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


LATEST = {"notebook": 2, "stamp": 2}


def versioned(name: str) -> str:
    """Return the name of the latest form, unless `name` says which."""
    return name if "-" in name else f"{name}-{LATEST.get(name, 1)}"


def by_uri(uri: str) -> dict[str, Any]:
    return schema(uri.split("#")[0].rsplit("/", 1)[-1].removesuffix(".schema.json"))


REGISTRY: Registry[Any] = Registry(
    retrieve=lambda uri: Resource.from_contents(by_uri(uri))  # type: ignore[call-arg]
)


def validator(name: str) -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(schema(name), registry=REGISTRY)


def validate(name: str, data: object) -> None:
    stored = json.loads(json.dumps(data))
    validator(name).validate(stored)
    fastjsonschema.compile(schema(name), handlers={"https": by_uri})(stored)


def promoted(run: Run) -> dict[str, Any]:
    book, _ = promote(notebook(run.cell()), Update.NEW)
    return book


@pytest.mark.parametrize("name", NAMES)
def test_the_schemas_are_schemas(name: str) -> None:
    jsonschema.Draft7Validator.check_schema(schema(name))
    form = versioned(name)
    assert schema(name)["$id"] == f"https://detllm.invalid/{form}.schema.json"
    assert schema(name)["properties"]["schema"] == {"const": f"detllm.{form.replace('-', '/')}"}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_everything_stored_is_valid(run: Run) -> None:
    stamp = run.stamp()
    validate("stamp", stamp.to_json())
    validate("stamp", stamp.to_json(store_prompt=False))
    validate("stamp-1", stamp.as_first().to_json())
    assert stamp.fingerprint is not None
    validate("fingerprint", stamp.fingerprint.to_json())
    book = promoted(run)
    validate("cell", book["cells"][0]["metadata"][KEY])
    validate("notebook", book["metadata"][KEY])


def test_a_stored_package_list_is_valid() -> None:
    packages = ("numpy==2.3.5",)
    book = keep_package_list(promoted(Run()), packages)
    validate("notebook", book["metadata"][KEY])
    assert list(undescribed(book["metadata"][KEY], schema("notebook"), schema("notebook"))) == []


def test_a_replaced_reference_is_valid() -> None:
    book = promoted(Run())
    book["cells"][0] = {**book["cells"][0], "outputs": Run(root_seed=1).cell()["outputs"]}
    again, _ = promote(book, Update.ALL)
    meta = again["cells"][0]["metadata"][KEY]
    assert "previous" in meta
    validate("cell", meta)
    validate("notebook", again["metadata"][KEY])


Schema = dict[str, Any]


def resolved(node: Schema, root: Schema) -> tuple[Schema, Schema]:
    """Return the schema behind references, and the file it is in."""
    while "$ref" in node or "allOf" in node or "anyOf" in node:
        inner = node.get("allOf", node.get("anyOf"))
        if "$ref" not in node and "$ref" not in (inner[0] if "allOf" in node else {}):
            node = inner[0] if "allOf" in node else inner[-1]  # the latest form
            continue
        target = node["$ref"] if "$ref" in node else node["allOf"][0]["$ref"]
        if not target.startswith("#"):
            root = by_uri(target)
        node = root["definitions"][target.rsplit("/", 1)[1]] if "#" in target else root
    return node, root


def undescribed(data: object, node: Schema, root: Schema) -> Iterator[str]:
    """Yield keys of `data` that the schema does not name."""
    node, root = resolved(node, root)
    if isinstance(data, dict):
        properties, rest = node.get("properties", {}), node.get("additionalProperties")
        for key, value in data.items():
            inner = properties.get(key, rest)
            if inner is None:
                yield key
            else:
                yield from undescribed(value, inner, root)
    elif isinstance(data, list):
        for item in data:
            yield from undescribed(item, node["items"], root)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_every_stored_key_is_described(run: Run) -> None:
    stored: Any = run.stamp().to_json()
    assert list(undescribed(stored, schema("stamp"), schema("stamp"))) == []
    book = promoted(run)
    for name, meta in (("cell", book["cells"][0]["metadata"]), ("notebook", book["metadata"])):
        assert list(undescribed(meta[KEY], schema(name), schema(name))) == []
    stored["calls"][0]["requests"][0]["forgotten"] = 1
    assert list(undescribed(stored, schema("stamp"), schema("stamp"))) == ["forgotten"]


def test_parameters_and_limits_are_those_of_the_code() -> None:
    params = schema("stamp")["definitions"]["params"]
    assert list(params["properties"]) == list(Sampling.__slots__)
    usual = {
        key: value["default"] for key, value in params["properties"].items() if "default" in value
    }
    assert usual == USUAL_PARAMETERS
    assert {*usual, *params["required"]} == {*Sampling.__slots__}
    assert schema("stamp")["properties"]["calls"]["maxItems"] == MAX_CALLS
    assert schema("fingerprint")["definitions"]["fields"]["maxProperties"] == MAX_FIELDS


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("schema",), "detllm.stamp/1"),
        (("level",), "best"),
        (("source",), "sha256:x"),
        (("root_seed",), 7),
        (("root_seed",), "-7"),
        (("calls", 0, "requests", 0, "params", "temperature"), 0.7),
        (("calls", 0, "requests", 0, "params", "top_p"), "one"),
        (("calls", 0, "requests", 0, "kind"), "image"),
        (("calls", 0, "generations", 0, "token_ids"), [1]),
        (("calls", 0, "generations", 0, "offsets"), "5:AAAA"),
        (("calls", 0, "generations", 0, "evidence", "chosen"), "!"),
        (("fingerprint", "numerics"), {"torch.threads": 0.5}),
        (("model", "weights"), "none"),
    ],
)
def test_the_stamp_schema_refuses(path: tuple[str | int, ...], wrong: object) -> None:
    data: Any = copy.deepcopy(Run().stamp().to_json())
    box = data
    for key in path[:-1]:
        box = box[key]
    box[path[-1]] = wrong
    with pytest.raises(jsonschema.ValidationError):
        validator("stamp").validate(data)
    with pytest.raises(fastjsonschema.JsonSchemaException):
        fastjsonschema.compile(schema("stamp"), handlers={"https": by_uri})(data)


def test_a_reference_has_neither_a_fingerprint_nor_a_previous() -> None:
    meta = promoted(Run())["cells"][0]["metadata"][KEY]
    for key in ("fingerprint", "previous"):
        wrong = {
            **meta,
            "reference": {**meta["reference"], key: Run().stamp().to_json()["fingerprint"]},
        }
        with pytest.raises(jsonschema.ValidationError):
            validator("cell").validate(wrong)


def test_what_the_schema_allows_in_a_fingerprint_the_reader_reads() -> None:
    data = {"schema": "detllm.fingerprint/1", "numerics": dict(MACHINE), "unknown": [1]}
    validate("fingerprint", data)
    assert Fingerprint.from_json(data).numerics == MACHINE
