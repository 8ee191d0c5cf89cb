"""A small, complete Gym of real server processes: for the demo, the end-to-end tests and the benchmarks."""
