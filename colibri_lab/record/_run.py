"""`lab.record.transformers`: inputs in, traces out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colibri_lab.progress import Progress, shown
from colibri_lab.record._checkpoint import Opened, open_model
from colibri_lab.record._family import Anatomy, anatomy
from colibri_lab.record._inputs import sequences
from colibri_lab.record._libraries import libraries
from colibri_lab.record._plan import wanted
from colibri_lab.record._store import Store
from colibri_lab.record._taps import Pass, sources
from colibri_lab.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["transformers"]


def transformers(
    model: Any,
    inputs: Any,
    *,
    capture: str | Sequence[str] = "moe",
    dtype: Any = None,
    device: str | None = None,
    progress: Progress = None,
) -> Trace | list[Trace]:
    """Runs a model of Hugging Face transformers on `inputs` and returns what passed through it.

    `model`: a loaded model of the families mixtral, qwen2_moe, qwen3_moe, olmoe, or the folder of a checkpoint (loaded
    for this call, on the CPU or `device`).
    `inputs`: a text (with the tokenizer's special tokens, as `session.feed` in an empty session), token ids, or what a
    tokenizer returns. Padding that `attention_mask` marks, left or right, is taken out before the model runs: positions
    begin at 0 with the first token, and no row of the trace is padding. A list of texts or several rows give a list of
    traces, one per sequence, each run alone; one row gives one Trace.
    `capture`: "routing", "moe", "all" or tap patterns, as for sessions; `attn.k` and `attn.v` come with "all", and
    `attn.weights`, only when named, are those that eager attention returns, else computed from q, k and the mask in
    float32.
    `dtype`: for a folder the arithmetic, None for float32 (the file's values widened); a loaded model keeps its own.

    The arrays are float32; narrower values are widened exactly, and `meta["arithmetic"]` names the model's dtype.
    Expert rows are those that the model used, seen in its matrix products; `meta["library"]["expert_rows"]` says
    "recomputed" where its implementation hides them. The model is put in eval mode for the call; it gives the same
    output bytes as without recording, and is afterwards as it was, also after an error or Ctrl-C.

    Raises UnsupportedError without torch or transformers, for another family, and when a module that was to be
    recorded never runs (compiled or replaced); ArgumentError for inputs, capture or dtype; FileError and FormatError
    for a folder.
    """
    torch, _ = libraries()
    opened = open_model(model, dtype, device)
    parts = anatomy(opened.model)
    source = sources(parts)
    patterns, kept = wanted(capture, source, parts.num_experts)
    rows, several = sequences(inputs, opened.tokenizer, parts.embed.num_embeddings)
    traces, total = [], len(rows) * len(parts.layers)
    with shown(progress, total, "layers", "recording") as report:
        for number, ids in enumerate(rows):
            store = Store(kept, len(ids), source, torch)
            run = Pass(parts, store, torch, _share(report, number * len(parts.layers), total))
            run.run(ids)
            meta = _meta(opened, parts, patterns, len(ids), run.expert_rows)
            traces.append(Trace(store.finish(), ids=ids, texts=opened.texts(ids), meta=meta))
    return traces if several else traces[0]


def _share(report: Callable[[float], object] | None, before: int, total: int) -> Callable[[int], object]:
    """What to call with the number of a layer that is done."""
    return lambda layer: None if report is None else report((before + layer + 1) / total)


def _meta(opened: Opened, parts: Anatomy, capture: list[str], tokens: int, expert_rows: str) -> dict[str, Any]:
    torch, hf = libraries()
    config = getattr(opened.model, "config", None)
    meta = {
        "producer": "transformers",
        "producer_version": hf.__version__,
        "model_type": parts.model_type,
        "model_name": opened.name,
        "num_hidden_layers": len(parts.layers),
        "moe_layers": parts.moe_layers,
        "num_experts": parts.num_experts,
        "top_k": parts.top_k,
        "gate_rule": parts.gate_rule,
        "gate_mode": parts.gate_rule,
        "capture": capture,
        "passes": [[0, tokens]],
        "edits": [],
        "arithmetic": str(parts.embed.weight.dtype).removeprefix("torch."),
        "weights_dtype": opened.weights_dtype,
        "config": parts.config,
        "library": {
            "transformers": hf.__version__,
            "torch": torch.__version__,
            "attention": str(getattr(config, "_attn_implementation", None) or "eager"),
            "experts": str(getattr(config, "_experts_implementation", None) or "eager"),
            "expert_rows": expert_rows,
            "device": str(parts.embed.weight.device),
        },
    }
    if opened.identity is not None:
        meta["model_identity"] = opened.identity
    return meta
