"""Plan a small GPT, verify the plan, train it on 4 processes and in one on real text, and compare the losses."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from sbpc.api.loading import load
from sbpc.api.planning import plan
from sbpc.cli.target import CASTS
from sbpc.cli.train_loop import optimizer_of, train
from sbpc.errors import SbpcError
from sbpc.inspect.page_charts import largest_difference
from sbpc.inspect.picture import graph_svg
from sbpc.inspect.tables import Table
from sbpc.mesh.mesh import Mesh
from sbpc.plans.plan import Plan
from sbpc.runtime.module import parallelize
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.launch import as_rank, launch, prepare

VOCAB, WIDTH, HEADS, LAYERS, SEQUENCE, BATCH = 256, 160, 4, 3, 64, 8
RATE, SEED, TEXT_BYTES = 1e-3, 7, 4_000_000
TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
FLOPS = 1.1  # a rank may do this times its fair share of the one-device flops


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (each(x).view(heads).transpose(1, 2) for each in (self.query, self.key, self.value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """Attention and a two-layer network, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019) over bytes, its head tied to its embedding; (tokens, targets) -> cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(SEQUENCE, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, VOCAB), targets.view(-1))


def model_of(dtype: str) -> GPT:
    """Returns the model with the weights of the demo."""
    torch.manual_seed(SEED)
    return GPT().to(CASTS[dtype])


def text() -> bytes:
    """Returns the source files of Python's own standard library, joined in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = b""
    for path in sorted(folder.glob("*.py")):
        source += path.read_bytes()
        if len(source) >= TEXT_BYTES:
            break
    if len(source) < 100 * SEQUENCE:
        raise SbpcError(
            f"there are no source files in {folder}\n  The demo reads Python's standard library: install its sources."
        )
    return source[:TEXT_BYTES]


def batches(steps: int) -> Iterator[tuple[tuple[Tensor, Tensor], dict[str, Any]]]:
    """Yields windows of the text, the same on every rank and in every run: tokens, and the tokens that follow them."""
    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - SEQUENCE - 1, (BATCH,), generator=generator)
        windows = torch.stack([data[start : start + SEQUENCE + 1] for start in starts.tolist()])
        yield (windows[:, :-1].contiguous(), windows[:, 1:].contiguous()), {}


def demo(folder: Path, steps: int, dtype: str, console: Console) -> dict[str, Any]:
    """Plans, verifies, trains on the mesh and in one process, and compares. Returns the figures; "equal" is the
    verdict.

    Writes plan.sbpc, graph.svg, report.html and losses.json into `folder`.
    Raises SbpcError if the plan does not spread work or bytes over the mesh, or if a rank fails.
    """
    if steps < 1:
        raise SbpcError(f"{steps} steps\n  Train one at least.")
    began = time.perf_counter()
    prepare()
    model = model_of(dtype)
    planned, count = plan_model(model, dtype, console)
    planning = time.perf_counter() - began
    edges = planned.verify()
    share, sent = check(planned)
    about = f"{edges:,} edges; a rank does {100 * share:.1f} % of the flops and sends\n           {sent}\n"
    say(console, f"\n[bold]2. verify[/]  {about}")
    files = [folder / name for name in ("plan.sbpc", "graph.svg", "report.html", "losses.json")]
    folder.mkdir(parents=True, exist_ok=True)
    planned.save(files[0])
    files[1].write_text(graph_svg(planned.boxed, planned.mesh, f"GPT on {planned.mesh}"))
    losses, training = train_both(model, planned, files[0], steps, dtype, console)
    difference, equal = compare(losses, dtype, console)
    planned.save_page(files[2], losses=losses)
    record = {"dtype": dtype, **losses, "largest_relative_difference": difference}
    files[3].write_text(json.dumps(record, indent=1) + "\n")
    seconds = time.perf_counter() - began
    say(console, f"written {', '.join(map(str, files))}\n{seconds:.0f} s in all, {planning:.1f} s of them planning")
    return {
        "equal": equal,
        "largest_relative_difference": difference,
        "tolerance": TOLERANCE[dtype],
        "losses": losses,
        "parameters": count,
        "edges": edges,
        "flops_share": share,
        "bytes_sent": planned.cost.bytes_sent,
        "seconds": seconds,
        "seconds_planning": planning,
        "seconds_training": training,
        "files": list(map(str, files)),
    }


def say(console: Console, line: str) -> None:
    """Prints a line as it is: it is not broken, and numbers in it are not coloured."""
    console.print(line, highlight=False, soft_wrap=True)


def plan_model(model: GPT, dtype: str, console: Console) -> tuple[Plan, int]:
    """Plans the model on 4 ranks and prints the plan. Returns it and the number of parameters."""
    count = sum(parameter.numel() for parameter in model.parameters())
    about = f"{count:,} parameters ({dtype}), batches of {BATCH} x {SEQUENCE} bytes of Python's standard library"
    say(console, f"[bold]1. plan[/]  a GPT of {about}\n")
    args, kwargs = next(batches(1))
    planned = plan(model, args, Mesh(data=2, tensor=2), kwargs=kwargs)
    say(console, escape(str(planned)))
    return planned, count


def train_both(
    model: GPT, planned: Plan, file: Path, steps: int, dtype: str, console: Console
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Trains on all ranks, then in this process. Returns the losses and the seconds of both."""
    ranks = planned.mesh.ranks
    say(console, f"[bold]3. train[/]  {steps} steps of AdamW on {ranks} processes, then in one\n")
    parallel, parallel_seconds = train_ranks(file, steps, dtype, ranks, console)
    torch.set_num_threads(1)  # as a rank has: the model is small, and threads would wait for each other
    with progress_bar("one process", steps, console) as tell:
        start = time.perf_counter()
        one = train(model, batches(steps), optimizer_of("adamw", model, RATE), tell)
        seconds = time.perf_counter() - start
    names = "one process", f"{ranks} ranks"
    return dict(zip(names, (one, parallel))), dict(zip(names, (seconds, parallel_seconds)))


