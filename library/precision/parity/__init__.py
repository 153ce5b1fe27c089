"""The arithmetic of parity: what fp8 does to one layer, and what can be done about it.

    activations    what a layer's inputs look like: second moment, sampled rows, sizes of the channels
    errors         how much of a layer's output an error of its weight changes
    survival       how much of a LoRA's update a merge into fp8 has kept
    low_rank       the low-rank update that undoes most of an error: retargeted LoRAs and remainders
    compensated    rounding in which each column makes up for the ones before it (GPTQ)
    keep           which layers are worth staying in bf16

Everything works on one layer's matrices and needs no gradient. The second moment C = X^T X / n of the inputs is all
that these formulas ask of the data, since the mean squared output error of a weight error E is

    mean over tokens of |x E^T|^2  =  trace(E C E^T)

so the number of calibration tokens costs time and no memory.
"""
