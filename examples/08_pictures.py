"""Draws a plan as three pictures: the map of the model, what runs when on one rank, and the schedule of a pipeline.

    python examples/08_pictures.py examples

It plans a small GPT for eight H100s, which takes some seconds and no GPU, and writes map.svg, timeline.svg and
schedule.svg into the folder. `plan.save_page("plan.html")` has these charts and more on one page.
"""

import argparse
from html import escape
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh, Plan
from sbpc.inspect.model_map import model_map
from sbpc.inspect.page_charts import schedule, timeline
from sbpc.inspect.picture import hue_of
from sbpc.inspect.tables import quantity

VOCAB, WIDTH, HEADS, LAYERS, BATCH, SEQUENCE = 32_000, 2048, 16, 2, 16, 1024
WIDE, LEFT = 880, 24  # pixels: of every picture, and of its margins
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1b2128; }
.mono { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.title { font-size: 16px; font-weight: 650; } .bold { font-weight: 650; }
.small { font-size: 11.5px; } .soft { fill: #5c6672; }
.end { text-anchor: end; } .middle { text-anchor: middle; } .in { fill: #fff; font-weight: 650; }
.ground { fill: #fff; stroke: #d1d9e0; } .lane { fill: #f0f3f6; } .rule { stroke: #e1e5ea; }
.forward, .s0 { fill: #1668dc; } .backward, .s2 { fill: #7c48d6; } .s1 { fill: #16803c; } .b { fill: #8a94a0; }
.exposed, .p { fill: #cc2b36; }
@media (prefers-color-scheme: dark) {
text { fill: #e4e9ef; } .soft { fill: #99a4b0; } .in { fill: #fff; }
.ground { fill: #0d1117; stroke: #3d444d; } .lane { fill: #1c232c; } .rule { stroke: #2b333d; }
.forward, .s0 { fill: #2f7ff0; } .backward, .s2 { fill: #9166e8; } .b { fill: #5f6975; }
}
"""


def linear(features: int, others: int) -> nn.Linear:
    return nn.Linear(features, others, bias=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.proj = nn.RMSNorm(WIDTH), linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.RMSNorm(WIDTH), linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(SEQUENCE, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def bar(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    shape = f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" class="{kind}"'
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def drawn(title: str, about: str, height: float, parts: list[str]) -> str:
    """A whole picture."""
    size = f'viewBox="0 0 {WIDE} {height:.0f}" width="{WIDE}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    ground = f'<rect class="ground" x="0.5" y="0.5" width="{WIDE - 1}" height="{height - 1:.1f}" rx="10"/>'
    words = [text(LEFT, 32, title, "title"), text(LEFT, 53, about, "soft")]
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", ground, *words, *parts, "</svg>\n"]
    )


def map_picture(plan: Plan) -> str:
    """The modules as a tree, with the state of every parameter on every axis."""
    columns, parts, y = [430 + 110 * at for at in range(len(plan.mesh.axes))], [], 104.0
    heads = [text(x, 82, name, "soft small") for x, name in ((LEFT, "parameter"), (260, "type"))]
    heads.append(text(WIDE - LEFT, 82, "bytes on a rank", "soft small end"))
    axes = zip(columns, plan.mesh.axes, plan.mesh.sizes)
    heads += [text(x, 82, f"{axis} × {size}", "soft small") for x, axis, size in axes]
    for row in model_map(plan):
        label = row.label + (f"  × {row.times}" if "{" in row.label else "")
        parts += [
            text(LEFT + 18 * row.depth, y, label, "" if row.home else "bold"),
            text(260, y, row.type, "mono soft"),
        ]
        for x, state in zip(columns, map(str, row.home.states if row.home else ())):
            chip = f'<rect x="{x}" y="{y - 13:.1f}" width="46" height="18" rx="5" class="{hue_of(state)}"/>'
            parts += [chip, text(x + 23, y + 0.5, state, "mono in middle")]
        parts.append(text(WIDE - LEFT, y, quantity(row.bytes, "B"), "end"))
        parts.append(f'<line x1="{LEFT}" x2="{WIDE - LEFT}" y1="{y + 8:.1f}" y2="{y + 8:.1f}" class="rule"/>')
        y += 25
    about = f"S(d): split along dim d; B: whole on every rank. A step takes {quantity(plan.cost.seconds, 's')}."
    return drawn(f"Where the parameters of a GPT lie on {plan.mesh}", about, y, [*heads, *parts])


def timeline_picture(plan: Plan) -> str:
    """Kernels and collectives of one rank, each stream in a lane, and in red what is not hidden."""
    chart, left = timeline(plan.timeline(), {}), 150
    scale, parts = (WIDE - left - LEFT) / chart["width"], []
    for at, name in enumerate([*chart["lanes"], "nothing is computed"]):
        y = 76 + chart["lane"] * at
        parts += [text(LEFT, y + 18, name, "small"), bar(left, y, chart["width"] * scale, 26, "lane")]
    for each in chart["bars"]:
        x, width = left + each["x"] * scale, (each["end"] - each["x"]) * scale
        parts.append(bar(x, 72 + each["y"], width, chart["bar"], each["phase"], each["title"]))
    parts += [bar(left + x * scale, 72 + y, width * scale, chart["bar"], "exposed") for x, width, y in chart["exposed"]]
    bottom = 76 + chart["lane"] * (len(chart["lanes"]) + 1)
    parts += [text(left + x * scale, bottom + 12, label, "soft small middle") for x, label in chart["ticks"][:-1:2]]
    cost = plan.cost
    hidden, sent = cost.comm_seconds - cost.exposed_seconds, quantity(cost.comm_seconds, "s")
    about = (
        f"blue: forward, purple: backward. Collectives take {sent}, of which {quantity(hidden, 's')} are hidden "
        "behind computing."
    )
    return drawn(
        f"One step on one of the {plan.mesh.ranks} ranks: {quantity(cost.seconds, 's')}", about, bottom + 30, parts
    )


def schedule_picture(plan: Plan) -> str:
    """What each stage of a pipeline works on, by micro-batch."""
    chart, left = schedule(plan), 90
    scale, parts = (WIDE - left - LEFT) / chart["width"], []
    for lane in chart["lanes"]:
        parts.append(text(LEFT, 94 + lane["y"], lane["name"], "small"))
        parts.append(bar(left, 76 + lane["y"], chart["width"] * scale, chart["bar"], "lane"))
    for each in chart["bars"]:
        x, width = left + each["x"] * scale, each["width"] * scale
        parts.append(bar(x, 76 + each["y"], max(width - 1, 0.5), chart["bar"], each["phase"], each["title"]))
        parts += [text(x + width / 2, 94 + each["y"], each["label"], "small in middle")] if each["label"] else []
    bottom = 76 + chart["height"]
    every = chart["width"] * scale / 5
    parts += [
        text(left + every * at, bottom + 14, label, "soft small middle")
        for at, label in enumerate(chart["ticks"][:-1:2])
    ]
    waits = f"The busiest stage waits for {100 * plan.cost.bubble_seconds / plan.cost.seconds:.1f} % of it."
    title = (
        f"{plan.stages} stages, {plan.schedule}, {plan.count} micro-batches on {plan.mesh}: "
        f"{quantity(plan.cost.seconds, 's')} a step"
    )
    return drawn(title, f"blue: forward of a micro-batch, purple: backward. {waits}", bottom + 32, parts)


def main(folder: Path) -> None:
    given = tuple(torch.zeros(BATCH, SEQUENCE, dtype=torch.int64, device="meta") for _ in range(2))
    with torch.device("meta"):
        model, deep = GPT(LAYERS).bfloat16(), GPT(7).bfloat16()
    plan = sbpc.plan(model, given, Mesh(data=2, tensor=4, cluster="h100"))
    stages = sbpc.plan(
        deep, given, Mesh(pipe=4, data=2, cluster="h100"), stages="pipe", microbatches=8, schedule="1f1b"
    )
    pictures = {"map": map_picture(plan), "timeline": timeline_picture(plan), "schedule": schedule_picture(stages)}
    for name, svg in pictures.items():
        (folder / f"{name}.svg").write_text(svg)
        print(f"{folder / name}.svg  {len(svg):,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the plan of a small GPT.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("."))
    main(parser.parse_args().folder)
