"""How a step is run, as one program, in a loop or in stages: its parts and programs, their order, and what they
cost."""
