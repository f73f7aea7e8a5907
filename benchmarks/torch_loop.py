"""The D2F decoding loop in eager PyTorch, batch 1, as the official code runs it: what jdllm is compared with.

One request is a canvas that grows block by block. Python decides every step: add a block, activate blocks, run the
model on everything behind the cache, commit tokens block by block, release finished blocks to the cache. Keys and
values are concatenated, attention is ``scaled_dot_product_attention`` with an additive block-causal bias, confidences
are a softmax over the vocabulary. Several requests are several such loops that take turns: one forward pass per request
and step.

As in the official code, keys are cached as they are and the whole of them is rotated in every pass, the norm is written
out, and the head runs on the whole input. Where it departs from it, it is the faster one: no gradient bookkeeping, the
adapter is merged, the bias is made once per request. ``tuned`` goes further, to what the same loop could be in eager
PyTorch: keys are cached rotated, the norm is PyTorch's own, the head runs from the first active block on. Greedy only.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jdllm.config import DecodeConfig, ModelConfig

Cache = list[tuple[Tensor, Tensor]]
"""Keys (rotated if tuned) and values of each layer, [1, K, cached, H]."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """What one forward pass was given: positions ``start`` to ``end`` of the canvas, ``masks`` of them masked."""

    start: int
    end: int
    masks: int


class TorchModel:
    """A LLaDA of jdllm's flat weights as plain tensors.

    Args:
        params: name -> float32 array, matrices [in, out]; or tensors, all of one dtype.
        tuned: leave out what the official code does twice.
        device: where the weights lie.
    """

    def __init__(
        self, params: Mapping[str, np.ndarray | Tensor], model: ModelConfig, tuned: bool = False, device: str = "cpu"
    ):
        self.model, self.tuned, self.device = model, tuned, torch.device(device)
        # F.linear wants [out, in].
        tensors = {n: _tensor(w).to(self.device) for n, w in params.items()}
        self.params = {n: t.T.contiguous() if t.ndim == 2 and n != "embed" else t for n, t in tensors.items()}
        self.layers: list[dict[str, Tensor]] = [
            {name.split(".")[2]: t for name, t in self.params.items() if name.startswith(f"layers.{i}.")}
            for i in range(model.n_layers)
        ]
        inverse = 1.0 / model.rope_theta ** (torch.arange(0, model.head_dim, 2).float() / model.head_dim)
        angles = torch.arange(model.max_sequence_length).float()[:, None] * inverse
        angles = torch.cat((angles, angles), dim=-1)
        self.dtype = self.params["embed"].dtype
        self.cos, self.sin = (x.to(self.device, self.dtype) for x in (angles.cos(), angles.sin()))  # [S, H]

    def forward(self, ids: Tensor, past: Cache | None, bias: Tensor, head_from: int) -> tuple[Tensor, Cache]:
        """One pass over ``ids`` [T], which stand behind the cached positions.

        Args:
            bias: additive [T, cached + T].
            head_from: the head runs on the positions from this one on.

        Returns:
            logits [T - head_from, V], and keys and values of the cached and the new positions together.
        """
        cfg, length = self.model, len(ids)
        cached = past[0][0].shape[2] if past else 0
        cos, sin = self.cos[cached : cached + length], self.sin[cached : cached + length]
        all_cos, all_sin = self.cos[: cached + length], self.sin[: cached + length]
        x = self.embed(ids[None])  # [1, T, D]
        grouped = cfg.n_heads != cfg.n_kv_heads
        present: Cache = []
        for i, p in enumerate(self.layers):
            q, k, v = self.attention_inputs(x, p)
            q = rotate(q, cos, sin)
            k = rotate(k, cos, sin) if self.tuned else k
            if past:
                k, v = torch.cat((past[i][0], k), dim=2), torch.cat((past[i][1], v), dim=2)
            present.append((k, v))
            k = k if self.tuned else rotate(k, all_cos, all_sin)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=grouped)
            x = self.rest_of_layer(x, out, p)
        logits = self.logits(x[0, head_from:] if self.tuned else x[0])
        return logits if self.tuned else logits[head_from:], present

    def embed(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, D]."""
        x = F.embedding(ids, self.params["embed"])
        return x * self.model.d_model**0.5 if self.model.input_emb_norm else x

    def attention_inputs(self, x: Tensor, p: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a layer, not yet rotated: [B, T, D] -> [B, heads, T, H] each."""
        h = self._norm(x, p, "attn_norm")
        q = _heads(F.linear(h, p["q"], p.get("q_bias")), self.model.n_heads)
        k = _heads(F.linear(h, p["k"], p.get("k_bias")), self.model.n_kv_heads)
        return q, k, _heads(F.linear(h, p["v"], p.get("v_bias")), self.model.n_kv_heads)

    def rest_of_layer(self, x: Tensor, attended: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        """What follows attention in a layer; ``attended`` [B, heads, T, H], all else [B, T, D]."""
        out = attended.transpose(1, 2).reshape(*x.shape[:2], self.model.n_heads * self.model.head_dim)
        x = x + F.linear(out, p["attn_out"], p.get("attn_out_bias"))
        h = self._norm(x, p, "ff_norm")
        gate = F.silu(F.linear(h, p["gate"], p.get("gate_bias")))
        return x + F.linear(gate * F.linear(h, p["up"], p.get("up_bias")), p["down"], p.get("down_bias"))

    def logits(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        kernel = self.params["embed"] if self.model.weight_tying else self.params["head"]
        logits = F.linear(self._norm(x, self.params, "norm"), kernel, self.params.get("head_bias"))
        return logits * self.model.d_model**-0.5 if self.model.scale_logits else logits

    def _norm(self, x: Tensor, p: Mapping[str, Tensor], name: str) -> Tensor:
        if self.tuned:
            out = F.rms_norm(x, (x.shape[-1],), p[name], self.model.rms_norm_eps)
        else:
            wide = x.to(torch.float32)
            variance = wide.pow(2).mean(-1, keepdim=True)
            out = p[name] * (wide * torch.rsqrt(variance + self.model.rms_norm_eps)).to(x.dtype)
        return out if f"{name}_bias" not in p else out + p[f"{name}_bias"]


def _tensor(weight: np.ndarray | Tensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else torch.from_numpy(np.array(weight))


def _heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, heads * H] -> [B, heads, T, H]."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


@dataclasses.dataclass
class Block:
    """Positions ``start`` to ``end``; ``masks`` of them undecided by count. The states are those of the reference:
    ``active``, then ``to_cache``, then ``in_cache``; ``complete`` is the paper's "fully activated"."""

    start: int
    end: int
    masks: int
    state: str
    complete: bool

    @property
    def decoded(self) -> float:
        return (self.end - self.start - self.masks) / (self.end - self.start)


class TorchRequest:
    """One request being decoded; ``step`` makes one forward pass.

    Attributes:
        canvas: int64 [length], prompt and blocks made so far.
        passes: one entry per forward pass.
    """

    def __init__(self, network: TorchModel, prompt_ids: Sequence[int], decode: DecodeConfig):
        if decode.temperature or decode.early_stop or decode.decoder != "d2f":
            raise ValueError("the PyTorch loop knows greedy D2F without early stop only")
        model = network.model
        self.network, self.decode = network, decode
        self.stop_ids = (model.eos_id,) if decode.stop_ids is None else decode.stop_ids
        self.canvas = torch.tensor(list(prompt_ids), device=network.device)
        self.prompt_length = len(prompt_ids)
        self.blocks = [Block(0, self.prompt_length, 0, "to_cache", True)]
        self.max_blocks = decode.max_tokens // decode.block_size
        self.cached = 0
        self.past: Cache | None = None
        self.eos_seen = False
        self.passes: list[Pass] = []
        longest = self.prompt_length + self.max_blocks * decode.block_size
        self.bias = block_causal_bias(self.prompt_length, longest, decode.block_size).to(network.device, network.dtype)

    @property
    def ids(self) -> list[int]:
        """Everything after the prompt."""
        return self.canvas[self.prompt_length :].tolist()

    @torch.inference_mode()
    def step(self) -> bool:
        """One iteration of the loop; False, without a forward pass, when the request has ended."""
        self._add_block()
        for before, block in zip(self.blocks, self.blocks[1:], strict=False):
            if before.decoded >= self.decode.decoded_token_threshold:
                block.complete = True
        active = [b for b in self.blocks if b.state == "active"]
        if not active:
            return False
        start, end, head_from = self.cached, len(self.canvas), active[0].start
        ids = self.canvas[start:]
        logits, present = self.network.forward(ids, self.past, self.bias[start:end, :end], head_from - start)
        masked = ids == self.network.model.mask_id
        self.passes.append(Pass(start, end, int(masked.sum())))
        self._keep(present)
        for block in active:
            self._commit(block, logits[block.start - head_from : block.end - head_from])
        self._release()
        return True

    def _add_block(self) -> None:
        last = self.blocks[-1]
        if len(self.blocks) - 1 >= self.max_blocks or self.eos_seen or last.decoded < self.decode.block_add_threshold:
            return
        size = self.decode.block_size
        masks = torch.full((size,), self.network.model.mask_id, device=self.canvas.device)
        self.canvas = torch.cat((self.canvas, masks))
        self.blocks.append(Block(last.end, last.end + size, size, "active", False))

    def _keep(self, present: Cache) -> None:
        """Keep the keys and values of the blocks that waited for the cache, drop those of the active ones."""
        for block in self.blocks:
            if block.state == "to_cache":
                block.state, self.cached = "in_cache", block.end
                self.past = None
        if self.past is None:
            self.past = [(k[:, :, : self.cached], v[:, :, : self.cached]) for k, v in present]

    def _commit(self, block: Block, logits: Tensor) -> None:
        part = self.canvas[block.start : block.end]  # a view
        places = (part == self.network.model.mask_id).nonzero()[:, 0]
        if not len(places):
            return
        probability, candidate, confidence = candidates(logits[places], self.decode)
        chosen = (probability > self.decode.skip_threshold).nonzero()[:, 0]
        if not len(chosen):
            if not block.complete:
                return
            chosen = confidence.argmax()[None]
        tokens = candidate[chosen]
        part[places[chosen]] = tokens
        block.masks -= len(tokens)
        self.eos_seen = self.eos_seen or any(t in self.stop_ids for t in tokens.tolist())

    def _release(self) -> None:
        """A block without masks waits for the cache once no earlier block is active."""
        for block in self.blocks:
            if block.state == "active":
                if (self.canvas[block.start : block.end] == self.network.model.mask_id).any():
                    return
                block.state = "to_cache"


def block_causal_bias(prompt_length: int, length: int, block_size: int) -> Tensor:
    """Additive float32 [length, length]: 0 where a position sees another, else -inf."""
    position = torch.arange(length)
    block = torch.where(position < prompt_length, 0, 1 + (position - prompt_length) // block_size)
    return torch.where(block[None] <= block[:, None], 0.0, -torch.inf)


def candidates(logits: Tensor, decode: DecodeConfig) -> tuple[Tensor, Tensor, Tensor]:
    """For logits [n, V]: the top probability, its token, and the confidence that picks the fallback, each [n]."""
    if decode.top_p < 1:
        ordered, order = logits.sort(descending=True)
        removed = ordered.softmax(-1).cumsum(-1) > decode.top_p
        removed[:, 1:] = removed[:, :-1].clone()  # the first token beyond the limit stays
        removed[:, 0] = False
        logits = logits.masked_fill(
            torch.zeros_like(removed).scatter(-1, order, removed), torch.finfo(logits.dtype).min
        )
    if decode.top_k:
        limit = logits.topk(min(decode.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < limit, torch.finfo(logits.dtype).min)
    p = logits.softmax(-1)
    probability, candidate = p.max(-1)
    if decode.confidence == "margin":
        two = p.topk(2).values
        return probability, candidate, two[:, 0] - two[:, 1]
    if decode.confidence == "neg_entropy":
        return probability, candidate, (p * (p + 1e-10).log()).sum(-1)
    return probability, candidate, probability


def generate(network: TorchModel, prompt_ids: Sequence[int], decode: DecodeConfig) -> TorchRequest:
    """Decode one request to its end."""
    request = TorchRequest(network, prompt_ids, decode)
    while request.step():
        pass
    return request


def take_turns(requests: Sequence[TorchRequest], max_steps: int | None = None) -> int:
    """Per-request dispatch of a batch: in every step, one forward pass for each request that has not ended.

    Returns:
        the number of steps, that of the longest request.
    """
    live, steps = list(requests), 0
    while live and steps != max_steps:
        live = [r for r in live if r.step()]
        steps += bool(live)
    return steps
