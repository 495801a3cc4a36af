"""For pyproject.toml: the extra `compilers` of the package is the lines of requirements.txt.

An extra, since an engine's environment has an older CUDA, which they would replace, and a wheel can bring what engines
call compiled. But for CUTLASS: a dependency cannot be had without its own, and of it only the headers are needed. Where
they are missing, the kernels written with it say so.
"""


def dynamic_metadata(field, settings):
    with open("requirements.txt", encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    return {"compilers": [line for line in lines if line and not line.startswith(("#", "nvidia-cutlass"))]}
