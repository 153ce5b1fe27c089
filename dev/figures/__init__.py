"""The figures of ``docs/precision.md``: what they show, measured with the library's own functions, and how it is drawn.

layers     weights, inputs and updates of known shape to measure on
numbers    what is measured on them
drawings   one function a figure
border     the same for the trained tiny fill model: runs, and the two figures made of them
"""
