"""The same load and faults for NVIDIA Dynamo and for Holdfast."""
