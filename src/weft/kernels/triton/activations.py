"""The activations of an epilogue, in float32."""

import triton
import triton.language as tl

ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "relu")


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (z + 0.044715 * z * z * z)
        z = z * tl.sigmoid(2.0 * inner)  # (1 + tanh(u)) / 2 is sigmoid(2 u)
    elif ACTIVATION == "silu":
        z = z * tl.sigmoid(z)
    elif ACTIVATION == "relu":
        z = tl.where(z > 0, z, tl.where(z != z, z, 0.0))
    return z
