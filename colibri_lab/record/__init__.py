"""Run a model of Hugging Face transformers and keep what passed through it, as a Trace.

    import colibri_lab as lab

    trace = lab.record.transformers("path/to/checkpoint", "The engine counts its gates.")
    trace.save("run.safetensors")

Needs `pip install 'colibri-lab[hf]'`. `python -m colibri_lab.record --help` is the same for machines without Jupyter.
"""

from __future__ import annotations

from colibri_lab.record._run import transformers

__all__ = ["transformers"]
