"""What is measured against what: each peer once, as its own users would run it at its best.

encoders      packed models against Hugging Face, torch.compile, ONNX Runtime, OpenVINO and CTranslate2
packed        the inputs of these, attention alone, `weft embed`, peak memory
overlap       overlapped matmuls against torch's
reshard       state dicts by torch's own means; what the ranks of a lab run
pipeline      the same for pipelines
torch_models  a tensor-parallel transformer by torch's parallelize_module
vllm          vLLM with and without the plugin; vllm_child is what runs in its own environment
"""
