"""The main job on real input: a small GPT is planned, verified, trained on 4 processes, and compared with 1 process."""

from __future__ import annotations

import argparse
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from sbpc.api.planning import load, plan
from sbpc.cli.train_loop import optimizer_of, train
from sbpc.errors import SbpcError
from sbpc.inspect.page import largest_difference, picture_html
from sbpc.inspect.picture import graph_svg
from sbpc.inspect.report import print_plan
from sbpc.mesh.mesh import Mesh
from sbpc.plans.plan import Plan
from sbpc.runtime.module import parallelize
from sbpc.runtime.start import process_groups as groups
from sbpc.runtime.start.launch import as_rank, launch

VOCAB, WIDTH, HEADS, LAYERS, SEQUENCE, BATCH = 256, 160, 4, 3, 64, 8
RATE, SEED, TEXT_BYTES = 1e-3, 7, 4_000_000
TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
FLOPS = 1.1  # a rank may do this times its fair share of the one-device flops
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
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
    """The model with the weights of the demo."""
    torch.manual_seed(SEED)
    return GPT().to(DTYPES[dtype])


def text() -> bytes:
    """The source files of Python's own standard library, one after the other in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = b""
    for path in sorted(folder.glob("*.py")):
        found += path.read_bytes()
        if len(found) >= TEXT_BYTES:
            break
    if len(found) < 100 * SEQUENCE:
        raise SbpcError(
            f"there are no source files in {folder}\n  The demo reads Python's standard library: install its sources."
        )
    return found[:TEXT_BYTES]


def batches(steps: int) -> Iterator[tuple[tuple[Tensor, Tensor], dict[str, Any]]]:
    """Windows of the text, the same on every rank and in every run: tokens, and the tokens that follow them."""
    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - SEQUENCE - 1, (BATCH,), generator=generator)
        windows = torch.stack([data[start : start + SEQUENCE + 1] for start in starts.tolist()])
        yield (windows[:, :-1].contiguous(), windows[:, 1:].contiguous()), {}


def demo(folder: Path, steps: int, dtype: str, console: Console) -> dict[str, Any]:
    """Plan, verify, train on the mesh and in one process, compare. Returns the figures; "equal" is the verdict.

    Writes plan.sbpc, graph.svg, report.html and losses.json into `folder`.
    Raises SbpcError if the plan is no plan (work or bytes are not spread over the mesh) or a rank fails.
    """
    if steps < 1:
        raise SbpcError(f"{steps} steps\n  Train one at least.")
    began = time.perf_counter()
    model = model_of(dtype)
    args, kwargs = next(batches(1))
    count = sum(parameter.numel() for parameter in model.parameters())
    about = f"{count:,} parameters ({dtype}), batches of {BATCH} x {SEQUENCE} bytes of Python's standard library"
    console.print(f"[bold]1. plan[/]  a GPT of {about}\n", highlight=False, soft_wrap=True)
    found = plan(model, args, Mesh(data=2, tensor=2), kwargs=kwargs)
    print_plan(found, console)
    planned = time.perf_counter() - began
    edges = found.verify()
    share, sent = check(found)
    about = f"{edges:,} edges; a rank does {100 * share:.1f} % of the flops and sends\n           {sent}\n"
    console.print(
        f"\n[bold]2. verify[/]  {about}",
        highlight=False,
        soft_wrap=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    found.save(folder / "plan.sbpc")
    (folder / "graph.svg").write_text(graph_svg(found.boxed, found.mesh, f"GPT on {found.mesh}"))
    console.print(
        f"[bold]3. train[/]  {steps} steps of AdamW on {found.mesh.ranks} processes, then in one\n",
        highlight=False,
        soft_wrap=True,
    )
    parallel, parallel_seconds = train_ranks(folder / "plan.sbpc", steps, dtype, found.mesh.ranks, console)
    with bar("one process", steps, console) as tell:
        start = time.perf_counter()
        one = train(model, batches(steps), optimizer_of("adamw", model, RATE), tell)
        one_seconds = time.perf_counter() - start
    losses = {"one process": one, f"{found.mesh.ranks} ranks": parallel}
    difference = largest_difference([one, parallel])
    console.print(f"\n[bold]4. compare[/]  losses of the same {steps} batches\n", highlight=False, soft_wrap=True)
    console.print(loss_table(one, parallel))
    equal = difference <= TOLERANCE[dtype]
    verdict = "[bold green]equal[/]" if equal else "[bold red]NOT EQUAL[/]"
    console.print(
        f"\nlargest relative difference {difference:.2e}, allowed {TOLERANCE[dtype]:.0e}: {verdict}",
        highlight=False,
        soft_wrap=True,
    )
    (folder / "losses.json").write_text(
        json.dumps({"dtype": dtype, **losses, "largest_relative_difference": difference}, indent=1) + "\n"
    )
    (folder / "report.html").write_text(picture_html(found, losses))
    seconds = time.perf_counter() - began
    files = [str(folder / name) for name in ("plan.sbpc", "graph.svg", "report.html", "losses.json")]
    console.print(
        f"written {', '.join(files)}\n{seconds:.0f} s in all, {planned:.1f} s of them planning",
        highlight=False,
        soft_wrap=True,
    )
    return {
        "equal": equal, "largest_relative_difference": difference, "tolerance": TOLERANCE[dtype], "losses": losses,
        "parameters": count, "edges": edges, "flops_share": share, "bytes_sent": found.cost.bytes_sent,
        "seconds": seconds, "seconds_planning": planned,
        "seconds_training": {"one process": one_seconds, f"{found.mesh.ranks} ranks": parallel_seconds}, "files": files,
    }  # fmt: skip


def check(found: Plan) -> tuple[float, str]:
    """A rank's share of the one-device flops, and the bytes by axis as text.

    A replicated plan is no plan: raises SbpcError unless the share is about 1 / ranks and every axis carries bytes.
    """
    cost, ranks = found.cost, found.mesh.ranks
    share = cost.flops / cost.flops_one_device
    if share > FLOPS / ranks:
        raise SbpcError(
            f"the plan is replicated: a rank does {100 * share:.1f} % of the flops, {100 / ranks:.0f} % is its share\n"
            "  This is a bug in sbpc: report it."
        )
    carried = {name for key, sent in cost.bytes_sent.items() if sent for name in key.split("+")}
    idle = [name for name in found.mesh.axes if name not in carried]
    if idle:
        raise SbpcError(f"no byte goes over axis {idle[0]!r}: {cost.bytes_sent}\n  This is a bug in sbpc.")
    return share, ", ".join(f"{name}: {sent:,.0f} bytes" for name, sent in cost.bytes_sent.items())


def train_ranks(file: Path, steps: int, dtype: str, ranks: int, console: Console) -> tuple[list[float], float]:
    """The losses of rank 0 of a run on all ranks of the mesh, and the seconds of its steps."""
    with tempfile.TemporaryDirectory(prefix="sbpc-demo-") as folder:
        out = Path(folder, "losses.json")
        arguments = ["-m", "sbpc.cli.demo_run", str(file), str(out), "--steps", str(steps), "--dtype", dtype]
        launch(arguments + ["--stderr"] * console.stderr, ranks)
        found = json.loads(out.read_text())
    return found["losses"], found["seconds"]


def rank(arguments: Sequence[str] | None = None) -> None:
    """A rank: load the plan, distribute the model, train. Rank 0 shows the progress, and writes the losses."""
    parser = argparse.ArgumentParser()
    for name, kind in (("plan", Path), ("out", Path), ("--steps", int), ("--dtype", str)):
        parser.add_argument(name, type=kind)
    parser.add_argument("--stderr", action="store_true")
    options = parser.parse_args(arguments)
    found = load(options.plan)
    model = parallelize(model_of(options.dtype), found)
    optimizer = optimizer_of("adamw", model, RATE)
    start = time.perf_counter()
    if os.environ["RANK"] == "0":
        with bar(f"{found.mesh.ranks} ranks", options.steps, Console(stderr=options.stderr)) as tell:
            losses = train(model, batches(options.steps), optimizer, tell)
        options.out.write_text(json.dumps({"losses": losses, "seconds": time.perf_counter() - start}))
    else:
        train(model, batches(options.steps), optimizer)
    groups.stop()


class bar:
    """A progress bar on a terminal, a line every tenth step elsewhere: `with bar(...) as tell: tell(step, loss)`."""

    def __init__(self, name: str, steps: int, console: Console) -> None:
        self.name, self.steps, self.console = name, steps, console
        columns = (
            TextColumn(f"{name:12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.progress.add_task(name, total=steps, loss="")

    def __enter__(self) -> Callable[[int, float], None]:
        self.progress.start()
        return self.tell

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def tell(self, step: int, loss: float) -> None:
        """Show a step."""
        self.progress.update(self.task, completed=step, loss=f"{loss:.4f}")
        if not self.console.is_terminal and (step % 10 == 0 or step in (1, self.steps)):
            self.console.print(
                f"{self.name:12}step {step:3d} of {self.steps}  loss {loss:.4f}", highlight=False, soft_wrap=True
            )


def loss_table(one: Sequence[float], parallel: Sequence[float], rows: int = 11, width: int = 24) -> Table:
    """Both losses at some steps side by side, with a bar for the one process."""
    table = Table(box=None, pad_edge=False)
    for title in ("step", "one process", "4 ranks", "relative difference"):
        table.add_column(title, justify="right")
    table.add_column("loss")
    shown = sorted({round(at * (len(one) - 1) / max(1, rows - 1)) for at in range(rows)})
    low, high = min(one), max(one)
    for step in shown:
        first, other = one[step], parallel[step]
        filled = (first - low) / (high - low) if high > low else 0.0
        table.add_row(
            str(step + 1),
            f"{first:.7f}",
            f"{other:.7f}",
            f"{abs(first - other) / abs(first):.1e}",
            "━" * (1 + round(width * filled)),
        )
    return table


if __name__ == "__main__":
    with as_rank():
        rank(sys.argv[1:])
