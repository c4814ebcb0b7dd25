"""What router and replicas share: the contract's stubs, block keys, settings, command line."""

__version__ = "0.1.0"
