"""Tasks of asyncio, one of which fails."""

import asyncio


async def wait(x):
    await asyncio.sleep(0)
    if x == 2:
        raise KeyError(x)
    return x


async def main():
    print(await asyncio.gather(*map(wait, range(4)), return_exceptions=True))


asyncio.run(main())
