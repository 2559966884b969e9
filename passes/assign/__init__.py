"""assign: one layout for every value and a home for every parameter, as cheap as the solver can find.

The layout problem: every node of the annotated graph is a variable. Its labels are what the node may do: one
signature per mesh axis, and an order of the axes that cut the same dim. A label costs the seconds of the local op. A
value goes from the layout in which its producer leaves it to those in which its readers take it: it is boxed at most
once to an alias layout, and from there once to every other layout that is wanted. Boxings cost the seconds of their
cheapest way. Wishes of the user leave a node fewer labels.

label_tables, build_tables   all labels of a kind of node, as arrays
two_phase_tables             labels under which a node runs as the small graph of its rule
local_bytes                  bytes of labels, for limits of memory
layout_problem               from the graph to variables and values, and from labels back to layouts
space                        solving, equal layers as one, and proving how far the best plan may be
wishes                       layouts of inputs, outputs and pins
expert_schemes               what experts do by hand, as pins
expert_structure             what these see in a graph: layers, batch, states from op to op
"""
