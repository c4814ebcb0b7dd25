"""What router and replicas share: the contract's stubs, block keys, settings and the command line."""

__version__ = "0.1.0"
