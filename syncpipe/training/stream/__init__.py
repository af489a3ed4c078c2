"""Training without a flush: ``pipe.train_stream``."""
