"""The commands of `holdfast golden`, and the file format in which goldens are exported and imported."""
