"""The exact optimizer: FP32 AdamW at 12 bytes a parameter, with bits that depend on nothing but the recipe.

`master` keeps an FP32 weight as two 16-bit planes, the upper one being the BF16 weight that is streamed. `constants`
turns a recipe and a step number into the sixteen floats every kernel reads. `kernel` applies one update in place, in
C++ or in plain PyTorch, to the same bits; its docstring is the one place where the order of operations is written
down. `norm` sums gradients for clipping in an order of its own, so that neither chunks nor threads nor placement can
change the norm.

This file imports nothing: `constants` must be usable where torch is not wanted (lowering, simulation, reports).
"""