def compare(losses: dict[str, list[float]], dtype: str, console: Console) -> tuple[float, bool]:
    """Prints both losses side by side. Returns the largest relative difference, and whether it is within the
    tolerance."""
    one, parallel = losses.values()
    say(console, f"\n[bold]4. compare[/]  losses of the same {len(one)} batches\n")
    say(console, "\n".join(loss_table(one, parallel).lines()))
    difference = largest_difference([one, parallel])
    equal = difference <= TOLERANCE[dtype]
    verdict = "[bold green]equal[/]" if equal else "[bold red]NOT EQUAL[/]"
    say(console, f"\nlargest relative difference {difference:.2e}, allowed {TOLERANCE[dtype]:.0e}: {verdict}")
    return difference, equal


def check(planned: Plan) -> tuple[float, str]:
    """Returns a rank's share of the one-device flops, and the bytes by axis as text.

    Raises SbpcError unless the share is about 1 / ranks and every axis carries bytes: a replicated plan is no plan.
    """
    cost, ranks = planned.cost, planned.mesh.ranks
    share = cost.flops / cost.flops_one_device
    if share > FLOPS / ranks:
        raise SbpcError(
            f"the plan is replicated: a rank does {100 * share:.1f} % of the flops, {100 / ranks:.0f} % is its share\n"
            "  This is a bug in sbpc: report it."
        )
    used = {name for key, sent in cost.bytes_sent.items() if sent for name in key.split("+")}
    idle = [name for name in planned.mesh.axes if name not in used]
    if idle:
        raise SbpcError(f"no byte goes over axis {idle[0]!r}: {cost.bytes_sent}\n  This is a bug in sbpc.")
    return share, ", ".join(f"{name}: {sent:,.0f} bytes" for name, sent in cost.bytes_sent.items())


def train_ranks(file: Path, steps: int, dtype: str, ranks: int, console: Console) -> tuple[list[float], float]:
    """Trains on all ranks of the mesh. Returns the losses of rank 0 and the seconds of its steps."""
    with tempfile.TemporaryDirectory(prefix="sbpc-demo-") as folder:
        out = Path(folder, "losses.json")
        arguments = ["-m", "sbpc.cli.demo_run", str(file), str(out), "--steps", str(steps), "--dtype", dtype]
        launch(arguments + ["--stderr"] * console.stderr, ranks)
        record = json.loads(out.read_text())
    return record["losses"], record["seconds"]


def rank(arguments: Sequence[str] | None = None) -> None:
    """Loads the plan, distributes the model and trains as one rank. Rank 0 shows the progress and writes the losses."""
    parser = argparse.ArgumentParser()
    for name, kind in (("plan", Path), ("out", Path), ("--steps", int), ("--dtype", str)):
        parser.add_argument(name, type=kind)
    parser.add_argument("--stderr", action="store_true")
    options = parser.parse_args(arguments)
    planned = load(options.plan)
    model = parallelize(model_of(options.dtype), planned)
    step: Any = model.step
    optimizer = optimizer_of("adamw", model, RATE)
    start = time.perf_counter()
    if os.environ["RANK"] == "0":
        with progress_bar(f"{planned.mesh.ranks} ranks", options.steps, Console(stderr=options.stderr)) as tell:
            losses = train(model, batches(options.steps), optimizer, tell, step)
        options.out.write_text(json.dumps({"losses": losses, "seconds": time.perf_counter() - start}))
    else:
        train(model, batches(options.steps), optimizer, step=step)
    process_groups.stop()


@contextlib.contextmanager
def progress_bar(name: str, steps: int, console: Console) -> Iterator[Callable[[int, float], None]]:
    """Gives a function that shows a step and its loss: in a bar on a terminal, in a line for every tenth step
    elsewhere."""
    loss = TextColumn("loss {task.fields[loss]}")
    columns = (TextColumn(f"{name:12}"), BarColumn(), MofNCompleteColumn(), loss, TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=steps, loss="")

        def tell(step: int, loss: float) -> None:
            progress.update(task, completed=step, loss=f"{loss:.4f}")
            if not console.is_terminal and (step % 10 == 0 or step in (1, steps)):
                say(console, f"{name:12}step {step:3d} of {steps}  loss {loss:.4f}")

        yield tell


def loss_table(one: Sequence[float], parallel: Sequence[float], rows: int = 11, width: int = 24) -> Table:
    """Returns both losses at some steps side by side, with a bar for the one process."""
    texts = []
    low, high = min(one), max(one)
    for step in sorted({round(at * (len(one) - 1) / max(1, rows - 1)) for at in range(rows)}):
        first, other = one[step], parallel[step]
        filled = (first - low) / (high - low) if high > low else 0.0
        difference = f"{abs(first - other) / abs(first):.1e}"
        texts.append((str(step + 1), f"{first:.7f}", f"{other:.7f}", difference, "━" * (1 + round(width * filled))))
    return Table("", ("step", "one process", "4 ranks", "relative difference", "loss"), texts, left=("loss",))


if __name__ == "__main__":
    with as_rank():
        rank(sys.argv[1:])
