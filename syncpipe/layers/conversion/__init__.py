"""Any ``nn.Module`` as an ``nn.Sequential``: traced while it runs, and cut between its modules."""
