"""The rules of ATen ops, one file a family, about one line an op."""
