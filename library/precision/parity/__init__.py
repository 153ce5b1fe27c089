"""The arithmetic of bf16/fp8 match: what fp8 does to one layer, and what can be done about it.

    activations    what a layer's inputs look like: second moment, sampled rows, sizes of the channels
    layer_errors   output error of a weight error, update retention, layers to exclude, low-rank residual correction
    compensated    rounding in which each column makes up for the ones before it (GPTQ)
    seam           where an error of an image is: along a mask's border, inside, outside

All but the last work on one layer's matrices and need no gradient. The second moment C = X^T X / n of the inputs is all
that these formulas ask of the data, since the mean squared output error of a weight error E is

    mean over tokens of |x E^T|^2  =  trace(E C E^T)

so the number of calibration tokens costs time and no memory.
"""
