"""How long planning takes, how good plans are, and whether predictions come true."""
