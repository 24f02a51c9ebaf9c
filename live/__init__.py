"""A real LoRA fine-tune in a process of its own, watched and paced through shared memory.

The controlling side imports `wattgym.live.handle`, which needs neither torch nor transformers; the job itself is
`python -m wattgym.live.job`.
"""
