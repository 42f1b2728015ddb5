"""One run on several ranks, the processes that `torchrun` starts, and how a step is spread over them."""

OFFERS = {"find_ranks": "ranks.find_ranks", "join_ranks": "ranks.join_ranks"}
