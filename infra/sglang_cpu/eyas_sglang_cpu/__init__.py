"""Lets the stock SGLang 0.5.23 wheel run on a machine without a GPU, EAGLE-3 (top-k 1) included.

SGLang finds the two functions below through entry points; nothing of SGLang is edited.

    prepare_imports   group sglang.srt.platforms: runs in every process before anything imports `sgl_kernel`
    register_hooks    group sglang.srt.plugins: runs in every process before a model is built

Imports of SGLang stay inside functions: this package is loaded while SGLang itself is still half imported.
"""

import sys


def prepare_imports() -> None:
    """Put stand-ins for packages that cannot be imported without a GPU at the end of the import path.

    Returns None, which tells SGLang that this is no platform of its own: it goes on to its own CPU platform.
    """
    from eyas_sglang_cpu import stand_ins

    stand_ins.install()


def register_hooks() -> None:
    """Teach the `torch_native` attention back end MLA and EAGLE, and hasten prefills, in scheduler processes only.

    The other processes compute nothing; importing the model code there would cost seconds and memory.
    """
    if not _in_scheduler_process():
        return
    from eyas_sglang_cpu import eagle, mla, prefill, proposals

    mla.register()
    eagle.register()
    prefill.register()
    proposals.register()


def _in_scheduler_process() -> bool:
    """SGLang calls plugins without saying from which process; the call stack tells."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "run_scheduler_process":
            return True
        frame = frame.f_back
    return False
