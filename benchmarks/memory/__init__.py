"""How much memory building a pipe takes, and a step of it."""
