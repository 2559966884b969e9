"""What `sbpc.plan` is asked, as data: its keywords, the command line, files, checks and comparisons follow from the
fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sbpc.graph.about import EXCHANGE, FLOAT32
from sbpc.mesh.collectives import EIGHT_BITS
from sbpc.mesh.layout import Layout
from sbpc.mesh.pins import spelled_out_pins
from sbpc.mesh.routing import ANY, Routing

Layouts = Sequence[str | Layout | None] | None  # one layout per tensor, None for whole
OPTIMIZER_STATE: dict[str | None, int] = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, None: 0}
"""How many tensors of a parameter's size an optimizer keeps."""
SECONDS, SERIAL, BYTES = OBJECTIVES = "seconds", "serial", "bytes"
AS_COMPUTED = "as computed"
REDUCTIONS = FLOAT32, EXCHANGE, AS_COMPUTED, *EIGHT_BITS
AS_STORED = "as stored"
GATHERED = AS_STORED, *EIGHT_BITS
ERROR, DROP = OVERFLOWS = "error", "drop"
NONE, SELECTIVE, FULL, AUTO = RECOMPUTE = "none", "selective", "full", "auto"


def option(default: Any, doc: str, *kinds: str, among: Iterable[Any] = ()) -> Any:
    """Returns a field that is a keyword of `sbpc.plan`. doc: what help() says of it. kinds: what it may be, see
    `sbpc.errors.check_kinds`; none where it is checked otherwise. among: all values that it may have."""
    return dataclasses.field(default=default, metadata={"doc": doc, "kinds": kinds, "among": tuple(among)})


