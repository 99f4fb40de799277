"""Triton's interpreter, where there is no GPU. Imported before anything that imports Triton, since that reads the variable once."""

import os

import torch

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # tests run in several processes, each of which would start as many as cores
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def mend() -> None:
    """Triton 3.6's interpreter keeps bfloat16 as uint16 and multiplies those numbers; its scalars are vectors of one, which numpy 2.4 does
    not take for an index."""
    import triton.language as tl
    from triton.runtime import interpreter

    dot, patch = interpreter.InterpreterBuilder.create_dot, interpreter._patch_lang_tensor

    def widened(self, a, b, *rest):
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    def indexed(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter.InterpreterBuilder.create_dot, interpreter._patch_lang_tensor = widened, indexed
