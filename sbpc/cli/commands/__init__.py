"""The commands of `sbpc`, one file each: `NAME`, `HELP`, `add` (its options) and `run`."""
