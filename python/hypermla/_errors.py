"""How the package raises its one exception."""

import functools
import operator

from hypermla._hypermla import Error


def raises_error(function):
    """Makes Error of what Python itself raises for a value that cannot be: a number too large, text without UTF-8 or
    with a NUL, a tensor without dimensions. An argument of a wrong type is a TypeError, as everywhere in Python."""

    @functools.wraps(function)
    def checked(*arguments, **keywords):
        try:
            return function(*arguments, **keywords)
        except (OverflowError, ValueError, IndexError) as error:
            raise Error(f"{function.__qualname__}() was given a value that cannot be: {error}") from error
        except AttributeError as error:
            raise TypeError(f"{function.__qualname__}() was given an object of a wrong type: {error}") from error

    return checked


def integers(**values):
    """Those of 32 bits, in order; what is none of them is named."""
    return tuple(integer(name, value, range(-2**31, 2**31), "fit 31 bits") for name, value in values.items())


def booleans(**values):
    """The truth of each, in order; what is neither true nor false is named."""
    for name, value in values.items():
        try:
            known = value in (True, False)
        except (ValueError, RuntimeError):  # several, of NumPy or PyTorch
            known = False
        if not known:
            raise Error(f"{name} cannot be {value!r}; give it True or False")
    return tuple(map(bool, values.values()))


def integer(name, value, allowed, must):
    """The value, where it is one of a range; else an Error that says what it must be."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is of type {type(value).__name__}; give an integer") from None
    if number not in allowed:
        raise Error(f"{name}={number} is not supported: it must {must}")
    return number
