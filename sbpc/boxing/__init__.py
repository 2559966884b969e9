"""Boxing: the cheapest collectives from one layout to another, and the ops that carry them out."""
