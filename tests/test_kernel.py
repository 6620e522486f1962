"""In a real notebook kernel: bad input is an exception and the next cell runs; the stop button stops."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

SETUP = """
import colibri_lab as lab
model = lab.open()
session = model.session(max_tokens=32)
session.feed("Once upon a time")
"""

LONG = """
long = model.session(max_tokens=40_000)
print("started", flush=True)
long.feed([5] * 40_000)
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager, client = start_new_kernel(kernel_name="python3")
    assert run(client, SETUP) == "ok"
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run(client: BlockingKernelClient, cell: str) -> str:
    """Runs a cell: "ok", or the name of the exception."""
    reply = client.execute_interactive(cell, timeout=60, store_history=False, output_hook=lambda message: None)
    content = reply["content"]
    return "ok" if content["status"] == "ok" else content["ename"]


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        ("lab.open('no/such/folder')", "FileError"),
        ("lab.open(lab.__file__)", "FileError"),
        ("session.feed([])", "ArgumentError"),
        ("session.feed([-1])", "ArgumentError"),
        ("session.feed([2**31])", "ArgumentError"),
        ("session.feed([5] * 33)", "CapacityError"),
        ("model.session(max_tokens=10**9)", "OutOfMemoryError"),
        ("session.tape['layers.99.moe.gates']", "TapError"),
        ("session.tape['layers.0.moe.input']", "NotCapturedError"),
        ("lab.load_trace(lab.__file__)", "FormatError"),
    ],
)
def test_G3_bad_input_is_an_exception_and_the_next_cell_runs(
    kernel: tuple[KernelManager, BlockingKernelClient], cell: str, error: str
) -> None:
    """No bad input kills the kernel, and the session goes on where it was."""
    _, client = kernel
    assert run(client, cell) == error
    assert run(client, "assert len(session.ids) == session.passes[-1].stop and session.logits.shape == (2048,)") == "ok"


def test_G4_the_stop_button_ends_a_long_pass(kernel: tuple[KernelManager, BlockingKernelClient]) -> None:
    """An interrupt during a pass is a KeyboardInterrupt; the session is as before the pass. Its seconds are printed."""
    manager, client = kernel
    request = client.execute(LONG, store_history=False, stop_on_error=False)  # else what comes at once is aborted too
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "stream" and "started" in message["content"]["text"]:
            break
    time.sleep(0.5)
    start = time.perf_counter()
    manager.interrupt_kernel()
    while (reply := client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != request:
        pass
    print(f"stopped after {time.perf_counter() - start:.2f} s")
    assert reply["content"]["status"] == "error" and reply["content"]["ename"] == "KeyboardInterrupt"
    assert run(client, "assert long.ids == [] and len(long.feed([5, 6]).ids) == 2") == "ok"
