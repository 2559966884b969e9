"""How the ranks of a job start, meet and agree."""
