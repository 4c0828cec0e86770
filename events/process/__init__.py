"""What every process of ours needs of its operating system."""
