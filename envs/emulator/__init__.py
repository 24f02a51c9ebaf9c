"""The trace-driven site emulator."""
