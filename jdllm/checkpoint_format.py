"""Names inside a jdllm checkpoint, known to those who write one (jdllm.convert) and read one (jdllm.checkpoint).

A checkpoint is a folder: ``jdllm.json`` (what it is), ``weights/`` (an Orbax tree: a flat dict of the weights), and
the source's config.json and tokenizer files.
"""

FORMAT_VERSION = 1
RECORD = "jdllm.json"
WEIGHTS = "weights"
