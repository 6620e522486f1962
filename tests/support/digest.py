"""Run sessions in a process of their own and print one hash per tap: `python digest.py < plan.json > result.json`.

The plan: `path` of a checkpoint, `capture`, `threads`, `stepped` (chunks run stage by stage), and `sessions`, each with
`ids` (a list of chunks, every chunk one pass), `generate` (how many tokens more) and `seed`; also, where numbers are
rounded, `emulate` (the record of a lab.Emulation). COLIBRI_ISA is set for the process when a code path is forced.
The result: the code path in force, and per session its ids and the sha256 of every tap's bytes.

What is hashed is the answer, not its accidents: every NaN counts as 0x7FC00000, and the rows of an expert are put in
token order, so that a session fed in one pass and one fed in many can be compared.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

import colibri_lab as lab


def canonical(array: np.ndarray) -> bytes:
    """The array's bytes with every NaN as the one quiet NaN."""
    if array.dtype != np.float32:
        return array.tobytes()
    bits = np.ascontiguousarray(array).view(np.uint32)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FC00000), bits).tobytes()


def taps(session) -> dict[str, np.ndarray]:
    """Every kept tap of the whole session; dispatch rows by expert, then by token."""
    tape = session.tape
    out = {path: tape[path] for path in tape if ".experts." not in path}
    for path in [path for path in out if path.endswith(".dispatch.offsets")]:
        prefix = path.removesuffix("offsets")
        offsets, tokens = out.pop(path), out[prefix + "tokens"]
        n_experts = offsets.shape[1] - 1
        experts = np.concatenate([np.repeat(np.arange(n_experts), np.diff(row)) for row in offsets])
        order = np.lexsort((tokens, experts))
        out[prefix + "counts"] = np.bincount(experts, minlength=n_experts)
        for name in [name for name in out if name.startswith(prefix) and not name.endswith("counts")]:
            out[name] = out[name][order]
    return out


def main() -> None:
    plan = json.load(sys.stdin)
    model = lab.open(plan["path"])
    emulate = lab.Emulation.from_record(plan["emulate"]) if "emulate" in plan else None
    sessions = []
    for wanted in plan["sessions"]:
        n_tokens = sum(map(len, wanted["ids"])) + wanted["generate"]
        session = model.session(capture=plan["capture"], threads=plan["threads"], max_tokens=n_tokens, emulate=emulate)
        for chunk in wanted["ids"]:
            if plan["stepped"]:
                session.stepper(chunk, chunk=None).finish()
            else:
                session.feed(chunk)
        for _ in session.generate(wanted["generate"], temperature=1.0, seed=wanted["seed"], stop_ids=()):
            pass
        hashes = {path: hashlib.sha256(canonical(tap)).hexdigest() for path, tap in taps(session).items()}
        hashes["last logits"] = hashlib.sha256(canonical(session.logits)).hexdigest()
        sessions.append({"ids": session.ids, "taps": hashes})
    json.dump({"isa": model.info["isa"], "sessions": sessions}, sys.stdout)


if __name__ == "__main__":
    main()
