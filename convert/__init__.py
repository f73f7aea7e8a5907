"""PyTorch checkpoints (safetensors, PEFT adapters) to jdllm checkpoints: ``python -m jdllm.convert``.

Nothing on the plain path imports jax or torch: a conversion is reading, transposing and writing a few megabytes at a
time, and its memory does not depend on the size of the model.
"""
