"""Models of the papers as flat lists of layers, that a pipe can cut anywhere."""
