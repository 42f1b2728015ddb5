"""Pickle and copy what `__main__` defines."""

import copy
import inspect
import pickle


class Card:
    def __init__(self, name):
        self.name = name


def make(name):
    return Card(name)


again = pickle.loads(pickle.dumps([make, Card("a")]))
print(again[0] is make, again[1].name, Card.__module__, copy.deepcopy(again[1]).name)
print(inspect.getsource(make).splitlines()[0], pickle.dumps(Card)[-30:])
