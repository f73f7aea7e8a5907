"""The D2F loop of a batch in lockstep, in PyTorch: one forward pass a step for all requests together.

What benchmarks.torch_loop does request by request, batched and synchronized: keys and values lie in one preallocated
cache, the windows are padded to the widest, and the batch ends with its longest request, the ended ones being carried
along. Python still decides the blocks, on NumPy copies: a step sends ids and positions to the device and fetches
probabilities and tokens back once. The forward pass runs eagerly, compiled, or as a captured CUDA graph.

Keys are cached rotated, as the tuned loop does. Greedy D2F by probability only.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Request
from benchmarks.torch_loop import Block, Pass, TorchModel, rotate
from jdllm.config import DecodeConfig, ModelConfig

HOW = ("eager", "compiled", "graphs")

GRAPH_WIDTHS = 16
"""Windows of captured graphs are padded to multiples of it: a graph has fixed shapes, and each costs a capture."""

Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class BatchRow:
    """The block control of one request on the host; the rules are those of TorchRequest.

    Attributes:
        canvas: int64 [length], prompt and blocks made so far.
        passes: one entry per forward pass.
    """

    def __init__(self, prompt_ids: Sequence[int], decode: DecodeConfig, model: ModelConfig):
        plain = DecodeConfig(top_p=1.0, top_k=0, confidence="probability")
        if any(getattr(decode, name) != getattr(plain, name) for name in ("top_p", "top_k", "confidence")):
            raise ValueError("the batched PyTorch loop knows no filters and ranks by probability only")
        if decode.temperature or decode.early_stop or decode.decoder != "d2f":
            raise ValueError("the batched PyTorch loop knows greedy D2F without early stop only")
        self.decode, self.mask_id = decode, model.mask_id
        self.stop_ids = (model.eos_id,) if decode.stop_ids is None else decode.stop_ids
        self.canvas = np.array(prompt_ids, np.int64)
        self.prompt_length = len(prompt_ids)
        self.blocks = [Block(0, self.prompt_length, 0, "to_cache", True)]
        self.cached, self.eos_seen = 0, False
        self.passes: list[Pass] = []

    @property
    def ids(self) -> list[int]:
        """Everything after the prompt."""
        return self.canvas[self.prompt_length :].tolist()

    def begin(self) -> tuple[int, int] | None:
        """Add and activate blocks; start and end of the next window, or None when the request has ended."""
        decode, last = self.decode, self.blocks[-1]
        room = len(self.blocks) - 1 < decode.max_tokens // decode.block_size
        if room and not self.eos_seen and last.decoded >= decode.block_add_threshold:
            self.canvas = np.append(self.canvas, np.full(decode.block_size, self.mask_id))
            self.blocks.append(Block(last.end, last.end + decode.block_size, decode.block_size, "active", False))
        for before, block in zip(self.blocks, self.blocks[1:], strict=False):
            if before.decoded >= decode.decoded_token_threshold:
                block.complete = True
        return (self.cached, len(self.canvas)) if any(b.state == "active" for b in self.blocks) else None

    def finish(self, probability: np.ndarray, candidate: np.ndarray) -> None:
        """Commit what the pass over the window found, [T] each, and release finished blocks to the cache."""
        start, end = self.cached, len(self.canvas)
        self.passes.append(Pass(start, end, int((self.canvas[start:] == self.mask_id).sum())))
        for block in self.blocks:
            if block.state == "to_cache":
                block.state, self.cached = "in_cache", block.end
        for block in self.blocks:
            if block.state == "active":
                window = slice(block.start - start, block.end - start)
                self._commit(block, probability[window], candidate[window])
        for block in self.blocks:
            if block.state == "active":
                if (self.canvas[block.start : block.end] == self.mask_id).any():
                    return
                block.state = "to_cache"

    def _commit(self, block: Block, probability: np.ndarray, candidate: np.ndarray) -> None:
        part = self.canvas[block.start : block.end]  # a view
        places = np.flatnonzero(part == self.mask_id)
        if not len(places):
            return
        chosen = places[probability[places] > self.decode.skip_threshold]
        if not len(chosen):
            if not block.complete:
                return
            chosen = places[[probability[places].argmax()]]
        part[chosen] = candidate[chosen]
        block.masks -= len(chosen)
        self.eos_seen = self.eos_seen or bool(np.isin(candidate[chosen], self.stop_ids).any())


class TorchBatch:
    """A batch of requests that is decoded any number of times.

    Args:
        how: one of HOW; ``graphs`` needs a network on a CUDA device.

    Attributes:
        rows: the requests as far as they are decoded.
        computed: window positions of all passes so far, padding and ended requests included.
        state_bytes: keys, values and what says who sees whom.
    """

    def __init__(self, network: TorchModel, asked: Sequence[Request], how: str = "eager"):
        self.network, self.asked = network, asked
        model, device, B = network.model, network.device, len(asked)
        canvas = max(len(p) + d.max_tokens // d.block_size * d.block_size for p, d in asked)
        # One position behind every canvas, S, takes what the padding of the windows writes. No one sees it.
        self.spare = canvas
        shape = (B, canvas + 1, model.n_kv_heads, model.head_dim)
        zeros = lambda: torch.zeros(shape, dtype=network.dtype, device=device)
        self.caches = [(zeros(), zeros()) for _ in range(model.n_layers)]
        self.row = torch.arange(B, device=device)[:, None]
        self.visible = torch.from_numpy(np.stack([_visible(len(p), canvas, d.block_size) for p, d in asked])).to(device)
        angle = lambda table: torch.cat((table[:canvas], table[:1]))  # [S + 1, H]
        self.cos, self.sin = angle(network.cos), angle(network.sin)
        self.state_bytes = self.visible.nbytes + sum(k.nbytes + v.nbytes for k, v in self.caches)
        self.multiple = GRAPH_WIDTHS if how == "graphs" else 1
        self.forward: Forward = self._forward
        if how == "compiled":
            self.forward = _compiled(self._forward)
        elif how == "graphs":
            self.forward = CapturedGraphs(self._forward)
        self.reset()

    def reset(self) -> None:
        """Start all requests anew."""
        self.computed = 0
        self.rows = [BatchRow(prompt, decode, self.network.model) for prompt, decode in self.asked]
        for keys, values in self.caches:
            keys.zero_()
            values.zero_()

    @torch.inference_mode()
    def step(self) -> bool:
        """One iteration of the loop; False, without a forward pass, when all requests have ended."""
        windows = [row.begin() for row in self.rows]
        widest = max((w[1] - w[0] for w in windows if w), default=0)
        if not widest:
            return False
        width = -(-widest // self.multiple) * self.multiple
        self.computed += len(self.rows) * width
        ids = np.zeros((len(self.rows), width), np.int64)
        positions = np.full_like(ids, self.spare)
        for b, window in enumerate(windows):
            if window:
                start, end = window
                ids[b, : end - start] = self.rows[b].canvas[start:]
                positions[b, : end - start] = np.arange(start, end)
        device = self.network.device
        found = self.forward(torch.from_numpy(ids).to(device), torch.from_numpy(positions).to(device))
        probability, candidate = (x.cpu().numpy() for x in found)
        for b, window in enumerate(windows):
            if window:
                self.rows[b].finish(probability[b], candidate[b])
        return True

    def _forward(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T] each -> the best token's probability and the token, [B, T] each. Writes the windows' keys and values
        into the caches."""
        network = self.network
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]  # [B, 1, T, H]
        seen = self.visible[self.row, positions][:, None]  # [B, 1, T, S + 1]
        grouped = network.model.n_heads != network.model.n_kv_heads
        x = network.embed(ids)
        for p, (keys, values) in zip(network.layers, self.caches, strict=True):
            q, k, v = network.attention_inputs(x, p)
            keys[self.row, positions] = rotate(k, cos, sin).transpose(1, 2)
            values[self.row, positions] = v.transpose(1, 2)
            attended = F.scaled_dot_product_attention(
                rotate(q, cos, sin), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=seen, enable_gqa=grouped
            )
            x = network.rest_of_layer(x, attended, p)
        probability, candidate = network.logits(x).softmax(-1).max(-1)
        return probability, candidate


