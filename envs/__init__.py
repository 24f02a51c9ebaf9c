"""Plants, the emulator, and the Gymnasium and batched environments over them."""
