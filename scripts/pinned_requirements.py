"""For pyproject.toml: the dependencies of the package are the lines of requirements.txt.

But for CUTLASS: a dependency cannot be had without its own, and of it only the headers are needed. Where they are
missing, the kernels written with it say so.
"""


def dynamic_metadata(field, settings):
    with open("requirements.txt", encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    return [line for line in lines if line and not line.startswith(("#", "nvidia-cutlass"))]
