"""Message passing (TRW-S): a lower bound, multipliers that prove it, reduced costs of labels, and a plan read off
them."""
