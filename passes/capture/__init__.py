"""From a module to its joint graph of forward and backward at global shapes."""
