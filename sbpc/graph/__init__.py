"""Small tools on fx graphs: ports of nodes, operands, rewriting, pytrees, random bits."""
