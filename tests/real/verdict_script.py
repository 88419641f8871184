"""Makes stamps under one change each, in a process of its own; prints them as JSON.

Run as ``python verdict_script.py DEMO_FOLDER SCRATCH_FOLDER``. One engine after the
other in one process, since a fresh process for each would take minutes.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import jupyter_detllm as det
from jupyter_detllm.models import model_digests

PROMPT = "What is the capital of France? Answer in one sentence."
# Long and short ones together, since which kernels depend on the batch, and from which
# length on, differs from CPU to CPU.
LONG = (
    "The town library keeps a record of every visitor, and each evening the librarian "
    "writes one line about the day. "
) * 12
TOPICS = ("a bridge", "a river", "an owl", "a clock", "a train", "a garden", "a violin", "a map")
EIGHT = tuple(
    f"{LONG if index % 2 else ''}Write about {topic}: who uses it, where, and why it matters."
    for index, topic in enumerate(TOPICS)
)


def _stamp() -> dict[str, object]:
    stamp = det.last_stamp()
    if stamp is None:
        raise SystemExit("a generation left no stamp")
    return stamp.to_json()


def _one(prompt: str = PROMPT, seed: int | None = None) -> dict[str, object]:
    det.generate(prompt, name="one", temperature=0.8, max_tokens=12, seed=seed)
    return _stamp()


def _with(model: str, level: str = "repeatable") -> dict[str, object]:
    det.use(model, seed=42, level=level)
    try:
        return _one()
    finally:
        det.release()


def _changed(demo: Path, scratch: Path, name: str) -> Path:
    """Return a copy of the model with one file changed."""
    folder = scratch / name
    shutil.copytree(demo, folder)
    if name == "weights":
        path = folder / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1  # the lowest bit of one byte of one weight
        path.write_bytes(data)
    elif name == "tokenizer":
        path = folder / "tokenizer.json"
        path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    else:
        path = folder / "chat_template.jinja"
        path.write_text(path.read_text(encoding="utf-8") + "{# changed #}", encoding="utf-8")
    return folder


def _batch_effect() -> dict[str, object]:
    det.generate(list(EIGHT), name="eight", temperature=0, max_tokens=64)
    together = _stamp()
    alone = []
    for prompt in EIGHT:
        det.generate(prompt, name="eight", temperature=0, max_tokens=64)
        alone.append(_stamp())
    return {"together": together, "alone": alone}


def main(demo: Path, scratch: Path) -> dict[str, object]:
    """Return every stamp by the change it was made under."""
    det.use(str(demo), seed=42, level="repeatable")
    out: dict[str, object] = {
        "base": _one(),
        "prompt": _one(f"{PROMPT} Please."),
        "seed": _one(seed=43),
    }
    out.update(_batch_effect())
    out["again"] = _one()
    det.release()
    out["level"] = _with(str(demo), level="seeded")
    out["weights"] = _with(str(_changed(demo, scratch, "weights")))
    for name in ("tokenizer", "chat_template"):
        out[name] = _identity(_changed(demo, scratch, name))
    return out


def _identity(folder: Path) -> dict[str, str]:
    """Return the digests an engine reads of a folder; starting one more takes its time."""
    digests = model_digests(folder)
    parts = {name: getattr(digests, name) for name in ("weights", "tokenizer", "chat_template")}
    return {name: str(digest) for name, digest in parts.items()}


if __name__ == "__main__":
    stamps = main(Path(sys.argv[1]), Path(sys.argv[2]))
    Path(sys.argv[2], "stamps.json").write_text(json.dumps(stamps), encoding="utf-8")
