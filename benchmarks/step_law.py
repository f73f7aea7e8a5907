"""How many forward passes D2F makes for an answer of n blocks where no probability is above the skip threshold."""

from jdllm.config import DecodeConfig, need


def stride(decode: DecodeConfig) -> int:
    """Passes between the starts of two blocks (s): a block is fully activated once its predecessor has enough tokens
    for both thresholds, and then commits one a pass."""
    thresholds = (decode.block_add_threshold, decode.decoded_token_threshold)
    return max(1, *(need(threshold, decode.block_size) for threshold in thresholds))


def law(blocks: int, decode: DecodeConfig) -> int:
    """s (n - 1) + B, of an answer that has ``blocks`` blocks, all whole."""
    return stride(decode) * (blocks - 1) + decode.block_size
