"""The commands of `holdfast golden`, and the file in which goldens are exchanged."""
