"""Plans under a limit on the bytes of a rank."""
