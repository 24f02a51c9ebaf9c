"""Federated LoRA fine-tuning: sites that train, engines that carry messages to them, and the loop that selects them."""
