"""Kill a rank by SIGKILL at a random step of a training job under torchrun, many times: `python -m tests.bench.faults`.

Every job must start again from its last checkpoint, end with the loss of a job that nobody killed, leave no process
behind and no port bound.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from tests.faults import run_job


def main() -> int:
    """Run the jobs; 1 if one of them came out wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first run, which draws step and rank")
    options = parser.parse_args()
    good = 0
    with tempfile.TemporaryDirectory() as folder:
        expected = run_job(Path(folder, "whole"), options.steps, options.every, None)
        for number in range(options.seed, options.seed + options.runs):
            kill = random.Random(number).randrange(1, options.steps)
            found = run_job(Path(folder, f"killed{number}"), options.steps, options.every, kill, seed=number)
            right = found.losses == expected.losses and not found.left and found.port_free
            good += right
            print(
                f"run {number:2d}: killed at step {found.killed}, first steps of its starts {found.starts}, "
                f"final loss {found.losses[options.steps]}, {found.seconds:.0f} s, {'right' if right else 'WRONG'}",
                flush=True,
            )
    print(f"{good} of {options.runs} jobs ended with the loss {expected.losses[options.steps]} of the one not killed")
    return 0 if good == options.runs else 1


if __name__ == "__main__":
    raise SystemExit(main())
