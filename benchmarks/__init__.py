"""The benchmarks behind every figure that Holdfast claims; README.md lists each with its command."""
