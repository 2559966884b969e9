"""The passes: each takes a graph to the next stage; the pipeline runs them in order and verifies after each."""
