"""Train the bundled model: a byte-level BPE tokenizer and a tiny Mixtral, on two CPU cores, in about an hour.

    python train.py CORPUS_DIR --work WORK_DIR --out tiny-colibri

It resumes from WORK_DIR/checkpoint.pt when there is one. The model is in network.py; at the end it is exported in the
Hugging Face layout and compared with transformers' own Mixtral on the same tokens (export.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time

import numpy as np
import tokenizers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from corpus import BOS, CONTEXT, MIXTURE, SEPARATOR, documents, token_row, windows
from export import export, largest_difference, write_json
from network import EXPERTS, LAYERS, VOCAB, Model

# A word with its space, one digit, a newline with the indentation after it, punctuation, or spaces.
PIECES = r"\p{N}|\n+[ \t]*| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s"


# ---- text ----


def train_tokenizer(corpus, path, characters=700_000):
    """Learn merges from the same number of characters of every domain, so that none is cut to bytes."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>", "<pad>"],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = []
    for domain in MIXTURE:
        text = SEPARATOR.join(documents(corpus, domain, "train"))
        share = characters // 3 if domain in ("arithmetic", "json", "markup") else characters
        texts += (text * (share // len(text) + 1))[:share].split(SEPARATOR)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    tokenizer.save(path)
    return tokenizer


class Stream:
    """One domain as one long row of tokens: <s> document </s> <s> document </s> …"""

    def __init__(self, tokenizer, texts):
        self.tokens = token_row(lambda text: tokenizer.encode(text).ids, texts)
        newlines = [index for token, index in tokenizer.get_vocab().items() if token and set(token) == {"Ċ"}]
        self.starts = np.flatnonzero(np.isin(self.tokens, [*newlines, BOS])) + 1  # after a newline or a document's <s>
        self.bytes = sum(len(text.encode()) for text in texts)

    def segment(self, rng, length):
        start = rng.choice(self.starts)
        return self.tokens[start : start + length]


def training_row(streams, rng, newline, length, settling):
    """One row: usually one domain, often two to four joined by a blank line, so that the model learns to change its
    mind. While settling, always one: otherwise it would change its mind unasked when it writes.
    """
    names, weights = list(MIXTURE), list(MIXTURE.values())
    pieces = 1 if settling else int(rng.choice([1, 2, 3, 4], p=[0.5, 0.2, 0.15, 0.15]))
    cuts = [*sorted(rng.integers(24, length - 24, pieces - 1)), length + 1]
    row = [BOS]
    for cut in cuts:
        stream = streams[names[rng.choice(len(names), p=weights)]]
        while len(row) < cut:
            row.extend(stream.segment(rng, cut - len(row)))
        if cut < length:
            row.append(newline)
    return row[: length + 1]


def training_batch(streams, options, step, newline, rank):
    """The batch of a step depends on nothing but the seed and the step: a resumed run sees what an unbroken one would.

    Attention is a third of the work at full context, so most steps use rows half as long, twice as many.
    """
    rng = np.random.default_rng((options.seed, step))
    halves = 2 if step < options.short * options.steps else 1
    table = torch.tensor(
        [
            training_row(streams, rng, newline, CONTEXT // halves, step >= options.steps)
            for _ in range(options.rows * halves)
        ][rank :: options.workers]
    )
    return table[:, :-1], table[:, 1:]


# ---- training ----


def learning_rate(step, options):
    """Warm-up, cosine, and for the settling steps a small rate that falls in a straight line to zero."""
    if step >= options.steps:
        return 0.15 * options.lr * (1 - (step - options.steps) / options.settle)
    warmup = min(150, options.steps // 10)
    if step < warmup:
        return options.lr * (step + 1) / warmup
    return options.lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, options.steps - warmup))))


@torch.no_grad()
def validate(model, streams, most=8):
    """Mean loss (nats per token) of each domain, and mutual information of domain and first choice in each layer."""
    losses, tables = {}, torch.zeros(LAYERS, len(streams), EXPERTS)
    for number, (domain, stream) in enumerate(streams.items()):
        total = count = 0
        for rows in torch.tensor(windows(stream.tokens, most)).split(8):
            logits, _, chosen = model(rows)
            total += F.cross_entropy(
                logits[:, :-1].reshape(-1, VOCAB).float(), rows[:, 1:].reshape(-1), reduction="sum"
            ).item()
            count += rows[:, 1:].numel()
            for layer, expert in enumerate(chosen):
                tables[layer, number] += expert[:, 0].bincount(minlength=EXPERTS)
        losses[domain] = total / count
        tables[:, number] /= tables[:, number].sum(dim=-1, keepdim=True)  # every domain weighs the same
    joint = tables / len(streams)
    expected = joint.sum(1, keepdim=True) * joint.sum(2, keepdim=True)
    information = torch.where(joint > 0, joint * (joint / expected).log2(), 0).sum((1, 2))
    return losses, information.tolist()


def average_gradients(model, workers):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    parts = (flat / workers).split([p.numel() for p in model.parameters()])
    for p, part in zip(model.parameters(), parts, strict=True):
        p.grad.copy_(part.view_as(p))


