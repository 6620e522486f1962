"""`python -m colibri_lab.record MODEL --text TEXT --out run.safetensors`: a recording without Jupyter.

Exit codes: 0 when the trace was written, 1 when not (one sentence on standard error), 2 for a wrong command line, 130
after Ctrl-C. Standard output gets one line, what was written; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from colibri_lab.errors import ColibriError
from colibri_lab.record._checkpoint import DTYPES
from colibri_lab.record._run import transformers


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no list of whole numbers such as 1,2,3") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m colibri_lab.record",
        description="Run a checkpoint with Hugging Face transformers and write what passed through it as a trace.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the checkpoint")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", help="the prompt; the checkpoint's tokenizer adds its special tokens")
    what.add_argument("--ids", type=_ids, help="the prompt as token ids: 1,2,3")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the trace to write (.safetensors)")
    parser.add_argument(
        "--capture",
        action="append",
        metavar="WHAT",
        help='"routing", "moe" (the default), "all" or a tap pattern; may be given several times',
    )
    parser.add_argument("--dtype", choices=DTYPES, help="arithmetic; float32 when not given")
    parser.add_argument("--device", help="where to run, such as cuda or cuda:1; the CPU when not given")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    options = _parser().parse_args(arguments)
    inputs = options.ids if options.text is None else options.text
    try:
        if not options.out.parent.is_dir():  # before minutes of work
            raise FileNotFoundError(f"'{options.out.parent}' is no folder to write into")
        trace = transformers(
            options.model, inputs, capture=options.capture or "moe", dtype=options.dtype, device=options.device
        )
        assert not isinstance(trace, list)  # one text or one row of ids
        trace.save(options.out)
    except (ColibriError, OSError, RuntimeError) as error:  # torch says with the last what a device cannot do
        print(f"colibri-lab: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("colibri-lab: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"{options.out}: {trace!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
