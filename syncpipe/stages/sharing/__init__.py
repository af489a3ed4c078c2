"""Tensors that several stages compute with: ties, and replicas."""
