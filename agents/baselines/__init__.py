"""Power-shaping controllers that a learned policy has to beat."""
