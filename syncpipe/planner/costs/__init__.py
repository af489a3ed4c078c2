"""What devices and layers cost, as far as planning goes."""
