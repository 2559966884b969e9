"""Plans under a limit on the bytes of a rank: what is alive when, prices of bytes, and the search for plans that
fit."""
