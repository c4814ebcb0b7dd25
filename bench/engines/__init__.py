"""The engines that `bench.engine` compares, each in a process of its own."""
