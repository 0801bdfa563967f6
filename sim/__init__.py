"""The simulator: what a schedule takes on a machine, predicted op by op.

`cost` turns bytes and FLOPs into works, `sharing` says what rate works get while others run, `fluid` lets them flow at these
rates, `simulate` runs the lanes. `longest_path` is the oracle and the lower bound, `memory` the use of memory over a trace.
Nothing here imports torch.
"""
