"""Registry: plan -> kernel. The one door through which `host/compile.py` reaches kernels."""

from cute_fa.kernels.backward.kernel import BackwardKernel
from cute_fa.kernels.backward.postprocess import PostprocessKernel
from cute_fa.kernels.backward.preprocess import PreprocessKernel
from cute_fa.kernels.forward.kernel import ForwardKernel
from cute_fa.tuning.plan import BackwardPlan, ForwardPlan, Plan, PostprocessPlan, PreprocessPlan

_KERNELS = {
    ForwardPlan: ForwardKernel,
    BackwardPlan: BackwardKernel,
    PreprocessPlan: PreprocessKernel,
    PostprocessPlan: PostprocessKernel,
}


def kernel_of(plan: Plan):
    """The kernel of a plan: callable under `cute.compile`, with `fake_arguments()` to compile it for."""
    return _KERNELS[type(plan)](plan)