def train(rank, options, streams, held_out, newline):
    """The loop of one worker. Two single-threaded workers that average their gradients are far faster than two threads:
    the matrices are small. Worker 0 also reports, validates, saves and, at the end, writes model.pt and run.json.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method="file://" + os.path.abspath(os.path.join(options.work, "meet")),
        rank=rank,
        world_size=options.workers,
    )
    torch.manual_seed(options.seed)
    model = Model()
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=options.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    checkpoint, step, spent, history = os.path.join(options.work, "checkpoint.pt"), 0, 0.0, []
    if os.path.exists(checkpoint):
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, spent, history = saved["step"], saved["seconds"], saved["history"]
        print(f"worker {rank} resumes at step {step}")
    total, began, last_save, last_print, smooth = (
        options.steps + options.settle,
        time.time() - spent,
        time.time(),
        0.0,
        None,
    )
    while step < total:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        ids, targets = training_batch(streams, options, step, newline, rank)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.bf16):
            logits, balance, _ = model(ids)
        loss = F.cross_entropy(logits.reshape(-1, VOCAB).float(), targets.reshape(-1))
        (
            loss + options.balance * balance * (0.1 if step >= options.steps else 1)
        ).backward()  # rows of one domain are no fair sample of loads
        average_gradients(model, options.workers)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if rank > 0:
            continue
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        now = time.time()
        if now - last_print > 10 or step == total:
            last_print, seconds, done = now, now - began, step / total
            bar = "#" * int(30 * done) + "." * (30 - int(30 * done))
            print(
                f"[{bar}] step {step}/{total} loss {smooth:.3f} balance {balance.item():.3f} "
                f"{step * options.rows * CONTEXT / seconds:,.0f} tokens/s {seconds / 60:.1f} min, "
                f"{(seconds / done - seconds) / 60:.1f} left",
                flush=True,
            )
        if step % options.every == 0 or step == total:
            losses, information = validate(model, held_out)
            history.append(
                {
                    "step": step,
                    "tokens": step * options.rows * CONTEXT,
                    "loss": losses,
                    "domain_expert_bits": information,
                }
            )
            print(
                "  validation "
                + " ".join(f"{domain} {loss:.2f}" for domain, loss in losses.items())
                + f" mean {sum(losses.values()) / len(losses):.3f} | bits of domain in first choice "
                + " ".join(f"{bits:.2f}" for bits in information),
                flush=True,
            )
        if now - last_save > 180 or step == total:
            last_save = now
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                    "seconds": now - began,
                    "history": history,
                },
                checkpoint + ".part",
            )
            os.replace(checkpoint + ".part", checkpoint)
    if rank == 0:
        torch.save(model.state_dict(), os.path.join(options.work, "model.pt"))
        write_json(
            options.work,
            "run.json",
            {
                "steps": step,
                "settling_steps": options.settle,
                "tokens": step * options.rows * CONTEXT,
                "seconds": round(time.time() - began, 1),
                "workers": options.workers,
                "peak_lr": options.lr,
                "balance_weight": options.balance,
                "short_rows_share": options.short,
                "bf16_autocast": options.bf16,
                "seed": options.seed,
                "history": history,
            },
        )
    dist.barrier()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpus")
    parser.add_argument("--work", default="work")
    parser.add_argument("--out", default="tiny-colibri")
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--settle", type=int, default=600, help="steps after those, on rows of one domain")
    parser.add_argument("--rows", type=int, default=4, help="rows of full context in a step, over all workers")
    parser.add_argument("--short", type=float, default=0.75, help="share of the steps that use half the context")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--balance", type=float, default=0.01)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--every", type=int, default=500, help="steps between validations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="processes, one core each")
    options = parser.parse_args()
    os.makedirs(options.work, exist_ok=True)
    path = os.path.join(options.work, "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path) if os.path.exists(path) else train_tokenizer(options.corpus, path)
    streams = {domain: Stream(tokenizer, documents(options.corpus, domain, "train")) for domain in MIXTURE}
    held_out = {domain: Stream(tokenizer, documents(options.corpus, domain, "val")) for domain in MIXTURE}
    for domain, stream in streams.items():
        print(f"{domain:10} {len(stream.tokens):9,} tokens, {stream.bytes / len(stream.tokens):.2f} bytes each")
    meeting = os.path.join(options.work, "meet")
    if os.path.exists(meeting):
        os.remove(meeting)
    newline = tokenizer.encode("\n\n", add_special_tokens=False).ids[0]
    # Let the workers keep freed memory: by default glibc gives every large tensor back and faults it in again.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 30))
    mp.spawn(train, (options, streams, held_out, newline), nprocs=options.workers)
    model = Model()
    model.load_state_dict(torch.load(os.path.join(options.work, "model.pt")))
    with open(os.path.join(options.work, "run.json"), encoding="utf-8") as handle:
        facts = json.load(handle)
    export(model, tokenizer, options.out, options.balance)
    rows = torch.cat([torch.tensor(windows(stream.tokens, 1)) for stream in held_out.values()])
    facts["largest_logit_difference_to_transformers"] = largest_difference(model, options.out, rows)
    facts["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    facts["bytes"] = {
        name: os.path.getsize(os.path.join(options.out, name)) for name in sorted(os.listdir(options.out))
    }
    write_json(options.work, "training.json", facts)
    print(json.dumps({key: value for key, value in facts.items() if key != "history"}, indent=2))
    assert facts["largest_logit_difference_to_transformers"] <= 1e-4, "the export and the training code disagree"


if __name__ == "__main__":
    main()
