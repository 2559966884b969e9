"""All ranks of a mesh in one process: the programs run in lockstep, bytes counted."""