@dataclass(frozen=True)
class Options:
    """What a plan was asked for, and what it knows of the step: that it trains, the name and the modes of the model,
    what it was drawn from. `help(sbpc.plan)` tells of each keyword.

    most: times the mean, the rows of experts that a rank has at most, None for any. loss: which result is the loss, if
    one is. baseline: the expert that is followed. forms: by block what its backward computes again, where that is not
    what `recompute` says. dtype: name of the autocast type. eval: modules in eval mode. left_out: entries of a state
    dict that the model leaves out. guards: see `sbpc.graph.guards`. Layouts are texts.
    """

    optimizer: str | None = option(
        "adamw",
        'whose state counts as memory: "adamw", "adam" (2 tensors for each parameter), "momentum" (1), "sgd", None '
        "(0).",
        "a text",
        "None",
        among=OPTIMIZER_STATE,
    )
    memory: float | None = option(
        None,
        "bytes that a rank may take at the peak of the step; None is no limit: collectives that run beside computing "
        "may then hold up to three quarters of what the cluster's devices have, where the step is shorter so. With a "
        "limit the plan is as fast as can be found under it: that can take minutes, and the gap may be some percent.",
    )
    pin: Mapping[str, str] = option(
        None,
        "{name: layout}: what you know better. A name is that of a parameter or of a value that `sbpc show` prints, "
        'or a pattern such as "*.up.weight" or "blocks.{0-2,5}.up.weight". "S(0)@tensor" leaves the other axes free, '
        '"B@data, S(1)@tensor" names two, "S(0)@tensor>data" cuts over tensor first, "[B, S(0)]" is all axes in the '
        'order of the mesh. "S(0)" will do on a mesh of one axis. A `sbpc.Layout` is taken too.',
        "a mapping whose keys are texts",
        "None",
    )
    inputs: str | Sequence[str | Layout | None] | None = option(
        None,
        'the axes, such as "data" or "replicate,shard", along which every rank gives its own rows of the batch, as '
        "DistributedSampler and the loader of accelerate hand them out: ranks that differ in other axes alone give the "
        "same. How many may differ from rank to rank. Rows are those along dim 0 of every tensor among the arguments "
        "whose dim 0 is as long as that of the first one that has dims; other tensors are whole. `args` of `sbpc.plan` "
        'are those of one device: the whole batch. Or a list with one layout, or None, for each tensor: ["S(0)@data", '
        "None], each rank then gives its shard; axes that it does not name are B. Without, inputs and outputs are "
        "whole on every rank.",
        "a text",
        "a list",
        "None",
    )
    outputs: str | Sequence[str | Layout | None] | None = option(
        None,
        "one layout, or None, for each tensor that the model returns. Where `inputs` names axes, a rank gets its own "
        "rows of what has the rows of the batch, and all else whole, unless this is a list. What you make of your rows "
        "outside of the plan counts as a sum over the ranks: of a mean of your own over them, backward gives the sum "
        "of the gradients of all ranks' means.",
        "a text",
        "a list",
        "None",
    )
    spread: bool = option(False, "store inputs, parameters and outputs exactly once over the ranks.", "True or False")
    objective: str = option(
        SECONDS,
        '"seconds", where collectives run beside computing; "serial", where they do not; or "bytes", which counts '
        "what the busiest rank sends and nothing else. With spread=True a single product then attains the tight lower "
        "bound on the best mesh (tests/matmul_bound.py).",
        "a text",
        among=OBJECTIVES,
    )
    dynamic: Mapping[str, Any] | None = option(
        None,
        '{"x": ("b", "s", "h"), "*up.weight": ("4*h", "h"), "heads": 12} names dims of inputs and parameters, so that '
        "`plan.cost.expr` is a formula in them. A dim that is not named is what it meets in an op, such as the bias "
        "of up, or else its number, and a note says so. A name with a number is a symbol that no dim has alone. The "
        "layouts are those of the plan.",
    )
    microbatches: int | None = option(
        None,
        "how many equal parts of the batch the step works on. Numbers are those of the whole batch: means, counts of "
        "targets, batch "
        "statistics and random numbers. With a number above 1 the step is a loop: `module.step(*args)` takes the "
        "whole batch on every "
        "rank, gradients add up and go home once, and formulas have the number as `m`. A step is written out part by "
        "part where it has no "
        "loss, where its parts need each other (batch norm), or with layouts in inputs= or outputs=, spread=, "
        'panels= or objective="bytes"; '
        "`plan.loop` is then None. A micro-batch of a loop runs in halves or panels where the step is shorter so. "
        "None is two parts side by side where the simulated step is shorter by 2 % so, else "
        "1; spaces of many "
        "layouts are not tried.",
    )
    panels: int | None = option(
        None,
        "into how many equal parts the products next to a collective are cut, so that one part is computed while the "
        "next is gathered, or the last one reduced and scattered. Bytes and results are the same, each part gathered "
        "is smaller. None is 2, 4 or 8, where the simulated step is shorter by 2 % with them, or no plan fits into "
        "`memory` without, else 1.",
    )
    slices: int | None = option(
        None,
        "into how many parts of the positions the last product of a language model, its loss and their backward are "
        "cut: one goes after the other, so that the logits of one part are alive. The model returns its loss, or "
        "`loss` makes it, and no logits. None is 1 without `memory`, else the fewest with which the logits, what the "
        "loss makes of them and their gradient are at most a sixteenth of it, if all ranks share them, and "
        "those of a slice 16 MiB at least.",
    )
    stages: str | None = option(
        None,
        'the axis of the mesh along which the model is cut into stages of a pipeline, such as "pipe": `plan.chunks` '
        "are its pieces, and layouts are those on the other axes. None is no pipeline. With stages, microbatches is "
        "by default the largest divisor of the batch up to four for each stage.",
        "a text",
        "None",
    )
    schedule: str | None = option(
        None,
        'the order in which the stages of a pipeline, or one stage in a loop, work: "gpipe", "1f1b", "interleaved" '
        '(two chunks of the model on each stage, or so many as "interleaved:3" says), "zbv" (two, there and back, and '
        'the backward in two parts) or "breadth-first" (two, or as many as is said; all micro-batches go through one '
        "chunk before the next, so that its gradients are on their way home for longer, and what later chunks gather "
        'comes beside earlier ones). It is taken as it is. None is "1f1b", for a loop without stages "breadth-first" '
        "where the simulated step is shorter by 2 % so, and fits. Where backwards read what the forwards of all "
        'micro-batches make, as a loss that balances experts does, it is "gpipe" or "breadth-first", by default the '
        "first.",
        "a text",
        "None",
    )
    cuts: Sequence[str] | None = option(
        None,
        "where the chunks of a model in stages begin, as `plan.cuts` says it of another plan: the name of the first "
        "parameter of each but the first, or of a parameter and how many calls behind the first that reads it, such as "
        "up.weight+2. Plans of one module are to be cut alike. None is where stages are even.",
        "a list of texts",
        "None",
    )
    recompute: str = option(
        NONE,
        'what a backward computes again instead of having it kept since the forward: "none"; "selective", in each '
        "repeated block what is cheap, as far as that keeps fewer bytes, or where attention is written out its values "
        'between the products; "full", all but the inputs of each block; "auto", nothing where `memory` allows it, '
        "else what makes the fastest plan that fits: nothing, what is cheap, or whole blocks. A block is a module such "
        'as "layers.3", or a child of a model without such. '
        "`plan.cost.recompute_seconds` tells what that takes.",
        "a text",
        among=RECOMPUTE,
    )
    reduce: str = option(
        FLOAT32,
        "how gradients are summed over ranks, micro-batches and stages where they are computed in 16 bits: "
        '"float32", in that type, or in the one of their parameter if it is wider; "exchange", in float32, too, but '
        "over ranks they may be sent as they are computed, which rounds the sum once and sends half as much (but what "
        "micro-batches add up is in float32, and is sent so: rounded, it would lose digits that it has); or "
        '"as computed", whose error grows with the root of the number of ranks; or "int8" or "float8", in float32, but '
        "gradients cross links in 8 bits where that is faster, each rank's part rounded once and the sum once more if "
        "it is gathered: up to 256 numbers of a row share a scale, int8 has their square roots, so that what is small "
        "beside others keeps digits (the loss of a small GPT after 1,000 steps was 0.7 % higher from one seed, as high "
        "from another). "
        "Partial sums of activations, as in tensor parallelism, are taken in the type of the activations.",
        "a text",
        among=REDUCTIONS,
    )
    gather: str = option(
        AS_STORED,
        'how parameters of float32 cross links: "as stored", or as they are cast before; or "int8" or "float8", in 8 '
        "bits where that is faster, as gradients by `reduce`: what a step reads is then rounded, what is stored and "
        "trained is not (the loss of a small GPT was 1.2 % higher for it after 1,000 steps).",
        "a text",
        among=GATHERED,
    )
    masters: bool | None = option(
        None,
        "whether parameters that the model holds in bfloat16 or float16 are stored in float32, and cast to the model's "
        "type at home, before they are gathered. The forward is that of the model as given. Parameters of the parallel "
        "module, their gradients and the optimizer's state are then in float32, and `sbpc.Checkpoints` saves them so; "
        "`state_dict()` gives copies in the model's types, and `load_state_dict` takes either. None is True for a step "
        "that trains with an optimizer. A plan of an evaluation needs none beside one with masters.",
        "True or False",
        "None",
    )
    capacity: float | None = option(
        None,
        "rows of experts that a rank has at most where ranks share them out by their experts, as a multiple of the "
        "mean: 1.25 is a quarter more. Memory is counted so. None is as many as there are: memory is then enough for "
        "any routing.",
    )
    overflow: str = option(
        ERROR,
        'what is done with rows beyond `capacity`: "error", every rank stops with a RoutingError that tells the '
        'counts; or "drop", each expert takes capacity times the mean of all experts at most, the first ones of the '
        "batch, and adds nothing to the tokens of others (Lepikhin et al. 2020, GShard): the numbers are others then, "
        "the same on any mesh.",
        "a text",
        among=OVERFLOWS,
    )
    routing: float = option(
        1.0,
        "rows of experts of the busiest rank that prices expect, as a multiple of the mean: 1 is even. "
        "`sbpc run --trace` tells what it was. Memory does not follow from it, see `capacity`.",
    )
    baseline: str | None = None
    forms: Mapping[str, str] | None = None
    most: float | None = None
    train: bool = True
    model: str = "model"
    dtype: str | None = None
    eval: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    loss: int | None = None
    guards: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        pins = spelled_out_pins({name: str(layout) for name, layout in (self.pin or {}).items()})
        object.__setattr__(self, "pin", pins)
        for name in ("inputs", "outputs"):
            if (layouts := getattr(self, name)) is not None and not isinstance(layouts, str):
                object.__setattr__(self, name, tuple(layout if layout is None else str(layout) for layout in layouts))
        if self.cuts is not None:
            object.__setattr__(self, "cuts", tuple(self.cuts))

    @property
    def own_rows(self) -> str | None:
        """The axes along which each rank gives its own rows of the batch, None where it does not."""
        return self.inputs if isinstance(self.inputs, str) else None

    @property
    def overlaps(self) -> bool:
        """Whether collectives run beside computing."""
        return self.objective == SECONDS

    @property
    def routed(self) -> Routing:
        """How uneven shares of rows of experts may be."""
        return Routing(self.routing, ANY if self.most is None else self.most)

    @property
    def copies(self) -> int:
        """How many tensors of a parameter's size the optimizer keeps."""
        return OPTIMIZER_STATE[self.optimizer]

    @property
    def in_order(self) -> Options:
        """The same for a step whose collectives are waited for at once."""
        return dataclasses.replace(self, objective=SERIAL) if self.overlaps else self
