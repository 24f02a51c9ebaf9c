"""The live plant: real training jobs on real or simulated devices behind the plant interface."""
