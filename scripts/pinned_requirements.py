"""For pyproject.toml: the dependencies of the package are the lines of requirements.txt."""


def dynamic_metadata(field, settings):
    with open("requirements.txt", encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    return [line for line in lines if line and not line.startswith("#")]
