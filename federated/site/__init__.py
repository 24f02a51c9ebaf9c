"""A site: the long-lived trainer process, its power controller, and the client that reaches it."""
