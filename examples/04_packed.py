"""Run a model without its padding: the same call, the same outputs, less work.

python examples/04_packed.py
"""

import time

import torch
from torch import nn

from weft.packed import PackedBatch, pack, packed_attention


def main() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 8, 1024, activation="gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
    lengths = torch.tensor([20, 180, 35, 90, 15, 60, 25, 40])
    padding = torch.arange(180)[None] >= lengths[:, None]
    src = torch.randn(8, 180, 256)

    fast = pack(encoder)
    with torch.no_grad():
        for name, model in (("padded", encoder), ("packed", fast)):
            model(src, src_key_padding_mask=padding)
            start = time.perf_counter()
            out = model(src, src_key_padding_mask=padding)
            print(f"{name}: {1e3 * (time.perf_counter() - start):6.1f} ms")
            if name == "padded":
                want = out
    print(f"largest difference: {(out - want)[~padding].abs().max():.1e}")
    print(f"tokens: {int(lengths.sum())} real, {padding.numel()} padded")

    # The parts can be used alone: a packed batch, and attention inside its sequences.
    batch = PackedBatch.from_padded(src, ~padding)
    heads = batch.values.view(batch.tokens, 8, 32)
    attended = packed_attention(heads, heads, heads, batch, causal=True)
    print(f"attention: {list(attended.shape)}, and back: {list(batch.with_values(attended).to_padded().shape)}")


if __name__ == "__main__":
    main()
