"""Orders a boxed graph so that collectives run beside computing, and tells starts from waits."""
