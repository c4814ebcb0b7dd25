"""Peers, each run by the interpreter of its own environment (`make peers`)."""
