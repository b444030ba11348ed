"""Registry: plan -> kernel. The one door through which `host/compile.py` reaches kernels."""

from cute_fa.kernels.forward.kernel import ForwardKernel
from cute_fa.tuning.plan import ForwardPlan

_KERNELS = {ForwardPlan: ForwardKernel}


def kernel_of(plan):
    """The kernel of a plan: callable under `cute.compile`, with `fake_arguments()` to compile it for."""
    return _KERNELS[type(plan)](plan)
