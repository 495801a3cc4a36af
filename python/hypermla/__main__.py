"""The command `hypermla`, and `python -m hypermla`: becomes the program that the package carries."""

import os
import sys


def main():
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "hypermla")
    os.execv(program, [program, *sys.argv[1:]])


if __name__ == "__main__":
    main()
