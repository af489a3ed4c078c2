"""Any ``nn.Module`` as an ``nn.Sequential``: recorded while it runs, and cut between its modules.

model, sample -> record -> [nodes] -> cut -> [layers of original modules and glue] -> compare
"""
