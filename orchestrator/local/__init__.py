"""The laptop loop: a small trainable policy, an OpenAI-compatible server for it, and a reference trainer.

`tokenizer` and `policy` are pure numpy; `engine` batches the decoding; `server` speaks HTTP; `trainer` learns
from batches. They know the rest of the project only through the protocols that any server or trainer speaks.
"""
