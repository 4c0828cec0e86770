"""The commands of `holdfast golden`, and the file format for exchanging goldens."""
