"""A program that records and is killed at random moments, again and again: `recorder.py FOLDER KILLS SEED RESETS`.

It opens the bundled model once and forks a child for each recording, so that a round takes milliseconds. For each it
prints the file, whether the child had begun, and how many passes the child had said were closed before it died.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import sys
import time
from pathlib import Path

import colibri_lab as lab

PASSES = 250  # 500 tokens


def ids_of(number: int) -> list[int]:
    """The tokens of pass `number`: one to three."""
    return [(7 * number + i) % 200 + 10 for i in range(number % 3 + 1)]


def record(model: lab.Model, file: Path, told: int, resets: bool) -> None:
    session = model.session(capture="all", max_tokens=512, threads=1, to=file)
    os.write(told, struct.pack("<i", 0))
    for number in range(PASSES):
        if resets and number % 7 == 6:
            session.reset()
        session.feed(ids_of(len(session.passes)), progress=False)
        os.write(told, struct.pack("<i", len(session.passes)))


def main(folder: Path, kills: int, seed: int, resets: bool) -> None:
    model, chance = lab.open(), random.Random(seed)
    model.session(max_tokens=8, to=folder / "warm")  # what is read once is read before the forks
    for number in range(kills):
        file = folder / f"{number}.safetensors"
        reading, told = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            record(model, file, told, resets)
            time.sleep(60)  # to be killed
        os.close(told)
        said = os.read(reading, 4)
        time.sleep(chance.random() * 0.15)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reading, 1 << 16):
            said += more
        os.close(reading)
        print(file, struct.unpack_from("<i", said, len(said) // 4 * 4 - 4)[0], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "resets")
