"""Measure the bundled model through colibri-lab's own engine and write report.json and report.md.

    python report.py CORPUS_DIR [--model FOLDER] [--figures training_figures.json] [--out .]

CORPUS_DIR is what build_corpus.py wrote; each domain of held-out text weighs the same. No torch: the losses, the
routing, the text and the silenced experts all come from the engine, so that this page also checks it against
training_figures.json, which holds what the training code measured.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import measures
import numpy as np
from corpus import BOS, DOMAINS, MIXTURE, documents, token_row, windows
from prompts import PROMPTS, SHOWCASE
from report_page import page
from safetensors.numpy import load_file, save_file

import colibri_lab as lab
from colibri_lab.trace import Trace

HERE = Path(__file__).parent


def log_softmax_at(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """ln p of each row's target, (n,) float64."""
    z = logits.astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    return z[np.arange(len(z)), targets] - np.log(np.exp(z).sum(axis=1))


class HeldOut:
    """One run over windows of held-out text: each domain's loss, and the routing of its first `kept` windows."""

    def __init__(self, model: lab.Model, rows: dict[str, np.ndarray], kept: int = 0) -> None:
        self.loss: dict[str, float] = {}
        self.windows: list[Trace] = []
        length = next(iter(rows.values())).shape[1]
        session = model.session(capture=["routing", "logits"], max_tokens=length)
        for domain, some in rows.items():
            total = 0.0
            for number, row in enumerate(some):
                session.reset()
                session.feed(row, progress=False)
                total -= log_softmax_at(session.tape["logits"][:-1], row[1:]).sum()
                if number < kept:
                    self.windows.append(routing_of(session.trace()))
            self.loss[domain] = float(total / some[:, 1:].size)

    def joined(self) -> Trace:
        """The kept windows one after another as one trace."""
        first = self.windows[0]
        arrays = {path: np.concatenate([part[path] for part in self.windows]) for path in first}
        ids = [token for part in self.windows for token in part.ids]
        return Trace(arrays, ids=ids, texts=[], meta=first.meta | {"passes": [[0, len(ids)]]})


def routing_of(trace: Trace) -> Trace:
    """A copy of a window's routing without its first token (<s>)."""
    arrays = {path: trace[path][1:].copy() for path in trace if ".moe." in path}
    return Trace(arrays, ids=trace.ids[1:], texts=[], meta=trace.meta | {"passes": [[0, len(trace.ids) - 1]]})


def silenced(model: lab.Model, few: dict[str, np.ndarray]) -> list[list[dict[str, float]]]:
    """How much each domain's loss rises when one expert's output is zero (its gate is not given to another)."""
    before, tensors, table = HeldOut(model, few).loss, load_file(model.info["files"][0]), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_bytes((model.folder / "config.json").read_bytes())
        for layer in range(model.config["num_hidden_layers"]):
            row = []
            for expert in range(model.config["num_experts"]):
                down = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight"
                save_file(tensors | {down: np.zeros_like(tensors[down])}, folder / "model.safetensors")
                after = HeldOut(lab.open(folder), few).loss
                row.append({domain: round(after[domain] - before[domain], 4) for domain in few})
            table.append(row)
    return table


def continuation(model: lab.Model, prompt: str, count: int, **options: Any) -> str:
    session = model.session(capture="none")
    session.feed(prompt)
    tokens = list(session.generate(count, progress=False, **options))
    return "".join(token.text for token in tokens if token.id not in model.end_ids)


def arithmetic(model: lab.Model, count: int = 60) -> dict[str, float]:
    """Share of right answers, greedily, after two solved lines of the same kind; the seed is not one of the corpus."""
    rng = np.random.default_rng(12345)

    def two(low: int, high: int, sign: str) -> tuple[str, str]:
        a, b = int(rng.integers(low, high)), int(rng.integers(low, high))
        return f"{a} {sign} {b} = ", str(a + b if sign == "+" else a * b)

    def sequence() -> tuple[str, str]:
        start, step = int(rng.integers(100)), int(rng.integers(1, 13))
        return "".join(f"{start + step * i}, " for i in range(4)), str(start + step * 4)

    kinds = {
        "sum of numbers below 10": lambda: two(0, 10, "+"),
        "sum of numbers below 100": lambda: two(0, 100, "+"),
        "product of numbers below 13": lambda: two(2, 13, "*"),
        "next of a sequence": sequence,
    }
    result = {}
    for kind, draw in kinds.items():
        right = 0
        for _ in range(count):
            (a, x), (b, y), (question, answer) = draw(), draw(), draw()
            prompt = f"{a}{x}\n{b}{y}\n{question.rstrip(' ')}"
            text = continuation(model, prompt, len(answer) + 2)
            right += text.strip().split("\n")[0].split(",")[0].strip() == answer
        result[kind] = right / count
    return result


