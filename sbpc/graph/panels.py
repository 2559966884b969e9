"""Products that are cut into panels: how the products of panels are marked, and the line about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch.fx import Node

PANEL_OF = "panel_of"  # the key in the meta of the product of a panel: the name of the product that is cut


def panel_remarks(nodes: Iterable[Node]) -> list[str]:
    """Returns a line that names the products in panels, with their numbers of panels; none without any."""
    panels = Counter(node.meta[PANEL_OF] for node in nodes if PANEL_OF in node.meta)
    return [f"in panels: {', '.join(f'%{name} ({count})' for name, count in panels.items())}"] if panels else []
