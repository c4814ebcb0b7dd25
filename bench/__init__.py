"""Benchmarks and checks that run the product as its users do."""
