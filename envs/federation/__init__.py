"""The emulated federation: sites with power, network, market and data, and what federated rounds do to a model."""
