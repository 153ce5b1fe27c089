"""bf16 and fp8 alike: what fp8 does to a model with a LoRA, measured on the user's own images, and what undoes it.

calibration   the images, noise and noise levels that everything here runs the model on
quantize      bf16 checkpoint -> quantised file, rounded by activations where that is wanted
merge         LoRAs rounded into quantised weights so that they still act, and a LoRA of what rounding lost
refit         a LoRA refitted to the quantised file it is used with
distilled     what a LoRA does on the distilled model of its base

The report (``tools/precision_report.py``), in the order in which data goes through it:

servers, deployed, serving     what programs do, what is deployed, the models of any variant
conditioning, runs             what a variant makes of picture and mask; both sides run on the same inputs
differences, border            errors by noise level, by region, over the sampling run, along the mask's border
layers, transformations, tensors, findings, comparison
                               layer by layer and tensor by tensor: how far off, and what was done to it
verdict, remedies              what is named, and what helps
report                         from a request to all that is measured
fixes                          what removes the difference, from the cheapest on
server_image                   what a server really painted, explained
page                           one self-contained HTML file, and the JSON
"""

SERVERS = ("comfyui", "comfyui-bypass", "comfyui-legacy", "diffusers", "gguf")
MERGES = ("nearest", "stochastic", "stochastic_fp16", "unrounded")  # how a LoRA is added to weights
FIXES = ("bypass", "refit", "correction")
