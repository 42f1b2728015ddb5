"""A child by `os.fork` and one by `multiprocessing`, each with a code of its own."""

import multiprocessing
import os
import sys


def work(queue):
    queue.put("from a child")
    sys.exit(4)


if __name__ == "__main__":
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
    print(process.exitcode)
