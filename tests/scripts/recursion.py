"""Recursion to the limit, which the script catches."""


def deep(n):
    return deep(n + 1)


try:
    deep(0)
except RecursionError:
    print("too deep")
