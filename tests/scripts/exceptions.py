"""Raise an exception of its own, from a function."""


class ModelError(BaseException):
    pass


def paint():
    raise {
        "base": ModelError,
        "value": ValueError,
        "group": lambda x: ExceptionGroup(x, [OSError(1)]),
    }[__import__("sys").argv[1]]("its own")


print("before")
paint()