def showcase(model: lab.Model, parts: list[tuple[str, str]], rng: np.random.Generator) -> dict[str, Any]:
    """Where routing changes most between the two parts of a prompt."""
    ids, side = [BOS], [-1]
    for number, (_, text) in enumerate(parts):
        piece = model.tokenizer.encode(text + ("\n\n" if number + 1 < len(parts) else ""), special=False)
        ids += piece
        side += [number] * len(piece)
    session = model.session()
    session.feed(ids)
    layers = measures.change(session.trace(), np.array(side), rng)
    prompt = "\n\n".join(text for _, text in parts)
    return {"domains": [d for d, _ in parts], "prompt": prompt, "tokens": len(ids), "layers": layers}


def baselines(train: dict[str, np.ndarray], held_out: dict[str, np.ndarray], vocabulary: int) -> dict[str, Any]:
    """Uniform, unigram of the whole mixture, and unigram of the domain itself (counts plus one)."""
    counts = {domain: np.bincount(row, minlength=vocabulary) + 1.0 for domain, row in train.items()}
    mixture = sum(weight * counts[d] / counts[d].sum() for d, weight in MIXTURE.items()) / sum(MIXTURE.values())
    out = {}
    for domain, rows in held_out.items():
        target = rows[:, 1:].ravel()
        own = counts[domain] / counts[domain].sum()
        out[domain] = {
            "uniform": math.log(vocabulary),
            "unigram_mixture": float(-np.log(mixture[target]).mean()),
            "unigram_own_domain": float(-np.log(own[target]).mean()),
            "held_out_tokens": int(target.size),
        }
    return out


def against_training(report: dict[str, Any], figures: dict[str, Any]) -> dict[str, float]:
    """Largest differences to what the training code measured on the same windows."""

    def worst(name: str) -> float:
        pairs = zip(report["layers"], figures["layers"], strict=True)
        return max(float(np.abs(np.subtract(ours[name], theirs[name])).max()) for ours, theirs in pairs)

    names = ("load", "router_entropy_bits", "domain_information_bits", "token_information_bits")
    shares = [
        abs(a - b)
        for ours, theirs in zip(report["layers"], figures["layers"], strict=True)
        for domain in DOMAINS
        for a, b in zip(ours["domain_expert_share"][domain], theirs["domain_expert_share"][domain], strict=True)
    ]
    return {
        "loss": max(abs(report["loss"][domain] - figures["loss"][domain]) for domain in DOMAINS),
        **{name: worst(name) for name in names},
        "domain_expert_share": max(shares),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpus")
    parser.add_argument("--model", help="a checkpoint folder (the bundled model)")
    parser.add_argument("--figures", type=Path, default=HERE / "training_figures.json", help="of the training code")
    parser.add_argument("--reading", type=Path, default=HERE / "READING.md", help="a person's reading, quoted")
    parser.add_argument("--silence", type=int, default=1, help="windows of each domain to silence experts on")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    model = lab.open(options.model)
    figures = json.loads(options.figures.read_text(encoding="utf-8"))
    rows = {
        part: {d: token_row(model.tokenizer.encode, documents(options.corpus, d, part)) for d in DOMAINS}
        for part in ("train", "val")
    }
    held_out = {domain: windows(row, 48) for domain, row in rows["val"].items()}
    report: dict[str, Any] = {"training": figures["training"], "domains": list(DOMAINS)}
    report["engine"] = {"isa": model.info["isa"], "version": model.info["engine_version"]}
    most = min(len(some) for some in held_out.values())  # every domain gives the routing figures as many windows
    measured = HeldOut(model, held_out, kept=most)
    report["loss"] = measured.loss
    report["baselines"] = baselines(rows["train"], held_out, model.config["vocab_size"])
    for domain, row in rows["val"].items():
        text = documents(options.corpus, domain, "val")
        report["baselines"][domain]["bytes_per_token"] = sum(len(one.encode()) for one in text) / len(row)
    trace, length = measured.joined(), len(measured.windows[0].ids)
    domain_of = np.repeat(np.arange(len(DOMAINS)), most * length)
    report["layers"] = measures.layer_figures(
        trace, domain_of, length, list(DOMAINS), lambda token: model.tokenizer.decode([token])
    )
    report["routing_tokens"], report["windows_per_domain"] = len(trace.ids), most
    report["against_training"] = against_training(report, figures)
    print(json.dumps({"loss": report["loss"], "against_training": report["against_training"]}, indent=1), flush=True)
    report["silenced_windows"] = options.silence
    report["silenced"] = silenced(model, {domain: some[: options.silence] for domain, some in held_out.items()})
    report["arithmetic"] = arithmetic(model)
    report["samples"] = {
        domain: {
            "prompt": prompt,
            "greedy": continuation(model, prompt, 80),
            "temperature 0.8, top-p 0.95": continuation(model, prompt, 80, temperature=0.8, top_p=0.95, seed=number),
        }
        for number, (domain, prompt) in enumerate(PROMPTS.items())
    }
    rng = np.random.default_rng(1)
    report["showcase"] = [showcase(model, parts, rng) for parts in SHOWCASE]
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (options.out / "report.json").write_text(text + "\n", encoding="utf-8")
    reading = options.reading.read_text(encoding="utf-8") if options.reading.is_file() else ""
    (options.out / "report.md").write_text(page(report, reading), encoding="utf-8")


if __name__ == "__main__":
    main()
