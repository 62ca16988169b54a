"""What is measured against what: each peer once, as its own users would run it at its best.

overlap       overlapped matmuls, against torch's matmuls and collectives
reshard       tensors and state dicts between meshes, against torch's own means
pipeline      pipelines of real and emulated stages, against torch's
packed        models and attention without padding, against Hugging Face, torch.compile, ONNX Runtime and others
arrivals      requests that arrive at random, as they come and in closed batches
sentence_transformers  embeddings and scores of pairs of texts, against sentence-transformers
end_to_end    the models and inputs of the next two, as numbers
parallel      a tensor-parallel transformer, against torch, Hugging Face and vLLM
torch_models  that transformer as torch's own users write it
servers/      embeddings over HTTP: servers as processes, and a client that loads them
vllm          vLLM's engines as processes, with and without the plugin
vllm_child    the program of such a process, in the environment that has vLLM
"""
