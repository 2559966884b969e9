"""One layout for every value: the layout problem of an annotated graph, and its solution."""
