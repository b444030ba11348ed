"""Schedule: the order of one step of the backward main loop as words, and from it the number in every wait.

A step takes one block of queries. Its five matrix products run asynchronously while the warps compute, so the order in
which products are issued, waited for and used decides the speed, and a wrong wait gives wrong gradients. Here the order
is data: a new one is one line, and the number of every wait follows from it (`steps`).

Words, S^T = K Q^T and so on as in `kernels/backward/kernel.py`:
    S dP dV dQ dK        leave a product in flight; dV:0, dV:1 its first and second half (of the queries), dK alike
    next_S               S of the next block of queries
    wait:X               until the last issued part of product X is done, and with it all that were issued before
    lse delta next_lse   from shared memory to registers. Ahead of the wait that precedes their use: behind it, the loads
                         queue up with the operand reads of the products that still run
    P P:0 P:1            probabilities from S, as fp32 in place and as 16-bit operands; all columns or one half
    dS dS:0 dS:1         dS = P (dP - delta), as 16-bit operands
    store_P store_dS     to shared memory
    sync                 both warpgroups: what was stored is visible
    store_dQ             hand dQ on, or add it in global memory
    landed               the last block's additions have landed; where they come in a fixed order
    free_Q free_dO       give the stage back to the load warp
"""

from typing import NamedTuple

# Both warpgroups hold 64 rows of S^T and P, dS are operands from registers.
# dV only after dS: fewer registers, because P as operand and dP do not live together for long.
DP_FIRST = "S lse dP wait:S P delta wait:dP dS store_dS dV sync dQ dK wait:dV free_dO wait:dQ store_dQ wait:dK free_Q"
# Half of dV runs under the second half of the exponentials, and half of dK under the second half of dS.
HALF_DK = (
    "S lse dP wait:S P:0 dV:0 P:1 delta dV:1 wait:dP dS:0 dK:0 dS:1 store_dS sync"
    " dQ dK:1 wait:dV free_dO wait:dQ store_dQ wait:dK free_Q"
)
# P and dS are operands from shared memory. The next S runs while dQ is added, so a loop begins behind its first S.
SHARED = (
    "dP delta P store_P wait:dP dS store_dS sync dV dQ dK landed wait:dV free_dO"
    " wait:dQ next_S next_lse store_dQ wait:dK free_Q wait:S"
)
SHARED_PROLOGUE = "next_S next_lse wait:S"

PRODUCTS = ("S", "dP", "dV", "dQ", "dK")

# What is left out with a gradient that nobody asks for.
_OF_DQ, _OF_DK, _OF_DV = {"dQ", "store_dQ", "landed"}, {"dK"}, {"dV", "store_P"}
_OF_DS = {"dP", "delta", "dS", "store_dS"}


class Step(NamedTuple):
    """word: as above, without its suffix. half: 0, 1 or None for the whole. num_in_flight: of a wait, how many of the
    latest groups of products may still run."""

    word: str
    half: int | None = None
    num_in_flight: int = 0


def steps(words: str) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """The steps of `words`, and which products are still in flight behind them. A wait for what is done is left out."""
    running, found = [], []
    for word in words.split():
        name, _, suffix = word.partition(":")
        if name == "wait":
            if suffix in running:
                last = len(running) - 1 - running[::-1].index(suffix)
                found.append(Step("wait", num_in_flight=len(running) - 1 - last))
                del running[: last + 1]
            continue
        product = name.removeprefix("next_")
        if product in PRODUCTS:
            running.append(product)
        found.append(Step(name, int(suffix) if suffix else None))
    return tuple(found), tuple(running)


def without(
    words: str, needs_dq: bool, needs_dk: bool, needs_dv: bool, has_p_in_smem: bool, has_landings: bool = False
) -> str:
    """`words` without what only serves gradients that are not needed, and without landings where nobody counts them."""
    dropped = set() if has_landings else {"landed"}
    for needed, own in ((needs_dq, _OF_DQ), (needs_dk, _OF_DK), (needs_dv, _OF_DV)):
        if not needed:
            dropped |= own
    if not (needs_dq or needs_dk):
        dropped |= _OF_DS
    if not has_p_in_smem and not needs_dq:
        # dS goes from registers into dK.
        dropped |= {"store_dS", "sync"}
    return " ".join(word for word in words.split() if word.partition(":")[0] not in dropped)
