"""Attention of 16 new queries over 1024 tokens from Python, on the CPU. Tensors are objects with DLPack or a buffer."""

import hypermla

kernel = hypermla.Kernel("flash_attention", device="cpu", b=1, s=16, t=1024, h=4, dtype="float16")
memory = {}
for tensor in kernel.tensors:
    elements = 1
    for extent in tensor.shape:
        elements *= extent
    memory[tensor.name] = bytearray(elements * (4 if tensor.dtype == "float32" else 2))
    kernel.bind(tensor.name, memory[tensor.name])
kernel.run()
predicted = kernel.predicted_seconds("NVIDIA H200")
print(f"lse {memoryview(memory['lse']).cast('f')[0]:.4f}, on an H200 in {predicted * 1e6:.1f} us")
