"""Leaves executors open: of threads with work that goes on, and of processes. Python ends both."""

import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor


def work(number: int) -> int:
    time.sleep(0.05)
    print(f"worked {number}", flush=True)
    return number


if __name__ == "__main__":
    threads, processes = ThreadPoolExecutor(1), ProcessPoolExecutor(1)
    print(processes.submit(abs, -3).result(), flush=True)
    for each in range(3):
        threads.submit(work, each)
    print("end of the script", flush=True)
