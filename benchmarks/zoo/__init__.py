"""Models to convert, in tiny sizes and with random weights: one table for each kind."""
