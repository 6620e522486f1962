"""The reference of these tests: transformers on the AVX2 code of torch, as the engine and the goldens have it."""

from __future__ import annotations

import os
import platform

if platform.machine() in ("x86_64", "AMD64"):
    # With AVX-512 torch raises powers in blocks of another length (csrc/model/rope.c), which for some head sizes gives
    # other last bits: at position 30,000 the same program differs by 1e-3 from itself on another CPU. Read with torch.
    os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
