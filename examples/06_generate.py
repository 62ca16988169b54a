"""A small Llama on the ranks of a group: a step of training, and text, by `weft.generate` and by its own method.

    python examples/06_generate.py
    torchrun --nproc-per-node 2 examples/06_generate.py

Weights are random, so that nothing needs to be downloaded; `AutoModelForCausalLM.from_pretrained(...)` takes the place
of `LlamaForCausalLM(config)`. The tokens are the same for any number of ranks.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import weft

PROMPTS = [[1, 5, 9, 2], [7], [3, 3, 8, 60, 4, 11]]  # of any lengths; nothing is padded


def main() -> None:
    if "RANK" in os.environ:  # torchrun says who and where
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=64,
    )  # fmt: skip
    model = weft.parallelize(LlamaForCausalLM(config), mesh)  # in place: its parameters are DTensors now

    ids = torch.randint(1, 97, (4, 24), generator=torch.Generator().manual_seed(1))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimiser.step()  # text below is made with the weights of after this step

    model.eval()
    tokens = weft.generate(model, PROMPTS, max_new_tokens=8, eos=())
    drawn = weft.generate(model, PROMPTS, max_new_tokens=8, eos=(), temperature=0.8, top_k=20, seed=3)
    batch, mask = torch.tensor([[0, 0, 0, 7], PROMPTS[0]]), torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1]])
    own = model.generate(batch, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)

    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}")
        for prompt, greedy, sampled in zip(PROMPTS, tokens, drawn, strict=True):
            print(f"{prompt} -> {greedy}, drawn {sampled}")
        print("model.generate() says the same:", own[:, 4:].tolist() == [tokens[1], tokens[0]])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
