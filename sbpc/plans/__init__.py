"""What a plan is: layouts, cost, bytes alive, symbolic sizes, programs of ranks and the file that holds them."""
