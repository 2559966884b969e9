"""The command line: targets, options, output and one file for every command."""