def _visible(prompt_length: int, canvas: int, block_size: int) -> np.ndarray:
    """bool [S + 1, S + 1]: who sees whom, with the spare position seen by itself alone. Blocks not yet added are later
    than any query's, so that the length needs no rule of its own."""
    position = np.arange(canvas + 1)
    block = np.where(position < prompt_length, 0, 1 + (position - prompt_length) // block_size)
    block[canvas] = canvas + 1
    return block[None] <= block[:, None]


def _compiled(forward: Forward) -> Forward:
    """One program for windows of any width. Kernels that the compiler makes announce themselves to the profiler, which
    sees nothing of them otherwise."""
    import torch._inductor.config

    torch._inductor.config.cpp.enable_kernel_profile = True
    return torch.compile(forward, dynamic=True)


class CapturedGraphs:
    """A forward pass as CUDA graphs, one for each width, captured when it is first needed."""

    def __init__(self, forward: Forward):
        self.forward = forward
        self.captured: dict[torch.Size, tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] = {}

    def __call__(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if ids.shape not in self.captured:
            self._capture(ids.clone(), positions.clone())
        graph, inputs, outputs = self.captured[ids.shape]
        for place, given in zip(inputs, (ids, positions), strict=True):
            place.copy_(given)
        graph.replay()
        return outputs

    def _capture(self, ids: Tensor, positions: Tensor) -> None:
        # Libraries set themselves up in their first calls, which must not be captured. Running the same window again
        # writes the same keys and values.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self.forward(ids, positions)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.forward(ids, positions)
        self.captured[ids.shape] = graph, (ids, positions), outputs
